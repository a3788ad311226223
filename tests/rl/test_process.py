"""Signals and ends of processes, whatever has become of those who read what they print."""

from __future__ import annotations

import subprocess
import sys

LIMIT_S = 30.0

SIGNALLED = """
import os, signal, time
from pearl.rl import process

def heard(signum):
    if signum == signal.SIGTERM:
        process.leave(7)
    print("heard", flush=True)

process.on_signals(heard)
for signum in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), signum)
time.sleep(30)
"""


def test_a_signal_is_heard_though_an_earlier_one_s_handler_failed_and_nobody_reads_the_output() -> None:
    """As in "COMMAND | tee", where Ctrl-C ends the other end of the pipe too."""
    child = subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    assert child.wait(LIMIT_S) == 7, said
    assert "BrokenPipeError" in said
    child.stderr.close()
