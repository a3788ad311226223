"""Numbers that are learned from telemetry: averages that forget, spreads, and step times as functions of batch and context.

Owns the arithmetic; what is measured is `profile.py`. Invariant: no input, however absurd, makes an estimate infinite, NaN or
negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

JUMP = 10.0
"""Largest factor by which one observation may differ from what is known; beyond, it counts as that far away."""

MOST_COUNTED = 1e12
"""No observation stands for more than that: sums of many of them stay far from what a float can hold."""

LEAST_EXPECTED_S = 1e-12
"""A prior that says less, of whatever size, tells nothing about how much slower or faster a machine is."""

OUTLYING, REWEIGHTED = 3.0, 6
"""Of `total_fit`."""


@dataclass(slots=True, kw_only=True)
class Average:
    """A mean that weighs observations by their count and forgets: before each new one, old weight shrinks by `keep`.

    It begins with `value` at the weight of `prior` observations, or of none if that was `guessed`. `deviation` is the mean
    absolute deviation likewise.
    """

    value: float
    low: float = 0.0
    high: float = 1e9
    keep: float = 0.7
    prior: float = 4.0
    weight: float = 0.0
    deviation: float = 0.0
    guessed: bool = False

    def observe(self, value: float | None, count: float = 1.0) -> bool:
        """False, nothing changed, for what is not a number in [low, high] (finite both), or for a count that none can be."""
        if value is None or not self.low <= value <= self.high or not 0 < count <= MOST_COUNTED:
            return False
        if self.guessed and not self.weight:
            self.value, self.weight = value, count
            return True
        if self.value > 0 and value > 0:
            value = min(max(value, self.value / JUMP), self.value * JUMP)
        old = self.prior * (self.weight == 0) + self.keep * self.weight
        share = count / (old + count)
        self.deviation += share * (abs(value - self.value) - self.deviation)
        self.value += share * (value - self.value)
        self.weight = old + count
        return True

    @property
    def confidence(self) -> float:
        """0: only the prior. Toward 1 with the weight of what was observed."""
        return self.weight / (self.weight + self.prior) if self.weight else 0.0

    @property
    def cautious(self) -> float:
        """A value that is seldom exceeded: mean plus four mean deviations (as in Jacobson 1988)."""
        return self.value + 4 * self.deviation


@dataclass(slots=True)
class StepFit:
    """Least squares of seconds over features, relative errors, forgetting, coefficients never negative.

    The prior counts as `prior` observations at `points`, scaled by how much slower or faster than the prior this machine
    turned out to be, so that a prior of the right form but the wrong speed bends nothing. `guessed`: nobody knows this
    machine's speed, so the first measurements alone say how fast it is, however far from the prior.
    """

    coefficients: Any
    points: Any
    keep: float = 0.7
    prior: float = 12.0
    weight: float = 0.0
    scale: float = 1.0
    guessed: bool = False
    _gram: Any = field(init=False)
    _right: Any = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = np.asarray(self.coefficients, dtype=np.float64)
        self.points = np.asarray(self.points, dtype=np.float64)
        self._prior_coefficients = self.coefficients.copy()
        size = len(self.coefficients)
        self._gram, self._right = np.zeros((size, size)), np.zeros(size)
        self._expected = np.maximum(self.points @ self.coefficients, LEAST_EXPECTED_S)

    _prior_coefficients: Any = field(init=False)
    _expected: Any = field(init=False)

    def observe(self, rows: Any, seconds: Any, counts: Any) -> None:
        """`rows` of features, one per measurement; all positive, and no more than times and counts can be (the caller's part).
        Refits at once."""
        rows, seconds, counts = (np.asarray(values, dtype=np.float64) for values in (rows, seconds, counts))
        expected = np.maximum(rows @ self._prior_coefficients, LEAST_EXPECTED_S)
        if self.guessed and not self.weight:
            self.scale = _weighted_median(seconds / expected, counts)
        seconds = np.clip(seconds, expected * self.scale / JUMP, expected * self.scale * JUMP)
        old = self.keep * self.weight
        total = old + counts.sum()
        ratio = float((counts * seconds / expected).sum())
        self.scale = (old * self.scale + ratio) / total
        relative = rows / seconds[:, None]
        self._gram = self.keep * self._gram + (relative * counts[:, None]).T @ relative
        self._right = self.keep * self._right + relative.T @ counts
        self.weight = total
        self.coefficients = self._solve()

    def _solve(self) -> Any:
        """Non-negative least squares; the form has four coefficients at most."""
        known = self.points / (self._expected * self.scale)[:, None]
        share = self.prior / len(known)
        gram, right = self._gram + share * known.T @ known, self._right + share * known.sum(axis=0)
        found = _non_negative(gram, right)
        return self._prior_coefficients * self.scale if found is None else found


def _weighted_median(values: Any, counts: Any) -> float:
    order = np.argsort(values)
    passed = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


def total_fit(rows: Any, seconds: Any, known: Any = 0.0) -> tuple[list[float], float]:
    """(coefficients, median relative error) of measurements that scatter: what is predicted adds up to what was measured, as
    it must where sums of many steps are wanted. Coefficients are never negative.

    `known` seconds of each measurement are explained already. Weighted least squares, errors over the root of what is
    predicted (so that they sum to 0), settled in a few rounds; relative errors would favour the quick ones. Measurements that
    are OUTLYING times off are left out: a processor that did something else.

    `rows` of features, one per measurement, and what was measured, > 0. ValueError if nothing can be fitted.
    """
    rows, seconds = np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(seconds) or not len(rows) or not (seconds > 0).all():
        raise ValueError(f"rows of shape {rows.shape}, {len(seconds)} measurements: must be as many, all of them > 0")
    known = np.broadcast_to(np.asarray(known, dtype=np.float64), seconds.shape)
    told = seconds
    for _ in range(REWEIGHTED):
        used = (told > 0) & (seconds < OUTLYING * told) & (told < OUTLYING * seconds)
        weighted = rows[used] / told[used, None]
        found = _non_negative(weighted.T @ rows[used], weighted.T @ (seconds - known)[used])
        if found is None and not known.any():
            raise ValueError("rows: no coefficients >= 0 fit them")
        found = np.zeros(rows.shape[1]) if found is None else found
        told = known + rows @ found
    return found.tolist(), float(np.median(np.abs(told / seconds - 1)))


def _non_negative(gram: Any, right: Any) -> Any:
    """Solves gram x = right, dropping the most negative x until none is left; None if nothing remains."""
    used = np.diag(gram) > 0
    while used.any():
        norm = np.sqrt(np.diag(gram)[used])  # features differ by many orders of magnitude
        system = gram[np.ix_(used, used)] / np.outer(norm, norm) + 1e-9 * np.eye(int(used.sum()))
        part = np.linalg.solve(system, right[used] / norm) / norm
        if (part >= 0).all():
            result = np.zeros(len(gram))
            result[used] = part
            return result
        used[np.flatnonzero(used)[np.argmin(part * norm)]] = False
    return None
