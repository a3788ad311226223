"""What was fitted: the few numbers that nobody prints, found on the paper's motivation figures alone, then frozen.

Owns the file `fitted.json`, its hash, and how the numbers enter a preset. How they were found is `bench/sim_fit.py`. Every
evaluation prints the hash, so that a table and the numbers behind it cannot part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import msgspec

from pearl.field_checks import above_zero, at_least, within
from pearl.sched.cost_profile import CostProfile
from pearl.sched.sim.workload import TaskFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """`overhead_s` per request outside of the engine, `step_overhead_s` of host time per engine step, `prefill_overhead_s` more
    per step that computes prompts (its kernels are launched one by one; the request is tokenized, looked up, admitted), and
    `miss_share` of turns that find nothing cached. `env_factor` and `generated_factor` scale the software family's means;
    `stall_share` of its turns and `slow_share` of its resets stall; `slowness` spreads environments' speed over
    trajectories. `mixing` as in CostProfile."""

    overhead_s: float
    step_overhead_s: float
    prefill_overhead_s: float
    miss_share: float
    env_factor: float
    generated_factor: float
    stall_share: float
    slow_share: float
    slowness: float
    mixing: float

    def __post_init__(self) -> None:
        at_least(self, "fitted", 0, "overhead_s", "step_overhead_s", "prefill_overhead_s", "slowness")
        within(self, "fitted", 0, 1, "miss_share", "stall_share", "slow_share", "mixing")
        above_zero(self, "fitted", "env_factor", "generated_factor")

    def costs(self, given: CostProfile) -> CostProfile:
        """`given` with the host's time per step, and what a prefill costs those who decode beside it."""
        prefill = replace(given.prefill, base_s=given.prefill.base_s + self.prefill_overhead_s)
        return replace(given, prefill=prefill, step_overhead_s=self.step_overhead_s, mixing=self.mixing)

    def family(self, given: TaskFamily) -> TaskFamily:
        """`given` with longer or shorter generations and environments, and other tails."""
        return replace(
            given,
            generated=replace(given.generated, mean=given.generated.mean * self.generated_factor),
            env_s=replace(given.env_s, mean=given.env_s.mean * self.env_factor),
            stall_share=self.stall_share,
            slow_share=self.slow_share,
            slowness=self.slowness,
        )


def read_fitted(path: Path | None = None) -> tuple[Fitted, str]:
    """(the numbers, the first 12 digits of the file's SHA-256). ValueError names the file.

    Without `path` those that were frozen.
    """
    data = path.read_bytes() if path else (resources.files(__package__) / "fitted.json").read_bytes()
    try:
        return msgspec.json.decode(data, type=Fitted), hashlib.sha256(data).hexdigest()[:12]
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{path or 'fitted.json'}: not a file of fitted numbers: {error}") from None
