"""Many decode steps of an unchanged batch, decided and taken in at once: for who knows what a step takes without running it.

Owns when a batch is steady and how its steps are counted together; everything else is the core's. A batch is steady while
every running request decodes, none of them can end or need a block that is not there, none waits that could be admitted, and
none has an ending that only its tokens would tell. Invariant: a run of n steps leaves the core as n single steps would, and
its output expands to theirs; only which of two equally good blocks a request got may differ.
"""

from __future__ import annotations

import math
from typing import Any, cast

from pearl.engine.core import EngineCore
from pearl.engine.ending import completion_of, ending_by_length
from pearl.engine.request import (
    PLACEHOLDER,
    Completion,
    Request,
    RequestStatus,
    RequestUpdate,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from pearl.engine.token_runs import TokenRuns

MOST_STEPS = 1 << 30


class SteadyResult(StepResult, frozen=True, kw_only=True):
    """What a steady run gave: each request drew `token_ids[request_id]` in all of its steps."""

    token_ids: dict[str, int] = {}  # noqa: RUF012 - msgspec gives each its own


class SteadyCore(EngineCore):
    """The core, with `schedule(now, num_steps)` for up to `steady_steps()` steps. Requests hold TokenRuns."""

    def steady_steps(self) -> int:
        """How many of the next steps run the present batch, each request decoding; 0 if the next one may not."""
        scheduler = self.scheduler
        if self.paused or self.asleep or self._unfinished or self._texts or self.growing or not scheduler.running:
            return 0
        if scheduler.waiting and scheduler.has_seat and not scheduler.still_blocked(scheduler.waiting[0]):
            return 0
        hands_over, most = scheduler.policy.hands_over, MOST_STEPS
        longest = min(self.settings.max_model_len, self.blocks.num_slots + 1)
        for request in scheduler.running.values():
            prompt, length = request.num_prompt_tokens, len(request.token_ids)
            decoding = prompt < length == request.num_written_tokens + 1  # `is_decoding`, which would count again
            if not decoding or (hands_over and not request.stays) or not _ends_by_length(request):
                return 0
            left = min(request.max_tokens + prompt, longest) - length
            if left < most:
                most = left
        return self._steps_with_room(most)

    def _steps_with_room(self, most: int) -> int:
        """As many of `most` steps as there are blocks for."""
        size, available = self.blocks.block_size, self.blocks.num_available
        running = self.scheduler.running.values()
        if len(running) * (most // size + 1) <= available:
            return most
        low, high = 0, most
        while low < high:
            steps = (low + high + 1) // 2
            missing = sum(self.blocks.num_missing(request, request.num_computed_tokens + steps) for request in running)
            low, high = (steps, high) if missing <= available else (low, steps - 1)
        return low

    def soonest_deadline(self) -> float:
        """When the next offer, arrival or credit ends: a run must not go on past it."""
        if not (self.exports or self.arrivals or self.credits):
            return math.inf
        offers, arrivals = (one.expires for one in self.exports.values()), (one.expires for one in self.arrivals.values())
        return min(*offers, *arrivals, *(one.expires for one in self.credits.values()), math.inf, math.inf)

    def schedule(self, now: float, num_steps: int = 1) -> SchedulerOutput:
        """As in EngineCore; of a steady batch up to `steady_steps()` steps at once (ValueError for more)."""
        if num_steps == 1:
            return super().schedule(now)
        if num_steps > self.steady_steps():
            raise ValueError(f"num_steps={num_steps}: only {self.steady_steps()} steps are steady")
        self.expire(now)
        entries, grow = [], self.blocks.grow
        for request in self.scheduler.running.values():
            start = request.num_computed_tokens
            if not grow(request, start + num_steps):
                raise RuntimeError(f"request {request.request_id!r}: no room for {num_steps} steady steps")
            _runs_of(request).repeat(PLACEHOLDER, num_steps - 1)
            request.num_computed_tokens = start + num_steps
            request.num_in_flight += 1
            entries.append(ScheduledRequest(request_id=request.request_id, start=start, num_tokens=1, samples=True))
        output = SchedulerOutput(step=self._num_steps, requests=tuple(entries), num_steps=num_steps)
        self._num_steps += num_steps
        self._unfinished.append(output)
        return output

    def finish(self, output: SchedulerOutput, result: StepResult, now: float) -> list[RequestUpdate]:
        """As in EngineCore; what came of a run of several steps is a SteadyResult."""
        if output.num_steps == 1:
            return super().finish(output, result, now)
        if not isinstance(result, SteadyResult) or not self._unfinished or self._unfinished[0] is not output:
            raise RuntimeError(f"output of step {output.step}: is not the oldest unfinished one, or its result is of one step")
        self._unfinished.popleft()
        self._num_computed_tokens += output.num_tokens
        updates, steps = [], output.num_steps
        logprobs, versions = (0.0,) * steps, (result.weight_version,) * steps
        for entry in output.requests:
            request = self.requests[entry.request_id]
            request.num_in_flight -= 1
            request.logprobs += logprobs
            request.weight_versions += versions
            token_id = result.token_ids[entry.request_id]
            update = RequestUpdate(
                request_id=entry.request_id,
                token_ids=(token_id,) * steps,
                logprobs=logprobs,
                weight_versions=versions,
                completion=self._take_run(request, token_id, entry.start, steps),
            )
            updates.append(update)
            if request.status is not RequestStatus.RUNNING and not request.num_in_flight:
                self._settle(request)
        self._num_generated_tokens += steps * len(updates)
        return updates

    def _take_run(self, request: Request, token_id: int, start: int, steps: int) -> Completion | None:
        """Enters the tokens of a run that began at position `start`; what the request gave, if they are its last."""
        runs, size, written = _runs_of(request), self.settings.block_size, start + steps
        runs.cut(start + 1)
        runs.repeat(token_id, steps)
        request.num_written_tokens = written
        if written // size > start // size:
            self.blocks.register(request, self.weight_version)
        ending = ending_by_length(request, max_model_len=self.settings.max_model_len, num_slots=self.blocks.num_slots)
        if ending is None:
            return None
        self._end(request, ending)
        return completion_of(request)


def _runs_of(request: Request) -> TokenRuns:
    runs = cast(Any, request.token_ids)
    if not isinstance(runs, TokenRuns):
        raise TypeError(f"request {request.request_id!r}: its tokens must be TokenRuns, not {type(runs).__name__}")
    return runs


def _ends_by_length(request: Request) -> bool:
    """Whether no token that it may draw ends it, and nothing is asked for but tokens."""
    params = request.params
    silent = params.ignore_eos or not request.eos_token_ids
    return silent and not (request.stop_token_ids or params.stop or params.logprobs or params.prompt_logprobs)
