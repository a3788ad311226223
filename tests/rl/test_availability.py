"""Workers of a machine that come and go by a file: which nodes run, and a job that lives through it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.elastic_job import ElasticJob
from pearl.config import ElasticOptions
from pearl.rl import process
from pearl.rl.availability import Availability, Nodes, Player
from pearl.sched.sim.availability import NodeChange


def change(node: str, add: bool = True) -> NodeChange:
    return NodeChange(at_s=0.0, add=add, node=node)


def test_no_more_run_than_may_and_who_waited_takes_the_place_of_who_left() -> None:
    nodes = Nodes(2)
    for name in "abc":
        nodes.change(change(name))
    assert nodes.starts() == ["a", "b"] and not nodes.starts()
    assert nodes.change(change("a", add=False)) == "a"
    assert not nodes.starts()  # it has its notice, and runs until it has ended
    nodes.ended("a")
    assert nodes.starts() == ["c"]


def test_a_node_that_waited_and_goes_is_nobody_s_loss() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.change(change("b"))
    assert nodes.starts() == ["a"]
    assert nodes.change(change("b", add=False)) is None
    nodes.ended("a")
    assert nodes.starts() == []


def test_a_worker_that_ended_by_itself_gets_no_other_before_its_node_comes_again() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.starts()
    nodes.ended("a")
    assert nodes.starts() == []
    nodes.change(change("a"))
    assert nodes.starts() == ["a"]


def test_a_node_that_comes_again_while_its_worker_leaves_gets_another() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.starts()
    assert nodes.change(change("a", add=False)) == "a"
    nodes.change(change("a"))
    assert nodes.change(change("a", add=False)) is None  # told once: the second time would be an order to end at once
    nodes.change(change("a"))
    assert nodes.starts() == []
    nodes.ended("a")
    assert nodes.starts() == ["a"]


def test_the_end_of_the_player_is_said_once(tmp_path: Path) -> None:
    """Of a run without settings it can make nothing."""
    player = Player(tmp_path)
    said: list[str] = []
    deadline = time.monotonic() + 60
    while not said:
        assert time.monotonic() < deadline, "it has not ended"
        said += filter(None, [player.ended()])
    assert "ended with exit code 1" in said[0] and "availability.log" in said[0]
    assert player.over and not player.ended()
    player.close()


def test_a_player_that_no_signal_ends_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would be that hangs in the kernel; a process that ends is waited for."""
    monkeypatch.setattr(process, "KILLED_S", 0.05)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    end = child.kill
    monkeypatch.setattr(child, "kill", lambda: None)
    try:
        assert not process.put_down(child)
    finally:
        end()
    monkeypatch.undo()
    assert process.put_down(child) and child.returncode == -signal.SIGKILL
    assert child.stdin is not None
    child.stdin.close()


def test_a_node_for_which_there_is_no_room_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Availability(tmp_path, [change("a"), change("b")], ElasticOptions())
    tried: list[str] = []

    def start(node: str) -> None:
        tried.append(node)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(played, "_start", start)
    played._turn(0.0)
    played._turn(1.0)
    assert tried == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_a_player_that_is_killed_costs_its_workers_or_the_job_if_asked(tmp_path: Path, required: bool) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n")
    with ElasticJob.begin(tmp_path, "max_steps=400", f"elastic.trace={trace}", f"elastic.trace_required={required}") as job:
        job.serving(1)
        [player] = [pid for pid, role in job.family().items() if role == "availability"]
        os.kill(player, signal.SIGKILL)
        if required:
            assert job.wait_until_gone(60) is not None, job.family()
            assert job.process.wait() == 1 and "the player of elastic.trace ended with exit code -9" in job.output()
            return
        job.wait_for("the job goes on without its workers", 60)
        job.wait_for("is gone: silent", 60)
        job.step(1)
        assert job.rows()[-1]["trace_ended"] == 1
        job.process.send_signal(signal.SIGINT)
        assert job.wait_until_gone(60) is not None and job.process.wait() == 130


@pytest.mark.slow
def test_a_resumed_job_whose_port_is_taken_says_so_and_plays_on(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n")
    with ElasticJob.begin(tmp_path, "max_steps=400", "save_steps=1", f"elastic.trace={trace}") as job:
        job.serving(1)
        port = int(job.address().rpartition(":")[2].partition("/")[0])
        job.step(2)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait_until_gone(60) is not None
        with socket.create_server(("127.0.0.1", port)):
            with ElasticJob.begin(tmp_path, "max_steps=400", resume=job.run) as again:
                again.wait_for(f"port {port}, where workers of before look for this job, is taken", 60)
                again.wait_for(" joined from ", 60)
                again.process.send_signal(signal.SIGINT)
                assert again.wait_until_gone(60) is not None
            with ElasticJob.begin(tmp_path, f"elastic.listen=127.0.0.1:{port}", resume=job.run) as refused:
                assert refused.process.wait(60) == 1
                assert "workers cannot join there" in refused.output()


@pytest.mark.slow
def test_a_job_lives_through_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n0,add,n2\n60000,add,n3\n300000,remove,n1\n480000,remove,n2\n")
    with ElasticJob.begin(
        tmp_path, "max_steps=60", f"elastic.trace={trace}", "elastic.speedup=30", "elastic.trace_nodes=2"
    ) as job:
        rows = job.finish()
    said = (job.run / "logs" / "availability.log").read_text()
    assert len(rows) == 60
    assert said.index("n1: joins") < said.index("n1: ended with exit code 0") < said.index("n3: joins")
    assert "n2: ended with exit code 0" in said
    kinds = [row["kind"] for row in job.transitions()]
    assert kinds.count("leave") >= 2 and kinds.count("admit") >= 2
