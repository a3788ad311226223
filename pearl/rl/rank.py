"""The main loop of one rank: carries out numbered commands in order, and steps its engine between them.

Owns the order of things on this rank; what the engine does is `serving.py`. It does not decide anything, and knows engine,
trainer and publishing only as what was injected (so it is torch-free and the same on every kind of device). Invariants:
commands run in number order, each answered by one `Done`, but for orders of an epoch that is over, which change nothing; an
exception anywhere becomes one `Failed` and ends the loop, but for an order that could not be carried out, whose `Done` says so.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from pearl.protocol import (
    Checkpoint,
    Command,
    Done,
    Export,
    Failed,
    Fetch,
    Leave,
    Prepare,
    Publish,
    Restore,
    Serve,
    SetReference,
    Sleep,
    Stop,
    SwitchRole,
    TrainStep,
    Wake,
)
from pearl.rl.serving import Serving, ServingEngine
from pearl.rl.waking import Fetcher, SleepingTrainer

IDLE_WAIT_S = 0.2
PUBLISH_POLL_S = 0.0002
PUBLISH_POLL_SHARE = 0.1
"""How often an idle rank looks after a publish under way: after this share of the time that it has taken, at most so long."""
VERDICT_WAIT_S = 3.0


class LearningTrainer(SleepingTrainer, Protocol):
    """What the loop needs of a trainer (`pearl.rl.trainer.Trainer` has it)."""

    def train_step(self, command: TrainStep) -> dict[str, Any]: ...
    def set_reference(self) -> None: ...
    def save(self, path: str) -> None: ...
    def save_state(self, path: str) -> None: ...
    def load_state(self, path: str) -> None: ...


class Publisher(Protocol):
    """This rank's part in giving weights to the engines (`pearl.rl.publisher` has one for each kind of rank)."""

    def begin(self, version: int) -> None:
        """Starts; returns without waiting for others."""

    def poll(self) -> dict[str, Any] | None:
        """Moves on without waiting; what it measured once this rank is through, else None."""

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Polls until this rank is through; an error after `timeout_s`."""


class ControlPort(Protocol):
    """The rank's side of the connection to the controller (`pearl.rl.control.ControlThread`)."""

    def take(self, timeout_s: float) -> list: ...
    def send(self, event: Any) -> None: ...


