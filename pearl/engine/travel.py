"""A request as a message and back: what of it travels to another engine.

Owns the translation between `Request` and `RequestState`, and nothing else. Torch-free, clock-free. Invariant: a request made
from the state of another draws the same tokens and ends where that one would have.
"""

from __future__ import annotations

from pearl.engine.request import Request
from pearl.protocol import RequestState

SAME = (
    "index", "params", "num_prompt_tokens", "max_tokens", "seed", "cache_salt", "session_id", "cacheable", "num_cached_tokens",
    "num_preemptions",
)  # fmt: skip
LISTS = ("token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "weight_versions")
SETS = ("stop_token_ids", "eos_token_ids")


def state_of(request: Request, *, request_id: str, streaming: bool) -> RequestState:
    """A copy of the request as it is between two steps; `request_id` is what its caller knows."""
    fields = {name: getattr(request, name) for name in SAME}
    fields |= {name: list(getattr(request, name)) for name in LISTS}
    fields |= {name: sorted(getattr(request, name)) for name in SETS}
    return RequestState(request_id=request_id, name=request.request_id, streaming=streaming, **fields)


def request_of(state: RequestState, arrival: float) -> Request:
    """The request of a state, without KV. `arrival` is its time here, in seconds."""
    fields = {name: getattr(state, name) for name in SAME}
    fields |= {name: list(getattr(state, name)) for name in LISTS}
    fields |= {name: frozenset(getattr(state, name)) for name in SETS}
    return Request(request_id=state.name, arrival=arrival, **fields)
