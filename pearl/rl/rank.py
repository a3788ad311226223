"""The main loop of one rank: carries out numbered commands in order, and steps its engine between them.

Owns the order of things on this rank. It does not decide anything, and knows engine, trainer and publishing only as what
was injected (so it is torch-free and the same on every kind of device). Invariant: commands run in number order, each
answered by one `Done`; an exception anywhere becomes one `Failed` and ends the loop.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pearl.protocol import (
    Abort,
    Checkpoint,
    Command,
    Done,
    Failed,
    NewRequest,
    Publish,
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


class ServingEngine(Protocol):
    """What the loop needs of an engine (`pearl.engine.engine.Engine` has it)."""

    def add_request(self, prompt: list[int], params: Any, request_id: str | None = None, **options: Any) -> str: ...
    def step_updates(self) -> Iterable[Any]: ...
    def abort(self, request_id: str) -> bool: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> Any: ...
    def switch_role(self, role: Role) -> Any: ...


class LearningTrainer(Protocol):
    """What the loop needs of a trainer (`pearl.rl.trainer.Trainer` has it)."""

    def train_step(self, command: TrainStep) -> dict[str, Any]: ...
    def set_reference(self) -> None: ...
    def save(self, path: str) -> None: ...


class ControlPort(Protocol):
    """The rank's side of the connection to the controller (`pearl.rl.control.ControlThread`)."""

    def take(self, timeout_s: float) -> list: ...
    def send(self, event: Any) -> None: ...


class RankLoop:
    """`run()` returns the rank's exit code. `publish(version)` gives the trainer's weights to the engine."""

    def __init__(
        self,
        *,
        rank: int,
        control: ControlPort,
        engine: ServingEngine,
        trainer: LearningTrainer,
        publish: Callable[[int], dict[str, Any]],
    ) -> None:
        self.rank = rank
        self.stop_reason = ""
        self.traceback = ""
        self._control = control
        self._engine = engine
        self._trainer = trainer
        self._publish = publish
        self._serving = False
        self._next_number = 0
        self._exit_code: int | None = None
        self._carry_out: dict[type, Callable[[Any], dict[str, Any]]] = {
            Serve: self._serve,
            SwitchRole: self._switch_role,
            TrainStep: lambda command: self._trainer.train_step(command),
            SetReference: self._set_reference,
            Publish: lambda command: self._publish(command.version),
            Checkpoint: self._checkpoint,
        }

    def run(self) -> int:
        try:
            while self._exit_code is None:
                busy = self._serving and self._engine.has_unfinished()
                for message in self._control.take(0.0 if busy else IDLE_WAIT_S):
                    self._apply(message)
                if self._exit_code is None and self._serving and self._engine.has_unfinished():
                    self._step()
        except Exception as error:  # whatever it was, the controller must hear of it before the rank ends
            self.stop_reason, self.traceback = f"{type(error).__name__}: {error}", traceback.format_exc()
            self._control.send(Failed(rank=self.rank, error=self.stop_reason, traceback=self.traceback))
            return 1
        return self._exit_code

    def _apply(self, message: Any) -> None:
        if self._exit_code is not None:
            return
        if isinstance(message, Submit):
            self._submit(message.requests)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._engine.abort(request_id)
        elif isinstance(message, Stop):
            self.stop_reason, self._exit_code = message.reason, message.exit_code
        elif isinstance(message, Command):
            self._command(message)

    def _command(self, command: Command) -> None:
        if command.number != self._next_number:
            raise RuntimeError(f"command number={command.number}: expected {self._next_number}, commands run in number order")
        self._next_number += 1
        started = time.perf_counter()
        metrics = self._carry_out[type(command)](command)
        self._control.send(
            Done(rank=self.rank, number=command.number, seconds=time.perf_counter() - started, metrics=metrics)
        )

    def _serve(self, command: Serve) -> dict[str, Any]:
        self._serving = True
        return {}

    def _switch_role(self, command: SwitchRole) -> dict[str, Any]:
        report = self._engine.switch_role(command.role)
        return {"switch_s": report.seconds}

    def _set_reference(self, command: SetReference) -> dict[str, Any]:
        self._trainer.set_reference()
        return {}

    def _checkpoint(self, command: Checkpoint) -> dict[str, Any]:
        self._trainer.save(command.path)
        return {}

    def _submit(self, requests: list[NewRequest]) -> None:
        refused = []
        for request in requests:
            try:
                self._engine.add_request(
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
            for update in self._engine.step_updates()
        ]
        if updates:
            self._send_tokens(updates, time.perf_counter() - started)

    def _send_tokens(self, updates: list[TokenUpdate], seconds: float) -> None:
        stats = self._engine.stats()
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


def _refusal(request_id: str, error: str) -> TokenUpdate:
    return TokenUpdate(
        request_id=request_id, token_ids=[], logprobs=[], weight_versions=[], finish_reason="error", error=error
    )
