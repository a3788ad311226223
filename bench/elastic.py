"""PEARL's own choice of roles and borrowing against every fixed one, at three loads, in whole jobs without devices.

    python -m bench.elastic [--loads short,append,long] [--steps N] [--jobs N] [--json]

Claim: left to itself a job trains at least 0.95 times the tokens per second of the best fixed configuration, whatever the
load; one load is such that splitting prefill from decode loses. Real processes, router, scheduler and hand-offs on emulated
devices (docs/elasticity.md): one rank trains, four serve, steps cost what the profile of an H800 says. The automatic job learns
costs and workload as it goes; both are measured over their last steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.job_process import JobProcess
from pearl.metrics.jsonl import read_jsonl

WORLD = 5
LIMIT_S = 600.0
LEARNING = 3
"""The automatic job makes this many times the steps of a fixed one; the last of them are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`turns` of `appended` new prompt tokens and `generated` sampled ones, after a first prompt of `first`."""

    turns: int
    appended: int
    generated: int
    first: int
    batch: int = 16

    def settings(self) -> list[str]:
        options = json.dumps({"turns": self.turns, "appended": self.appended, "first": self.first})
        sizes = f"rollout_batch_size={self.batch}", f"optimizer.mini_batch_size={self.batch}"
        return [f"env.options={options}", f"emulation.turn_tokens={self.generated}", *sizes]


LOADS = {
    "short": Load(turns=4, appended=60, generated=60, first=200),
    "append": Load(turns=4, appended=3000, generated=60, first=3000),
    "long": Load(turns=4, appended=800, generated=100, first=4000),
}
"""With `short` prompts there is nothing to split off: prefill workers would stand idle."""
FIXED = {
    f"{mode} {ratio} borrow {borrow}".replace(" auto", ""): [f"pd.mode={mode}", f"pd.ratio={ratio}", f"borrow.workers={borrow}"]
    for mode, ratio in (("mixed", "auto"), ("split", "1:3"), ("split", "2:2"), ("split", "3:1"))
    for borrow in ("none", "all")
}
COMMON = [
    "device=emulated:qwen3-8b-h800", "env.name=bench.long_turns:LongTurns", "env.max_turns=20", "cluster.train_ranks=1",
    "group_size=8", "max_staleness=1", "model.max_position=32768", "engine.max_model_len=32768", "rollout.max_tokens=1000",
    "emulation.train_token_s=2e-6", "emulation.publish_s=0.05", "pd.cooldown_s=10", "sched.consider_s=3",
]  # fmt: skip


def run(load: Load, settings: list[str], slowdown: float, steps: int, measured: int) -> dict[str, Any]:
    """One job; trained tokens per emulated second over its last `measured` steps, and what it had become."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        own = [f"emulation.slowdown={slowdown}", f"max_steps={steps}", f"output_dir={folder / 'runs'}"]
        wanted = [*COMMON, *load.settings(), *settings, *own]
        options = [part for value in wanted for part in ("--set", value)]
        command = ["-m", "pearl", "run", "quickstart", "--nproc", str(WORLD), *options]
        with JobProcess.command(folder, command) as job:
            if job.wait_until_gone(LIMIT_S) is None or job.process.wait() != 0:
                raise RuntimeError(f"{settings}:\n{job.output()[-3000:]}")
            directory = job.run_directory()
            assert directory is not None
            rows = read_jsonl(directory / "metrics.jsonl")
            changes = read_jsonl(directory / "transitions.jsonl")
    last = rows[-measured:]
    switches = [row["after"] for row in changes if row["kind"] == "switch"]
    borrowed = sum(row["kind"] == "borrow" for row in changes)
    seconds = sum(row["time_s"] for row in last) / slowdown
    return {
        "tokens_per_s": sum(row["batch_tokens"] for row in last) / seconds,
        "step_s": seconds / len(last),
        "shape": switches[-1] if switches else "4M",
        "borrowed": borrowed,
    }


def measure(name: str, slowdown: float, steps: int, jobs: int) -> float:
    """Prints a load's table; automatic over best fixed."""
    load = LOADS[name]
    with ThreadPoolExecutor(jobs) as pool:
        automatic = pool.submit(run, load, [], slowdown, LEARNING * steps, steps - 1)
        futures = {key: pool.submit(run, load, settings, slowdown, steps, steps - 1) for key, settings in FIXED.items()}
        fixed = {key: future.result() for key, future in futures.items()}
        own = automatic.result()
    best = max(one["tokens_per_s"] for one in fixed.values())
    print(f"{name}: {load}")
    for key, one in {**fixed, "auto": own}.items():
        share, words = one["tokens_per_s"] / best, f"last shape {one['shape']}, borrowed {one['borrowed']} times"
        print(f"  {key:24} {one['tokens_per_s']:9.0f} tokens/s  {share:5.2f}  step {one['step_s']:5.2f} s  {words}", flush=True)
    return own["tokens_per_s"] / best


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--loads", default=",".join(LOADS))
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--slowdown", type=float, default=6.0, help="of everything, so that few cores can follow")
    options.add_argument("--jobs", type=int, default=1, help="jobs at a time; several disturb each other on few cores")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    ratios = {name: measure(name, given.slowdown, given.steps, given.jobs) for name in given.loads.split(",")}
    value = min(ratios.values())
    result = {"bench": "elastic", "claim": "auto / best fixed", "value": value, "target": 0.95, "ok": value >= 0.95}
    print(" ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    if given.json:
        print(json.dumps(result | {"ratios": ratios}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
