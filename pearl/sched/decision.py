"""What was decided, why, what it was to bring and to cost, and what it did cost: the log of a cluster scheduler.

Owns the records. A decision is open until all of its workers have answered, are gone or were replaced by a newer order.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from pearl.sched.predictor import Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One transition. `kind`: switch, borrow, give_back, expand, admit, leave or again (an order that failed, repeated);
    `cause`: the event that led to it.

    `predicted_s` are makespans without and with it, `gain_s` what it is to save, `cost_s` what it is expected to take (of the
    same seconds), `threshold_s` the gain from which it was allowed. `forced`: it was not weighed. `unsure`: what the
    predictions rest on that was not measured. `seconds`, `ok` and `error` are there once it is done.
    """

    number: int
    at: float
    kind: str
    cause: str
    before: str
    after: str
    predicted_s: tuple[float, float]
    gain_s: float
    cost_s: float
    threshold_s: float = 0.0
    forced: bool = False
    workers_changed: int = 0
    roles_changed: int = 0
    moved_kv_tokens: int = 0
    unsure: tuple[str, ...] = ()
    seconds: float | None = None
    ok: bool | None = None
    error: str = ""

    def row(self) -> dict[str, Any]:
        """For JSON: what is infinite (nobody serves, nothing was weighed) is None."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        values["predicted_s"] = [_finite(value) for value in self.predicted_s]
        return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}


class DecisionLog:
    """Open and finished decisions. `take` hands the finished ones out, in the order in which they finished."""

    def __init__(self) -> None:
        self.open: dict[int, Decision] = {}
        self.residuals: list[Residual] = []
        self._waiting: dict[int, set[str]] = {}
        self._number_of: dict[str, int] = {}
        self._done: list[Decision] = []
        self._next = 0

    def next_number(self) -> int:
        self._next += 1
        return self._next

    def begin(self, decision: Decision, workers: set[str]) -> None:
        """`workers` have something to answer for; one that still owed an answer to an older decision no longer does."""
        self.open[decision.number] = decision
        self._waiting[decision.number] = set(workers)
        for worker in sorted(workers):  # whose error is told must not depend on a set
            older = self._number_of.get(worker)
            self._number_of[worker] = decision.number
            if older is not None:
                self._settle(older, worker, decision.at, error=f"{worker}: overtaken by {decision.kind}")
        if not workers:
            self._close(decision.number, decision.at)

    def of(self, worker: str) -> Decision | None:
        """The open decision that the worker owes an answer to."""
        number = self._number_of.get(worker)
        return None if number is None else self.open[number]

    def answered(self, worker: str, now: float, error: str = "") -> None:
        """The worker is done with what it was last told, or is gone (`error`)."""
        number = self._number_of.pop(worker, None)
        if number is not None:
            self._settle(number, worker, now, error)

    def take(self) -> list[Decision]:
        done, self._done = self._done, []
        return done

    def take_residuals(self) -> list[Residual]:
        residuals, self.residuals = self.residuals, []
        return residuals

    def _settle(self, number: int, worker: str, now: float, error: str) -> None:
        if error:
            self.open[number] = replace(self.open[number], ok=False, error=self.open[number].error or error)
        self._waiting[number].discard(worker)
        if not self._waiting[number]:
            self._close(number, now)

    def _close(self, number: int, now: float) -> None:
        decision = self.open.pop(number)
        del self._waiting[number]
        self._done.append(replace(decision, seconds=now - decision.at, ok=decision.ok is None))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
