"""A copy out of a pool that this process can reach itself, between two steps: what `local` and `host` have in common.

Owns the order in which a copy asks: is it still under lease, how much of it is written, copy, is it still under lease. It does
not know how the pool was found. Invariants: nothing is written after `done` has said True, has raised, or after `cancel`; what
the source has not written is not read; a copy counts only if the lease held before and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from pearl.engine.migration.pieces import Unfolding, copy_part, part_bytes, pieces
from pearl.engine.migration.planner import CopyPart, CopyPlan
from pearl.engine.migration.transport import LeaseWords, Pool, TransferError
from pearl.kv_transfer import KVTransfer


class Copying:
    """A ticket. `gone` says why the source cannot be had any more, or None. `done` copies up to `most_bytes` a call."""

    def __init__(
        self,
        transfer: KVTransfer,
        plan: CopyPlan,
        source: Tensor,
        words: LeaseWords,
        pool: Pool,
        *,
        gone: Callable[[], str | None],
        most_bytes: int,
    ) -> None:
        self._transfer, self._gone, self._most_bytes = transfer, gone, most_bytes
        self._source: tuple[Tensor, LeaseWords] | None = (source, words)
        """None once it is over: a mapping goes only when nobody has it any more."""
        self._pool = pool
        self._unfolding = Unfolding(plan, transfer.layout, transfer.num_written_tokens)
        self._left: deque[CopyPart] = deque()
        """Readable, and not copied yet."""
        self._error: TransferError | None = None

    def done(self) -> bool:
        if self._source is not None:
            self._go_on(*self._source)
        if self._error is not None:
            raise self._error
        return self._source is None

    def cancel(self) -> bool:
        if self._source is not None:
            self._end("it was cancelled")
        return True

    def _go_on(self, source: Tensor, words: LeaseWords) -> None:
        block, word = self._transfer.blocks[-1], self._transfer.lease_word
        due = words.is_due(block, word)
        try:
            if not due:
                self._copy(source, words)
        except ValueError as error:  # the source's blocks are not what they were said to be
            return self._end(str(error))
        reason = self._gone()
        if reason is not None:
            self._end(reason)
        elif not due and not words.holds(block, word):
            self._end("its lease has ended")  # so what was copied may be another request's
        elif not due and self._unfolding.whole and not self._left:
            self._source = None

    def _copy(self, source: Tensor, words: LeaseWords) -> None:
        if not self._left:
            ready = self._unfolding.ready(words.progress(self._transfer.blocks[-1]))
            self._left.extend(pieces(CopyPlan(parts=tuple(ready), num_bytes=0), self._transfer.layout, self._most_bytes))
        copied = 0
        while self._left and (not copied or copied + part_bytes(self._left[0], self._transfer.layout) <= self._most_bytes):
            part = self._left.popleft()
            copy_part(source, self._pool.tensor, part)
            copied += part_bytes(part, self._transfer.layout)

    def _end(self, reason: str) -> None:
        self._error, self._source = TransferError(self._transfer.transfer_id, reason), None
        self._left.clear()
