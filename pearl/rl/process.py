"""Child processes that cannot outlive their parent, and signals turned into values. Torch-free, Linux.

Invariant: a process that called `die_with_parent` is killed by the kernel when the thread that started it ends, also when
that happened before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KILLED_S = 10.0
"""A child that is still there so long after SIGKILL hangs in the kernel, and is left to it."""


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Asks Linux to send `signum` to this process when its parent dies (prctl(2)); ends at once if `parent` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        raise SystemExit("the parent process is gone")


def on_signals(handler: Callable[[int], None]) -> None:
    """Calls `handler(signum)` for SIGINT and SIGTERM, in a thread of its own, one signal after the other.

    The main thread would hear of a signal only when it is back from C, and it may sit in a collective for minutes. To be
    called in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for signum in SIGNALS:
        signal.signal(signum, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            for number in os.read(reader, 64):
                if number in SIGNALS:
                    try:
                        handler(number)
                    except Exception:  # whatever it was, the next signal must be heard
                        with contextlib.suppress(OSError, ValueError):
                            traceback.print_exc()

    threading.Thread(target=listen, name="signals", daemon=True).start()


def start(arguments: list[str], log: Path, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen:
    """Starts a child with its output in `log`. It stays in our process group, so that a terminal's Ctrl-C reaches it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=pass_fds)


def stop(child: subprocess.Popen, timeout_s: float) -> None:
    """Waits for a child that was told to end; SIGKILL after `timeout_s`, and KILLED_S more at most."""
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        put_down(child)


def put_down(child: subprocess.Popen) -> bool:
    """SIGKILL; False, if it has not ended KILLED_S later."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_S)
    return child.returncode is not None


def is_readable(fd: int, timeout_s: float) -> bool:
    """Waits until there is something to read, or its writer has gone; any descriptor will do (select stops at 1,023)."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def leave(code: int) -> NoReturn:
    """Ends this process now. Taking down torch's threads and groups in order takes seconds, and can wait for peers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def state(pid: int) -> str:
    """The letter of proc(5) for a process of this host: "T" stopped, "Z" ended and not waited for; "" if there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs (or is stopped); a zombie does not."""
    return state(pid) not in ("", "Z", "X")


def is_orphan(parent: int) -> bool:
    """Whether `parent`, which was our parent, has died. It counts as such from the end of its main thread on."""
    return os.getppid() != parent or not is_alive(parent)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)]]


def environment(pid: int) -> dict[str, str]:
    """The variables a process was started with; empty if it is gone or not ours to read."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
