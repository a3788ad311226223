"""External workers follow the published versions: who is told to fetch what from whom, and who gets no requests meanwhile."""

from __future__ import annotations

import itertools
from typing import Any

import zmq

from pearl.config import ElasticOptions
from pearl.protocol import Fetch, Join, Ready
from pearl.rl.followers import AGAIN_S, ANSWER_S, Followers
from pearl.rl.members import Externals
from pearl.sched.router import Router

ROOT = "10.0.0.1:1"


class Stage:
    """Externals without sockets; `sent` has the orders of each."""

    def __init__(self) -> None:
        self.externals = Externals(zmq.Context(), ElasticOptions(), first=4, now=0.0)
        self.externals.send = self._send  # type: ignore[method-assign]
        self.router = Router()
        numbers = itertools.count(100)
        self.followers = Followers(self.externals, self.router, lambda: next(numbers))
        self.sent: list[tuple[int, Fetch]] = []

    def _send(self, number: int, message: Any) -> bool:
        self.sent.append((number, message))
        return True

    def serve(self, pulls: str = "") -> int:
        """Another worker that serves."""
        member = self.externals.admit(f"peer{len(self.externals.members)}", Join(pid=1, host="h"), 0.0)
        self.externals.prepared(member.number, Ready(rank=member.number, max_model_len=64, pulls=pulls))
        self.router.add_worker(member.name)
        return member.number

    def taken(self) -> list[tuple[int, Fetch]]:
        sent, self.sent = self.sent, []
        return sent

    def held(self, number: int) -> bool:
        return self.router.loads[f"rank{number}"].held


def test_fetching_begins_with_the_announcement_and_who_is_behind_is_held_once_it_is_published() -> None:
    stage = Stage()
    number = stage.serve()
    stage.followers.announce(1, [ROOT], 0.0)
    [(to, order)] = stage.taken()
    assert (to, order.weight_version, order.pulls) == (number, 1, [ROOT]) and not stage.held(number)
    stage.followers.publish(1, 0.1)
    assert stage.held(number) and not stage.taken()
    assert not stage.followers.answered(order.number, number + 1, "", 0.2)  # it was not asked
    assert stage.held(number)
    assert stage.followers.answered(order.number, number, "", 0.2)
    assert not stage.held(number)


def test_who_has_it_in_time_is_never_held() -> None:
    stage = Stage()
    number = stage.serve()
    stage.followers.announce(1, [ROOT], 0.0)
    stage.followers.heard(number, 1)
    stage.followers.publish(1, 0.1)
    assert not stage.held(number)


def test_a_failed_fetch_is_tried_again_after_a_rest() -> None:
    stage = Stage()
    number = stage.serve()
    stage.followers.announce(1, [ROOT], 0.0)
    stage.followers.publish(1, 0.0)
    [(_, first)] = stage.taken()
    stage.followers.answered(first.number, number, "nobody gave it", 1.0)
    stage.followers.turn(1.0 + AGAIN_S / 2)
    assert not stage.taken() and stage.held(number) and stage.followers.failed == 1
    stage.followers.turn(1.0 + AGAIN_S)
    [(_, again)] = stage.taken()
    assert again.weight_version == 1 and again.number > first.number
    stage.followers.turn(1.1 + AGAIN_S)
    assert not stage.taken()


def test_a_fetch_that_was_lost_on_its_way_is_told_again() -> None:
    """Nothing else would say so: the worker lives, and waits for orders."""
    stage = Stage()
    number = stage.serve()
    stage.followers.announce(1, [ROOT], 0.0)
    stage.followers.publish(1, 0.0)
    [(_, first)] = stage.taken()
    stage.followers.turn(ANSWER_S - 1.0)
    assert not stage.taken() and stage.held(number)
    stage.followers.turn(ANSWER_S)
    [(to, again)] = stage.taken()
    assert to == number and again.number > first.number and again.weight_version == 1
    assert stage.followers.answered(again.number, number, "", ANSWER_S + 1.0) and not stage.held(number)


def test_who_has_said_nothing_yet_is_no_source() -> None:
    stage = Stage()
    number = stage.serve("10.0.0.9:1")
    ready = {0: Ready(rank=0, max_model_len=64, pulls=ROOT), number: Ready(rank=number, max_model_len=64, pulls="10.0.0.9:1")}
    stage.followers.announce(1, [ROOT], 0.0)
    stage.followers.publish(1, 0.0)
    assert stage.followers.sources(ready) == [ROOT]
    stage.followers.heard(number, 1)
    assert stage.followers.sources(ready) == ["10.0.0.9:1", ROOT]


def test_a_newer_version_is_ordered_over_an_older_one_whose_answer_may_never_come() -> None:
    stage = Stage()
    number = stage.serve()
    for version in (1, 2, 3):
        stage.followers.announce(version, [ROOT], float(version))
        stage.followers.publish(version, float(version))
    orders = [order for _, order in stage.taken()]
    assert [order.weight_version for order in orders] == [1, 2, 3]
    stage.followers.answered(orders[2].number, number, "", 4.0)
    assert not stage.held(number)
    assert not stage.followers.answered(orders[0].number, number, "", 4.0)  # no longer waited for


def test_workers_take_a_version_from_each_other_and_few_ask_the_trainers() -> None:
    stage = Stage()
    numbers = [stage.serve(f"10.0.1.{index}:1") for index in range(7)]
    stage.followers.announce(1, [ROOT], 0.0)
    orders = dict(stage.taken())
    assert set(orders) == set(numbers)
    first = [order.pulls[0] for order in orders.values()]
    assert first.count(ROOT) == 1  # one asks the trainers' machine, the others each other
    assert all(order.pulls[-1] == ROOT for order in orders.values())  # which is asked in the end if all else fails
    assert all(first.count(f"10.0.1.{index}:1") <= 2 for index in range(7))


def test_whoever_is_gone_is_forgotten_and_a_later_one_is_told_at_once() -> None:
    stage = Stage()
    number = stage.serve()
    stage.followers.announce(1, [ROOT], 0.0)
    stage.followers.publish(1, 0.0)
    [(_, order)] = stage.taken()
    stage.externals.forget(number)
    stage.followers.forget(number)
    stage.router.lose_worker(f"rank{number}")
    assert not stage.followers.answered(order.number, number, "", 1.0)
    late = stage.serve()
    stage.followers.turn(2.0)
    assert [to for to, _ in stage.taken()] == [late] and stage.held(late)


def test_who_wakes_asks_those_first_that_have_the_newest_version() -> None:
    stage = Stage()
    first, second = stage.serve("10.0.1.1:1"), stage.serve("10.0.1.2:1")
    where = {0: ROOT, first: "10.0.1.1:1", second: "10.0.1.2:1"}
    ready = {number: Ready(rank=number, max_model_len=64, pulls=pulls) for number, pulls in where.items()}
    stage.followers.announce(2, [ROOT], 0.0)
    stage.followers.publish(2, 0.0)
    stage.followers.heard(first, 1)
    stage.followers.heard(second, 2)
    assert stage.followers.sources(ready) == ["10.0.1.2:1", ROOT]
