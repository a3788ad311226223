"""The cluster scheduler in a running job: events in, orders out to members, their answers back in, and the log on disk.

Owns which order of whom is unanswered, and `transitions.jsonl`. It decides nothing and knows no sockets: what is to be sent
goes through a `ClusterPort`, time comes in by `feed` and `tick`. Invariants: an answer counts once, and for the order that it
answers; what an event leads to is carried out in order, also when carrying out leads to further events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

from pearl import protocol
from pearl.protocol import MemberOrder
from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.commands import (
    Admit,
    Borrow,
    ClusterCommand,
    GiveBack,
    Leave,
    MoveSession,
    Prepare,
    Refuse,
    Requeue,
    SetRole,
    TrainerMayBegin,
)
from pearl.sched.events import ClusterEvent, OrderDone, Tick, WorkerGone, WorkerRole

TICK_S = 1.0


class ClusterPort(Protocol):
    """Who reaches the members: the controller. Nothing here waits or raises because a member is gone."""

    def order(self, worker: str, make: Callable[[int], MemberOrder]) -> int:
        """Sends the order that `make(number)` gives; its number. `ClusterService.answered` is called when it is answered."""

    def dismiss(self, worker: str, make: Callable[[int], MemberOrder], reason: str) -> None:
        """Sends the last order to a worker that counts as lost by now; nobody waits for an answer."""

    def pulls(self) -> list[str]:
        """Where weight versions are to be had now."""

    def requeue(self, sessions: tuple[str, ...]) -> None:
        """Places the requests of these sessions again, from their last token."""

    def move(self, session: str, source: str, target: str) -> None:
        """Has a running request handed over."""

    def trainer_may_begin(self, step: int) -> None:
        """Nobody borrows the trainers' GPUs any more."""

    def refuse(self, worker: str, reason: str) -> None:
        """The worker cannot take part."""


class ClusterService:
    """Drives `scheduler`; `write` gets a row per finished decision, with the names of `Decision.row` and times since `began`.

    `counts`: answers to no open order of that worker ("stale_answers").
    """

    def __init__(
        self, scheduler: ClusterScheduler, port: ClusterPort, write: Callable[[dict[str, Any]], None], began: float
    ) -> None:
        self.scheduler = scheduler
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        """Of this thread's processor time."""
        self.changes = 0
        """Orders and answers so far: while it stays the same, so do all roles."""
        self.finished = 0
        """Decisions that are done."""
        self._port, self._write, self._began = port, write, began
        self._open: dict[int, tuple[str, int, float]] = {}
        """Number of an order -> (worker, its epoch, when it was sent)."""
        self._events: deque[ClusterEvent] = deque()
        self._busy = False
        self._ticked = began

    def feed(self, event: ClusterEvent, now: float) -> None:
        """Something happened: carries out what the scheduler makes of it."""
        self._events.append(event)
        if self._busy:  # carrying something out has led to it
            return
        self._busy = True
        try:
            while self._events:
                for command in self.scheduler.on_event(self._events.popleft(), now):
                    self._carry_out(command, now)
        finally:
            self._busy = False
        for decision in self.scheduler.log.take():
            self.finished += 1
            row = decision.row()
            self._write(row | {"at": row["at"] - self._began})

    def tick(self, now: float) -> None:
        """To be called often; about once a second it is heard."""
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self.feed(Tick(), now)

    def answered(self, number: int, worker: str, *, error: str, now: float) -> None:
        """A member answered the order of this number; answers to what is not open, or another's, are counted and forgotten.

        What the order took is the time from when it was sent: nobody has any use of the worker before the answer is here.
        """
        self.changes += 1
        asked, epoch, sent = self._open.get(number, ("", -1, now))
        if asked != worker:
            self.counts["stale_answers"] += 1
            return
        del self._open[number]
        self.feed(OrderDone(worker=worker, epoch=epoch, ok=not error, seconds=now - sent, error=error), now)

    def gone(self, worker: str, reason: str, now: float) -> None:
        """A member is no longer there."""
        self.changes += 1
        self._forget(worker)
        self.feed(WorkerGone(worker=worker, reason=reason), now)

    # ------------------------------------------------------------------------------------------------ carrying out

    def _carry_out(self, command: ClusterCommand, now: float) -> None:
        match command:
            case Leave() if command.worker not in self.scheduler.state.workers:
                self._forget(command.worker)
                self._port.dismiss(command.worker, self._worded(command), "does not answer")
            case SetRole() | Borrow() | GiveBack() | Leave() | Prepare():
                self._order(command.worker, command.epoch, self._worded(command), now)
            case Admit():
                pulls = self._port.pulls()
                for member in command.members:
                    wake = _wake(member.role, member.epoch, command.weight_version, pulls)
                    self._order(member.worker, member.epoch, wake, now)
            case Requeue():
                self._port.requeue(command.sessions)
            case MoveSession():
                self._port.move(command.session, command.source, command.target)
            case TrainerMayBegin():
                self._port.trainer_may_begin(command.step)
            case Refuse():
                self._port.refuse(command.worker, command.reason)

    def _worded(self, command: SetRole | Borrow | GiveBack | Leave | Prepare) -> Callable[[int], MemberOrder]:
        epoch = command.epoch
        match command:
            case SetRole():
                role = protocol.Role(str(command.role))
                return lambda number: protocol.SwitchRole(number=number, role=role, epoch=epoch)
            case Borrow():
                return _wake(command.role, epoch, command.weight_version, self._port.pulls())
            case GiveBack():
                return lambda number: protocol.Sleep(number=number, epoch=epoch)
            case Leave():
                return lambda number: protocol.Leave(number=number, epoch=epoch)
            case Prepare():
                return lambda number: protocol.Prepare(number=number, epoch=epoch)

    def _order(self, worker: str, epoch: int, make: Callable[[int], MemberOrder], now: float) -> None:
        self._forget(worker)
        self.changes += 1
        self._open[self._port.order(worker, make)] = (worker, epoch, now)

    def _forget(self, worker: str) -> None:
        """What it still owes an answer to is of an epoch that is over."""
        self._open = {number: order for number, order in self._open.items() if order[0] != worker}


def _wake(role: WorkerRole, epoch: int, weight_version: int, pulls: list[str]) -> Callable[[int], MemberOrder]:
    wire = protocol.Role(str(role))
    return lambda number: protocol.Wake(number=number, role=wire, epoch=epoch, weight_version=weight_version, pulls=pulls)
