"""`pearl run` as a process: what it says last, its exit code, and that it holds the ranks as torchrun does."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_cases import ROOT, settings

from bench.job_process import TAG, JobProcess, send
from pearl.rl.launcher import exit_code

CURSOR_UP = b"\x1b[1A"


def pearl_run(folder: Path, *extra: str, world: int = 2) -> JobProcess:
    """A small job started by `pearl run`; its run goes into `folder`/runs."""
    tag, log = secrets.token_hex(8), folder / "out.txt"
    (folder / "tmp").mkdir(parents=True)
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder / "tmp"), TAG: tag}
    command = [sys.executable, "-m", "pearl", "run", f"--nproc={world}", *settings(folder / "runs", *extra)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    return JobProcess(process, folder, tag, log)


def ended(job: JobProcess) -> tuple[int, list[str]]:
    """The exit code and the lines of a job that has to end now, with nothing left of it."""
    assert job.wait_until_gone(20) is not None, job.family()
    return job.process.wait(), job.output().splitlines()


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 130}, 130),
        ({0: 1, 1: 1}, 1),
        ({1: 3}, 3),
        ({0: -9}, 137),
        ({0: 143, 1: -9}, 137),
        ({0: 1, 1: -15}, 1),
        ({0: -15}, 143),
        ({1: -11, 2: -15}, 139),
    ],
)
def test_the_exit_code_is_that_of_the_cause(codes: dict[int, int], code: int) -> None:
    assert exit_code(codes) == code


def test_ctrl_c_ends_with_130_and_the_last_line_says_how_to_go_on(tmp_path: Path) -> None:
    with pearl_run(tmp_path, "max_steps=1000", "save_steps=2") as job:
        job.wait_for("step    3/", 90)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        code, lines = ended(job)
        run = job.run_directory()
    assert code == 128 + signal.SIGINT
    assert [line for line in lines if "Traceback" in line or "torch" in line] == []
    assert sum("interrupted by SIGINT" in line for line in lines) == 1
    assert lines[-2].startswith("ended after")
    assert lines[-1].startswith("to go on after step ") and lines[-1].endswith(f": pearl run --resume {run} --nproc 2")


def shown_on_a_terminal(command: list[str], until: bytes, limit_s: float) -> tuple[int, bytes]:
    """Exit code, and what a terminal got from a job that its Ctrl-C ended once it had shown `until`."""
    master, slave = os.openpty()
    child = subprocess.Popen(
        command, env=os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown, told, deadline = b"", False, time.monotonic() + limit_s
    try:
        while select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                shown += os.read(master, 1 << 16)
            except OSError:  # nobody has the other end any more
                return child.wait(limit_s), shown
            if until in shown and not told:
                told = True
                os.killpg(child.pid, signal.SIGINT)
        raise TimeoutError(f"not over within limit_s={limit_s:g} s: {shown!r}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        os.close(master)


def test_after_ctrl_c_a_terminal_s_display_is_not_drawn_again(tmp_path: Path) -> None:
    """Whatever is printed by then, by whomever, stays below it."""
    job = ["quickstart", "--set", "device=emulated:quickstart-cpu", "--set", f"output_dir={tmp_path / 'runs'}"]
    code, shown = shown_on_a_terminal([sys.executable, "-m", "pearl", "run", *job], b"tokens/s", 90)
    assert code == 128 + signal.SIGINT
    display, said, rest = shown.partition(b"interrupted by SIGINT")
    assert CURSOR_UP in display and said and b"tokens/s" in display.rpartition(CURSOR_UP)[2], "it stays, in its last state"
    assert CURSOR_UP not in rest and b"\r\nended after" in rest and b"it cannot go on" in rest


def test_a_rank_0_that_is_killed_is_named_once(tmp_path: Path) -> None:
    with pearl_run(tmp_path, "max_steps=1000") as job:
        job.wait_for("step ", 90)
        send(job.pid_of("rank0") or 0, signal.SIGKILL)
        code, lines = ended(job)
    assert code == 128 + signal.SIGKILL
    assert sum("rank 0 (pid" in line and "was killed by SIGKILL" in line for line in lines) == 1
    assert [line for line in lines if "Traceback" in line or "torch" in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "signum", "expected", "reason"),
    [
        ("torchrun", signal.SIGKILL, -9, "the launcher is gone"),
        ("torchrun", signal.SIGTERM, 143, "interrupted by SIGTERM"),
        ("torchrun", signal.SIGINT, 130, "interrupted by SIGINT"),
        ("rank1", signal.SIGKILL, 137, "died"),
        ("rank0", signal.SIGTERM, 143, "interrupted by SIGTERM"),
        ("controller", signal.SIGKILL, 1, "the controller ended with exit code -9"),
    ],
)
def test_it_holds_the_ranks_as_torchrun_does(
    tmp_path: Path, victim: str, signum: signal.Signals, expected: int, reason: str
) -> None:
    with pearl_run(tmp_path, "max_steps=1000") as job:
        job.wait_for("step ", 90)
        send(job.pid_of(victim) or 0, signum)
        code, lines = ended(job)
    assert code == expected
    assert sum(reason in line for line in lines) == 1, lines


@pytest.mark.slow
def test_a_stopped_launcher_ends_nothing(tmp_path: Path) -> None:
    with pearl_run(tmp_path, "max_steps=8", "timeouts.silence_s=3", "timeouts.heartbeat_s=1") as job:
        job.wait_for("step ", 90)
        send(job.process.pid, signal.SIGSTOP)
        job.wait_for("done after", 60)
        time.sleep(1)
        send(job.process.pid, signal.SIGCONT)
        code, _ = ended(job)
    assert code == 0


@pytest.mark.parametrize("pause_s", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_signal_before_the_ranks_is_one_line(tmp_path: Path, pause_s: float) -> None:
    """The command line is being checked, or torch's launcher is being loaded."""
    with pearl_run(tmp_path, world=1) as job:
        time.sleep(pause_s)
        os.killpg(job.process.pid, signal.SIGINT)
        code, lines = ended(job)
    assert code in (128 + signal.SIGINT, -signal.SIGINT)  # the interpreter itself was still starting
    if code > 0:
        assert len(lines) <= 3 and not any("Traceback" in line for line in lines), lines
