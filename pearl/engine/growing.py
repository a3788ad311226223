"""Prompts that are still being computed and may be read along: for requests that have room in another engine already.

Mixed into EngineCore; owns who may read along, and how much of their KV is announced as written. It knows no transport, no
clock and no bytes. A growing request is an ordinary running one: it holds no lease, and gives way like all others.

Invariants
- What is announced is written: whole chunks when their step is finished, layers while it runs (by who runs it).
- Its lease word changes before its blocks can be used again, whatever ends it. If it is offered with all of its prompt, the
  offer goes on under the same id and word, so that what was read counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pearl.engine.block_manager import BlockManager
from pearl.engine.migration.transport import LeaseWords
from pearl.engine.request import Request, RequestStatus, ScheduledRequest, SchedulerOutput
from pearl.engine.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class Growing:
    """The KV of a prompt of `num_tokens` tokens, to be written into `blocks`. `life`: which of its lives that is."""

    transfer_id: str
    request: Request
    blocks: tuple[int, ...]
    word: int
    num_tokens: int
    weight_version: int
    epoch: int
    life: int
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    """(where it ends, step) of the chunks in unfinished outputs."""


class GrowingRequests:
    """Mixed into MovingRequests, which has `_next_id`."""

    blocks: BlockManager
    scheduler: Scheduler
    weight_version: int
    epoch: int
    _words: LeaseWords

    def _init_growing(self) -> None:
        self.growing: dict[str, Growing] = {}
        """By request."""

    def _next_id(self, kind: str) -> str:
        raise NotImplementedError

    def _grow(self, output: SchedulerOutput) -> None:
        """Announces the chunks of a new output, before anything of it is computed."""
        self._end_strays()
        if not self.scheduler.policy.hands_over:
            return
        for entry in output.requests:
            growing = self.growing.get(entry.request_id) or self._begin_growing(entry)
            if growing is not None:
                growing.chunks.append((entry.start + entry.num_tokens, output.step))
                self._announce(growing)

    def _begin_growing(self, entry: ScheduledRequest) -> Growing | None:
        request = self.scheduler.running[entry.request_id]
        num_tokens = request.num_prompt_tokens
        if request.reservation_id is None or request.stays or len(request.token_ids) > num_tokens:
            return None
        blocks = tuple(request.block_table[: self.blocks.blocks_for(num_tokens)])
        growing = self.growing[request.request_id] = Growing(
            transfer_id=self._next_id("t"),
            request=request,
            blocks=blocks,
            word=self._words.open(blocks[-1], request.num_written_tokens),
            num_tokens=num_tokens,
            weight_version=self.weight_version,
            epoch=self.epoch,
            life=request.num_preemptions,
        )
        return growing

    def _grown(self, request_id: str, step: int) -> None:
        """What `step` computed of a request is written."""
        growing = self.growing.get(request_id)
        if growing is not None:
            if growing.chunks and growing.chunks[0][1] == step:
                growing.chunks.popleft()
            self._announce(growing)

    def _announce(self, growing: Growing) -> None:
        written = growing.request.num_written_tokens
        end, step = growing.chunks[0] if growing.chunks else (written, 0)
        self._words.announce(growing.blocks[-1], written, end, step)

    def _end_growing(self, request_id: str) -> None:
        """Nobody may read along any more."""
        growing = self.growing.pop(request_id, None)
        if growing is not None:
            self._words.close(growing.blocks[-1])

    def _end_strays(self) -> None:
        """Of those that gave way, or that this engine's role does not hand over."""
        if not self.growing:
            return
        for growing in list(self.growing.values()):
            request = growing.request
            goes_on = request.status is RequestStatus.RUNNING and request.num_preemptions == growing.life
            if not goes_on or not self.scheduler.policy.hands_over:
                self._end_growing(request.request_id)

    def _taken_over(self, request: Request, num_tokens: int) -> tuple[str, int] | None:
        """The id and word under which a request that is now offered was read along; None if it was not, or not as a whole."""
        growing = self.growing.get(request.request_id)
        if growing is None or growing.num_tokens != num_tokens or request.num_preemptions != growing.life:
            self._end_growing(request.request_id)
            return None
        del self.growing[request.request_id]
        return growing.transfer_id, growing.word
