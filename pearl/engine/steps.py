"""The steps of one engine, one after the other, or one ahead: decided and queued while the device is busy with the one before.

Owns the outputs that are scheduled and not yet finished. It decides nothing (the core does) and knows no tensors (the runner
does). Invariants: outputs are finished in order; a step that cannot be run has not happened, and neither has any queued behind
it; when nothing can be scheduled, nothing stays unfinished; `settle` leaves nothing unfinished, and must come before whatever
changes weights, role or memory under a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from pearl.clock import Clock
from pearl.engine.core import EngineCore
from pearl.engine.request import Request, RequestUpdate, SchedulerOutput, StepResult


class Launches(Protocol):
    """A runner: `launch` queues a step and gives what waits for its result."""

    def launch(
        self, output: SchedulerOutput, requests: Mapping[str, Request], *, weight_version: int
    ) -> Callable[[], StepResult]: ...


class Steps:
    """`ahead`: a step's updates come with the call after the one that queued it."""

    def __init__(self, core: EngineCore, runner: Launches, *, ahead: bool) -> None:
        self.ahead = ahead
        self._core, self._runner = core, runner
        self._unfinished: deque[tuple[SchedulerOutput, Callable[[], StepResult]]] = deque()
        self._updates: list[RequestUpdate] = []

    @property
    def queued(self) -> bool:
        """Whether a step is queued whose updates are still to come."""
        return bool(self._unfinished)

    def run(self, clock: Clock, weight_version: int, announce: Callable[[], None]) -> list[RequestUpdate]:
        """Schedules and queues a step (`announce` comes in between), and finishes those that are due."""
        output = self._core.schedule(clock.now())
        try:
            announce()
            launched = self._runner.launch(output, self._core.requests, weight_version=weight_version)
        except BaseException:
            self._core.cancel(output)
            raise
        self._unfinished.append((output, launched))
        return self._finish(clock, keep=1 if self.ahead and output.requests else 0)

    def settle(self, clock: Clock) -> list[RequestUpdate]:
        """Waits for what is queued; its updates."""
        return self._finish(clock, keep=0)

    def _finish(self, clock: Clock, *, keep: int) -> list[RequestUpdate]:
        while len(self._unfinished) > keep:
            output, launched = self._unfinished[0]
            try:
                result = launched()
            except BaseException:
                while self._unfinished:
                    self._core.cancel(self._unfinished.pop()[0])
                raise
            self._unfinished.popleft()
            self._updates += self._core.finish(output, result, clock.now())
        updates, self._updates = self._updates, []
        return updates
