"""The GPU-worker-role table: one way to change it, and invariants after every event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_cases import joined

from pearl.sched.events import (
    Activity,
    OrderDone,
    Ordered,
    TrainingBegins,
    TrainingFinished,
    TrainingStarted,
    WeightsPublished,
    WorkerGone,
    WorkerReclaimed,
    WorkerReport,
    WorkerRole,
    Zone,
)
from pearl.sched.shape import Shape
from pearl.sched.state import REMEMBERED, ClusterState

TRAINING, DECODE, PREFILL = WorkerRole.TRAINING, WorkerRole.DECODE, WorkerRole.PREFILL


def table(*events) -> ClusterState:
    state = ClusterState()
    for event in events:
        assert state.apply(event, 0.0)
        state.check()
    return state


def test_an_order_is_under_way_until_it_is_answered() -> None:
    state = table(joined("a", 0), joined("b", 1))
    assert state.apply(Ordered(worker="a", role=DECODE), 1.0)
    row = state.workers["a"]
    assert (row.epoch, row.activity, row.role, row.next_role) == (1, Activity.TRANSITIONING, WorkerRole.MIXED, DECODE)
    assert state.shape() == Shape(mixed=1, decode=1), "counted in the role that was ordered"
    assert state.apply(OrderDone(worker="a", epoch=1), 2.0)
    assert state.workers["a"].role is DECODE and state.workers["a"].activity is Activity.ACTIVE
    state.apply(Ordered(worker="a", role=PREFILL), 3.0)
    assert state.apply(OrderDone(worker="a", epoch=2, ok=False, error="no"), 4.0)
    assert state.workers["a"].role is DECODE, "a failed order changes nothing"
    state.check()


def test_messages_of_other_epochs_and_doubled_ones_are_dropped_and_counted() -> None:
    state = table(joined("a", 0))
    report = WorkerReport(worker="a", epoch=0, running=3, kv_used=7, kv_total=10)
    assert state.apply(report, 1.0) and state.workers["a"].running == 3
    state.apply(Ordered(worker="a", role=DECODE), 2.0)
    before = state.workers["a"]
    for event in (report, WorkerReport(worker="a", epoch=5), OrderDone(worker="a", epoch=0), OrderDone(worker="x", epoch=0)):
        assert not state.apply(event, 3.0)
    assert state.workers["a"] == before
    assert state.apply(OrderDone(worker="a", epoch=1), 4.0) and not state.apply(OrderDone(worker="a", epoch=1), 4.0)
    assert not state.apply(joined("a", 0), 5.0)
    assert state.dropped == {"old_epoch": 2, "epoch_ahead": 1, "unknown_worker": 1, "doubled": 2}


def test_slot_gpus_and_epoch_are_for_life() -> None:
    state = table(joined("a", 0), joined("b", 1))
    state.apply(Ordered(worker="a", role=DECODE), 0.0)
    assert state.apply(WorkerGone(worker="a"), 0.0) and not state.apply(WorkerGone(worker="a"), 0.0)
    with pytest.raises(ValueError, match="for life"):
        state.apply(joined("a", 5), 0.0)
    with pytest.raises(ValueError, match="for life"):
        state.apply(joined("b", 5), 0.0)
    assert state.apply(joined("c", 2), 0.0) and state.apply(joined("a", 0), 0.0)
    assert {name: row.slot for name, row in state.workers.items()} == {"b": 1, "c": 2, "a": 0}
    assert state.workers["a"].epoch == 2, "answers from its former life are old"
    state.check()


def test_gpus_are_shared_by_a_trainer_and_one_overlap_worker_only() -> None:
    state = table(joined("t", 0, zone=Zone.OVERLAP, role=TRAINING), joined("o", 0, zone=Zone.OVERLAP, active=False))
    for name, options in (("d", {}), ("o2", {"zone": Zone.OVERLAP}), ("t2", {"zone": Zone.OVERLAP, "role": TRAINING})):
        with pytest.raises(ValueError, match=f"'{name}': GPUs"):
            state.apply(joined(name, 0, **options), 0.0)
    with pytest.raises(ValueError, match="must be in zone overlap"):
        state.apply(joined("t3", 7, role=TRAINING), 0.0)
    with pytest.raises(ValueError, match="at least one GPU"):
        state.apply(joined("", 7), 0.0)
    assert list(state.workers) == ["t", "o"]


def test_training_has_the_overlap_zone_to_itself() -> None:
    state = table(joined("t", 0, zone=Zone.OVERLAP, role=TRAINING), joined("o", 0, zone=Zone.OVERLAP, active=False))
    assert state.workers["o"].lendable and not state.workers["t"].serves
    assert state.apply(TrainingBegins(step=0, deadline=9.0), 0.0) and state.training == "wanted"
    assert not state.apply(TrainingBegins(step=0, deadline=9.0), 0.0)
    assert state.apply(TrainingStarted(), 0.0) and not state.apply(TrainingStarted(), 0.0)
    state.check()
    with pytest.raises(ValueError, match="cannot be active while"):
        state.apply(joined("o9", 9, zone=Zone.OVERLAP), 0.0)
    assert state.workers["t"].activity is Activity.ACTIVE
    state.apply(Ordered(worker="o", role=DECODE), 0.0)
    with pytest.raises(AssertionError, match="while they train"):
        state.check()
    state.apply(OrderDone(worker="o", epoch=1, ok=False), 0.0)
    assert not state.apply(TrainingFinished(step=3), 0.0), "another step's"
    assert state.apply(TrainingFinished(step=0), 0.0) and state.workers["t"].activity is Activity.INACTIVE
    state.check()


def test_time_and_departures_of_external_workers_are_counted() -> None:
    state = ClusterState()
    state.apply(joined("d", 0), 0.0)
    state.apply(joined("e", 1, external=True), 10.0)
    state.apply(joined("f", 2, external=True), 20.0)
    assert state.apply(WorkerReclaimed(worker="e", deadline=60.0), 30.0)
    assert not state.apply(WorkerReclaimed(worker="e", deadline=60.0), 30.0)
    assert state.apply(WorkerReclaimed(worker="e", deadline=50.0), 30.0) and state.workers["e"].deadline == 50.0
    state.apply(WorkerGone(worker="e"), 40.0)
    state.apply(WorkerGone(worker="f"), 50.0)
    assert state.external_seconds == 10 + 2 * 10 + 2 * 10 + 10 and state.departures == 2
    assert state.apply(WeightsPublished(version=2), 60.0) and not state.apply(WeightsPublished(version=1), 60.0)
    assert state.weight_version == 2


def test_who_was_told_to_leave_is_gone_with_its_answer() -> None:
    state = table(joined("a", 0))
    state.apply(Ordered(worker="a", role=WorkerRole.MIXED, active=False, leaving=True), 0.0)
    assert not state.workers["a"].serves and state.shape().mode == "empty"
    assert state.apply(OrderDone(worker="a", epoch=1), 0.0) and not state.workers
    state.check()


NAMES, ZONES = st.sampled_from(["a", "b", "o"]), {"o": Zone.OVERLAP}
EVENTS = st.one_of(
    NAMES.map(lambda name: joined(name, ord(name), zone=ZONES.get(name, Zone.DEDICATED), active=name not in ZONES)),
    st.builds(Ordered, worker=NAMES, role=st.sampled_from([DECODE, PREFILL]), active=st.booleans()),
    st.builds(OrderDone, worker=NAMES, epoch=st.integers(0, 4), ok=st.booleans()),
    st.builds(WorkerReport, worker=NAMES, epoch=st.integers(0, 4), kv_used=st.integers(0, 9)),
    st.builds(WorkerGone, worker=NAMES),
    st.builds(WorkerReclaimed, worker=NAMES, deadline=st.floats(0, 9)),
)


@settings(deadline=None, max_examples=150)
@given(events=st.lists(EVENTS, max_size=30))
def test_no_order_of_events_breaks_the_table_and_repeats_change_nothing(events) -> None:
    state = ClusterState()
    epochs: dict[str, int] = {}
    for now, event in enumerate(events):
        state.apply(event, float(now))
        state.check()
        if not isinstance(event, Ordered):
            rows = dict(state.workers)
            repeated = state.apply(event, float(now))
            assert not repeated or isinstance(event, WorkerReport)
            assert state.workers == rows
        for name, row in state.workers.items():
            assert row.epoch >= epochs.get(name, 0), "epochs never go back"
            epochs[name] = row.epoch


def test_who_is_long_gone_is_forgotten_and_slots_are_never_shared() -> None:
    state = table(joined("a", 0))
    state.apply(WorkerGone(worker="a"), 0.0)
    for number in range(1, REMEMBERED + 1):
        state.apply(joined(f"w{number}", number, external=True), 0.0)
        state.apply(WorkerGone(worker=f"w{number}"), 0.0)
    state.check()
    assert len(state._past) == REMEMBERED and state.apply(joined("a", 5), 0.0), "its GPUs are no longer its own"
    assert state.workers["a"].slot == REMEMBERED + 1
    assert state.apply(joined("w7", 7), 0.0) and state.workers["w7"].slot == 7 and state.workers["w7"].epoch == 1
    state.check()
