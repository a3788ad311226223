"""Groups between their start and their training: storage and the books.

Owns which trajectories are running, which groups are complete, and what became of all others. It does not decide when a
group starts or when a batch is due (`sched/admission.py`). Invariant (`check`): every trajectory that was dispatched is
running, held, trained, or dropped for a named cause. Groups leave in the order of their ids, all of them, so a batch does
not depend on who finished first. `holdings` and `from_holdings` carry books and trajectories over the end of a process: what
had ended is kept, what was running is counted as dropped and as dispatched once more, to be played again from its seed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pearl.rl.types import Group, Trajectory
from pearl.sched.admission import is_stale

GroupState = Literal["open", "ready", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group with members that still run: the ended ones are in `group`; `size` counts the seats, taken by either.

    `spares` of them are for those that come last: the group is complete without.
    """

    group: Group
    size: int
    running: tuple[str, ...]
    spares: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """All that a buffer holds and has counted, as a value: what a checkpoint stores of it."""

    dispatched: int
    trained: int
    dropped: dict[str, int]
    dropped_groups: int
    ready: tuple[Group, ...]
    open: tuple[OpenGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplayed:
    """A member of an open group that has to be played, from its seed on."""

    trajectory_id: str
    group_id: int
    env_seed: int


@dataclass(slots=True, kw_only=True)
class _Entry:
    group: Group
    size: int
    running: set[str] = field(default_factory=set)
    spares: int = 0


class Buffer:
    """Counts trajectories: `dispatched`, `trained`, `dropped` (by cause); groups: `dropped_groups` (to be replaced).

    Causes: "failed" (the member itself), "small group" (siblings of failed ones, fewer than two left), "stale", "spare" (those
    that a group did not wait for), and what callers of `drop_running` and `drop_group` say.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_groups = 0
        self._open: dict[int, _Entry] = {}
        self._ready: dict[int, Group] = {}

    @property
    def ready(self) -> int:
        """Complete groups waiting for training."""
        return len(self._ready)

    @property
    def in_flight(self) -> int:
        """Trajectories dispatched and neither trained nor dropped: running, or held until their group is taken."""
        held = sum(len(group.trajectories) for group in self._ready.values())
        return held + sum(len(entry.running) + len(entry.group.trajectories) for entry in self._open.values())

    def dispatch(self, group_id: int, env_seed: int, trajectory_ids: list[str], spares: int = 0) -> None:
        """A group starts with these members, and does not wait for the last `spares` of them to end.

        ValueError for an id in use, or no members beside the spares.
        """
        if group_id in self._open or group_id in self._ready:
            raise ValueError(f"group_id={group_id}: is in use")
        if not trajectory_ids or len(set(trajectory_ids)) != len(trajectory_ids):
            raise ValueError(f"trajectory_ids={trajectory_ids}: must be one or more different ids")
        if not 0 <= spares < len(trajectory_ids):
            raise ValueError(f"spares={spares}: must be >= 0 and less than the {len(trajectory_ids)} members")
        group = Group(group_id=group_id, env_seed=env_seed)
        self._open[group_id] = _Entry(group=group, size=len(trajectory_ids), running=set(trajectory_ids), spares=spares)
        self.dispatched += len(trajectory_ids)

    def retry(self, failed: Trajectory, trajectory_id: str) -> None:
        """A member failed and another plays its seed in its place; the failed one counts as dropped."""
        entry = self._entry_of(failed)
        if trajectory_id in entry.running:
            raise ValueError(f"trajectory_id={trajectory_id!r}: is running already")
        entry.running.remove(failed.trajectory_id)
        entry.running.add(trajectory_id)
        self.dropped["failed"] += 1
        self.dispatched += 1

    def is_running(self, trajectory: Trajectory) -> bool:
        """Whether it is one that its group still waits for."""
        entry = self._open.get(trajectory.group_id)
        return entry is not None and trajectory.trajectory_id in entry.running

    def spared(self, group_id: int) -> list[str]:
        """Members that still run and that their group need not wait for, since enough others are done: dropped by this call."""
        entry = self._open.get(group_id)
        if entry is None or len(entry.group.trajectories) < entry.size - entry.spares:
            return []
        names = sorted(entry.running)
        self.dropped["spare"] += len(names)
        entry.running.clear()
        self._close(entry)
        return names

    def finish(self, trajectory: Trajectory) -> GroupState:
        """A member ended, done or failed; says what that makes of its group.

        With the last member the group is "ready" if at least two are done (one, in groups of one), else "dropped".
        ValueError for a trajectory that is not running.
        """
        if trajectory.outcome not in ("done", "failed"):
            raise ValueError(f"trajectory {trajectory.trajectory_id!r}: outcome={trajectory.outcome!r}, must be done or failed")
        entry = self._entry_of(trajectory)
        entry.running.remove(trajectory.trajectory_id)
        if trajectory.outcome == "done":
            entry.group.trajectories.append(trajectory)
        else:
            self.dropped["failed"] += 1
        return "open" if entry.running else self._close(entry)

    def take(self, batch_groups: int, weight_version: int, max_staleness: int) -> list[Group] | None:
        """The `batch_groups` oldest groups, now counted as trained; None while one of them is still played.

        Waiting for the oldest instead of taking whoever is complete keeps a slow group from being passed over until it is
        too stale, and makes batches the same whoever finished first. Of those that are due, groups with a token more than
        `max_staleness` versions older than `weight_version` (that of the weights which the update starts from) are dropped
        and counted instead.
        """
        while len(self._ready) >= batch_groups:
            oldest = sorted(self._ready.keys() | self._open.keys())[:batch_groups]
            if len(oldest) < batch_groups or any(group_id in self._open for group_id in oldest):
                return None
            stale = [group_id for group_id in oldest if self._is_stale(group_id, weight_version, max_staleness)]
            if not stale:
                batch = [self._ready.pop(group_id) for group_id in oldest]
                self.trained += sum(len(group.trajectories) for group in batch)
                return batch
            for group_id in stale:
                self.drop_group(group_id, "stale")
        return None

    def _is_stale(self, group_id: int, weight_version: int, max_staleness: int) -> bool:
        members = self._ready[group_id].trajectories
        return any(is_stale(member.oldest_version, weight_version, max_staleness) for member in members)

    def drop_group(self, group_id: int, cause: str) -> None:
        """Gives up a group, open or complete, whole; ValueError if it is unknown."""
        entry = self._open.pop(group_id, None)
        group = entry.group if entry else self._ready.pop(group_id, None)
        if group is None:
            raise ValueError(f"group_id={group_id}: is neither open nor ready")
        self.dropped[cause] += len(group.trajectories) + (len(entry.running) if entry else 0)
        self.dropped_groups += 1

    def is_flat(self, group_id: int) -> bool:
        """Whether a complete group's members all got the same reward."""
        return len({member.reward for member in self._ready[group_id].trajectories}) == 1

    def drop_running(self, cause: str) -> int:
        """Gives up every group that is not complete (the job stops); returns how many trajectories that cost."""
        before = self.dropped.total()
        for group_id in list(self._open):
            self.drop_group(group_id, cause)
        return self.dropped.total() - before

    def holdings(self) -> Holdings:
        """A copy of the books and of every group not trained yet; ended trajectories are shared, they no longer change."""
        return Holdings(
            dispatched=self.dispatched,
            trained=self.trained,
            dropped=dict(self.dropped),
            dropped_groups=self.dropped_groups,
            ready=tuple(_copy(group) for _, group in sorted(self._ready.items())),
            open=tuple(
                OpenGroup(group=_copy(entry.group), size=entry.size, running=tuple(sorted(entry.running)), spares=entry.spares)
                for _, entry in sorted(self._open.items())
            ),
        )

    @classmethod
    def from_holdings(cls, holdings: Holdings, cause: str) -> tuple[Buffer, list[Unplayed]]:
        """A buffer that goes on from `holdings`, and the members to play again, in the order of their groups.

        What was running then is lost: dropped for `cause`, and dispatched again under the same id and seed. ValueError if
        the groups or the books contradict themselves.
        """
        buffer = cls()
        buffer.dispatched, buffer.trained = holdings.dispatched, holdings.trained
        buffer.dropped, buffer.dropped_groups = Counter(holdings.dropped), holdings.dropped_groups
        buffer._ready = {group.group_id: _copy(group) for group in holdings.ready}
        for held in holdings.open:
            entry = _Entry(group=_copy(held.group), size=held.size, running=set(held.running), spares=held.spares)
            buffer._open[entry.group.group_id] = entry
        _check_groups(holdings)
        try:
            buffer.check()
        except RuntimeError as error:
            raise ValueError(f"holdings: {error}") from None
        unplayed = [
            Unplayed(trajectory_id=name, group_id=held.group.group_id, env_seed=held.group.env_seed)
            for held in holdings.open
            for name in held.running
        ]
        if unplayed:
            buffer.dropped[cause] += len(unplayed)
            buffer.dispatched += len(unplayed)
        return buffer, unplayed

    def counts(self) -> dict[str, int]:
        """The books, for the log: dispatched = trained + in_flight + the dropped ones of each cause."""
        causes = {f"dropped_{cause.replace(' ', '_')}": count for cause, count in sorted(self.dropped.items())}
        return {"dispatched": self.dispatched, "trained": self.trained, "in_flight": self.in_flight, **causes}

    def check(self) -> None:
        """RuntimeError with all numbers if a trajectory was lost or counted twice."""
        if self.dispatched != self.trained + self.dropped.total() + self.in_flight:
            raise RuntimeError(f"trajectories do not add up: {self.counts()}")

    def _entry_of(self, trajectory: Trajectory) -> _Entry:
        entry = self._open.get(trajectory.group_id)
        if entry is None or trajectory.trajectory_id not in entry.running:
            raise ValueError(f"trajectory {trajectory.trajectory_id!r} of group {trajectory.group_id}: is not running")
        return entry

    def _close(self, entry: _Entry) -> GroupState:
        group = entry.group
        if len(group.trajectories) < min(2, entry.size - entry.spares):
            self.drop_group(group.group_id, "small group")
            return "dropped"
        del self._open[group.group_id]
        group.trajectories.sort(key=lambda member: member.trajectory_id)
        self._ready[group.group_id] = group
        return "ready"


def _copy(group: Group) -> Group:
    return Group(group_id=group.group_id, env_seed=group.env_seed, trajectories=list(group.trajectories))


def _check_groups(holdings: Holdings) -> None:
    """ValueError for a group or a member that is there twice, or an open group that could not have come about."""
    groups = [*holdings.ready, *(held.group for held in holdings.open)]
    ids = [group.group_id for group in groups]
    if len(set(ids)) != len(ids):
        raise ValueError(f"holdings: group ids {sorted(ids)}: must be different")
    for held in holdings.open:
        names = [*held.running, *(member.trajectory_id for member in held.group.trajectories)]
        if not held.running or len(set(names)) != len(names) or not len(names) <= held.size > held.spares >= 0:
            raise ValueError(f"holdings: open group {held.group.group_id} of size={held.size} with members {names}")
