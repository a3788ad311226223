"""External workers of this machine that come and go as a trace of availability says; a child of the controller.

    python -m pearl.rl.availability RUN PARENT_PID       (started once workers may join a job with `elastic.trace`)

Owns the processes of these workers and the trace's pace. It knows nothing of what they serve: a node that is added is a worker
that joins, one that is removed gets SIGTERM. Invariants: no more than `elastic.trace_nodes` run at a time, the nodes that came
first; all of them die with the job; the end of the player itself is noticed and said, and costs the job its workers alone.
Torch-free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from pearl import config as configuration
from pearl.config import ElasticOptions
from pearl.rl import process
from pearl.rl.door import JOIN_ADDRESS
from pearl.sched.sim.availability import NodeChange, read_trace

POLL_S = 0.1


class Nodes:
    """Which nodes are there, and which of them run a worker; pure. `change` and `ended` say what is to be done."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.there: dict[str, None] = {}
        self.running: set[str] = set()
        self._told: set[str] = set()
        """Those of the running whose worker was told to go."""

    def change(self, change: NodeChange) -> str | None:
        """The node whose worker has to be told to go, if any."""
        if change.add:
            self.there[change.node] = None
            return None
        self.there.pop(change.node, None)
        if change.node not in self.running or change.node in self._told:
            return None
        self._told.add(change.node)
        return change.node

    def ended(self, node: str) -> None:
        """Its worker has ended; a node whose worker ended by itself gets no other, one that came again meanwhile does."""
        self.running.discard(node)
        if node not in self._told:
            self.there.pop(node, None)
        self._told.discard(node)

    def starts(self) -> list[str]:
        """The nodes that get a worker now."""
        free = self._most - len(self.running)
        nodes = [node for node in self.there if node not in self.running][: max(0, free)]
        self.running.update(nodes)
        return nodes


class Availability:
    """Plays the trace from when `run` is called."""

    def __init__(self, run: Path, changes: Iterable[NodeChange], options: ElasticOptions) -> None:
        self._run, self._options = run, options
        self._changes = list(changes)
        self._nodes = Nodes(options.trace_nodes)
        self._workers: dict[str, subprocess.Popen] = {}

    def play(self) -> None:
        """Never returns: the end of the job is the end of this process."""
        began = time.monotonic()
        while True:
            self._turn((time.monotonic() - began) * self._options.speedup)
            time.sleep(POLL_S)

    def _turn(self, now_s: float) -> None:
        while self._changes and self._changes[0].at_s <= now_s:
            leaving = self._nodes.change(self._changes.pop(0))
            if leaving is not None:
                self._workers[leaving].send_signal(signal.SIGTERM)
        for node, worker in list(self._workers.items()):
            if worker.poll() is not None:
                print(f"{node}: ended with exit code {worker.returncode}", flush=True)
                del self._workers[node]
                self._nodes.ended(node)
        for node in self._nodes.starts():
            try:
                self._workers[node] = self._start(node)
            except OSError as error:  # no room for another process; the others go on
                print(f"{node}: cannot start: {error}", flush=True)
                self._nodes.ended(node)

    def _start(self, node: str) -> subprocess.Popen:
        address = (self._run / JOIN_ADDRESS).read_text().strip()
        print(f"{node}: joins", flush=True)
        command = [sys.executable, "-m", "pearl.rl.join", address, "--with-parent", "--gpus", node]
        return process.start(command, self._run / "logs" / f"external-{node}.log")


class Player:
    """The process that plays the trace of a run, as its parent has it."""

    def __init__(self, run: Path) -> None:
        self._log = run / "logs" / "availability.log"
        self._process = process.start([sys.executable, "-m", "pearl.rl.availability", str(run), str(os.getpid())], self._log)
        self.over = False

    def ended(self) -> str:
        """Once it has ended, which it never should: one line about that, the first time; else ""."""
        if self.over or self._process.poll() is None:
            return ""
        self.over = True
        return f"the player of elastic.trace ended with exit code {self._process.returncode}; see {self._log}"

    def close(self) -> None:
        """Its workers die with it. Waits `process.KILLED_S` at most."""
        process.put_down(self._process)


def main(argv: list[str]) -> None:
    run, parent = Path(argv[0]), int(argv[1])
    process.die_with_parent(parent=parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the job, whose end is ours
    options = configuration.from_json((run / "config.json").read_bytes()).elastic
    Availability(run, read_trace(Path(options.trace)).changes, options).play()


if __name__ == "__main__":
    main(sys.argv[1:])
