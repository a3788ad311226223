"""What a cluster scheduler may decide, and from when a decision pays: every automatic choice has a fixed setting.

Owns the settings and their checks. Invariant: the threshold of a change of mode is not below that of a change of ratio.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pearl.config import above_zero, at_least, one_of

MODES = ("mixed", "split", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSettings:
    """Which shapes, and when to change. `mode`: auto or one of MODES. `ratio`: "auto", or "P:D" as in "3:5", for split pools.

    Thresholds are shares of the present makespan. `hybrid_margin`: a hybrid must be better than the best of the simple
    shapes by so much. `cooldown_s`: no further change of shape that nothing forces, at the same number of workers.
    """

    mode: str = "auto"
    ratio: str = "auto"
    mode_threshold: float = 0.08
    ratio_threshold: float = 0.03
    hybrid_margin: float = 0.03
    unsure_penalty: float = 0.10
    cooldown_s: float = 120.0
    predictor: Literal["full", "paper"] = "full"

    def __post_init__(self) -> None:
        one_of("pd.mode", self.mode, ("auto", *MODES))
        one_of("pd.predictor", self.predictor, ("full", "paper"))
        at_least(self, "pd", 0, "ratio_threshold", "hybrid_margin", "unsure_penalty", "cooldown_s")
        at_least(self, "pd", self.ratio_threshold, "mode_threshold")
        if self.ratio != "auto":
            self.parts()

    def parts(self) -> tuple[int, int]:
        """(P, D) of a fixed ratio."""
        parts = self.ratio.split(":")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"pd.ratio={self.ratio!r}: must be auto or like 3:5, both at least 1")
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowSettings:
    """How many training workers serve while nothing is trained: "auto", "all", "none", "all_or_none" or a number as text.

    "auto" borrows as many as pay, "all_or_none" all if they pay, "all" and a number whether they pay or not.
    `margin`: what is gained must be so many times the cost. `return_margin`: the lead of a return, over its expected time,
    `return_extra_s` on top.
    """

    workers: str = "auto"
    margin: float = 1.0
    return_margin: float = 1.5
    return_extra_s: float = 0.5

    def __post_init__(self) -> None:
        if self.workers not in ("auto", "all", "none", "all_or_none") and not self.workers.isdecimal():
            raise ValueError(f"borrow.workers={self.workers!r}: must be auto, all, none, all_or_none or a number")
        at_least(self, "borrow", 0, "margin", "return_extra_s")
        at_least(self, "borrow", 1, "return_margin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandSettings:
    """Whether external workers are prepared: "auto" (if they live long enough to pay), "always" or "never".

    `prior_life_s`: their expected life before any has been seen to leave; `margin` as in borrowing.
    """

    external: str = "auto"
    margin: float = 1.0
    prior_life_s: float = 3600.0

    def __post_init__(self) -> None:
        one_of("expand.external", self.external, ("auto", "always", "never"))
        at_least(self, "expand", 0, "margin")
        above_zero(self, "expand", "prior_life_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """All of it. `change_timeout_s`: a change that a worker has not confirmed by then is ordered again, `tries` times in all,
    and then the worker counts as lost. `tail_share`: from so small a rest of the batch on, requests move to idle workers."""

    pd: PdSettings = field(default_factory=PdSettings)
    borrow: BorrowSettings = field(default_factory=BorrowSettings)
    expand: ExpandSettings = field(default_factory=ExpandSettings)
    change_timeout_s: float = 30.0
    prepare_timeout_s: float = 600.0
    tries: int = 3
    consider_s: float = 10.0
    tail_share: float = 0.25

    def __post_init__(self) -> None:
        above_zero(self, "sched", "change_timeout_s", "prepare_timeout_s", "consider_s")
        at_least(self, "sched", 1, "tries", whole=True)
        at_least(self, "sched", 0, "tail_share")
