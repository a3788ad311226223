"""The scheduler in a running job: what is sent for each of its commands, whose answer counts, and what is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sched_cases import busy_load, joined

from pearl import protocol
from pearl.config import BorrowSettings, ExpandSettings, PdSettings
from pearl.protocol import Fetch, Leave, Prepare, Role, Sleep, SwitchRole, Wake
from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.events import TrainingBegins, TrainingFinished, WeightsPublished, WorkerReclaimed, WorkerRole, Zone
from pearl.sched.profile import RuntimeProfile
from pearl.sched.published import qwen3_8b_h800
from pearl.sched.service import ClusterService
from pearl.sched.settings import SchedulerSettings


class Port:
    """Keeps what it is asked; orders are numbered from 0. `on_order` is called while an order is sent."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.on_order: Callable[[str], None] = lambda worker: None

    def order(self, worker: str, make: Callable[[int], Any]) -> int:
        self.orders.append((worker, make(len(self.orders))))
        self.on_order(worker)
        return len(self.orders) - 1

    def dismiss(self, worker: str, make: Callable[[int], Any], reason: str) -> None:
        self.order(worker, make)
        self.calls.append(("dismiss", worker, reason))

    def pulls(self) -> list[str]:
        return ["there:1"]

    def requeue(self, sessions: tuple[str, ...]) -> None:
        self.calls.append(("requeue", sessions))

    def move(self, session: str, source: str, target: str) -> None:
        self.calls.append(("move", session, source, target))

    def trainer_may_begin(self, step: int) -> None:
        self.calls.append(("may begin", step))

    def refuse(self, worker: str, reason: str) -> None:
        self.calls.append(("refuse", worker))


class Stage:
    def __init__(self, **settings: Any) -> None:
        self.port, self.rows = Port(), []
        profile = RuntimeProfile(qwen3_8b_h800(), busy_load())
        self.scheduler = ClusterScheduler(SchedulerSettings(**settings), profile)
        self.service = ClusterService(self.scheduler, self.port, self.rows.append, 100.0)
        self.now = 100.0

    def feed(self, *events: Any) -> None:
        for event in events:
            self.service.feed(event, self.now)

    def tick(self) -> None:
        self.now += 1.0
        self.service.tick(self.now)

    def take(self) -> list[tuple[str, Any]]:
        """The orders since the last call, all answered half a second later."""
        taken, start = self.port.orders[self.start :], self.start
        self.start = len(self.port.orders)
        self.now += 0.5
        for number in range(start, self.start):
            self.service.answered(number, self.port.orders[number][0], error="", now=self.now)
        return taken

    start = 0


def test_roles_are_ordered_and_answers_count_once() -> None:
    stage = Stage(pd=PdSettings(mode="split", ratio="1:1"))
    stage.feed(joined("rank1", 1), joined("rank2", 2))
    stage.tick()
    assert [(worker, type(order)) for worker, order in stage.port.orders] == [("rank1", SwitchRole), ("rank2", SwitchRole)]
    assert {order.role for _, order in stage.port.orders} == {Role.PREFILL, Role.DECODE}
    assert [order.number for _, order in stage.port.orders] == [0, 1] and stage.rows == []
    stage.take()
    assert str(stage.scheduler.state.shape()) == "1P1D"
    [row] = stage.rows
    assert (row["kind"], row["after"], row["at"], row["seconds"], row["ok"]) == ("switch", "1P1D", 1.0, 0.5, True)
    before = dict(stage.scheduler.state.workers)
    for number in (0, 1, 77):
        stage.service.answered(number, "rank1", error="", now=stage.now)
    assert stage.service.counts["stale_answers"] == 3 and dict(stage.scheduler.state.workers) == before


def test_nobody_answers_for_another() -> None:
    stage = Stage(pd=PdSettings(mode="split", ratio="1:1"))
    stage.feed(joined("rank1", 1), joined("rank2", 2))
    stage.tick()
    stage.service.answered(0, "rank2", error="", now=stage.now)
    assert stage.service.counts["stale_answers"] == 1 and stage.scheduler.state.workers["rank1"].role == "mixed"
    stage.service.answered(0, "rank1", error="", now=stage.now)
    assert stage.scheduler.state.workers["rank1"].role == str(stage.port.orders[0][1].role)


def test_an_order_that_failed_is_repeated_and_the_old_answer_is_stale() -> None:
    stage = Stage(pd=PdSettings(mode="split", ratio="1:1"))
    stage.feed(joined("rank1", 1), joined("rank2", 2))
    stage.tick()
    stage.service.answered(1, "rank2", error="not now", now=stage.now)
    assert stage.scheduler.state.shape().total == 2
    stage.service.answered(0, "rank1", error="", now=stage.now)
    for _ in range(130):
        stage.tick()
        if len(stage.port.orders) > 2:
            break
    worker, order = stage.port.orders[2]
    assert worker == stage.port.orders[1][0] and order.epoch > stage.port.orders[1][1].epoch
    stage.service.answered(1, "rank2", error="", now=stage.now)
    assert stage.service.counts["stale_answers"] == 1
    stage.take()
    assert str(stage.scheduler.state.shape()) == "1P1D"
    assert [row["error"] for row in stage.rows if not row["ok"]] == [f"{worker}: not now"]


