"""The buffer's books: what was dispatched is running, held, trained, or dropped for a cause."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pearl.rl.buffer import Buffer, Holdings, OpenGroup, Unplayed
from pearl.rl.types import Group, Trajectory


def ended(name: str, group: int, *, version: int = 0, outcome: str = "done") -> Trajectory:
    return Trajectory(trajectory_id=name, group_id=group, env_seed=group, weight_versions=[-1, version], outcome=outcome)


def fill(buffer: Buffer, group: int, *, size: int = 2, version: int = 0) -> None:
    names = [f"{group}.{member}" for member in range(size)]
    buffer.dispatch(group, group, names)
    for name in reversed(names):
        state = buffer.finish(ended(name, group, version=version))
    assert state == "ready"


def test_batches_leave_in_the_order_of_their_ids() -> None:
    buffer = Buffer()
    for group in (3, 0, 2, 1):
        fill(buffer, group)
    batch = buffer.take(3, weight_version=0, max_staleness=0)
    assert [group.group_id for group in batch] == [0, 1, 2]
    assert [member.trajectory_id for member in batch[0].trajectories] == ["0.0", "0.1"]
    assert buffer.take(2, weight_version=0, max_staleness=0) is None and buffer.ready == 1
    assert buffer.counts() == {"dispatched": 8, "trained": 6, "in_flight": 2}
    buffer.check()


def test_a_failed_member_leaves_its_siblings() -> None:
    buffer = Buffer()
    buffer.dispatch(0, 7, ["a", "b", "c"])
    assert buffer.finish(ended("b", 0, outcome="failed")) == "open"
    assert buffer.finish(ended("a", 0)) == "open"
    assert buffer.finish(ended("c", 0)) == "ready"
    (group,) = buffer.take(1, weight_version=0, max_staleness=0)
    assert [member.trajectory_id for member in group.trajectories] == ["a", "c"] and group.env_seed == 7
    assert buffer.counts() == {"dispatched": 3, "trained": 2, "in_flight": 0, "dropped_failed": 1}
    buffer.check()


def test_fewer_than_two_survivors_drop_the_group() -> None:
    buffer = Buffer()
    buffer.dispatch(0, 0, ["a", "b"])
    buffer.finish(ended("a", 0, outcome="failed"))
    assert buffer.finish(ended("b", 0)) == "dropped"
    assert buffer.ready == 0 and buffer.dropped_groups == 1
    assert buffer.dropped == {"failed": 1, "small group": 1}
    buffer.dispatch(1, 0, ["alone"])
    assert buffer.finish(ended("alone", 1)) == "ready"
    buffer.dispatch(2, 0, ["lost"])
    assert buffer.finish(ended("lost", 2, outcome="failed")) == "dropped"
    assert buffer.dropped_groups == 2
    buffer.check()


def test_a_retry_takes_the_place_of_the_failed_one() -> None:
    buffer = Buffer()
    buffer.dispatch(0, 0, ["a", "b"])
    buffer.retry(ended("a", 0, outcome="failed"), "a.again")
    assert buffer.finish(ended("b", 0)) == "open"
    assert buffer.finish(ended("a.again", 0)) == "ready"
    assert buffer.counts() == {"dispatched": 3, "trained": 0, "in_flight": 2, "dropped_failed": 1}
    buffer.check()


def test_staleness_is_counted_from_the_oldest_token_at_consumption() -> None:
    buffer = Buffer()
    fill(buffer, 0, version=3)
    fill(buffer, 1, version=4)
    buffer.dispatch(2, 2, ["2.0", "2.1"])
    mixed = Trajectory(trajectory_id="2.0", group_id=2, env_seed=2, weight_versions=[-1, 5, -1, 3], outcome="done")
    buffer.finish(mixed)
    buffer.finish(ended("2.1", 2, version=5))
    assert buffer.take(3, weight_version=4, max_staleness=1) is not None
    buffer = Buffer()
    fill(buffer, 0, version=3)
    fill(buffer, 1, version=4)
    assert buffer.take(2, weight_version=5, max_staleness=1) is None
    assert buffer.counts() == {"dispatched": 4, "trained": 0, "in_flight": 2, "dropped_stale": 2}
    assert buffer.dropped_groups == 1
    assert [group.group_id for group in buffer.take(1, weight_version=5, max_staleness=1)] == [1]
    buffer.check()


def test_stopping_accounts_for_what_was_running() -> None:
    buffer = Buffer()
    fill(buffer, 0)
    buffer.dispatch(1, 1, ["a", "b"])
    buffer.finish(ended("a", 1))
    assert buffer.drop_running("stopped") == 2
    assert buffer.counts() == {"dispatched": 4, "trained": 0, "in_flight": 2, "dropped_stopped": 2}
    buffer.check()


def test_bad_calls_are_refused_and_change_nothing() -> None:
    buffer = Buffer()
    fill(buffer, 0)
    buffer.dispatch(1, 1, ["a", "b"])
    before = buffer.counts()
    for call in (
        lambda: buffer.dispatch(0, 0, ["x"]),
        lambda: buffer.dispatch(1, 0, ["x"]),
        lambda: buffer.dispatch(2, 0, []),
        lambda: buffer.dispatch(2, 0, ["x", "x"]),
        lambda: buffer.finish(ended("nobody", 1)),
        lambda: buffer.finish(ended("0.0", 0)),
        lambda: buffer.finish(ended("a", 1, outcome="running")),
        lambda: buffer.retry(ended("nobody", 1), "c"),
        lambda: buffer.retry(ended("a", 1), "b"),
        lambda: buffer.drop_group(9, "stale"),
    ):
        with pytest.raises(ValueError, match=r"group_id|traject"):
            call()
        assert buffer.counts() == before
    buffer.trained += 1
    with pytest.raises(RuntimeError, match=r"do not add up.*'trained': 1"):
        buffer.check()


def half_done() -> Buffer:
    """One trained group, one ready, one dropped, and one with a done member, a failed one and two that run."""
    buffer = Buffer()
    for group in (0, 1):
        fill(buffer, group)
    assert buffer.take(1, weight_version=0, max_staleness=0) is not None
    buffer.dispatch(2, 2, ["2.0"])
    buffer.finish(ended("2.0", 2, outcome="failed"))
    buffer.dispatch(3, 33, ["3.0", "3.1", "3.2", "3.3"])
    buffer.finish(ended("3.2", 3))
    buffer.finish(ended("3.0", 3, outcome="failed"))
    return buffer


def test_holdings_are_a_copy_and_go_on_with_what_ran_played_again() -> None:
    buffer = half_done()
    holdings = buffer.holdings()
    buffer.finish(ended("3.1", 3))
    buffer.take(1, weight_version=0, max_staleness=0)
    again, unplayed = Buffer.from_holdings(holdings, "resume")
    assert unplayed == [Unplayed(trajectory_id=name, group_id=3, env_seed=33) for name in ("3.1", "3.3")]
    assert (again.dispatched, again.trained, again.in_flight) == (11, 2, 5)
    assert +again.dropped == {"failed": 2, "resume": 2}
    assert again.dropped_groups == 1 and again.ready == 1
    again.check()
    for name in ("3.1", "3.3"):
        state = again.finish(ended(name, 3))
    assert state == "ready"
    batch = again.take(2, weight_version=0, max_staleness=0)
    assert [[member.trajectory_id for member in group.trajectories] for group in batch] == [
        ["1.0", "1.1"],
        ["3.1", "3.2", "3.3"],
    ]
    assert Buffer.from_holdings(holdings, "resume")[0].counts()["in_flight"] == 5


def test_nothing_running_counts_nothing_as_lost() -> None:
    buffer = Buffer()
    fill(buffer, 0)
    again, unplayed = Buffer.from_holdings(buffer.holdings(), "resume")
    assert unplayed == [] and again.counts() == buffer.counts() == {"dispatched": 2, "trained": 0, "in_flight": 2}


def test_contradicting_holdings_are_refused() -> None:
    good = half_done().holdings()
    (held,) = good.open
    done = held.group.trajectories
    for change, message in (
        ({"dispatched": good.dispatched + 1}, "do not add up"),
        ({"open": (held, held), "dispatched": good.dispatched + 3}, "group ids"),
        ({"ready": (*good.ready, held.group), "dispatched": good.dispatched + 1}, "group ids"),
        ({"open": (OpenGroup(group=held.group, size=4, running=()),), "dispatched": good.dispatched - 2}, "open group 3"),
        ({"open": (OpenGroup(group=held.group, size=4, running=("3.1", "3.2")),)}, "open group 3"),
        (
            {"open": (OpenGroup(group=Group(group_id=3, env_seed=3, trajectories=done), size=2, running=held.running),)},
            "size=2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Buffer.from_holdings(dataclasses.replace(good, **change), "resume")


class Books(RuleBasedStateMachine):
    """Random courses; the model keeps what became of every trajectory by name."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer()
        self.fate: dict[str, str] = {}
        self.running: dict[str, int] = {}
        self.needed: dict[int, int] = {}
        self.groups = 0
        self.version = 0
        self.cut_short = 0

    @rule(size=st.integers(1, 4), spares=st.integers(0, 2))
    def dispatch(self, size: int, spares: int) -> None:
        names = [f"{self.groups}.{member}" for member in range(size + spares)]
        self.buffer.dispatch(self.groups, self.groups, names, spares)
        self.needed[self.groups] = size
        self.running |= dict.fromkeys(names, self.groups)
        self.groups += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "failed"]), age=st.integers(0, 2))
    def finish(self, data: st.DataObject, outcome: str, age: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        group = self.running.pop(name)
        dropped = self.buffer.dropped_groups
        state = self.buffer.finish(ended(name, group, version=max(0, self.version - age), outcome=outcome))
        self.fate[name] = outcome
        assert (state == "open") == (group in self.running.values())
        done = [name for name, fate in self.fate.items() if name.startswith(f"{group}.") and fate == "done"]
        spared = self.buffer.spared(group)
        assert bool(spared) == (state == "open" and len(done) >= self.needed[group])
        for name in spared:
            assert self.running.pop(name) == group and group in self.buffer._ready
            self.fate[name] = "spare"
        assert (state == "dropped") == (self.buffer.dropped_groups == dropped + 1)

    @rule(groups=st.integers(1, 3), staleness=st.integers(0, 2))
    def take(self, groups: int, staleness: int) -> None:
        batch = self.buffer.take(groups, self.version, staleness)
        if batch is None:
            oldest = sorted({*self.buffer._ready, *self.buffer._open})[:groups]
            assert len(oldest) < groups or any(group in self.buffer._open for group in oldest)
            return
        self.version += 1
        for member in (member for group in batch for member in group.trajectories):
            assert self.fate[member.trajectory_id] == "done"
            assert self.version - 1 - member.oldest_version <= staleness
            self.fate[member.trajectory_id] = "trained"

    @rule()
    def resume(self) -> None:
        """The process ends and another goes on from what was written."""
        data = msgspec.msgpack.encode(self.buffer.holdings())
        self.buffer, unplayed = Buffer.from_holdings(msgspec.msgpack.decode(data, type=Holdings), "resume")
        assert {member.trajectory_id: member.group_id for member in unplayed} == self.running
        self.cut_short += len(unplayed)

    @invariant()
    def add_up(self) -> None:
        self.buffer.check()
        assert self.buffer.dispatched == len(self.running) + len(self.fate) + self.cut_short
        assert self.buffer.trained == list(self.fate.values()).count("trained")
        assert self.buffer.dropped["failed"] == list(self.fate.values()).count("failed")
        assert self.buffer.dropped["spare"] == list(self.fate.values()).count("spare")
        assert self.buffer.dropped["resume"] == self.cut_short
        assert self.buffer.in_flight >= len(self.running)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_slow_group_is_waited_for_and_not_passed_over() -> None:
    buffer = Buffer()
    for group_id in range(3):
        buffer.dispatch(group_id, group_id, [f"{group_id}-0", f"{group_id}-1"])
    for group_id in (1, 2, 0):
        assert buffer.take(2, weight_version=0, max_staleness=0) is None
        for member in range(2):
            buffer.finish(
                Trajectory(trajectory_id=f"{group_id}-{member}", group_id=group_id, env_seed=group_id, outcome="done")
            )
    batch = buffer.take(2, weight_version=0, max_staleness=0)
    assert batch is not None
    assert [group.group_id for group in batch] == [0, 1]