class RankLoop:
    """`run()` returns the rank's exit code. A rank that only trains has no engine, one that only serves no trainer.

    `fetcher` is the way to weights of a rank that has no part in publishing; `block_size` turns blocks into tokens.
    `report_s`: as of `Serving`.
    """

    def __init__(
        self,
        *,
        rank: int,
        control: ControlPort,
        engine: ServingEngine | None,
        trainer: LearningTrainer | None,
        publisher: Publisher,
        publish_timeout_s: float,
        fetcher: Fetcher | None = None,
        block_size: int = 16,
        report_s: float = 0.0,
    ) -> None:
        self.rank = rank
        self.stop_reason = ""
        self.traceback = ""
        self._control = control
        self._trainer = trainer
        self._publisher = publisher
        self._publish_timeout_s = publish_timeout_s
        self._publishing: tuple[int, float] | None = None
        self._waking: tuple[int, float] | None = None
        self._fetch: Fetch | None = None
        self._last_number = -1
        self._exit_code: int | None = None
        self._serving: Serving | None = None
        if engine is not None:
            lent = trainer if engine.asleep else None
            self._serving = Serving(
                rank, engine, control.send, fetcher=fetcher, trainer=lent, block_size=block_size, report_s=report_s
            )

    def run(self) -> int:
        try:
            while self._exit_code is None:
                self.turn()
        except Exception as error:  # whatever it was, the controller must hear of it before the rank ends
            self.traceback = traceback.format_exc()
            verdict = report_failure(self._control, self.rank, error)
            self.stop_reason = verdict.reason
            return verdict.exit_code
        return self._exit_code

    def turn(self) -> None:
        """Takes what has come, waiting for it if there is nothing else to do, and moves on whatever is under way."""
        for message in self._control.take(self._patience()):
            self._apply(message)
        if self._exit_code is None:
            self._advance_publish(wait=False)
            self._advance_wake()
            self._serve()

    def _serve(self) -> None:
        if self._serving is not None:
            if self._serving.has_work:
                self._serving.step()
            self._serving.report(time.monotonic())

    def _patience(self) -> float:
        """How long the loop may wait for a message."""
        if self._serving is not None and self._serving.has_work:
            return self._serving.patience_s
        began = self._publishing or self._waking
        if began is None:
            return IDLE_WAIT_S
        return min(PUBLISH_POLL_S, PUBLISH_POLL_SHARE * (time.perf_counter() - began[1]))

    def _apply(self, message: Any) -> None:
        if self._exit_code is not None:
            return
        if isinstance(message, Stop):
            self.stop_reason, self._exit_code = message.reason, message.exit_code
        elif isinstance(message, Prepare | Wake | Sleep | SwitchRole | Leave | Fetch):
            self._order(message)
        elif isinstance(message, Command):
            self._command(message)
        else:
            self._need_serving(message).take(message)

    def _command(self, command: Command) -> None:
        if command.number <= self._last_number:
            raise RuntimeError(f"command number={command.number}: came after {self._last_number}, commands run in number order")
        self._last_number = command.number
        self._advance_publish(wait=True)
        started = time.perf_counter()
        if isinstance(command, Publish):
            self._publisher.begin(command.version)
            self._publishing = (command.number, started)
            self._advance_publish(wait=False)
        else:
            metrics = self._carry_out(command)
            self._done(command.number, started, metrics)

    def _carry_out(self, command: Command) -> dict[str, Any]:
        match command:
            case TrainStep():
                return self._need_trainer(command).train_step(command)
            case SetReference():
                self._need_trainer(command).set_reference()
            case Export():
                self._need_trainer(command).save(command.path)
            case Checkpoint():
                self._need_trainer(command).save_state(command.path)
            case Restore():
                self._need_trainer(command).load_state(command.path)
            case Serve():
                self._need_serving(command).active = True
            case _:
                raise RuntimeError(f"{type(command).__name__}: this rank does not know such a command")
        return {}

    def _advance_publish(self, *, wait: bool) -> None:
        """Moves a publish under way on; `wait`: until this rank is through with it."""
        if self._publishing is None:
            return
        metrics = self._publisher.wait(self._publish_timeout_s) if wait else self._publisher.poll()
        if metrics is not None:
            (number, started), self._publishing = self._publishing, None
            self._done(number, started, metrics)

    # ------------------------------------------------------------------------------------------------- orders to this rank

    def _order(self, order: Any) -> None:
        """Carries out an order to this rank alone; one of an epoch that is over, or doubled, changes nothing."""
        serving = self._need_serving(order)
        if order.number <= self._last_number:
            serving.stale += 1
            return
        self._last_number = order.number
        if isinstance(order, Fetch):
            self._fetch = order
            self._next_fetch()
            return
        if serving.is_stale(order.epoch):
            return
        self._advance_publish(wait=True)
        started = time.perf_counter()
        through = self._answer(order.number, started, lambda: self._obey(serving, order))
        if not isinstance(order, SwitchRole):  # which is done between two steps, whatever is on its way to this rank
            self._waking = None if through else (order.number, started)

    def _next_fetch(self) -> None:
        """Begins with the newest version that there is, once whatever is under way has come."""
        if self._fetch is not None and self._waking is None and self._serving is not None:
            order, serving, self._fetch = self._fetch, self._serving, None
            started = time.perf_counter()
            if not self._answer(order.number, started, lambda: serving.wake(order)):
                self._waking = order.number, started

    def _answer(self, number: int, started: float, work: Callable[[], dict[str, Any] | None]) -> bool:
        """Does some of an order's work; False if there is more to do, else the order has been answered."""
        try:
            metrics = work()
        except ValueError as error:
            self._done(number, started, {}, str(error))
            return True
        if metrics is not None:
            self._done(number, started, metrics)
        return metrics is not None

    def _obey(self, serving: Serving, order: Any) -> dict[str, Any] | None:
        match order:
            case Prepare():  # the engine is there
                return {}
            case SwitchRole():
                return serving.switch(order)
            case Wake():
                return serving.wake(order)
            case Sleep():
                return serving.sleep()
            case Leave():
                serving.waking.cancel()
                self.stop_reason, self._exit_code = "told to leave", 0
                return {"interrupted": serving.interrupt()}
        raise RuntimeError(f"{type(order).__name__}: this rank does not know such an order")

    def _advance_wake(self) -> None:
        if self._waking is not None and self._serving is not None:
            if self._answer(*self._waking, self._serving.poll_wake):
                self._waking = None
        self._next_fetch()  # what it waited for may have come, or have been overtaken

    # ------------------------------------------------------------------------------------------------- parts

    def _done(self, number: int, started: float, metrics: dict[str, Any], error: str = "") -> None:
        seconds = time.perf_counter() - started
        self._control.send(Done(rank=self.rank, number=number, seconds=seconds, metrics=metrics, error=error))

    def _need_serving(self, message: Any) -> Serving:
        if self._serving is None:
            raise RuntimeError(f"{type(message).__name__}: rank {self.rank} does not serve")
        return self._serving

    def _need_trainer(self, message: Any) -> LearningTrainer:
        if self._trainer is None:
            raise RuntimeError(f"{type(message).__name__}: rank {self.rank} does not train")
        return self._trainer


def report_failure(control: ControlPort, rank: int, error: Exception) -> Stop:
    """Tells the controller of a failure and returns its verdict, which names the first cause (ours may be a peer's end).

    Leaving before it has come would make the launcher end rank 0 before that has named the cause.
    """
    reason = f"{type(error).__name__}: {error}"
    control.send(Failed(rank=rank, error=reason, traceback="".join(traceback.format_exception(error))))
    deadline = time.monotonic() + VERDICT_WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        for message in control.take(left):
            if isinstance(message, Stop):
                return Stop(number=message.number, reason=message.reason, exit_code=message.exit_code or 1)
    return Stop(number=-1, reason=reason, exit_code=1)
