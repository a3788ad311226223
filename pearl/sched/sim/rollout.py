"""Trajectories and their environments: who starts when, what comes after a turn, and when a batch is complete.

Owns the trajectories under way and the groups between start and training. When one may start is `sched/admission.py`'s rule,
the same object as in a live run; batches are made of the oldest groups, as live. It knows no workers. Invariant: every
trajectory that was started is under way, complete, trained or dropped; a dropped one is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pearl.sched.admission import Admission
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.dispatch import Dispatcher
from pearl.sched.sim.episode import Episode
from pearl.sched.sim.plans import SimSettings, TrajectoryPlan


@dataclass(slots=True, eq=False)
class _Group:
    waiting: list[TrajectoryPlan]
    """Members that were not started yet."""
    size: int
    began: float
    ended: float = 0.0
    complete: list[Episode] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.complete) == self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What step `number` (from 0) trains. `began`: its first trajectory was started; `ended`: the last was complete."""

    number: int
    episodes: tuple[Episode, ...]
    began: float
    ended: float

    @property
    def plans(self) -> list[TrajectoryPlan]:
        return [episode.plan for episode in self.episodes]


class Rollout:
    """`progressed` is called when a trajectory is complete, `batch_opened` before the first group of a batch (counted from 0)
    starts; `version` says which weights are published."""

    def __init__(self, settings: SimSettings, agenda: Agenda, dispatcher: Dispatcher, plans: Iterator[TrajectoryPlan]) -> None:
        self._settings, self._agenda, self._dispatcher, self._plans = settings, agenda, dispatcher, plans
        self.admission = Admission(
            groups_per_batch=settings.batch // settings.group,
            max_staleness=settings.max_staleness,
            barrier=settings.semantics == "barrier",
        )
        self.counts: Counter[str] = Counter()
        self.version: Callable[[], int] = lambda: 0
        self.progressed: Callable[[], None] = lambda: None
        self.batch_opened: Callable[[int], None] = lambda batch: None
        self.trained_batches = 0
        self._groups: dict[int, _Group] = {}
        self._started = self._dropped_groups = self._taken = 0
        self._ahead: TrajectoryPlan | None = None
        dispatcher.turn_over = self._turn_over

    @property
    def in_flight(self) -> int:
        return len(self._dispatcher.live)

    def episodes(self) -> Iterator[Episode]:
        """All that were started and are neither taken nor dropped."""
        yield from self._dispatcher.live.values()
        for group in self._groups.values():
            yield from group.complete

    @property
    def held(self) -> int:
        """Complete, and not trained or dropped yet."""
        return sum(len(group.complete) for group in self._groups.values())

    # ------------------------------------------------------------------------------------------------ start and turns

    def start(self) -> None:
        """Starts what may start now."""
        while self.in_flight < self._settings.batch:
            group = next((one for one in self._groups.values() if one.waiting), None) or self._open_group()
            if group is None:
                return
            self._play(Episode(group.waiting[0], self._chance(group.waiting.pop(0).trajectory)))

    def _open_group(self) -> _Group | None:
        may = self.admission.may_start(
            started=self._started,
            trained_batches=self.trained_batches,
            dropped=self._dropped_groups,
            total_batches=self._settings.max_steps,
            collected_batches=self.collected,
        )
        members = self._next_group() if may else []
        if not members:
            return None
        batch, place = divmod(self._started - self._dropped_groups, self.admission.groups_per_batch)
        if not place:
            self.batch_opened(batch)
        self._started += 1
        group = self._groups[members[0].group] = _Group(members, len(members), self._agenda.now)
        return group

    def _next_group(self) -> list[TrajectoryPlan]:
        """The plans of the next group, as many as it has; empty when there are no more."""
        first = self._ahead or next(self._plans, None)
        self._ahead = None
        members = [] if first is None else [first]
        for plan in self._plans if members else ():
            if plan.group != members[0].group:
                self._ahead = plan
                break
            members.append(plan)
        for plan in members:
            self._check(plan)
        return members

    def _check(self, plan: TrajectoryPlan) -> None:
        sizes = self._settings.engine
        most = min(sizes.max_model_len - 1, int(self._settings.costs.kv_capacity_tokens // sizes.block_size * sizes.block_size))
        if plan.tokens > most:
            raise ValueError(f"trajectory {plan.trajectory}: has {plan.tokens} tokens, a worker can hold {most} of one")

    def _play(self, episode: Episode) -> None:
        self.counts["started"] += 1
        self._dispatcher.live[episode.name] = episode
        self._agenda.after(episode.plan.reset_s + self._settings.overhead_s, lambda: self._dispatcher.submit(episode))

    def _chance(self, trajectory: int) -> random.Random:
        return random.Random(self._settings.seed * 1_000_003 + trajectory)

    def _turn_over(self, episode: Episode) -> None:
        env_s, faults = episode.end_turn(), self._settings.faults
        if faults.hang and episode.chance.random() < faults.hang:
            self._agenda.after(faults.hang_s, lambda: self._again(episode))
        else:
            self._agenda.after(env_s, lambda: self._answered(episode))

    def _answered(self, episode: Episode) -> None:
        if episode.is_over:
            self._complete(episode)
            return
        episode.answer(self._settings.miss_share)
        submit = self._dispatcher.submit
        self._agenda.after(self._settings.overhead_s, lambda: submit(episode))

    def _again(self, episode: Episode) -> None:
        """Its environment was given up: the trajectory is played again."""
        self.counts["failed"] += 1
        self.counts["tokens_dropped"] += episode.generated
        self._dispatcher.forget(episode)
        del self._dispatcher.live[episode.name]
        episode.restart()
        self._play(episode)

    def _complete(self, episode: Episode) -> None:
        self._dispatcher.forget(episode)
        del self._dispatcher.live[episode.name]
        self.counts["complete"] += 1
        group = self._groups[episode.plan.group]
        group.complete.append(episode)
        group.ended = self._agenda.now
        self.progressed()

    # ------------------------------------------------------------------------------------------------ batches

    @property
    def collected(self) -> int:
        """Batches that are complete or were."""
        return self._taken + self._complete_batches()

    def _complete_batches(self) -> int:
        """Batches that wait for the trainer."""
        complete = 0
        for group in self._groups.values():
            if not group.is_complete:
                break
            complete += 1
        return complete // self.admission.groups_per_batch

    def unfinished(self) -> int:
        """Trajectories of the oldest batch that is not complete: under way or still to come."""
        per_batch = self.admission.groups_per_batch
        groups = list(self._groups.values())[self._complete_batches() * per_batch :][:per_batch]
        to_come = (per_batch - len(groups)) * self._settings.group
        return to_come + sum(group.size - len(group.complete) for group in groups)

    def take(self) -> Batch | None:
        """The oldest groups as a batch, if all are complete; those that are too stale are dropped, counted and replaced."""
        while self._complete_batches():
            oldest = list(self._groups)[: self.admission.groups_per_batch]
            stale = [number for number in oldest if self._is_stale(self._groups[number])]
            for number in stale:
                stale_ones = self._groups.pop(number).complete
                self.counts["stale"] += len(stale_ones)
                self.counts["tokens_dropped"] += sum(episode.generated for episode in stale_ones)
                self._dropped_groups += 1
            if not stale:
                groups = [self._groups.pop(number) for number in oldest]
                episodes = tuple(episode for group in groups for episode in group.complete)
                self.counts["taken"] += len(episodes)
                self.counts["tokens_taken"] += sum(episode.generated for episode in episodes)
                began, ended = min(group.began for group in groups), max(group.ended for group in groups)
                self._taken += 1
                return Batch(number=self._taken - 1, episodes=episodes, began=began, ended=ended)
        return None

    def _is_stale(self, group: _Group) -> bool:
        version = self.version()
        return any(self.admission.too_stale(oldest_version=one.oldest, weight_version=version) for one in group.complete)
