"""Ranks that died or are silent: a pid is looked up, and killed, on the machine that it is of, and nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from pearl.engine.node import node
from pearl.protocol import Hello, Kill
from pearl.rl import process
from pearl.rl.dead_ranks import first_cause, kill_ranks


def hello(rank: int, pid: int, host: str) -> Hello:
    return Hello(rank=rank, pid=pid, host=host, roles=["serve"])


def ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_who_died_here_explains_what_peers_say() -> None:
    gone, alive = hello(1, ended_pid(), node()), hello(0, os.getpid(), node())
    assert first_cause("peer reset", [alive, gone]) == f"rank 1 (pid {gone.pid}) died; then peer reset"
    assert first_cause("peer reset", [alive]) == "peer reset"


def test_a_machine_of_the_same_name_is_another_one() -> None:
    """Its pids are those of strangers here."""
    assert first_cause("peer reset", [hello(1, ended_pid(), socket.gethostname())]) == "peer reset"
    sent: list[tuple[int, Any]] = []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        try:
            theirs = hello(1, stranger.pid, socket.gethostname())
            kill_ranks([1], {1: theirs}, lambda rank, message: sent.append((rank, message)))
            assert stranger.poll() is None and not sent
            kill_ranks([1], {1: theirs, 2: hello(2, 7, theirs.host)}, lambda *message: sent.append(message))
            assert stranger.poll() is None and sent == [(2, Kill(pid=stranger.pid))]
            kill_ranks([1], {1: hello(1, stranger.pid, node())}, lambda *message: sent.append(message))
            assert stranger.wait(10) == -9
        finally:
            process.put_down(stranger)
