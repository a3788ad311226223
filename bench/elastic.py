"""PEARL's own choice of roles and borrowing against every fixed one, at three loads, in whole jobs without devices.

    python -m bench.elastic [--loads full,split,lend] [--steps N] [--jobs N] [--slowdown X] [--json]  (17 minutes)

Claim: left to itself a job trains at least 0.95 times the tokens per second of the best fixed configuration, whatever the
load. At one load splitting prefill from decode loses, at one it wins, at one lending the trainers' ranks pays. Real processes,
router, scheduler and hand-offs on emulated devices (docs/elasticity.md); the automatic job knows nothing of their costs or of
the workload when it begins. All jobs of a load play the same trajectories, and are compared over the same batches: all of them
(what was lost before the choice was made counts), and the second half, which decides. Every job is interrupted after its last
measured batch. Beside the ratios stands the least share of processor time that was idle during a load: what runs on a machine
without any says little. Last, what a step of a trainer that lent its ranks takes, over one of a trainer that did not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.job_process import JobProcess, send
from pearl.metrics.jsonl import read_jsonl
from pearl.sched.cost_profile import ChangeCost, CostKey, CostProfile, DecodeCost, PrefillCost, write_profiles
from pearl.sched.published import qwen3_8b_h800

WORLD = 5
LIMIT_S = 600.0
POLL_S = 0.2
SATURATED = 0.1
"""With less processor time idle than this, emulated devices are late and what is measured is the machine."""
KEPT_WEIGHTS_S = 0.65
"""16.4 GB of weights from host memory to a device, at 25 GB/s."""


def quick_to_lend() -> CostProfile:
    """The published 8B on two H800, its trainers' ranks lent with weights that were kept in host memory: its copy, and half of
    that for the way back, which copies nothing but ends what runs. Assumed, not measured."""
    lent, back = ChangeCost(fixed_s=KEPT_WEIGHTS_S), ChangeCost(fixed_s=KEPT_WEIGHTS_S / 2)
    return replace(qwen3_8b_h800(), borrow=lent, give_back=back)


def short_of_memory() -> CostProfile:
    """The published 8B on a worker that has room for the KV of 16,500 tokens beside everything else."""
    return replace(qwen3_8b_h800(), kv_capacity_tokens=16_500.0)


def dense_32b() -> CostProfile:
    """A dense model of 64 layers and four times the weights of the 8B, on the same worker: its kernel times scaled by weights
    read and multiplied (4), by KV per token (64 layers for 36), by heads in attention (40 for 32), by layers in what a step
    costs in any case (64 for 36). Derived, not measured."""
    small, layers = qwen3_8b_h800(), 64 / 36
    decode = DecodeCost(
        base_s=4 * small.decode.base_s,
        per_seq_s=layers * small.decode.per_seq_s,
        per_context_s=layers * small.decode.per_context_s,
    )
    prefill = PrefillCost(
        base_s=layers * small.prefill.base_s,
        per_token_s=4 * small.prefill.per_token_s,
        per_pair_s=layers * 40 / 32 * small.prefill.per_pair_s,
    )
    kv_bytes = layers * small.kv_bytes_per_token
    room = (2 * 80e9 * 0.85 - 4 * 16.4e9) / kv_bytes
    key = CostKey(gpu="H800", model="dense-32B", tp=2, kernels="derived")
    return replace(small, key=key, decode=decode, prefill=prefill, kv_bytes_per_token=kv_bytes, kv_capacity_tokens=room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`turns` of `appended` new prompt tokens and `generated` sampled ones, after a first prompt of `first`; `staleness`
    batches beyond the one that is collected may be under way. `pace` scales the slowdown, so that steps of all loads take
    about as long here."""

    turns: int
    appended: int
    generated: int
    first: int
    batch: int = 16
    group: int = 4
    staleness: int = 1
    trainers: int = 1
    pace: float = 1.0
    profile: Callable[[], CostProfile] = qwen3_8b_h800

    def settings(self, folder: Path) -> list[str]:
        options = json.dumps({"turns": self.turns, "appended": self.appended, "first": self.first})
        path = folder / "profile.json"
        write_profiles(path, [self.profile()])
        return [
            f"device=emulated:{path}", f"env.options={options}", f"emulation.turn_tokens={self.generated}",
            f"rollout_batch_size={self.batch}", f"optimizer.mini_batch_size={self.batch}", f"group_size={self.group}",
            f"max_staleness={self.staleness}", f"cluster.train_ranks={self.trainers}",
        ]  # fmt: skip


LOADS = {
    "full": Load(
        turns=2, appended=600, generated=200, first=3000, staleness=0, pace=0.5, profile=short_of_memory,
    ),
    "split": Load(turns=3, appended=1000, generated=60, first=300, staleness=3, pace=0.6, profile=dense_32b),
    "lend": Load(
        turns=4, appended=3000, generated=60, first=3000, batch=24, staleness=0, trainers=3, pace=0.6,
        profile=quick_to_lend,
    ),
}  # fmt: skip
"""`full`: the KV of all trajectories fits four workers, and not those that are left beside prefill workers (the case of the
paper in which splitting loses).
`split`: a third of the work are prompts, and decode steps take nearly as long for many sequences as for few. `lend`: two
workers serve a rollout that is bound by prompts, three trainers wait for it."""