def test_training_ranks_are_woken_and_put_to_sleep_before_the_trainer_begins() -> None:
    stage = Stage(borrow=BorrowSettings(workers="all"), pd=PdSettings(mode="mixed"))
    stage.feed(joined("t0", 0, zone=Zone.OVERLAP, role=WorkerRole.TRAINING, active=False))
    stage.feed(joined("rank0", 0, zone=Zone.OVERLAP, active=False), joined("rank1", 1), WeightsPublished(version=4))
    stage.feed(TrainingBegins(step=1, deadline=stage.now + 9))
    assert stage.port.calls == [("may begin", 1)]
    stage.feed(TrainingFinished(step=1))
    [(worker, wake)] = stage.take()
    assert (worker, type(wake), wake.weight_version, wake.role, wake.pulls) == ("rank0", Wake, 4, Role.MIXED, ["there:1"])
    stage.feed(TrainingBegins(step=2, deadline=stage.now + 9))
    assert stage.port.calls == [("may begin", 1)]
    [(worker, sleep)] = stage.take()
    assert (worker, type(sleep), sleep.epoch) == ("rank0", Sleep, wake.epoch + 1)
    assert stage.port.calls == [("may begin", 1), ("may begin", 2)]
    assert [row["kind"] for row in stage.rows] == ["borrow", "give_back"]


def test_an_external_worker_is_prepared_admitted_and_leaves() -> None:
    stage = Stage(expand=ExpandSettings(external="always"), pd=PdSettings(mode="mixed"))
    stage.feed(joined("rank1", 1), WeightsPublished(version=2))
    stage.feed(joined("rank2", 2, external=True, prepared=False, active=False))
    stage.tick()
    [(worker, prepare)] = stage.take()
    assert (worker, type(prepare)) == ("rank2", Prepare)
    stage.tick()
    [(worker, wake)] = stage.take()
    assert (worker, type(wake), wake.weight_version) == ("rank2", Wake, 2)
    stage.feed(WorkerReclaimed(worker="rank2", deadline=stage.now + 20))
    [(worker, leave)] = stage.take()
    assert (worker, type(leave)) == ("rank2", Leave)
    assert "rank2" not in stage.scheduler.state.workers
    assert [row["kind"] for row in stage.rows] == ["expand", "admit", "leave"]


def test_requests_of_a_worker_that_is_gone_are_placed_again() -> None:
    stage = Stage()
    stage.feed(joined("rank1", 1), joined("rank2", 2))
    worker = stage.scheduler.router.place("s", 10)
    assert worker is not None
    stage.service.gone(worker, "silent", stage.now)
    assert stage.port.calls == [("requeue", ("s",))]
    stage.service.gone(worker, "silent", stage.now)  # told twice
    assert len(stage.port.calls) == 1


def test_who_answers_no_order_is_told_to_leave_and_nothing_more_is_awaited_of_it() -> None:
    stage = Stage(pd=PdSettings(mode="mixed"), expand=ExpandSettings(external="always"))
    stage.feed(joined("rank1", 1), WeightsPublished(version=2))
    stage.feed(joined("rank2", 2, external=True, active=False))
    for _ in range(200):
        stage.tick()
    waked, left = (type(order) for worker, order in (stage.port.orders[0], stage.port.orders[-1]) if worker == "rank2")
    assert (waked, left) == (Wake, Leave) and "rank2" not in stage.scheduler.state.workers
    assert stage.port.calls[-1] == ("dismiss", "rank2", "does not answer") and not stage.service._open
    stage.service.answered(len(stage.port.orders) - 1, "rank2", error="", now=stage.now)
    assert stage.service.counts["stale_answers"] == 1


def test_what_carrying_out_leads_to_comes_after_it() -> None:
    """A member that is found gone while it is ordered about: the rest of the orders come first."""
    stage = Stage(pd=PdSettings(mode="split", ratio="1:1"))
    stage.feed(joined("rank1", 1), joined("rank2", 2), joined("rank3", 3))

    def lost(worker: str) -> None:
        if worker == "rank1" and "rank1" in stage.scheduler.state.workers:
            stage.service.gone("rank1", "unreachable", stage.now)
            assert "rank1" in stage.scheduler.state.workers  # not yet

    stage.port.on_order = lost
    stage.tick()
    assert "rank1" not in stage.scheduler.state.workers
    stage.scheduler.state.check()


def test_a_refused_worker_is_told() -> None:
    stage = Stage()
    stage.feed(joined("rank1", 1), joined("rank2", 1))
    assert stage.port.calls == [("refuse", "rank2")]


@pytest.mark.parametrize("kind", [Prepare, Wake, Sleep, SwitchRole, Leave, Fetch])
def test_every_order_is_a_command_to_a_rank(kind: type) -> None:
    assert issubclass(kind, protocol.Command) and kind in protocol.MemberOrder.__args__
