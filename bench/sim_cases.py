"""What the simulator's benches share: printed figures, one way to run a system on a case, and mean makespans.

Owns the figures of arXiv 2609.35158 and where the line runs between those that were fitted on (its motivation) and those that
are tested. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pearl.sched.settings import BorrowSettings, PdSettings, SchedulerSettings
from pearl.sched.sim.baselines import ROLL, System
from pearl.sched.sim.plans import Availability, EngineSizes, Hardware, TrajectoryPlan
from pearl.sched.sim.presets.fitted import Fitted
from pearl.sched.sim.presets.qwen3 import Preset
from pearl.sched.sim.simulator import Simulation
from pearl.sched.sim.tables import Run
from pearl.sched.sim.workload import TaskFamily

BLOCKS = EngineSizes(block_size=512)
"""Coarse blocks: a run takes half the time of blocks of 64; prompts are computed anew from the last whole block on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A figure of the paper: `low` to `high` (equal for a single number)."""

    low: float
    high: float

    def hit(self, value: float, within: float = 0.15) -> bool:
        """Whether `value` is in the range, or off its nearer end by no more than `within` of that end.

        Gains and losses (between -1 and 1) are compared as factors: +12.8 % is 1.128. That alone would be lenient, so a gain
        must also have the right sign.
        """
        if abs(self.low) < 1 and abs(self.high) < 1:
            near = min(max(value, self.low), self.high)
            return value * (self.low + self.high) >= 0 and abs((1 + value) / (1 + near) - 1) <= within
        near = min(max(value, self.low), self.high)
        return abs(value / near - 1) <= within


def plans_of(family: TaskFamily, seed: int, group: int = 16) -> Iterator[TrajectoryPlan]:
    for members in family.groups(group, seed):
        yield from members


def run_system(
    system: System,
    preset: Preset,
    fitted: Fitted,
    *,
    segment: str = "",
    seed: int = 0,
    hardware: Hardware | None = None,
    availability: Availability | None = None,
    **more: Any,
) -> Run:
    """One simulated run; `more` are fields of SimSettings."""
    hardware = hardware or Hardware(training_gpus=16, reserved_workers=2, tp=2)
    settings = system.settings(preset, fitted, hardware=hardware, **{"seed": seed, "engine": BLOCKS} | more)
    plans = plans_of(fitted.family(preset.family), seed)
    result = Simulation(settings, plans, availability if system.external else None).run()
    return Run(policy=system.name, segment=segment, seed=seed, result=result)


def fixed(name: str, mode: str, ratio: str = "auto", borrow: str = "none", margin: float = 1.0) -> System:
    """A fixed mode on fixed GPUs, nothing else of ours."""
    pd = PdSettings(mode=mode, ratio=ratio, append_on_decode="0")
    scheduler = SchedulerSettings(pd=pd, borrow=BorrowSettings(workers=borrow, margin=margin))
    return replace(ROLL, name=name, scheduler=replace(scheduler, tail_share=0.0))


def makespan(
    system: System, preset: Preset, fitted: Fitted, *, workers: int, seeds: tuple[int, ...] = (0,), **more: Any
) -> float:
    """Mean seconds of rollout of a batch on so many workers, the trainer never in the way (synchronous steps)."""
    hardware = Hardware(training_gpus=8, reserved_workers=workers, tp=2)
    rows = []
    for seed in seeds:
        options = {"max_steps": 1, "max_staleness": 0} | more
        rows += run_system(system, preset, fitted, seed=seed, hardware=hardware, **options).result.steps
    return sum(row.makespan_s for row in rows) / len(rows)
