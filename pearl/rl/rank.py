"""The main loop of one rank: carries out numbered commands in order, and steps its engine between them.

Owns the order of things on this rank. It does not decide anything, and knows engine, trainer and publishing only as what
was injected (so it is torch-free and the same on every kind of device). Invariant: commands run in number order, each
answered by one `Done`; an exception anywhere becomes one `Failed` and ends the loop.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from typing import Any, Protocol

from pearl.protocol import (
    Abort,
    Checkpoint,
    Command,
    Done,
    Export,
    Failed,
    NewRequest,
    Publish,
    Restore,
    Role,
    Serve,
    SetReference,
    Stop,
    Submit,
    SwitchRole,
    Tokens,
    TokenUpdate,
    TrainStep,
)

IDLE_WAIT_S = 0.2
PUBLISH_POLL_S = 0.0002
PUBLISH_POLL_SHARE = 0.1
"""How often an idle rank looks after a publish under way: after this share of the time that it has taken, at most so long."""
VERDICT_WAIT_S = 3.0


class ServingEngine(Protocol):
    """What the loop needs of an engine (`pearl.engine.engine.Engine` has it)."""

    def add_request(self, prompt: list[int], params: Any, request_id: str | None = None, **options: Any) -> str: ...
    def step_updates(self) -> Iterable[Any]: ...
    def discard(self, request_id: str) -> bool: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> Any: ...
    def switch_role(self, role: Role) -> Any: ...


class LearningTrainer(Protocol):
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
    """`run()` returns the rank's exit code. A rank that only trains has no engine, one that only serves no trainer."""

    def __init__(
        self,
        *,
        rank: int,
        control: ControlPort,
        engine: ServingEngine | None,
        trainer: LearningTrainer | None,
        publisher: Publisher,
        publish_timeout_s: float,
    ) -> None:
        self.rank = rank
        self.stop_reason = ""
        self.traceback = ""
        self._control = control
        self._engine = engine
        self._trainer = trainer
        self._publisher = publisher
        self._publish_timeout_s = publish_timeout_s
        self._publishing: tuple[int, float] | None = None
        self._serving = False
        self._last_number = -1
        self._exit_code: int | None = None

    def run(self) -> int:
        try:
            while self._exit_code is None:
                for message in self._control.take(self._patience()):
                    self._apply(message)
                if self._exit_code is None:
                    self._advance_publish(wait=False)
                    if self._has_work():
                        self._step()
        except Exception as error:  # whatever it was, the controller must hear of it before the rank ends
            self.traceback = traceback.format_exc()
            verdict = report_failure(self._control, self.rank, error)
            self.stop_reason = verdict.reason
            return verdict.exit_code
        return self._exit_code

    def _has_work(self) -> bool:
        return self._serving and self._engine is not None and self._engine.has_unfinished()

    def _patience(self) -> float:
        """How long the loop may wait for a message."""
        if self._has_work():
            return 0.0
        if self._publishing is None:
            return IDLE_WAIT_S
        return min(PUBLISH_POLL_S, PUBLISH_POLL_SHARE * (time.perf_counter() - self._publishing[1]))

    def _apply(self, message: Any) -> None:
        if self._exit_code is not None:
            return
        if isinstance(message, Submit):
            self._submit(message.requests)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._need_engine(message).discard(request_id)
        elif isinstance(message, Stop):
            self.stop_reason, self._exit_code = message.reason, message.exit_code
        elif isinstance(message, Command):
            self._command(message)

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
                self._serving = self._need_engine(command) is not None
            case SwitchRole():
                return {"switch_s": self._need_engine(command).switch_role(command.role).seconds}
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

    def _done(self, number: int, started: float, metrics: dict[str, Any]) -> None:
        seconds = time.perf_counter() - started
        self._control.send(Done(rank=self.rank, number=number, seconds=seconds, metrics=metrics))

    def _need_engine(self, message: Any) -> ServingEngine:
        if self._engine is None:
            raise RuntimeError(f"{type(message).__name__}: rank {self.rank} does not serve")
        return self._engine

    def _need_trainer(self, message: Any) -> LearningTrainer:
        if self._trainer is None:
            raise RuntimeError(f"{type(message).__name__}: rank {self.rank} does not train")
        return self._trainer

    def _submit(self, requests: list[NewRequest]) -> None:
        refused = []
        engine = self._need_engine(requests)
        for request in requests:
            try:
                engine.add_request(
                    request.prompt_token_ids, request.params, request_id=request.request_id, session_id=request.session_id
                )
            except ValueError as error:  # the request's own fault; its trajectory pays, the rank goes on
                refused.append(_refusal(request.request_id, str(error)))
        if refused:
            self._send_tokens(refused, 0.0)

    def _step(self) -> None:
        started = time.perf_counter()
        updates = [
            TokenUpdate(
                request_id=update.request_id,
                token_ids=list(update.token_ids),
                logprobs=list(update.logprobs),
                weight_versions=list(update.weight_versions),
                finish_reason=update.completion.finish_reason if update.completion else None,
                error=update.completion.error if update.completion else None,
                num_cached_tokens=update.completion.num_cached_tokens if update.completion else 0,
            )
            for update in self._need_engine(self).step_updates()
        ]
        if updates:
            self._send_tokens(updates, time.perf_counter() - started)

    def _send_tokens(self, updates: list[TokenUpdate], seconds: float) -> None:
        stats = self._need_engine(self).stats()
        self._control.send(
            Tokens(
                rank=self.rank,
                updates=updates,
                seconds=seconds,
                waiting=stats.waiting,
                running=stats.running,
                free_blocks=stats.free_blocks,
            )
        )


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


def _refusal(request_id: str, error: str) -> TokenUpdate:
    return TokenUpdate(
        request_id=request_id, token_ids=[], logprobs=[], weight_versions=[], finish_reason="error", error=error
    )
