"""Work that is killed: in a forked child, before any chosen operation on files, or at any moment from outside.

The child is ended by SIGKILL, so nothing of Python's clean-up runs; what its kernel calls did stays, as after a real kill.
(A power cut can lose more: what was not synced. That order is tested by recording the calls.)
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
"""Audit events (sys.addaudithook) before each of which the child can be killed."""


def start(work: Callable[[], object], kill_before: int | None = None) -> int:
    """Forks a child that does `work`, killed before its operation number `kill_before` (from 0); returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        if kill_before is not None:
            _arm(kill_before)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def survived(pid: int) -> bool:
    """Waits for the child: True if it did all its work, False if it was killed. AssertionError if it failed by itself."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the child raised; see its traceback"
    return True


def _arm(kill_before: int) -> None:
    seen = 0

    def watch(event: str, _: object) -> None:
        nonlocal seen
        if event in OPERATIONS:
            if seen == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(watch)