FIXED = {
    f"{mode} {ratio} borrow {borrow}".replace(" auto", ""): [f"pd.mode={mode}", f"pd.ratio={ratio}", f"borrow.workers={borrow}"]
    for mode, ratio in (("mixed", "auto"), ("split", "1:3"), ("split", "2:2"), ("split", "3:1"))
    for borrow in ("none", "all")
}
COMMON = [
    "env.name=bench.long_turns:LongTurns", "env.max_turns=20", "model.max_position=32768", "engine.max_model_len=32768",
    "rollout.max_tokens=1000", "emulation.train_token_s=2e-6", "emulation.publish_s=0.05", "pd.cooldown_s=10",
    "sched.consider_s=3", "max_steps=100000", "save_steps=0", "eval_steps=0",
]  # fmt: skip


def run(load: Load, settings: list[str], slowdown: float, steps: int) -> list[dict[str, Any]]:
    """The rows of a job's first `steps` steps, times in emulated seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slow = slowdown * load.pace
        own = [f"emulation.slowdown={slow}", f"output_dir={folder / 'runs'}"]
        options = [part for value in [*COMMON, *load.settings(folder), *settings, *own] for part in ("--set", value)]
        command = ["-m", "pearl", "run", "quickstart", "--nproc", str(WORLD), *options]
        with JobProcess.command(folder, command) as job:
            rows = _rows(job, steps)
            send(job.process.pid, signal.SIGINT)
            if job.wait_until_gone(LIMIT_S) is None:
                raise RuntimeError(f"{settings}: does not end:\n{job.output()[-3000:]}")
        return [row | {name: row[name] / slow for name in ("time_s", "train_s")} for row in rows]


def _rows(job: JobProcess, steps: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + LIMIT_S
    rows: list[dict[str, Any]] = []
    while len(rows) < steps:
        if time.monotonic() > deadline or job.process.poll() is not None:
            raise RuntimeError(f"{len(rows)} of {steps} steps within {LIMIT_S:g} s:\n{job.output()[-3000:]}")
        time.sleep(POLL_S)
        path = job.run_directory()
        rows = read_jsonl(path / "metrics.jsonl") if path is not None and (path / "metrics.jsonl").exists() else []
    return rows[:steps]


def rate(rows: list[dict[str, Any]]) -> float:
    """Trained tokens per emulated second."""
    return sum(row["batch_tokens"] for row in rows) / sum(row["time_s"] for row in rows)


def processor_times() -> tuple[float, float]:
    """(all, idle) of this machine since it started."""
    fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def shapes_of(rows: list[dict[str, Any]]) -> str:
    """What the cluster was after each step, changes only."""
    told: list[str] = []
    for row in rows:
        if not told or not told[-1].endswith(row["serving_shape"]):
            told.append(f"{row['step']}:{row['serving_shape']}")
    return " ".join(told[:6]) + (" ..." if len(told) > 6 else "")


def measure(name: str, slowdown: float, steps: int, jobs: int) -> dict[str, Any]:
    """Prints a load's table; automatic over best fixed, over all batches and over the second half."""
    load, before = LOADS[name], processor_times()
    with ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(run, load, settings, slowdown, steps) for key, settings in {"auto": [], **FIXED}.items()}
        rows = {key: future.result() for key, future in futures.items()}
    total, idle = (after - at for after, at in zip(processor_times(), before, strict=True))
    whole = {key: rate(one) for key, one in rows.items()}
    late = {key: rate(one[steps // 2 :]) for key, one in rows.items()}
    best_whole, best_late = (max(rates[key] for key in FIXED) for rates in (whole, late))
    print(f"{name}: {load}\n  {'':26} {'all':>18} {'second half':>18}   after step: shape")
    for key, one in rows.items():
        columns = f"{whole[key]:9.0f} {whole[key] / best_whole:8.3f} {late[key]:9.0f} {late[key] / best_late:8.3f}"
        print(f"  {key:26} {columns}   {shapes_of(one)}", flush=True)
    saturated = "; SATURATED: the machine, not the devices, was measured" if idle / total < SATURATED else ""
    print(f"  {idle / total:.0%} of the machine's processor time was idle{saturated}", flush=True)
    lent, kept = ([row["train_s"] for row in rows[f"mixed borrow {which}"][1:]] for which in ("all", "none"))
    best = {word: max(late[key] for key in FIXED if word in key) for word in ("mixed", "split", "all", "none")}
    return {
        "second_half": late["auto"] / best_late,
        "all": whole["auto"] / best_whole,
        "best_split_over_mixed": best["split"] / best["mixed"],
        "best_lending_over_none": best["all"] / best["none"],
        "train_step_lending_over_none": float(np.median(lent) / np.median(kept)),
        "idle": idle / total,
    }


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.elastic", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--loads", default=",".join(LOADS))
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--slowdown", type=float, default=3.0, help="of everything, so that few cores can follow")
    options.add_argument("--jobs", type=int, default=3, help="jobs at a time; more need more slowdown")
    options.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = options.parse_args()
    found = {name: measure(name, given.slowdown, given.steps, given.jobs) for name in given.loads.split(",")}
    value = min(one["second_half"] for one in found.values())
    result = {"bench": "elastic", "claim": "auto / best fixed", "value": value, "target": 0.95, "ok": value >= 0.95}
    for name, one in found.items():
        print(name, " ".join(f"{key} {number:.3f}" for key, number in one.items()))
    if given.json:
        print(json.dumps(result | {"loads": found}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
