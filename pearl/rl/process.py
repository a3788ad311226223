"""Child processes that cannot outlive their parent, and signals turned into values. Torch-free, Linux.

Invariant: a process that called `die_with_parent` is killed by the kernel when the thread that started it ends, also when
that happened before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Asks Linux to send `signum` to this process when its parent dies (prctl(2)); exits at once if `parent` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def on_signals(handler: Callable[[int], None]) -> None:
    """Calls `handler(signum)` for SIGINT and SIGTERM."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _frame: handler(number))


def start(arguments: list[str], log: Path, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    """Starts a child with its output in `log`. It stays in our process group, so that a terminal's Ctrl-C reaches it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=pass_fds)


def stop(child: subprocess.Popen, timeout_s: float) -> None:
    """Waits for a child that was told to end; SIGKILL after `timeout_s`."""
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs (or is stopped); a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def tell_terminal(text: str) -> None:
    """One line to the terminal that this process was started from, if there is one: for a child whose output is a log."""
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text + "\n")
