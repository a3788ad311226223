"""Faults that other systems had between the processes of one job, each with real processes under the real launcher."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pearl.metrics.jsonl import read_jsonl
from pearl.rl.process import is_alive

ROOT = Path(__file__).resolve().parents[2]
MARK = "PEARL_TEST_JOB"
SMALL = ["rollout_batch_size=16", "group_size=4", "optimizer.mini_batch_size=8", "warmup.steps=1", "warmup.episodes=4"]
SLOW_START = """
import sys, time
from pearl.rl import launch, world

build = world.build_parts

def slow(config, layout, rank, *rest):
    time.sleep(6.5 if rank == 0 else 8.0)
    return build(config, layout, rank, *rest)

world.build_parts = slow
sys.exit(launch.rank_main())
"""
FAILING_ENGINE = """
import sys, time
from pathlib import Path
from pearl.engine.engine import Engine
from pearl.rl import launch

step, left = Engine.step_updates, 5

def failing(self):
    global left
    left -= 1
    if left < 0:
        Path(sys.argv[1]).write_text(str(time.time()))
        raise ZeroDivisionError("the engine met something unexpected")
    return step(self)

Engine.step_updates = failing
sys.exit(launch.rank_main(sys.argv[2:]))
"""


def settings(root: Path, *extra: str) -> list[str]:
    return [part for value in [*SMALL, f"output_dir={root}", *extra] for part in ("--set", value)]


def torchrun(world: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", *arguments]


def marked(mark: str) -> list[int]:
    """Processes that still run of those started with this mark in their environment, however they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def gone(mark: str, seconds: float) -> list[int]:
    """What is left after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """start(command, **environment) -> a job whose output goes to `.text()`; what is left of it is killed after the test."""
    mark, started = str(tmp_path), []

    def build(command: list[str], **variables: str) -> SimpleNamespace:
        log = tmp_path / f"job-{len(started)}.txt"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", MARK: mark, **variables}
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        started.append(process)
        return SimpleNamespace(process=process, text=log.read_text, mark=mark, runs=tmp_path / "runs")

    yield build
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


def has_private_mounts() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False)
    return probe.returncode == 0


@pytest.mark.slow
def test_ranks_that_load_slower_than_any_heartbeat_and_a_tiny_dev_shm(
    start: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    """First rank 0 is late, then the serving rank is later still; where possible with 64 KiB of shared memory in all."""
    script = tmp_path / "slow_start.py"
    script.write_text(SLOW_START)
    extra = ["max_steps=1", "timeouts.heartbeat_s=0.4", "timeouts.silence_s=6", "timeouts.command_s=60"]
    command = torchrun(2, str(script), "quickstart", *settings(tmp_path / "runs", *extra))
    if has_private_mounts():
        mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
        command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(command)}"]
    job = start(command)
    assert job.process.wait(120) == 0, job.text()
    assert gone(job.mark, 0.0) == []
    [run] = job.runs.iterdir()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1]
    ready = next(line for line in job.text().splitlines() if line.startswith("ready after"))
    assert float(ready.split()[2]) > 6.5


def test_an_error_in_a_serving_rank_ends_the_job_with_its_words_and_touches_nobody_else(
    start: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    script, failed_at = tmp_path / "failing_engine.py", tmp_path / "failed_at"
    script.write_text(FAILING_ENGINE)
    command = torchrun(2, str(script), str(failed_at), "quickstart", *settings(tmp_path / "runs", "max_steps=1000"))
    beside = f"sleep 300 & {shlex.join(command)}; code=$?; echo ended $(date +%s.%N) with $code; kill $!"
    job = start(["sh", "-c", beside])  # ends with 0 only if the sleeping neighbour is still there to be killed
    assert job.process.wait(120) == 0, job.text()
    words = "rank 1 failed: ZeroDivisionError: the engine met something unexpected"
    assert job.text().count(words) == 1, job.text()
    assert "Traceback" not in job.text().split("torch/distributed/elastic")[0]
    [(ended, code)] = re.findall(r"^ended ([0-9.]+) with (\d+)$", job.text(), re.MULTILINE)
    assert code != "0"
    assert float(ended) - float(failed_at.read_text()) < 15
    [run] = job.runs.iterdir()
    assert "the engine met something unexpected" in (run / "logs" / "controller.log").read_text()
    assert gone(job.mark, 5.0) == []


def test_one_rank_of_two_alone_gives_up_in_its_time(start: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    arguments = settings(tmp_path / "runs", "timeouts.join_s=4")
    began = time.monotonic()
    job = start([sys.executable, "-m", "pearl.rl.launch", "quickstart", *arguments], **variables)
    assert job.process.wait(60) == 1, job.text()
    assert time.monotonic() - began < 25
    assert "rank 1" in job.text()
    assert "timeouts.join_s=4 s" in job.text()
    assert "Traceback" not in job.text()
    assert gone(job.mark, 3.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_ends_while_ranks_load_leaves_nothing(
    start: Callable[..., SimpleNamespace], tmp_path: Path, signum: int
) -> None:
    job = start(torchrun(3, "-m", "pearl.rl.launch", "quickstart", *settings(tmp_path / "runs", "max_steps=1000")))
    deadline = time.monotonic() + 60
    while "run directory" not in job.text():
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.05)
    job.process.send_signal(signum)
    assert job.process.wait(20) != 0
    assert gone(job.mark, 10.0) == []


@pytest.mark.slow
def test_eight_jobs_at_once_on_one_machine(start: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    extra = ["max_steps=1", "timeouts.join_s=120", "timeouts.silence_s=60"]
    command = torchrun(1, "-m", "pearl.rl.launch", "quickstart", *settings(tmp_path / "runs", *extra))
    jobs = [start(command) for _ in range(8)]
    codes = [job.process.wait(300) for job in jobs]
    assert codes == [0] * 8, [job.text() for job in jobs if job.process.returncode]
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 8
    assert all(len(read_jsonl(run / "metrics.jsonl")) == 1 for run in runs)
    assert gone(jobs[0].mark, 3.0) == []
