"""External GPUs that come and go as an availability trace says, and workers that die by chance.

Owns the trace's GPUs and which of them are a worker. What becomes of workers is the fleet's affair. Invariant: `tp` GPUs make a
worker, named by them, so that the same GPUs are the same worker each time they come.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pearl.sched.events import ClusterEvent, WorkerReclaimed, Zone
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.fleet import Fleet, Node
from pearl.sched.sim.plans import Availability, SimSettings


class Gpus:
    def __init__(
        self,
        settings: SimSettings,
        availability: Availability,
        agenda: Agenda,
        fleet: Fleet,
        emit: Callable[[ClusterEvent], None],
    ) -> None:
        self._settings, self._agenda, self._fleet, self._emit = settings, agenda, fleet, emit
        self._free: list[str] = []
        self._worker_of: dict[str, str] = {}
        self._chance = random.Random(f"deaths {settings.seed}")
        for at_s, sign, gpus in availability.events:
            if sign > 0:
                agenda.at(at_s, lambda gpus=gpus: self._come(gpus))  # type: ignore[misc]
            else:
                if availability.notice_s:
                    notice = max(0.0, at_s - availability.notice_s)
                    agenda.at(notice, lambda gpus=gpus, at_s=at_s: self._reclaim(gpus, at_s))  # type: ignore[misc]
                agenda.at(at_s, lambda gpus=gpus: self._go(gpus))  # type: ignore[misc]
        fleet.left = self._back_later
        if settings.faults.death:
            self._next_death()

    def _come(self, gpus: tuple[str, ...]) -> None:
        self._free += gpus
        tp = self._settings.hardware.tp
        while len(self._free) >= tp:
            members, self._free = self._free[:tp], self._free[tp:]
            name = "+".join(sorted(members))
            self._worker_of.update(dict.fromkeys(members, name))
            self._fleet.join(name, members, zone=Zone.DEDICATED, external=True)

    def _reclaim(self, gpus: tuple[str, ...], deadline: float) -> None:
        for name in dict.fromkeys(self._worker_of[gpu] for gpu in gpus if gpu in self._worker_of):
            if name in self._fleet.nodes:
                self._emit(WorkerReclaimed(worker=name, deadline=deadline))

    def _go(self, gpus: tuple[str, ...]) -> None:
        left = []
        for gpu in gpus:
            name = self._worker_of.pop(gpu, None)
            if name is None:
                self._free = [free for free in self._free if free != gpu]
                continue
            self._fleet.lose(name, "GPUs taken")
            others = [other for other, worker in self._worker_of.items() if worker == name]
            for other in others:
                del self._worker_of[other]
            left += others
        self._free += [gpu for gpu in left if gpu not in gpus]
        self._come(())

    def _next_death(self) -> None:
        """Of one of the dedicated workers, each being as likely; more workers, more deaths."""
        count = max(1, sum(node.zone is Zone.DEDICATED for node in self._fleet.nodes.values()))
        wait = self._chance.expovariate(self._settings.faults.death * count)
        self._agenda.after(wait, self._die)

    def _die(self) -> None:
        mortal = [name for name, node in self._fleet.nodes.items() if node.zone is Zone.DEDICATED]
        if mortal:
            name = self._chance.choice(mortal)
            node = self._fleet.nodes[name]
            self._fleet.lose(name, "died")
            self._back_later(name, node)
        self._next_death()

    def _back_later(self, name: str, node: Node) -> None:
        self._agenda.after(self._settings.faults.revive_s, lambda: self._revive(name, node))

    def _revive(self, name: str, node: Node) -> None:
        """It is back, bare (a trainer's GPUs: asleep), unless its GPUs are not there any more."""
        there = not node.external or all(self._worker_of.get(gpu) == name for gpu in node.gpus)
        if there and name not in self._fleet.nodes:
            prepared = node.zone is Zone.OVERLAP
            self._fleet.join(name, sorted(node.gpus), zone=node.zone, external=node.external, prepared=prepared)
