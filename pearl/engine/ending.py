"""When a token ends a request, what is told about it, and whether a step gave all it was asked for.

Pure functions of a request and the core's limits. They know no blocks and no scheduling; `core.py` carries the decision out.
Invariant: a stop by id or text never comes before `min_tokens`, and of several reasons for one token the first of
EOS or stop id, stop string, length is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pearl.engine.request import Completion, Request, RequestUpdate, SchedulerOutput, StepResult
from pearl.protocol import FinishReason


class TextStream(Protocol):
    """Text of one request, token by token; it knows the request's stop strings and `min_tokens`."""

    stopped_by: str | None

    def push(self, token_id: int, *, hidden: bool = False) -> str:
        """Takes one id (hidden: it shows no text) and returns the text that is final now."""

    def close(self) -> str:
        """No more ids will come: returns the text held back until now."""

    @property
    def text(self) -> str:
        """All text returned so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a request ends. `stop_reason` as in Completion; `error` is one line."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


LENGTH = Ending(finish_reason="length")
ABORTED = Ending(finish_reason="abort")


def ending_by_id(request: Request, token_id: int) -> Ending | None:
    """EOS or a stop id as the newest of the request's tokens, which already has it. EOS is skipped under `ignore_eos`."""
    if token_id in request.eos_token_ids and not request.params.ignore_eos:
        ending = Ending(finish_reason="stop")
    elif token_id in request.stop_token_ids:
        ending = Ending(finish_reason="stop", stop_reason=token_id)
    else:
        return None
    return ending if len(request.token_ids) - request.num_prompt_tokens >= request.params.min_tokens else None


def ending_by_length(request: Request, *, max_model_len: int, num_slots: int) -> Ending | None:
    """`max_tokens` or `max_model_len` reached, or no room in the whole pool for the newest token's KV."""
    num_tokens = len(request.token_ids)
    if num_tokens - request.num_prompt_tokens >= request.max_tokens or num_tokens >= max_model_len:
        return LENGTH
    if num_tokens > num_slots:
        error = f"num_blocks: the KV pool has {num_slots} slots, too few for the {num_tokens} tokens of this request"
        return Ending(finish_reason="error", error=error)
    return None


def completion_of(request: Request) -> Completion:
    """The result of a request whose ending has been written into it."""
    if request.finish_reason is None:
        raise RuntimeError(f"request {request.request_id!r} has not ended")
    params, token_ids = request.params, request.output_token_ids
    return Completion(
        request_id=request.request_id,
        index=request.index,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        token_ids=token_ids,
        logprobs=None if params.logprobs is None else list(request.logprobs),
        top_logprobs=list(request.top_logprobs) if params.logprobs else None,
        prompt_logprobs=list(request.prompt_logprobs) if params.prompt_logprobs else None,
        text=request.text,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        weight_versions=list(request.weight_versions),
        params=params,
        error=request.error,
    )


def update_of(request: Request, token_ids: tuple[int, ...], text: str) -> RequestUpdate:
    """What one step added to a request: no token or its newest one; with the completion if it has ended."""
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=(request.logprobs[-1],) if token_ids else (),
        weight_versions=(request.weight_versions[-1],) if token_ids else (),
        text=text,
        completion=completion_of(request) if request.finish_reason is not None else None,
    )


def check_complete(output: SchedulerOutput, result: StepResult) -> None:
    """Raises RuntimeError if a step's result lacks what its output asked for."""
    for entry in output.requests:
        if entry.samples and entry.request_id not in result.sampled:
            raise RuntimeError(f"result of step {output.step} has no sampled token for request {entry.request_id!r}")
        if entry.wants_prompt_logprobs and entry.request_id not in result.prompt_logprobs:
            raise RuntimeError(f"result of step {output.step} has no prompt log-probs for request {entry.request_id!r}")
