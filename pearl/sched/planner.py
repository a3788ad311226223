"""Which shape of the cluster serves a batch best, and how many training workers to borrow for it.

Owns the enumeration and the choice by predicted cost; when a change pays is `policy.py`, who changes is `transition.py`. It
sees counts only. Up to EXACT_LIMIT shapes are all tried; of more, a grid that is refined around the best of each mode down to
single workers (the makespan falls and then rises along each axis). Pure numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pearl.sched.predictor import AnyPredictor, Prediction
from pearl.sched.settings import MODES, PdSettings
from pearl.sched.shape import Shape

Array = Any

EXACT_LIMIT = 200
GRID = {"mixed": (9, 1, 1), "split": (7, 1, 17), "hybrid": (3, 5, 7)}
"""Points of the first grid per mode, along (borrowed, mixed, prefill); later ones have 5 per axis around the best."""

NEAR = 1e-3
"""Makespans closer than this share are equal; the shape with the fewest changed roles is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`fixed` workers serve in any case and up to `lendable` more can be borrowed, at `toggle_s[k]` seconds for k of them.

    `weight` is the share of a batch that is still to be played (R / B of the paper). `keep`: no count may be below this one's
    and its mode is kept (nobody changes a role). `now`: the shape whose counts ties are settled by.
    """

    fixed: int
    lendable: int = 0
    least_borrowed: int = 0
    toggle_s: tuple[float, ...] = (0.0,)
    weight: float = 1.0
    keep: Shape = field(default_factory=Shape)
    now: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        if self.fixed < 0 or not 0 <= self.least_borrowed <= self.lendable:
            raise ValueError(
                f"fixed={self.fixed}, least_borrowed={self.least_borrowed}, lendable={self.lendable}: "
                "must be >= 0, and least_borrowed <= lendable"
            )
        if len(self.toggle_s) != self.lendable + 1:
            raise ValueError(f"toggle_s has {len(self.toggle_s)} entries, must have lendable + 1 = {self.lendable + 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What should be. `shape` counts the `borrowed` too; `score_s`: weight * makespan + cost of borrowing."""

    shape: Shape
    borrowed: int
    score_s: float
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`best` is None if nothing is possible, and `dropped` says why (reason -> how many shapes). `tried`: shapes priced.

    `best_by_mode`: (shape, borrowed, score) of each mode.
    """

    best: Allocation | None
    best_by_mode: dict[str, tuple[Shape, int, float]]
    dropped: dict[str, int]
    tried: int


def plan_allocation(predictor: AnyPredictor, budget: Budget, pd: PdSettings) -> Choice:
    """The best allocation within the budget, of all allowed modes and of each."""
    search = _Search(predictor, budget, pd)
    by_mode: dict[str, tuple[Shape, int, float]] = {}
    best: tuple[Shape, int, float] | None = None
    for mode in _modes(pd):
        if budget.keep.mode in MODES and mode != budget.keep.mode:
            continue
        margin = pd.hybrid_margin if mode == "hybrid" else 0.0
        found = search.best_of(mode, np.inf if best is None else best[2] * (1 - margin / 2))
        if found is not None:
            by_mode[mode] = found
            if best is None or found[2] < best[2] * (1 - margin):
                best = found
    allocation = None
    if best is not None:
        shape, borrowed, score = best
        allocation = Allocation(shape=shape, borrowed=borrowed, score_s=score, prediction=predictor.predict(shape))
    return Choice(best=allocation, best_by_mode=by_mode, dropped=search.dropped, tried=search.tried)


def _modes(pd: PdSettings) -> tuple[str, ...]:
    if pd.mode != "auto":
        return (pd.mode,)
    if pd.predictor == "paper":
        return ("mixed", "split")
    return ("split",) if pd.ratio != "auto" else ("mixed", "split", "hybrid")


class _Search:
    """Candidates are columns (borrowed, mixed, prefill); decode is the rest."""

    def __init__(self, predictor: AnyPredictor, budget: Budget, pd: PdSettings) -> None:
        self._predictor, self._budget, self._pd = predictor, budget, pd
        self._toggle = np.asarray(budget.toggle_s, dtype=np.float64)
        self.dropped: dict[str, int] = {}
        self.tried = 0

    def best_of(self, mode: str, refine_below: float) -> tuple[Shape, int, float] | None:
        """A hybrid is refined only if the first grid has one that is better than `refine_below`."""
        b = self._budget
        most = b.fixed + b.lendable
        borrowed = np.arange(b.least_borrowed, b.lendable + 1)
        full: tuple[Array, ...]
        if mode == "mixed":
            full = (borrowed, np.array([-1]), np.array([0]))
        elif mode == "split":
            full = (borrowed, np.array([0]), np.arange(1, max(1, most)))
        else:
            full = (borrowed, np.arange(1, max(1, most - 1)), np.arange(1, max(1, most - 1)))
        if b.keep.total == most:  # no freedom
            same = mode == b.keep.mode
            full = (borrowed if same else borrowed[:0], np.array([b.keep.mixed]), np.array([b.keep.prefill]))
        size = np.prod([len(axis) for axis in full])
        if not size:
            reason = "a worker would change its role" if b.keep.total == most else f"{most} workers are too few for {mode}"
            self._drop(reason, 1)
            return None
        rows = _product(full) if size <= EXACT_LIMIT else _product(self._first_grid(mode, full))
        best = self._best_row(mode, rows)
        step = [len(axis) / points for axis, points in zip(full, GRID[mode], strict=True)] if size > EXACT_LIMIT else [0.5]
        promising = best is not None and (mode != "hybrid" or best[1] < refine_below)
        while best is not None and promising and max(step) > 0.5:
            step = [width / 2 for width in step]
            near = [_around(best[0][axis], width, full[axis]) for axis, width in enumerate(step)]
            best = min(best, self._best_row(mode, _product(near)) or best, key=lambda found: found[1])
        if best is None:
            return None
        borrowed_now, mixed, prefill, decode = best[0]
        return Shape(mixed=mixed, prefill=prefill, decode=decode), borrowed_now, best[1]

    def _first_grid(self, mode: str, full: tuple[Array, ...]) -> list[Array]:
        grid = [axis[_spread(len(axis), points)] for axis, points in zip(full, GRID[mode], strict=True)]
        now, budget = (self._budget.now.mixed, self._budget.now.prefill), self._budget
        keep = (budget.keep.mixed, budget.keep.prefill)
        for axis, counts in enumerate(zip(now, keep, strict=True), 1):
            extra = [count for count in counts if count in full[axis]]
            grid[axis] = np.unique(np.concatenate((grid[axis], np.array(extra, dtype=int))))
        return grid

    def _best_row(self, mode: str, rows: Array) -> tuple[tuple[int, ...], float] | None:
        """((borrowed, mixed, prefill, decode), score) of the best possible row."""
        rows = self._possible(mode, rows)
        if not len(rows):
            return None
        borrowed, mixed, prefill, decode = rows.T
        self.tried += len(rows)
        makespans = self._predictor.makespans(mixed, prefill, decode)
        score = self._budget.weight * makespans + self._toggle[borrowed]
        if not np.isfinite(score).any():
            shape = Shape(mixed=int(mixed[0]), prefill=int(prefill[0]), decode=int(decode[0]))
            self._drop(self._predictor.predict(shape).infeasible, len(rows))
            return None
        unable = ~np.isfinite(score)
        if unable.any():
            self._drop("the decode pool cannot hold the batch", int(unable.sum()))
        near = np.flatnonzero(score <= np.min(score) * (1 + NEAR))
        now = self._budget.now
        targets = rows[near][:, 1:]
        changed = np.maximum(0, np.array((now.mixed, now.prefill, now.decode)) - targets).sum(axis=1)
        pick = near[np.lexsort((score[near], changed))[0]]
        return tuple(int(count) for count in rows[pick]), float(score[pick])

    def _possible(self, mode: str, rows: Array) -> Array:
        """Rows that are shapes, with their decode column; those that settings or `keep` exclude are counted."""
        b = self._budget
        total = b.fixed + rows[:, 0]
        mixed = np.where(rows[:, 1] < 0, total, rows[:, 1])
        decode = total - mixed - rows[:, 2]
        table = np.column_stack((rows[:, 0], mixed, rows[:, 2], decode))
        shapes = (decode > 0) if mode != "mixed" else (mixed > 0)
        table = table[shapes & (decode >= 0)]
        kept = (table[:, 1:] >= np.array((b.keep.mixed, b.keep.prefill, b.keep.decode))).all(axis=1)
        self._drop("a worker would change its role", int((~kept).sum()))
        table = table[kept]
        if mode != "mixed" and self._pd.ratio != "auto":
            table = table[self._has_ratio(table)]
        return table

    def _has_ratio(self, table: Array) -> Array:
        """The nearest to the fixed ratio that the number of split workers allows."""
        prefill, decode = self._pd.parts()
        split = table[:, 2] + table[:, 3]
        wanted = np.clip(np.rint(split * prefill / (prefill + decode)), 1, split - 1)
        return table[:, 2] == wanted

    def _drop(self, reason: str, count: int) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def _product(axes: Any) -> Array:
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)


def _spread(length: int, points: int) -> Array:
    return np.unique(np.linspace(0, length - 1, min(length, points)).round().astype(int))


def _around(center: int, width: float, axis: Array) -> Array:
    """Up to 5 values of `axis` (which is contiguous) around `center`, `width` apart, at least one."""
    if len(axis) == 1:
        return axis
    apart = max(1, round(width))
    values = center + apart * np.arange(-2, 3)
    return values[(values >= axis[0]) & (values <= axis[-1])]


def fixed_borrow(setting: str, already: int, lendable: int) -> range:
    """How many more workers may be borrowed under this setting, `already` being borrowed; at least one number."""
    if setting in ("auto", "all_or_none"):
        return range(lendable + 1)
    more = {"all": lendable, "none": 0}.get(setting)
    count = min(lendable, max(0, int(setting) - already)) if more is None else more
    return range(count, count + 1)
