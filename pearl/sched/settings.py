"""What a cluster scheduler may decide, and from when a decision pays: the sections of a job that concern it, together.

Owns their composition; the sections and their checks are in `scheduler_options.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.config import Config
from pearl.scheduler_options import MODES as MODES
from pearl.scheduler_options import BorrowSettings as BorrowSettings
from pearl.scheduler_options import ExpandSettings as ExpandSettings
from pearl.scheduler_options import PdSettings as PdSettings
from pearl.scheduler_options import SchedOptions as SchedOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(SchedOptions):
    """All of it."""

    pd: PdSettings = field(default_factory=PdSettings)
    borrow: BorrowSettings = field(default_factory=BorrowSettings)
    expand: ExpandSettings = field(default_factory=ExpandSettings)

    @classmethod
    def of(cls, config: Config) -> SchedulerSettings:
        """Those of a job."""
        s = config.sched
        return cls(
            pd=config.pd,
            borrow=config.borrow,
            expand=config.expand,
            change_timeout_s=s.change_timeout_s,
            prepare_timeout_s=s.prepare_timeout_s,
            tries=s.tries,
            consider_s=s.consider_s,
            tail_share=s.tail_share,
        )
