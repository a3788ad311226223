"""Whole jobs as a user starts them, small ones: their settings, their command lines, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.job_process import ROOT, JobProcess
from pearl.metrics.jsonl import read_jsonl

SMALL = ["rollout_batch_size=16", "group_size=4", "optimizer.mini_batch_size=8", "warmup.steps=3", "warmup.episodes=4"]


def settings(run_root: Path, *extra: str) -> list[str]:
    """`--set` options of a small job whose run goes into `run_root`."""
    return [part for value in [*SMALL, f"output_dir={run_root}", *extra] for part in ("--set", value)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def python(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(folder: Path, *extra: str, world: int = 1) -> JobProcess:
    """A small quickstart under torchrun; its run goes into `folder`/runs, its output to `folder`/out.txt."""
    return JobProcess.start(folder, ["quickstart", *settings(folder / "runs", *extra)], world=world)


def start_faulty(folder: Path, fault: str, *extra: str, world: int = 2) -> JobProcess:
    """Like `start`, with the fault of tests/faulty_rank.py."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "FAULT": fault}
    arguments = ["quickstart", *settings(folder / "runs", *extra)]
    return JobProcess.start(folder, arguments, world=world, module="faulty_rank", environment=paths)


def resume(run: Path, folder: Path, *extra: str, world: int = 1) -> JobProcess:
    """Goes on with a run; the output goes to `folder`/resumed.txt."""
    more = [part for value in extra for part in ("--set", value)]
    return JobProcess.start(folder, ["--resume", str(run), *more], world=world, name="resumed")


def finish(job: JobProcess, seconds: float = 120) -> str:
    """Waits for a job that must end well; its output."""
    gone = job.wait_until_gone(seconds)
    assert gone is not None, f"not over within {seconds:g} s:\n{job.output()}"
    assert job.process.wait() == 0, job.output()
    return job.output()


def rows_of(run: Path) -> list[dict]:
    """The rows of a run's metrics."""
    return read_jsonl(run / "metrics.jsonl")
