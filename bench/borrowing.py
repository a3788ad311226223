"""Claim: training ranks that serve while nothing is trained are back before the trainer's deadline every time.

In 100 of 100 rounds of borrow, rollout under load, return, update. A whole job of two ranks: one trains, and lends itself in
every step (`borrow.workers=all`, steps in order). A return counts from the trainer's wish until the rank has answered; its
deadline is what the scheduler would allow for it ahead of a known end: `borrow.return_margin` times the time it expected, and
`return_extra_s`. `value` is the share of returns in time. Also printed: seconds of borrowing and returning, of the trainer's
updates after returns, and how the trainer's memory grew over the run.

A second job lends nothing. `train_ratio` is the median time of an update after lending over that of one without (target: at
most 1.05): a rank is wholly back before its update begins, so that nothing of an update waits for a return.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.job_process import JobProcess
from pearl.config import BorrowSettings
from pearl.metrics.jsonl import read_jsonl

TARGET = 1.0
SIZES = ["rollout_batch_size=32", "group_size=4", "optimizer.mini_batch_size=16", "warmup.steps=3", "warmup.episodes=4"]
LENDING, KEEPING = (["max_staleness=0", f"borrow.workers={which}"] for which in ("all", "none"))
MOST_RATIO = 1.05
LIMIT_S = 1200.0


def resident_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * 4096 / 1e6


def play(rounds: int, folder: Path, kind: list[str]) -> tuple[list[dict], list[dict], list[float]]:
    """Transitions, steps and samples of rank 0's memory of one job."""
    folder.mkdir()
    settings = [*SIZES, *kind, f"max_steps={rounds}", f"output_dir={folder / 'runs'}"]
    memory: list[float] = []
    with JobProcess.start(folder, ["quickstart", *[part for one in settings for part in ("--set", one)]], world=2) as job:
        deadline, rank = time.monotonic() + LIMIT_S, None
        while job.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over within {LIMIT_S:g} s:\n{job.output()}")
            rank = rank or job.pid_of("rank0")
            if rank is not None and "step " in job.output() and (size := resident_mb(rank)):
                memory.append(size)
            time.sleep(1.0)
        run = job.run_directory()
        if run is None or job.process.wait() != 0:
            raise RuntimeError(job.output())
        return read_jsonl(run / "transitions.jsonl"), read_jsonl(run / "metrics.jsonl"), memory


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.borrowing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="of the lending job, half as many of the other (default 100)")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()
    settings = BorrowSettings()
    with tempfile.TemporaryDirectory() as folder:
        _, kept, _ = play(max(4, arguments.rounds // 2), Path(folder) / "keeping", KEEPING)
        made, steps, memory = play(arguments.rounds, Path(folder) / "lending", LENDING)
    returns = [row for row in made if row["kind"] == "give_back"]
    lead = [settings.return_margin * row["cost_s"] + settings.return_extra_s for row in returns]
    in_time = sum(row["ok"] and row["seconds"] <= limit for row, limit in zip(returns, lead, strict=True))
    lent = [row["seconds"] for row in made if row["kind"] == "borrow" and row["ok"]]
    back = [row["seconds"] for row in returns]
    third = max(1, len(memory) // 3)
    result = {
        "bench": "borrowing",
        "claim": "lent ranks are back before the deadline",
        "value": in_time / max(1, len(returns)),
        "target": TARGET,
        "returns": len(returns),
        "borrow_s": [statistics.median(lent), max(lent)],
        "return_s": [statistics.median(back), max(back)],
        "train_s": [statistics.median(row["train_s"] for row in rows[1:]) for rows in (steps, kept)],
        "interrupted": steps[-1]["interrupted"],
        "memory_mb": [statistics.median(memory[:third]), statistics.median(memory[-third:])] if memory else None,
    }
    result["train_ratio"] = result["train_s"][0] / result["train_s"][1]
    result["ok"] = result["value"] >= TARGET and result["train_ratio"] <= MOST_RATIO and len(returns) >= arguments.rounds * 0.9
    for name, value in result.items():
        print(f"{name:>12}  {value}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
