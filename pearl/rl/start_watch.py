"""Watches a rank's start, before all ranks are connected to the controller: whoever is stopped or dead is found out and named.

Owns the watch over the processes of this host that the start depends on: the other ranks (children of the same launcher) and,
on rank 0, the controller. It does not know what starting consists of. Invariant: a start ends, well or with a reason, however
its processes are stopped or killed; only time in which the launcher and this process ran counts. Torch-free, Linux (without
/proc nobody else is seen, and only deadlines are kept).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from pearl.config import Timeouts
from pearl.rl import process
from pearl.rl.heartbeat import LONGEST_GAP_S

TICK_S = 0.25
SPEAK_FIRST_S = 3.0
"""By so much rank 0, which prints for all, is quicker to give up than the others."""


class StartWatch(threading.Thread):
    """Calls `fail(reason)`, in this thread, once the start cannot succeed; `missing` and `end` tell it how far that has come.

    `launcher` is the pid of the parent, `local_ranks` how many ranks it starts on this host.
    """

    def __init__(self, *, rank: int, launcher: int, local_ranks: int, timeouts: Timeouts, fail: Callable[[str], None]) -> None:
        super().__init__(name="start watch", daemon=True)
        self.controller: subprocess.Popen | None = None
        self._rank = rank
        self._launcher = launcher
        self._local_ranks = local_ranks
        self._timeouts = timeouts
        self._fail = fail
        self._others: dict[int, int] = {}
        self._stopped_s: dict[int, float] = {}
        self._joined = False
        self._missing: list[int] = []
        self._join_left = timeouts.join_s + (0.0 if rank == 0 else SPEAK_FIRST_S)
        self._controller_ended = False
        self._over = threading.Event()

    def start(self) -> None:
        self._find_others()  # now: loading torch will keep this thread from running for seconds
        super().start()

    def missing(self, ranks: list[int]) -> None:
        """Who has not come yet to where all ranks find each other; nobody: they have."""
        self._missing = ranks
        self._joined = not ranks

    def end(self) -> None:
        """The start is over."""
        self._over.set()

    def lost(self) -> str:
        """'rank 1 (pid 7) died while starting', if a rank is gone that the launcher has buried already; else ''.

        One that it has not buried yet died with us, by the launcher's own signal.
        """
        gone = [f"rank {rank} (pid {pid}) died while starting" for pid, rank in self._others.items() if not process.state(pid)]
        return ", ".join(gone)

    def run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            gap, last = min(now - last, LONGEST_GAP_S), now
            reason = self._look(gap)
            if reason and not self._over.is_set():
                self._fail(reason)
                return

    def _look(self, gap: float) -> str:
        """Why the start cannot succeed, '' as long as it can."""
        if len(self._others) < self._local_ranks - 1:
            self._find_others()
        if self.controller is not None and self.controller.poll() is not None:
            if self._controller_ended:
                return f"the controller ended with exit code {self.controller.returncode}"
            self._controller_ended = True  # a signal to our whole group says more, and has until the next look to do so
        return self._look_for_stopped(gap) or self._look_at_join(gap)

    def _find_others(self) -> None:
        for pid in process.children(self._launcher):
            rank = process.environment(pid).get("RANK", "")
            if pid != os.getpid() and rank.isdigit():
                self._others[pid] = int(rank)

    def _look_for_stopped(self, gap: float) -> str:
        controller = {self.controller.pid: "the controller"} if self.controller is not None else {}
        names = {pid: f"rank {rank}" for pid, rank in self._others.items()} | controller
        stopped = {pid for pid in names if process.state(pid) == "T"}
        self._stopped_s = {pid: self._stopped_s.get(pid, 0.0) + gap for pid in stopped}
        overdue = [pid for pid, seconds in self._stopped_s.items() if seconds > self._timeouts.silence_s]
        if not overdue or self._another_speaks(stopped, overdue):
            return ""
        for pid in overdue:
            process.kill(pid)
        who = ", ".join(names[pid] for pid in overdue)
        reason = f"{who} was stopped for timeouts.silence_s={self._timeouts.silence_s:g} s while starting, killed"
        if any(self._others.get(pid) == 0 for pid in overdue):  # who prints for all cannot say so itself
            print(reason, flush=True)
        return reason

    def _another_speaks(self, stopped: set[int], overdue: list[int]) -> bool:
        """The first rank that is not stopped kills and says so; each rank for its own controller."""
        if self.controller is not None and self.controller.pid in overdue:
            return False
        return any(rank < self._rank and pid not in stopped for pid, rank in self._others.items())

    def _look_at_join(self, gap: float) -> str:
        """Counts from when this rank has come itself: how long loading torch takes is not the others' fault."""
        if self._joined or not self._missing or process.state(self._launcher) == "T":
            return ""
        self._join_left -= gap
        if self._join_left > 0:
            return ""
        who = ", ".join(map(str, self._missing))
        reason = f"rank {who} did not come within timeouts.join_s={self._timeouts.join_s:g} s"
        if self._rank and 0 in self._missing:
            print(reason, flush=True)
        return reason


def launcher_answers() -> bool:
    """False if torchrun's store is closed: it died before we could ask to be told of its death."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with contextlib.suppress(OSError, KeyError, ValueError):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        try:
            socket.create_connection(address, timeout=2.0).close()
        except ConnectionRefusedError:
            return False
    return True
