"""Finds the free numbers of the simulator (`pearl/sched/sim/presets/fitted.json`) on the paper's motivation figures alone.

    python -m bench.sim_fit --draws 40 --out FILE        random draws; each line of FILE is one, with its errors
    python -m bench.sim_fit --check                      the errors of the frozen numbers

Fitted on: rollout times at 16, 24 and 32 rollout GPUs (8B: -10.3 % and a further -8.9 %), 934 s at 16, 216 s for a mean
trajectory alone; with --experts also 30B-A3B on 8 workers: split against colocated at batches of 32, 80 and 96. Evaluation
figures (`bench.sim`) play no part.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bench.sim_cases import fixed, makespan
from pearl.sched.sim.baselines import ROLL
from pearl.sched.sim.presets.fitted import Fitted, read_fitted
from pearl.sched.sim.presets.qwen3 import Preset, preset_named

TARGETS = {"cut_24": (0.103, 0.02), "cut_32": (0.089, 0.02), "alone_s": (216.0, 0.25), "rollout_s": (934.0, 0.35)}
"""Figure -> (printed, how far off counts as one: absolute for cuts, of the logarithm for seconds)."""

EXPERTS = {32: 0.097, 80: 0.014, 96: -0.061}
"""30B-A3B, 8 workers: batch -> throughput of the best split over colocated, less 1."""

RATIOS = {32: ("3:5", "4:4"), 80: ("4:4", "5:3"), 96: ("4:4", "5:3")}
"""Splits that are tried for the best; the paper's best are 4P4D at a batch of 48 and 5P3D at 64."""

RANGES = {
    "overhead_s": (0.1, 0.3),
    "step_overhead_s": (0.001, 0.003),
    "miss_share": (0.2, 0.35),
    "generated_factor": (1.5, 3.5),
    "stall_share": (0.0, 0.002),
    "slowness": (0.0, 0.6),
}
"""A first round of draws with stalls in up to 1 % of the turns found rollout times that no number of GPUs changes."""


def drawn(rng: np.random.Generator) -> Fitted:
    """The environment's mean follows: it makes a trajectory alone as long as printed, if that can be."""
    values = {name: round(float(rng.uniform(*ends)), 4) for name, ends in RANGES.items()}
    preset, low, high = preset_named("qwen3-8b-h800"), 0.05, 3.0
    for _ in range(7):
        middle = round((low + high) / 2, 3)
        short = alone_s(preset, Fitted(mixing=1.0, env_factor=middle, **values), 64) < TARGETS["alone_s"][0]
        low, high = (middle, high) if short else (low, middle)
    return Fitted(mixing=1.0, env_factor=middle, **values)


def alone_s(preset: Preset, fitted: Fitted, trajectories: int = 256) -> float:
    """Mean seconds of a trajectory that has a worker to itself, resets left out."""
    family, costs = fitted.family(preset.family), fitted.costs(preset.costs)
    total = 0.0
    for number in range(trajectories // 16):
        for plan in family.group(number, 16, seed=0):
            length = plan.first_prompt
            new = float(length)
            for turn in plan.turns:
                new += turn.appended
                miss = fitted.miss_share * float(costs.prefill_s(length + turn.appended, 0.0))
                total += miss + (1 - fitted.miss_share) * float(costs.prefill_s(new, length + turn.appended - new))
                length += turn.appended + turn.generated
                total += turn.generated * float(costs.decode_step_s(1, length)) + turn.env_s + fitted.overhead_s
                new = 0.0
    return total / trajectories


def figures(fitted: Fitted, seeds: tuple[int, ...]) -> dict[str, float]:
    preset = preset_named("qwen3-8b-h800")
    times = {gpus: makespan(ROLL, preset, fitted, workers=gpus // 2, seeds=seeds) for gpus in (16, 24, 32)}
    cuts = {"cut_24": 1 - times[24] / times[16], "cut_32": (times[24] - times[32]) / times[16]}
    return cuts | {"alone_s": alone_s(preset, fitted), "rollout_s": times[16]}


def experts(fitted: Fitted) -> dict[int, float]:
    preset = preset_named("qwen3-30b-a3b-h800")
    found = {}
    for batch, ratios in RATIOS.items():
        mixed = makespan(ROLL, preset, fitted, workers=8, batch=batch)
        split = min(makespan(fixed(ratio, "split", ratio), preset, fitted, workers=8, batch=batch) for ratio in ratios)
        found[batch] = mixed / split - 1
    return found


def error_of(found: dict[str, float]) -> float:
    """Sum of squares, each in units of what counts as one."""
    total = 0.0
    for name, (printed, unit) in TARGETS.items():
        off = found[name] - printed if printed < 1 else math.log(found[name] / printed)
        total += (off / unit) ** 2
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="trajectories are drawn from so many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path, nargs="?", const=Path(), help="only these numbers, or the frozen ones")
    parser.add_argument("--experts", action="store_true", help="the figures of 30B-A3B too; slow")
    options = parser.parse_args()
    rng, seeds = np.random.default_rng(options.seed), tuple(range(options.seeds))
    frozen = options.check is not None
    for number in range(1 if frozen else options.draws):
        fitted = read_fitted(options.check if options.check != Path() else None)[0] if frozen else drawn(rng)
        found = figures(fitted, seeds)
        row = {"draw": number, "error": round(error_of(found), 2), "found": found, "fitted": asdict(fitted)}
        if options.experts:
            row["experts"] = experts(fitted)
        line = json.dumps(row)
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
