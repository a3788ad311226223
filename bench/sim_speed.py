"""Claim: two hours of a job on 32 GPUs, 64 trajectories of up to 60 turns in flight, are simulated in 30 processor seconds.

One core, on a drawn segment of external GPUs, with all of the scheduler's choices on; --gpus and --minutes for other sizes
(half of the GPUs train, a quarter serves always, a quarter is external; two trajectories per GPU). Beside the seconds: turns,
outputs of batch schedulers and the single steps that they stand for, and peak memory. `value`: processor seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from bench.sim_cases import plans_of
from pearl.sched.sim.availability import SEGMENTS, segment_gpus, steady
from pearl.sched.sim.baselines import OURS
from pearl.sched.sim.plans import EngineSizes, Hardware
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import preset_named
from pearl.sched.sim.simulator import Simulation

TARGET_S, SEGMENT_GPUS = 30.0, 32


def simulation_of(gpus: int, minutes: float, block_size: int) -> Simulation:
    preset, fitted = preset_named("qwen3-8b-h800"), read_fitted()[0]
    if gpus == SEGMENT_GPUS:
        hardware, external = Hardware(training_gpus=16, reserved_workers=2), segment_gpus(SEGMENTS[0], None, tp=2, seed=0)[0]
    else:
        hardware, external = Hardware(training_gpus=gpus // 2, reserved_workers=gpus // 8), steady(gpus // 8, tp=2)
    settings = OURS.settings(
        preset,
        fitted,
        hardware=hardware,
        batch=gpus * 2,
        until_s=60 * minutes,
        engine=EngineSizes(block_size=block_size),
    )
    return Simulation(settings, plans_of(fitted.family(preset.family), 0), external)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_speed", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--gpus", type=int, default=SEGMENT_GPUS)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--block-size", type=int, default=256)
    options = parser.parse_args()
    began = time.process_time()
    result = simulation_of(options.gpus, options.minutes, options.block_size).run()
    seconds = time.process_time() - began
    row = {name: result.counts[name] for name in ("turns", "outputs", "steps", "computed", "generated")}
    row |= {"rl_steps": len(result.steps), "events": result.events}
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.gpus} GPUs, {options.minutes:g} minutes: {seconds:.1f} processor seconds")
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        claimed = options.gpus == SEGMENT_GPUS and options.minutes == 120
        head = {"bench": "sim_speed", "claim": (__doc__ or "").splitlines()[0], "value": seconds, "target": TARGET_S}
        print(json.dumps(head | {"ok": seconds <= TARGET_S if claimed else None} | row))


if __name__ == "__main__":
    main()
