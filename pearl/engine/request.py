"""One request's state, and the values that pass between deciding and doing in an engine step.

`Request` is owned and changed by the core alone (scheduler, block manager, `core.finish`); the model runner reads it.
`SchedulerOutput` (which tokens run) and `StepResult` (what they gave) are values; those of which every step makes one per
request are msgspec structs, which are made in a fifth of a frozen dataclass's time. Torch-free, clock-free.

Invariants of a Request
- `token_ids[:num_prompt_tokens]` is the prompt; the rest are sampled ids, at most the last of them -1 (drawn by an output
  that has not been finished yet).
- PARKED: on its way to or from another engine, or given back; it holds no blocks itself.
- `num_written_tokens <= num_computed_tokens <= len(token_ids)`: KV known to be in the pool, KV scheduled to be computed, all.
- `logprobs`, `weight_versions` (and `top_logprobs` if asked) have one entry per finished sampled token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pearl.protocol import FinishReason, SamplingParams

if TYPE_CHECKING:
    from pearl.engine.prefix_cache import CacheEntry

PLACEHOLDER = -1
"""Stands in `Request.token_ids` for a token that an unfinished output will draw."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A generation in the engine. `seed` and `index` (which of n siblings) fix its random numbers wherever it runs."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    session_id: str | None = None
    arrival: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    num_in_flight: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    trail: list[CacheEntry] = field(default_factory=list)
    """Of a session's request: what its first blocks are cached as."""
    cacheable: bool = True
    """False once its KV mixes weight versions: it registers no more blocks in the prefix cache."""
    lost_prefix: bool = False
    """Its session had more blocks here than are still cached."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    stays: bool = False
    """Goes on here whatever the role: nobody took it, or it was placed here on purpose."""
    most_computed: int | None = None
    """A decode worker that would have to compute more of its tokens gives it back; None: never."""
    reservation_id: str | None = None
    """The credit that another engine has given for it."""

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last sampled token is written: nothing is left to do but the next token."""
        return self.num_prompt_tokens < len(self.token_ids) == self.num_written_tokens + 1

    @property
    def output_token_ids(self) -> list[int]:
        """Sampled ids, placeholders left out."""
        ids = self.token_ids[self.num_prompt_tokens :]
        return ids[:-1] if ids and ids[-1] == PLACEHOLDER else ids


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Positions `[start, start + num_tokens)` of one request run in this step.

    `samples`: the last of them is the request's last known token, so its logits give the next one.
    `wants_prompt_logprobs`: this chunk's logits at prompt positions are asked for.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    wants_prompt_logprobs: bool = False


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens run in step `step`: the decision of the batch scheduler. Empty `requests` means nothing can run now.

    `num_steps` > 1: this and the steps after it, which differ in nothing but positions: all entries are decodes, and in the
    i-th of them (from 0) each runs the position `start` + i.
    """

    step: int
    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...] = ()
    num_steps: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_steps * sum(scheduled.num_tokens for scheduled in self.requests)

    def expand(self) -> list[SchedulerOutput]:
        """The single steps."""
        if self.num_steps == 1:
            return [self]
        return [
            SchedulerOutput(
                step=self.step + number,
                requests=tuple(msgspec.structs.replace(entry, start=entry.start + number) for entry in self.requests),
            )
            for number in range(self.num_steps)
        ]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner drew for one request. `error` (non-finite logits) makes the other fields meaningless."""

    token_id: int
    logprob: float
    top_logprobs: dict[int, float] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave: one SampledToken per sampling request, and prompt log-probs by request.

    `prompt_logprobs[id]` holds log-probs of the tokens at positions start+1 .. of the chunk that are prompt tokens, in order
    (the first prompt token has none and is not in it).
    """

    sampled: dict[str, SampledToken]
    prompt_logprobs: dict[str, list[float]] = {}
    weight_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. A stop token stays in `token_ids` (with its log-prob) and is left out of `text`.

    `stop_reason`: None for EOS, the id for a stop token, the string for a stop string. `weight_versions` has one entry per
    sampled token. `error` is set exactly when `finish_reason` is "error".
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    prompt_logprobs: list[float | None] | None
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int
    num_preemptions: int
    weight_versions: list[int]
    params: SamplingParams
    error: str | None = None


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What `core.finish` says of one request: the tokens this step added and, at its end, the completion.

    `index` tells siblings (n > 1) apart once the engine has put them under their common id.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    text: str = ""
    completion: Completion | None = None
    index: int = 0
