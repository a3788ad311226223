"""What a batch of trajectories asks of the cluster, as the numbers that predictions need.

Owns the frozen Workload and how unequal trajectories become segments. It does not know costs or workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Of the turns of trajectories, smallest first: where `Workload.turn_quantiles` are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Means per trajectory and turn; tokens and seconds.

    `batch` trajectories make a step and `in_flight` are under way at a time (0: as many as the batch). With `barrier` the
    next batch starts when the last one is complete, else each that ends is replaced at once. A trajectory begins with
    `first_prompt` tokens and has `turns` turns, each of `appended` tokens from the environment and `generated` ones.
    `context` is the mean length while it runs, `longest` that of the longest at its end. `env_s` and `overhead_s` pass per
    turn outside of the engine. `miss_share` of the context that could be cached where a prompt is computed is not, for other
    reasons than lack of memory (`found_prefixes.py`). `local_share` of the turns append, `local_appended` tokens, on the decode
    worker that holds the KV. `turn_quantiles` are turns over their mean, at QUANTILES; empty: all equal. `decode_share` is the
    measured mean share of trajectories that decode (f of the paper). `eviction`: what full caches give up, as in EngineConfig.
    `calibration` multiplies predictions for pools without prefill workers, `split_calibration` the others: measured over
    predicted, of late.
    """

    batch: float
    turns: float
    appended: float
    generated: float
    first_prompt: float = 0.0
    context: float
    longest: float
    env_s: float = 0.0
    overhead_s: float = 0.0
    miss_share: float = 0.0
    local_share: float = 0.0
    local_appended: float = 0.0
    turn_quantiles: tuple[float, ...] = ()
    decode_share: float = 1.0
    in_flight: float = 0.0
    barrier: bool = True
    eviction: Literal["lru", "keep"] = "lru"
    calibration: float = 1.0
    split_calibration: float = 1.0

    def __post_init__(self) -> None:
        for name in ("batch", "turns", "generated", "context", "longest", "calibration", "split_calibration"):
            _check(name, getattr(self, name), 0.0, math.inf, open_low=True)
        for name in ("appended", "first_prompt", "env_s", "overhead_s", "local_appended", "in_flight"):
            _check(name, getattr(self, name), 0.0, math.inf)
        for name in ("miss_share", "local_share"):
            _check(name, getattr(self, name), 0.0, 1.0)
        _check("decode_share", self.decode_share, 0.0, 1.0, open_low=True)
        if self.eviction not in ("lru", "keep"):
            raise ValueError(f"workload.eviction={self.eviction!r}: must be one of lru, keep")
        rising = all(low <= high for low, high in pairwise(self.turn_quantiles))
        if self.turn_quantiles and (len(self.turn_quantiles) != len(QUANTILES) or self.turn_quantiles[0] <= 0 or not rising):
            raise ValueError(f"turn_quantiles={self.turn_quantiles}: must be {len(QUANTILES)} rising numbers > 0, or none")

    @property
    def concurrency(self) -> float:
        """Trajectories under way when all slots are full."""
        return self.in_flight or self.batch

    @property
    def theta(self) -> float:
        """The bubble ratio of the paper, (1 - f) / f."""
        return (1.0 - self.decode_share) / self.decode_share

    def calibration_of(self, split: bool) -> float:
        """Measured over predicted, in pools with prefill workers or without."""
        return self.split_calibration if split else self.calibration

    def segments(self) -> tuple[tuple[float, float], ...]:
        """(trajectories under way, turns) one after the other: the batch thins out as short trajectories end.

        Without a barrier there is one segment: as many turns as one slot plays in its share of a batch.
        """
        if not self.barrier:
            return ((self.concurrency, self.batch * self.turns / self.concurrency),)
        if not self.turn_quantiles:
            return ((self.batch, self.turns),)
        bounds = (0.0, *QUANTILES)
        marks = (0.0, *self.turn_quantiles)
        alive = [1.0 - (low + high) / 2 for low, high in pairwise(bounds)]
        alive[0] = 1.0  # nobody ends in the first turns; the mean below is kept all the same
        lengths = [high - low for low, high in pairwise(marks)]
        played = sum(share * length for share, length in zip(alive, lengths, strict=True))
        rows = zip(alive, lengths, strict=True)
        return tuple((max(1.0, share * self.batch), length / played * self.turns) for share, length in rows if length > 0)


def _check(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    fits = low < value <= high if open_low else low <= value <= high
    if not (math.isfinite(value) and fits):
        above = f"{'>' if open_low else '>='} {low:g}"
        valid = f"{above} and <= {high:g}" if high < math.inf else above
        raise ValueError(f"workload.{name}={value}: must be {valid}")
