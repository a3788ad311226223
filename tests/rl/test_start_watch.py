"""A start that cannot succeed is ended with a reason, whoever is stopped or dead; a suspended launcher is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pearl.config import Timeouts
from pearl.rl import process
from pearl.rl.start_watch import StartWatch

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen]]:
    made: list[subprocess.Popen] = []
    yield made
    for child in made:
        child.kill()
        child.wait()


def rank(children: list[subprocess.Popen], number: int) -> subprocess.Popen:
    """A process that looks like a rank started by the same launcher: a child of this one."""
    child = subprocess.Popen(SLEEP, env=os.environ | {"RANK": str(number)})
    children.append(child)
    deadline = time.monotonic() + 10
    while process.environment(child.pid).get("RANK") != str(number):  # not yet, while it is being started
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def watch(number: int, ranks: int, launcher: int | None = None, **timeouts: float) -> tuple[StartWatch, list[str]]:
    said: list[str] = []
    limits = Timeouts(**({"silence_s": 0.5, "join_s": 60.0} | timeouts))
    it = StartWatch(rank=number, launcher=launcher or os.getpid(), local_ranks=ranks, timeouts=limits, fail=said.append)
    it.start()
    return it, said


def wait_for(said: list[str], seconds: float = 10.0) -> str:
    deadline = time.monotonic() + seconds
    while not said:
        assert time.monotonic() < deadline, "nothing was said"
        time.sleep(0.02)
    return said[0]


def test_a_stopped_rank_is_killed_by_the_first_that_runs(children: list[subprocess.Popen]) -> None:
    stopped, other = rank(children, 2), rank(children, 1)
    first, said = watch(0, 3)
    second, nothing = watch(3, 3)  # rank 1 runs, so it is not for rank 3 to act
    stopped.send_signal(signal.SIGSTOP)
    assert "rank 2 was stopped for timeouts.silence_s=0.5 s while starting, killed" in wait_for(said)
    assert stopped.wait(5) == -signal.SIGKILL
    assert nothing == []
    assert other.poll() is None
    first.end()
    second.end()


def test_rank_0_is_spoken_for_by_another(children: list[subprocess.Popen], capfd: Any) -> None:
    stopped = rank(children, 0)
    it, said = watch(1, 2)
    stopped.send_signal(signal.SIGSTOP)
    assert wait_for(said) in capfd.readouterr().out
    assert stopped.wait(5) == -signal.SIGKILL
    it.end()


def test_a_dead_or_stopped_controller_is_told(children: list[subprocess.Popen]) -> None:
    for signum, reason in ((signal.SIGKILL, "ended with exit code -9"), (signal.SIGSTOP, "was stopped for")):
        controller = subprocess.Popen(SLEEP)
        children.append(controller)
        it, said = watch(0, 1)
        it.controller = controller
        controller.send_signal(signum)
        assert f"the controller {reason}" in wait_for(said)
        assert controller.wait(5) == -signal.SIGKILL
        it.end()


def test_a_rank_that_never_comes_is_named(children: list[subprocess.Popen]) -> None:
    it, said = watch(0, 1, join_s=0.3)
    it.missing([1, 3])
    assert wait_for(said) == "rank 1, 3 did not come within timeouts.join_s=0.3 s"
    it.end()


def test_a_rank_that_still_loads_has_all_the_time_of_the_start(children: list[subprocess.Popen]) -> None:
    it, said = watch(0, 1, join_s=0.2)
    time.sleep(1.0)
    assert said == []
    it.missing([1])
    assert "rank 1 did not come" in wait_for(said)
    it.end()


def test_time_in_which_the_launcher_is_stopped_does_not_count(children: list[subprocess.Popen]) -> None:
    launcher = subprocess.Popen(SLEEP)
    children.append(launcher)
    launcher.send_signal(signal.SIGSTOP)
    it, said = watch(0, 1, launcher=launcher.pid, join_s=0.3)
    it.missing([1])
    time.sleep(1.2)
    assert said == []
    launcher.send_signal(signal.SIGCONT)
    assert "rank 1 did not come" in wait_for(said)
    it.end()


def test_nothing_is_said_once_all_have_come_or_the_start_is_over(children: list[subprocess.Popen]) -> None:
    joined, said = watch(0, 1, join_s=0.3)
    joined.missing([])
    over, nothing = watch(0, 1, join_s=0.6)
    over.missing([1])
    over.end()
    time.sleep(1.2)
    assert said == nothing == []
    joined.end()


def test_a_rank_that_the_launcher_has_buried_died_before_us(children: list[subprocess.Popen]) -> None:
    gone, zombie = rank(children, 1), rank(children, 2)
    it, _ = watch(0, 3)
    assert it.lost() == ""
    gone.kill()
    gone.wait()
    zombie.kill()
    deadline = time.monotonic() + 10
    while process.state(zombie.pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert it.lost() == f"rank 1 (pid {gone.pid}) died while starting"
    it.end()
