"""External workers and the weights they have: who is told to fetch which version, from whom, and who waits for it. Torch-free.

Owns what each external worker is known to have, and which fetches are unanswered. The trainers have no part in it and wait for
nobody. Invariants: a worker that is behind the published version gets no new requests, so that no trajectory begins on weights
that are older than its batch allows, while what it has goes on; one whose fetch failed, or that does not answer, is told again,
never dropped for it; workers take a version from each other before they ask the trainers' machines.
"""

from __future__ import annotations

from collections.abc import Callable

from pearl.engine.weights.fanout import Member as Place
from pearl.engine.weights.fanout import plan_fanout
from pearl.protocol import Fetch, Ready
from pearl.rl.members import Externals, name_of
from pearl.sched.router import Router

AGAIN_S = 1.0
"""After a failure a worker is told again to fetch no earlier than this."""
ANSWER_S = 300.0
"""A fetch without an answer for so long is told again: a connection that breaks takes along what is on it, and a worker's own
limits (`pull_fetcher.py`) are shorter."""


class Followers:
    """`next_number()` numbers orders. `failed` counts fetches that did not succeed; `announced` is the newest version."""

    def __init__(self, externals: Externals, router: Router, next_number: Callable[[], int]) -> None:
        self.failed = 0
        self._externals, self._router, self._next_number = externals, router, next_number
        self.announced = self._published = -1
        self._roots: list[str] = []
        self._has: dict[int, int] = {}
        self._open: dict[int, tuple[int, int, float]] = {}
        """Fetch commands without an answer: number -> (member, version, since when)."""
        self._rests_until: dict[int, float] = {}

    def announce(self, version: int, roots: list[str], now: float) -> None:
        """A version is about to be at `roots` ("host:port" on the trainers' machines): fetching may begin at once."""
        self.announced, self._roots = version, roots
        self.turn(now)

    def publish(self, version: int, now: float) -> None:
        """All ranks of WORLD have it: who serves without it is held."""
        self._published = version
        self.turn(now)

    def turn(self, now: float) -> None:
        """In every turn of the loop: orders for who is behind, and holding them back or not."""
        behind = []
        for number, member in self._externals.members.items():
            if member.name in self._router.loads:
                has = self._has.get(number, -1)
                self._router.hold(member.name, has < self._published)
                if has < self.announced and self._is_due(number, now):
                    behind.append(number)
        if behind:
            self._order(behind, now)

    def heard(self, number: int, version: int) -> None:
        """A member said which version it has."""
        self._has[number] = max(version, self._has.get(number, -1))

    def answered(self, order: int, number: int, error: str, now: float) -> bool:
        """Whether the answer of this member was one to a fetch that it was told."""
        asked, version, _ = self._open.get(order, (-1, -1, now))
        if asked != number:
            return False
        del self._open[order]
        # A worker with a newer order has left older ones out.
        self._open = {other: fetch for other, fetch in self._open.items() if fetch[0] != number or other > order}
        if error:
            self.failed += 1
            self._rests_until[number] = now + AGAIN_S
        else:
            self.heard(number, version)
            self.turn(now)
        return True

    def forget(self, number: int) -> None:
        """It is gone."""
        self._has.pop(number, None)
        self._rests_until.pop(number, None)
        self._open = {order: fetch for order, fetch in self._open.items() if fetch[0] != number}

    def sources(self, ready: dict[int, Ready]) -> list[str]:
        """Whom somebody who wakes may ask, in this order: workers that have the newest version, then the trainers' machines."""
        externals = [one.pulls for number, one in ready.items() if self._has.get(number, -1) >= self._published >= 0]
        others = [one.pulls for number, one in ready.items() if number not in self._externals.members]
        return [pulls for pulls in externals + others if pulls]

    def _is_due(self, number: int, now: float) -> bool:
        """Nothing of the announced version is under way to it, and it has rested after a failure."""
        under_way = (version for member, version, since in self._open.values() if member == number and now - since < ANSWER_S)
        return max(under_way, default=-1) < self.announced and now >= self._rests_until.get(number, now)

    def _order(self, numbers: list[int], now: float) -> None:
        sources = self._planned()
        for number in numbers:
            order = Fetch(
                number=self._next_number(), weight_version=self.announced, pulls=sources.get(number, self._roots)
            )
            self._open[order.number] = number, self.announced, now
            self._externals.send(number, order)

    def _planned(self) -> dict[int, list[str]]:
        """Member -> whom to ask, by the tree of all that serve."""
        places = [Place(name=root, node=root, version=self.announced, trains=True) for root in self._roots]
        numbers = {}
        for number, member in self._externals.members.items():
            where = member.ready.pulls if member.ready is not None else ""
            if where and where not in self._roots and where not in numbers and name_of(number) in self._router.loads:
                has = min(self._has.get(number, -1), self.announced)
                places.append(Place(name=where, node=where, version=has))
                numbers[where] = number
        plan = plan_fanout(places)
        return {numbers[one.receiver]: list(one.sources) for one in plan.assignments if one.receiver in numbers}
