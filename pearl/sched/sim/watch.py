"""How long each batch took to collect, with which workers, and what had been predicted when that began.

Owns a row per batch. It knows neither trajectories nor how a prediction is made. Invariant: a batch's clock begins when
everybody works for it: when its first group starts, or when the batch before it is complete, if that is later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pearl.sched.shape import Shape
from pearl.sched.sim.agenda import Agenda


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """`steady`: nobody came, went or changed its role meanwhile. `workers`: those that served, averaged over the time."""

    ended_s: float
    makespan_s: float
    predicted_s: float | None
    shape: Shape
    steady: bool
    workers: float


@dataclass(slots=True)
class _Row:
    at: float
    predicted_s: float | None
    shape: Shape
    changes: int
    worker_s: float
    result: Watched | None = None


class BatchWatch:
    """`predict` gives the present shape and the makespan that is predicted for it, None if it cannot be."""

    def __init__(self, agenda: Agenda, predict: Callable[[], tuple[Shape, float | None]]) -> None:
        self._agenda, self._predict = agenda, predict
        self._rows: dict[int, _Row] = {}
        self._changes, self._worker_s = 0, 0.0
        self._shape: Shape | None = None
        self._complete = 0

    def look(self, shape: Shape, workers: int, seconds: float) -> None:
        """It looks like this, and counts for `seconds`."""
        self._changes += shape != self._shape
        self._shape = shape
        self._worker_s += workers * seconds

    def opened(self, batch: int) -> None:
        """The first group of this batch (counted from 0) starts."""
        shape, predicted_s = self._predict()
        self._changes += shape != self._shape
        self._shape = shape
        self._rows[batch] = _Row(self._agenda.now, predicted_s, shape, self._changes, self._worker_s)

    def complete(self, batches: int) -> None:
        """So many batches are complete."""
        while self._complete < batches:
            row = self._rows.get(self._complete)
            if row is not None:
                seconds = max(1e-9, self._agenda.now - row.at)
                row.result = Watched(
                    ended_s=self._agenda.now,
                    makespan_s=seconds,
                    predicted_s=row.predicted_s,
                    shape=row.shape,
                    steady=row.changes == self._changes,
                    workers=(self._worker_s - row.worker_s) / seconds,
                )
            self._complete += 1
            if self._complete in self._rows:
                self.opened(self._complete)

    def take(self, batch: int) -> Watched:
        """The row of a batch that is complete; KeyError for another."""
        result = self._rows.pop(batch).result
        if result is None:
            raise KeyError(batch)
        return result
