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
    """`overhead_s` per request outside of the engine, `step_overhead_s` of host time per engine step, `prompt_s` of host time
    per prompt, by model (the request is tokenized, looked up, admitted, and its kernels are launched one by one; 0 for models
    that are not named), and `miss_share` of turns that find nothing cached. `env_factor` and `generated_factor` scale the task
    family's means, whose environments do not stall."""

    overhead_s: float
    step_overhead_s: float
    prompt_s: dict[str, float]
    miss_share: float
    env_factor: float
    generated_factor: float

    def __post_init__(self) -> None:
        at_least(self, "fitted", 0, "overhead_s", "step_overhead_s")
        within(self, "fitted", 0, 1, "miss_share")
        above_zero(self, "fitted", "env_factor", "generated_factor")
        wrong = {model: seconds for model, seconds in self.prompt_s.items() if not 0 <= seconds < 60}
        if wrong:
            raise ValueError(f"fitted.prompt_s={wrong}: must be seconds >= 0 and < 60")

    def costs(self, given: CostProfile) -> CostProfile:
        """`given` with the host's time per step and prompt."""
        per_prompt_s = given.prefill.per_prompt_s + self.prompt_s.get(given.key.model, 0.0)
        prefill = replace(given.prefill, per_prompt_s=per_prompt_s)
        return replace(given, prefill=prefill, step_overhead_s=self.step_overhead_s)

    def family(self, given: TaskFamily) -> TaskFamily:
        """`given` with longer or shorter generations and environments, and without stalls."""
        return replace(
            given,
            generated=replace(given.generated, mean=given.generated.mean * self.generated_factor),
            env_s=replace(given.env_s, mean=given.env_s.mean * self.env_factor),
            stall_share=0.0,
            slow_share=0.0,
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
