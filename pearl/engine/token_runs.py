"""Token ids that nobody looks at, as runs of equal ones: a list's part in a Request, in the memory of a few numbers.

Owns the sequence; for those who step the core without a model (simulators), where a context of tens of thousands of ids is
only ever counted, compared and hashed by blocks. It does what the core does with `Request.token_ids`, and no more.
Invariant: it equals the list that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, repeat
from typing import overload

SHORT = 1024
"""Slices up to so many ids are remembered: blocks of the same ids are the same tuple, which compares in no time."""


class TokenRuns:
    """Runs (where one ends, its id), none of them empty, neighbours of different ids."""

    __slots__ = ("_ends", "_ids")

    def __init__(self, ends: Iterable[int] = (), ids: Iterable[int] = ()) -> None:
        self._ends, self._ids = list(ends), list(ids)

    @classmethod
    def of(cls, token_id: int, count: int) -> TokenRuns:
        return cls([count], [token_id]) if count else cls()

    def copy(self) -> TokenRuns:
        return TokenRuns(self._ends, self._ids)

    def beginning(self, count: int) -> TokenRuns:
        """The first `count` ids."""
        runs = self.copy()
        runs.cut(count)
        return runs

    def bounds(self) -> tuple[int, int]:
        """(least, greatest) id; ValueError if there is none."""
        return min(self._ids), max(self._ids)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        starts = [0, *self._ends]
        return chain.from_iterable(
            repeat(token_id, end - start) for token_id, start, end in zip(self._ids, starts, self._ends, strict=False)
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenRuns):
            return self._ends == other._ends and self._ids == other._ids
        return list(self) == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...] | TokenRuns: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...] | TokenRuns:
        """A slice is a tuple; if it is long and from the beginning, runs."""
        if isinstance(index, slice):
            first, last, ends = index.start, index.stop, self._ends
            if first and last and ends and (ends[-2] if len(ends) > 1 else 0) <= first < last <= ends[-1]:
                return _same(self._ids[-1], last - first)  # blocks of the last run: nearly all that is asked for
            start, stop, _ = index.indices(len(self))
            return self._part(start, stop) if start or stop <= SHORT else self.beginning(stop)
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} of {len(self)} tokens")
        return self._ids[self._run_at(position)]

    def __setitem__(self, index: int, token_id: int) -> None:
        """Only at the end is anything ever replaced: a placeholder by what was drawn."""
        if index % len(self) != len(self) - 1:
            raise IndexError(f"index {index} of {len(self)} tokens: only the last can be replaced")
        self.pop()
        self.append(token_id)

    def append(self, token_id: int) -> None:
        self.repeat(token_id, 1)

    def repeat(self, token_id: int, count: int) -> None:
        """Appends the same id so many times."""
        ends, ids = self._ends, self._ids
        if not count:
            return
        if ids and ids[-1] == token_id:
            ends[-1] += count
        else:
            ends.append((ends[-1] if ends else 0) + count)
            ids.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        if isinstance(token_ids, TokenRuns):
            start = 0
            for token_id, end in zip(token_ids._ids, token_ids._ends, strict=True):
                self.repeat(token_id, end - start)
                start = end
        else:
            for token_id in token_ids:
                self.repeat(token_id, 1)

    def pop(self) -> int:
        """The last id, taken away."""
        token_id = self[-1]
        self.cut(len(self) - 1)
        return token_id

    def cut(self, length: int) -> None:
        """Keeps the first `length` ids."""
        ends = self._ends
        while ends and (ends[-2] if len(ends) > 1 else 0) >= length:
            ends.pop()
            self._ids.pop()
        if ends and ends[-1] > length:
            ends[-1] = length

    def blocks(self, size: int, first: int, last: int) -> list[tuple[int, ...]]:
        """The blocks `first` to `last` (not included) of `size` ids each; all of them must be full."""
        parts: list[tuple[int, ...]] = []
        run, end = self._run_at(first * size) if first < last else 0, last * size
        while len(parts) < last - first:
            start = (first + len(parts)) * size
            whole = (min(self._ends[run], end) - start) // size
            if whole > 0:
                parts += [_same(self._ids[run], size)] * whole
            else:
                parts.append(self._part(start, start + size))
                whole = 1
            start += whole * size
            while start < end and self._ends[run] <= start:
                run += 1
        return parts

    def num_equal(self, other: TokenRuns) -> int:
        """How many ids at the start are the same in both."""
        equal = 0
        for mine, theirs, end, their_end in zip(self._ids, other._ids, self._ends, other._ends, strict=False):
            if mine != theirs:
                break
            equal = min(end, their_end)
            if end != their_end:
                break
        return equal

    def _run_at(self, position: int) -> int:
        """Searched from the end, where the looking is done."""
        run = len(self._ends) - 1
        while run and self._ends[run - 1] > position:
            run -= 1
        return run

    def _part(self, start: int, stop: int) -> tuple[int, ...]:
        if stop <= start:
            return ()
        run = self._run_at(start)
        if stop <= self._ends[run]:
            return _same(self._ids[run], stop - start)
        parts: list[tuple[int, ...]] = []
        while start < stop:
            end = min(stop, self._ends[run])
            parts.append((self._ids[run],) * (end - start))
            start, run = end, run + 1
        return tuple(chain.from_iterable(parts))


def _same(token_id: int, count: int) -> tuple[int, ...]:
    return _short(token_id, count) if count <= SHORT else (token_id,) * count


@lru_cache(maxsize=16_384)
def _short(token_id: int, count: int) -> tuple[int, ...]:
    return (token_id,) * count
