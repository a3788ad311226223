"""A job that is killed, stopped or suspended: it ends in time and says why, or goes on; what it saved is not lost.

The whole table of victims, signals and phases is measured by bench/kill_matrix.py; here are its most telling cases, and what
that table cannot show: a suspended terminal, lost environments, and that a resumed run does what it would have done.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from job_cases import finish, resume, rows_of, start, start_faulty

from bench.job_process import JobProcess, send
from bench.kill_matrix import Case, run_case
from pearl.metrics.jsonl import read_jsonl
from pearl.rl.run_state import open_run

EXACT = ("weight_version", "lr", "trained", "in_flight", "failed_trajectories", "staleness_mean", "staleness_max")
"""What a resumed run repeats exactly. `dispatched` and `dropped` both count what was under way at the checkpoint once more."""

PLAYED = ("reward_mean", "reward_std", "success_rate", "turns_mean", "invalid_rate", "batch_tokens", "trained_tokens")
"""What follows from the sampled tokens. They are the same unless a draw falls between two roundings: how requests are batched
depends on when environments answer, and the sums of a matrix product on its shape."""

TRAINED = ("loss", "kl", "entropy", "grad_norm", "ratio_mean")
"""What differs in its last digits for the same reason."""


# ------------------------------------------------------------------------------------------------- ends in time


TELLING = [
    ("controller", "SIGKILL", "checkpoint"),
    ("rank0", "SIGKILL", "checkpoint"),
    ("rank0", "SIGTERM", "train"),
    ("rank0", "SIGSTOP", "start"),
    ("rank1", "SIGKILL", "publish"),
    ("rank1", "SIGKILL", "start"),
    ("rank1", "SIGSTOP", "rollout"),
    ("controller", "SIGSTOP", "train"),
    ("torchrun", "SIGKILL", "rollout"),
    ("torchrun", "SIGINT", "warm-up"),
    ("torchrun", "SIGSTOP", "train"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "signal_name", "phase"), TELLING)
def test_it_ends_in_time_says_why_leaves_nothing_and_resumes(
    tmp_path: Path, victim: str, signal_name: str, phase: str
) -> None:
    """Except where the launcher is stopped, which ends nothing."""
    outcome = run_case(Case(victim=victim, signal=signal_name, phase=phase), tmp_path)
    assert outcome.faults == [], outcome.row()


def test_a_controller_killed_in_a_save_ends_the_job_and_loses_no_checkpoint(tmp_path: Path) -> None:
    outcome = run_case(Case(victim="controller", signal="SIGKILL", phase="checkpoint"), tmp_path, resume=False)
    assert outcome.faults == [], outcome.row()
    [run] = (tmp_path / "runs").iterdir()
    assert open_run(run).state.step >= 2


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_raises_ends_the_job_and_is_named(tmp_path: Path, rank: int) -> None:
    with start_faulty(tmp_path, f"raise:{rank}", "max_steps=1000") as job:
        job.wait_for("FloatingPointError", 90)
        assert job.wait_until_gone(15) is not None, job.family()
        assert job.process.wait() != 0
        assert job.output().count(f"rank {rank} failed: FloatingPointError: loss is nan") == 1
        assert "Traceback" in (run_of(job) / "logs" / f"rank{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_stuck_in_c_ends_with_its_launcher(tmp_path: Path, rank: int, signum: signal.Signals) -> None:
    """The main thread runs no Python any more: signals and heartbeats are the business of other threads."""
    with start_faulty(tmp_path, f"stick:{rank}", "max_steps=1000") as job:
        job.wait_for("ready after", 90)
        time.sleep(15)  # longer than timeouts.silence_s: a rank that is busy for long is not silent
        assert job.process.poll() is None
        send(job.process.pid, signum)
        assert job.wait_until_gone(15) is not None, job.family()
        assert job.process.wait() != 0
        reason = "the launcher is gone" if signum == signal.SIGKILL else f"interrupted by {signum.name}"
        assert job.output().count(reason) == 1, job.output()


# ------------------------------------------------------------------------------------------------- goes on


@pytest.mark.parametrize("pause_s", [6.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_ctrl_z_and_fg_are_survived(tmp_path: Path, pause_s: float) -> None:
    """All processes are suspended (where the launcher gives ranks sessions of their own, a terminal stops only itself).

    Every deadline that could run out in the pause is shorter than it.
    """
    limits = ["timeouts.silence_s=4", "timeouts.heartbeat_s=1", "env.timeout_s=4"]
    with start(tmp_path, "max_steps=12", *limits, world=2) as job:
        job.wait_for("step ", 90, count=3)
        family = job.family()
        assert sorted(family.values()) == ["controller", "environment", "rank0", "rank1", "torchrun"]
        for pid in family:
            send(pid, signal.SIGSTOP)  # SIGTSTP is ignored by a group without a terminal
        printed = job.output()
        time.sleep(pause_s)
        assert job.output() == printed
        for pid in family:
            send(pid, signal.SIGCONT)
        output = finish(job)
        run = job.run_directory()
    assert run is not None
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert sum(rows[-1][name] for name in ("dropped", "env_errors", "env_timeouts", "env_restarts")) == 0
    assert "done after" in output


@pytest.mark.slow
def test_a_killed_environment_process_costs_at_most_its_episodes(tmp_path: Path) -> None:
    with start(tmp_path, "max_steps=8", "env.workers=2", world=2) as job:
        for count in (2, 4):
            job.wait_for("step ", 90, count=count)
            [victim, *_] = [pid for pid, role in job.family().items() if role == "environment"]
            send(victim, signal.SIGKILL)
        finish(job)
        run = job.run_directory()
    assert run is not None
    last = rows_of(run)[-1]
    assert (last["step"], last["env_restarts"]) == (8, 2)
    assert last["dropped"] <= 2
    assert last["dispatched"] == last["trained"] + last["dropped"] + last["in_flight"]


# ------------------------------------------------------------------------------------------------- resumes


def run_of(job: JobProcess) -> Path:
    run = job.run_directory()
    assert run is not None, job.output()
    return run


def wait_for_checkpoint(job: JobProcess, step: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while (run := job.run_directory()) is None or not (run / "checkpoints" / f"step_{step:06d}" / "STABLE").exists():
        assert time.monotonic() < deadline and job.process.poll() is None, job.output()
        time.sleep(0.005)


def episodes_of(run: Path, first_group: int) -> dict[str, dict]:
    """Of the groups from this one on; one may end while the step before it is still being saved, and count as that step's."""
    rows = read_jsonl(run / "trajectories.jsonl")
    return {row["trajectory_id"]: row for row in rows if int(row["trajectory_id"].split("-")[0]) >= first_group}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_and_resumed_run_does_what_it_would_have_done(tmp_path: Path, world: int) -> None:
    extra = ["max_steps=4", "save_steps=2", "max_staleness=0", "optimizer.schedule=linear", "algorithm.kl_coef=0.01"]
    (tmp_path / "straight").mkdir()
    with start(tmp_path / "straight", *extra, world=world) as job:
        finish(job)
        straight = run_of(job)
    with start(tmp_path, *extra, world=world) as job:
        wait_for_checkpoint(job, 2)
        send(job.pid_of("rank0") or 0, signal.SIGKILL)
        assert job.wait_until_gone(15) is not None
        assert job.process.wait() != 0
        run = run_of(job)
    with resume(run, tmp_path, world=world) as job:
        output = finish(job)
    assert "resumed after step 2 with weight version 2" in output
    rows, expected = rows_of(run), rows_of(straight)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    ours, theirs = (episodes_of(one, first_group=2 * 16 // 4) for one in (run, straight))
    assert {name: row["env_seed"] for name, row in ours.items()} == {name: row["env_seed"] for name, row in theirs.items()}
    assert len(ours) == 2 * 16
    for row, other in zip(rows[2:], expected[2:], strict=True):
        assert {name: row[name] for name in EXACT} == {name: other[name] for name in EXACT}
        assert row["dispatched"] - row["dropped"] == other["dispatched"] - other["dropped"]
        assert {name: row[name] for name in PLAYED} == {name: other[name] for name in PLAYED}
        for name in TRAINED:
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert [row["token_ids"] for row in ours.values()] == [theirs[name]["token_ids"] for name in ours]


@pytest.mark.slow
def test_killed_at_any_point_of_saving_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    """One run, killed six times inside a save, resumed each time: nothing that was saved is ever lost."""
    rng = random.Random(7)
    job = start(tmp_path, "max_steps=40", "save_steps=1")
    saved = 0
    for attempt in range(6):
        with job:
            wait_for_checkpoint(job, saved + 1)
            run = run_of(job)
            aside = run / "checkpoints" / f".step_{saved + 2:06d}.new"
            while not aside.exists():
                time.sleep(0.001)
            time.sleep(rng.random() * 0.08)
            victim = rng.choice(["rank0", "controller", "torchrun"])
            send(job.pid_of(victim) or 0, signal.SIGKILL)
            assert job.wait_until_gone(15) is not None
        point = open_run(run)
        assert point.state.step >= saved + 1, (victim, point.skipped)
        saved = point.state.step
        steps = [row["step"] for row in rows_of(run)]
        assert steps == list(range(1, len(steps) + 1))
        job = resume(run, tmp_path, f"max_steps={saved + 2}" if attempt == 5 else "max_steps=40")
    with job:
        finish(job)
    assert [row["step"] for row in rows_of(run)] == list(range(1, saved + 3))
