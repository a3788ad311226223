"""The simulated GPUs: carries out what the cluster scheduler orders, and lets workers come, go and die.

Owns who is there and what is being done with them. It decides nothing; each order takes the time its cost says, and is answered
once, by an `OrderDone` of its epoch, unless it is made to be silent. Invariants: a GPU is in one worker of a zone at a time; an
order that was overtaken by a later one for the same worker does nothing more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.engine.limits import CoreSettings
from pearl.engine.steady import SteadyCore
from pearl.protocol import Role
from pearl.sched.commands import (
    Admit,
    Borrow,
    ClusterCommand,
    GiveBack,
    Leave,
    Member,
    MoveSession,
    Prepare,
    Refuse,
    Requeue,
    SetRole,
    TrainerMayBegin,
)
from pearl.sched.events import ClusterEvent, OrderDone, WorkerGone, WorkerJoined, WorkerRole, Zone
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.dispatch import Dispatcher
from pearl.sched.sim.plans import SimSettings
from pearl.sched.sim.worker import SimWorker

Emit = Callable[[ClusterEvent], None]


@dataclass(slots=True, eq=False)
class Node:
    """A worker's place. `epoch`: of the last order; `prepared`: an engine is built; `changing`: an order is under way."""

    worker: SimWorker
    gpus: frozenset[str]
    zone: Zone
    external: bool
    prepared: bool
    epoch: int = 0
    changing: bool = False
    borrowed: bool = False


