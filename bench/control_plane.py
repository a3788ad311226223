"""Claim: the control plane takes less than 2 % of an RL step with 16 serving workers.

    python -m bench.control_plane [--load published|full] [--steps N] [--slowdown X] [--report S] [--json]

Control-plane overhead is the processor time of the controller over the wall time of a step, both as the run's own metrics.jsonl
has them (docs/metrics.md). The controller is one process beside the ranks: it schedules the cluster, places requests, takes
every sampled token in, makes prompts of what environments say, packs batches and writes the run's files; environments' own
code and the ranks run elsewhere. The job is whole (docs/elasticity.md, "Without devices"). Two loads:

published   an RL step as it is published for 8B models: 16 workers serve, 8 ranks train (and may be lent), batches of 64
            trajectories of software engineering whose environments take their time (`published_turns.py`). About 20 minutes.
full        the most that 16 workers can ask of a controller: they decode at the pace of an H800 without a pause, environments
            answer at once and one rank trains in next to no time. A minute.

Times are those of the devices: with a slow-down, wall time is divided by it, and processor time is not, so that a busy machine
changes less. Beside: microseconds per sampled token, of the controller and of the serving ranks; a rank's are those of an
emulated engine and of its part in the control plane together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.job_process import JobProcess, cpu_seconds
from pearl.metrics.jsonl import read_jsonl

WORKERS = 16
TARGET = 0.02
LIMIT_S = 3600.0
HEARTBEAT_S = 2.0
"""The default, of the devices' seconds."""
LOOK_S = 0.2
COMMON = [
    "device=emulated:qwen3-8b-h800", "rollout_batch_size=64", "optimizer.mini_batch_size=64", "max_staleness=1",
    "model.max_position=32768", "engine.max_model_len=32768", "timeouts.join_s=300", "timeouts.silence_s=120",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many `trainers` beside the serving ranks."""

    trainers: int
    settings: tuple[str, ...]


LOADS = {
    "published": Load(
        trainers=8,
        settings=(
            "env.name=bench.published_turns:PublishedTurns", "env.max_turns=100", "env.workers=64", "env.timeout_s=1000",
            "cluster.train_ranks=8", "group_size=16", "rollout.max_tokens=4000", "emulation.turn_tokens=148",
            "rollout.request_timeout_s=1000",
        ),
    ),
    "full": Load(
        trainers=1,
        settings=(
            "env.name=bench.long_turns:LongTurns", "env.max_turns=20", "cluster.train_ranks=1", "group_size=8",
            "rollout.max_tokens=1000", "emulation.train_token_s=2e-6", "emulation.publish_s=0.05", "pd.mode=mixed",
            "borrow.workers=none",
        ),
    ),
}  # fmt: skip


def run(given: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """One job: the rows of its steps, and the processor seconds of its serving ranks from the beginning to the end."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        load = LOADS[given.load]
        own = [f"emulation.slowdown={given.slowdown}", f"max_steps={given.steps}", f"output_dir={folder / 'runs'}"]
        own += [f"timeouts.heartbeat_s={HEARTBEAT_S * given.slowdown}"]
        env = {"turns": given.turns} if given.load == "full" else {"slowdown": given.slowdown}
        own += [f"env.options={json.dumps(env)}"]
        own += [] if given.report is None else [f"rollout.report_s={given.report}"]
        options = [part for value in [*COMMON, *load.settings, *own] for part in ("--set", value)]
        command = ["-m", "pearl", "run", "quickstart", "--nproc", str(WORKERS + load.trainers), *options]
        with JobProcess.command(folder, command) as job:
            ranks = dict(_watch(job))
            if job.process.poll() != 0:
                raise RuntimeError(job.output()[-3000:])
            directory = job.run_directory()
            assert directory is not None
            return read_jsonl(directory / "metrics.jsonl"), sum(ranks.values())


def _watch(job: JobProcess) -> Iterator[tuple[int, float]]:
    """(rank, processor seconds since it was ready), again and again until the job is over."""
    job.wait_for("ready after", LIMIT_S)
    ranks = {pid: int(role[4:]) for pid, role in job.family().items() if role.startswith("rank")}
    ranks = {pid: rank for pid, rank in ranks.items() if rank >= len(ranks) - WORKERS}
    began = {pid: cpu_seconds(pid) or 0.0 for pid in ranks}
    deadline = time.monotonic() + LIMIT_S
    while job.process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job took more than {LIMIT_S:g} s:\n{job.output()[-3000:]}")
        for pid, rank in ranks.items():
            seconds = cpu_seconds(pid)
            if seconds is not None:
                yield rank, seconds - began[pid]
        time.sleep(LOOK_S)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    rows, ranks_s = run(given)
    cpu_s = sum(row["controller_cpu_s"] for row in rows)
    wall_s = sum(row["time_s"] for row in rows) / given.slowdown
    tokens = sum(row["generated_tokens"] for row in rows)
    return {
        "bench": "control_plane",
        "claim": f"controller's processor time over the time of a step, {WORKERS} workers, load {given.load}",
        "value": cpu_s / wall_s,
        "target": TARGET,
        "ok": cpu_s / wall_s <= TARGET,
        "controller_s": cpu_s,
        "steps_s": wall_s,
        "tokens": tokens,
        "controller_us": 1e6 * cpu_s / tokens,
        "ranks_us": 1e6 * ranks_s / tokens,
        "load": os.getloadavg()[0],
        "rows": [{name: row[name] for name in ("time_s", "controller_cpu_s", "generated_tokens")} for row in rows],
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'step':>4} {'wall s':>8} {'controller cpu s':>17} {'tokens':>8}   (wall as it passed)"]
    for number, row in enumerate(result["rows"], 1):
        lines.append(f"{number:>4} {row['time_s']:8.2f} {row['controller_cpu_s']:17.3f} {row['generated_tokens']:8}")
    per_token = f"{result['controller_us']:.1f} us of the controller and {result['ranks_us']:.1f} us of the ranks"
    lines.append(f"{result['tokens']} sampled tokens in {result['steps_s']:.1f} s of the devices; per token {per_token}")
    verdict = "ok" if result["ok"] else "missed"
    lines.append(f"control-plane overhead {100 * result['value']:.2f} %, target {100 * result['target']:g} %: {verdict}")
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.control_plane", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--load", choices=LOADS, default="published")
    options.add_argument("--turns", type=int, default=10, help="of a trajectory on average, where the load is full")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--slowdown", type=float, default=1.0, help="of everything, if few cores cannot follow")
    options.add_argument("--report", type=float, help="rollout.report_s; not its default")
    options.add_argument("--json", action="store_true", help="one JSON object on the last line")
    result = measure(given := options.parse_args())
    print(table(result))
    if given.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
