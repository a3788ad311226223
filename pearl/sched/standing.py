"""The workers that take requests, by role and in the order in which they would be chosen.

Owns the order, so that choosing among thousands looks at the first few. What a rank is made of is the router's. Invariant: a
worker stands in one role at most, under the rank that it was given last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

from pearl.protocol import Role

Rank = tuple[Any, ...]
"""Compared as it is; no two workers have the same."""


class Standing:
    def __init__(self) -> None:
        self._rows: dict[Role, list[tuple[Rank, str]]] = {role: [] for role in Role}
        self._place: dict[str, tuple[Role, Rank]] = {}

    def put(self, worker: str, role: Role, rank: Rank) -> None:
        """The worker stands here from now on."""
        place = self._place.get(worker)
        if place == (role, rank):
            return
        self.remove(worker)
        insort(self._rows[role], (rank, worker))
        self._place[worker] = role, rank

    def remove(self, worker: str) -> None:
        """The worker takes nothing; unknown ones are ignored."""
        place = self._place.pop(worker, None)
        if place is not None:
            rows = self._rows[place[0]]
            del rows[bisect_left(rows, (place[1], worker))]

    def any(self) -> bool:
        return bool(self._place)

    def of(self, role: Role) -> Sequence[tuple[Rank, str]]:
        """(rank, worker), the first to be chosen first."""
        return self._rows[role]

    def holds(self, worker: str, role: Role) -> bool:
        place = self._place.get(worker)
        return place is not None and place[0] is role


def names(rows: Sequence[tuple[Rank, str]]) -> Iterator[str]:
    return (worker for _, worker in rows)