class Fleet:
    """`may_train` is called with the step whose training may begin, `left` with who has left though its GPUs stay."""

    def __init__(
        self, settings: SimSettings, agenda: Agenda, dispatcher: Dispatcher, emit: Emit, epoch_of: Callable[[str], int]
    ) -> None:
        self._settings, self._agenda, self._dispatcher, self._emit = settings, agenda, dispatcher, emit
        self._epoch_of = epoch_of
        self.nodes: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()
        self.version = 0
        self.may_train: Callable[[int], None] = lambda step: None
        self.left: Callable[[str, Node], None] = lambda name, node: None
        self._chance = random.Random(f"orders {settings.seed}")

    # ------------------------------------------------------------------------------------------------ who is there

    def found(self) -> None:
        """Enters the hardware that is always there: its reserved workers serve at once, its training GPUs could be lent."""
        hardware = self._settings.hardware
        training = [f"t{number}" for number in range(hardware.training_gpus)]
        self._emit(WorkerJoined(worker="trainer", gpus=frozenset(training), zone=Zone.OVERLAP, role=WorkerRole.TRAINING))
        for number in range(hardware.training_gpus // hardware.tp):
            gpus = training[number * hardware.tp : (number + 1) * hardware.tp]
            self.join(f"overlap{number}", gpus, zone=Zone.OVERLAP, serving=False, prepared=True)
        for number in range(hardware.reserved_workers):
            gpus = [f"r{number}.{part}" for part in range(hardware.tp)]
            self.join(f"reserved{number}", gpus, zone=Zone.DEDICATED, serving=True, prepared=True)

    def join(
        self,
        name: str,
        gpus: Sequence[str],
        *,
        zone: Zone,
        serving: bool = False,
        prepared: bool = False,
        external: bool = False,
    ) -> None:
        settings = self._settings
        sizes = settings.engine
        core = CoreSettings(
            block_size=sizes.block_size,
            num_blocks=int(settings.costs.kv_capacity_tokens // sizes.block_size),
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_batch_tokens=sizes.max_batch_tokens,
            vocab_size=1 << 60,
            decode_prefill_tokens=sizes.decode_prefill_tokens,
            eviction=sizes.eviction,
            transfer_deadline=sizes.transfer_deadline_s,
        )
        worker = SimWorker(name, settings.costs, core, self._agenda, self._dispatcher)
        node = self.nodes[name] = Node(worker, frozenset(gpus), zone, external, prepared)
        self._dispatcher.workers[name] = worker
        if serving:
            worker.wake(Role.MIXED, self.version)
        capacity = core.num_slots
        self._emit(
            WorkerJoined(
                worker=name, gpus=node.gpus, zone=zone, external=external, prepared=prepared, active=serving, kv_total=capacity
            )
        )
        node.epoch = max(node.epoch, self._epoch_of(name))

    def lose(self, name: str, reason: str) -> None:
        """From one moment to the next: dead, or its GPUs taken."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self.counts["lost"] += node.worker.serving
        node.worker.die()
        del self._dispatcher.workers[name]
        self._dispatcher.lose_transfers(node.worker)
        self._emit(WorkerGone(worker=name, reason=reason))

    def publish(self, version: int) -> None:
        """New weights are everywhere: each engine takes them between two steps."""
        self.version = version
        for node in self.nodes.values():
            node.worker.post(lambda core: core.set_weight_version(version, self._settings.update_mode))

    # ------------------------------------------------------------------------------------------------ orders

    def execute(self, commands: Sequence[ClusterCommand]) -> None:
        """Begins to carry them out, in their order. What is ordered together shares its cost."""
        kinds = Counter(type(command) for command in commands)
        for command in commands:
            match command:
                case Requeue():
                    self._dispatcher.requeue(command.sessions)
                case MoveSession():
                    self._dispatcher.move(command.session, command.source, command.target)
                case TrainerMayBegin():
                    self.may_train(command.step)
                case Refuse():
                    raise RuntimeError(f"worker {command.worker}: refused, {command.reason}")
                case Admit():
                    self._admit(command)
                case Prepare() | SetRole() | Borrow() | GiveBack() | Leave():
                    self._order(command, kinds[type(command)])

    def _order(self, command: Prepare | SetRole | Borrow | GiveBack | Leave, count: int) -> None:
        node = self._take(command.worker, command.epoch)
        if node is None:
            return
        costs, worker = self._settings.costs, node.worker
        match command:
            case Prepare():
                self._later(node, command.epoch, costs.prepare.seconds(count), lambda: self._prepared(node))
            case Borrow():
                role = Role(str(command.role))
                self._later(node, command.epoch, costs.borrow.seconds(count), lambda: self._wake(node, role, borrowed=True))
            case SetRole():
                role, seconds, epoch = Role(str(command.role)), float(costs.switch.seconds(count)), command.epoch
                worker.post(lambda core: self._switch(node, role, seconds, epoch))
                if not worker.serving:
                    self._answer(node, epoch, 0.0, error="does not serve")
            case GiveBack():
                self._stop(node, command.epoch, float(costs.give_back.seconds(count)))
            case Leave():
                self._interrupted(node, lambda: self._leave(node, command))

    def _take(self, name: str, epoch: int) -> Node | None:
        """The node that an order is for; None if it is gone or has had a later one."""
        node = self.nodes.get(name)
        if node is None or epoch <= node.epoch:
            return None
        node.epoch, node.changing = epoch, True
        return node

    def _later(self, node: Node, epoch: int, seconds: Any, then: Callable[[], None]) -> None:
        """`then`, and the answer, unless the order fails or is overtaken."""
        began = self._agenda.now

        def end() -> None:
            if not self._obeys(node, epoch):
                return
            failed = self._chance.random() < self._settings.faults.order
            if not failed:
                then()
            self._answer(node, epoch, self._agenda.now - began, error="failed by chance" if failed else "")

        self._agenda.after(float(seconds), end)

    def _answer(self, node: Node, epoch: int, seconds: float, error: str = "") -> None:
        if not self._obeys(node, epoch):
            return
        node.changing = False
        if self._settings.faults.silence and self._chance.random() < self._settings.faults.silence:
            self.counts["silent"] += 1
            return
        self._emit(OrderDone(worker=node.worker.name, epoch=epoch, ok=not error, seconds=seconds, error=error))
        self._dispatcher.retry()

    def _prepared(self, node: Node) -> None:
        node.prepared = True

    def _wake(self, node: Node, role: Role, borrowed: bool = False) -> None:
        node.borrowed = borrowed
        if not node.worker.serving:
            node.worker.wake(role, self.version)
        elif node.worker.role is not role:
            node.worker.post(lambda core: core.switch_role(role, now=self._agenda.now))

    def _switch(self, node: Node, role: Role, seconds: float, epoch: int) -> None:
        """Between two steps: the role changes in place, and the worker rests for what that takes."""
        if not self._obeys(node, epoch):
            return
        failed = self._chance.random() < self._settings.faults.order
        if not failed:
            node.worker.core.switch_role(role, now=self._agenda.now)
        error = "failed by chance" if failed else ""
        node.worker.hold(seconds, lambda: self._answer(node, epoch, seconds, error))

    def _stop(self, node: Node, epoch: int, seconds: float) -> None:
        """What is left is interrupted; then the GPUs are freed."""
        self._interrupted(node, lambda: self._later(node, epoch, seconds, lambda: self._given_back(node)))

    def _interrupted(self, node: Node, then: Callable[[], None]) -> None:
        """At the end of the step under way the worker stops serving, and its requests go elsewhere; then `then`."""
        worker = node.worker

        def stop(core: SteadyCore) -> None:
            self._dispatcher.interrupt(worker)
            then()

        if worker.serving:
            worker.post(stop)
        else:
            then()

    def _given_back(self, node: Node) -> None:
        node.borrowed = False

    def _leave(self, node: Node, command: Leave) -> None:
        """It is gone. A reclaimed one's GPUs are taken later; another one comes back some time."""
        if self._obeys(node, command.epoch):
            del self.nodes[command.worker], self._dispatcher.workers[command.worker]
            self._emit(OrderDone(worker=command.worker, epoch=command.epoch))
            if not command.decision:
                self.left(command.worker, node)

    def _admit(self, command: Admit) -> None:
        """The members of a group serve together or not at all; new requests wait meanwhile."""
        nodes = [(member, self._take(member.worker, member.epoch)) for member in command.members]
        self._dispatcher.closed += 1
        seconds = float(self._settings.costs.finalise.seconds(len(nodes)))
        self._agenda.after(seconds, lambda: self._admitted(nodes, seconds))

    def _admitted(self, nodes: list[tuple[Member, Node | None]], seconds: float) -> None:
        there = [(member, node) for member, node in nodes if node is not None and self._obeys(node, member.epoch)]
        complete = len(there) == len(nodes) and self._chance.random() >= self._settings.faults.order
        for member, node in there if complete else ():
            self._wake(node, Role(str(member.role)))
        self._dispatcher.closed -= 1
        for member, node in there:
            self._answer(node, member.epoch, seconds, error="" if complete else "the group is not complete")
        self._dispatcher.retry()

    def _obeys(self, node: Node, epoch: int) -> bool:
        return self.nodes.get(node.worker.name) is node and node.epoch == epoch
