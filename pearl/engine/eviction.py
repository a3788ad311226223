"""In which order cached blocks that nobody holds are given up.

Owns the order; it does not know what blocks hold, nor whose they are. Sessions that come back in turns are the worst case of
"the one used longest ago goes first": with a little less room than they want, that is always the one that comes next, and
nobody finds anything. So blocks that had to be computed again, since their session came back and had lost them, are marked
`doubtful` and go before the others: what does not fit anyway takes its room from its like, and those that found theirs keep
it. That is the idea of inserting at the cold end (LIP; Qureshi et al., "Adaptive Insertion Policies for High Performance
Caching", ISCA 2007). It needs something that lets the kept ones go (BIP there): here their age. What has not been asked for in
OVERDUE times the turns between two of a session belongs to one that has ended or gone elsewhere, and goes first of all.

Invariants: every block is in one of the two queues, in the order of release; without marks the order is that of release alone.
All is constant time per block. Time is counted in turns of sessions that have ended here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

Eviction = Literal["lru", "keep"]

OVERDUE = 1.5
"""Times the mean number of turns from one of a session to its next; with 1, simulated caches lost what was wanted still."""

SMOOTHING = 1 / 16


class EvictionOrder:
    """Blocks that may be given up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Block -> the turn in which it was released."""
        self._lost: OrderedDict[int, None] = OrderedDict()
        """Doubtful ones."""
        self._doubtful: set[int] = set()
        self._turns = 0
        self._interval = math.inf

    def __len__(self) -> int:
        return len(self._kept) + len(self._lost)

    def __iter__(self) -> Iterator[int]:
        """Next to be given up first."""
        return iter(self.first(len(self)))

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._kept or block_id in self._lost

    def mark(self, block_ids: Iterable[int], *, doubtful: bool) -> None:
        """Says of held blocks how they are to be released."""
        if doubtful:
            self._doubtful.update(block_ids)
        elif self._doubtful:
            self._doubtful.difference_update(block_ids)

    def release(self, block_id: int) -> None:
        """It may be given up, after all of its kind that were released before it."""
        self.hold(block_id)
        if block_id in self._doubtful:
            self._lost[block_id] = None
        else:
            self._kept[block_id] = self._turns

    def release_all(self, block_ids: Sequence[int]) -> None:
        """The same for held ones, in this order."""
        doubtful = self._doubtful
        if not doubtful:
            self._kept.update(dict.fromkeys(block_ids, self._turns))
            return
        self._lost.update(dict.fromkeys(block_id for block_id in block_ids if block_id in doubtful))
        self._kept.update(dict.fromkeys((block_id for block_id in block_ids if block_id not in doubtful), self._turns))

    def hold(self, block_id: int) -> None:
        """It may not be given up; nothing if it could not be."""
        self._kept.pop(block_id, None)
        if self._lost:
            self._lost.pop(block_id, None)

    def hold_all(self, block_ids: Iterable[int]) -> None:
        for queue in (self._kept, self._lost) if self._lost else (self._kept,):
            drop = queue.pop
            for block_id in block_ids:
                drop(block_id, None)

    def first(self, count: int) -> list[int]:
        """The `count` blocks that go next, or as many as there are: overdue ones, doubtful ones, the others."""
        if not self._lost:
            return list(islice(self._kept, count))
        found: list[int] = []
        overdue = self._turns - OVERDUE * self._interval
        for block_id, released in self._kept.items():
            if released >= overdue or len(found) == count:
                break
            found.append(block_id)
        old = len(found)
        found += islice(self._lost, count - old)
        found += islice(self._kept, old, old + count - len(found))
        return found

    def end_turn(self, last: int | None) -> int:
        """A session's turn has ended here, the one before as this returned at that time (`last`; None: there was none)."""
        self._turns += 1
        if last is not None:
            passed = self._turns - last
            known = self._interval < math.inf
            self._interval = self._interval + SMOOTHING * (passed - self._interval) if known else passed
        return self._turns

    def clear(self) -> None:
        """No block may be given up, and none is doubtful."""
        for blocks in (self._kept, self._lost, self._doubtful):
            blocks.clear()

    def check_integrity(self) -> None:
        """RuntimeError for a block in a queue that is not that of its kind."""
        wrong = (self._kept.keys() & self._doubtful) | (self._lost.keys() - self._doubtful)
        if wrong:
            raise RuntimeError(f"blocks {sorted(wrong)} are in the wrong queue of the eviction order")
