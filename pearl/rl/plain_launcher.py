"""Starts the ranks of a job without devices on this machine, and ends as they do: `python -m pearl.rl.plain_launcher W ARGS...`

Owns the ranks' processes, the pipes by which they find each other, and the exit code. There is no WORLD and no torch. It knows
nothing of what ranks do. Invariants as in `launcher.py`: the ranks' parent is this process; when one fails, or a signal comes,
the others are told at once and killed after `GRACE_S`; the exit code is 0 only if every rank's is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

RANK_MODULE = "pearl.rl.launch"
MEETING = "PEARL_MEETING"
"""File descriptors of pipes: on rank 0 one to each of the others, there the one from rank 0."""
OURS = (signal.SIGTERM,)
"""What a launcher ends the other ranks with when one has failed."""
GRACE_S = 30.0
POLL_S = 0.05


class Ranks:
    """The processes. `tell` sends a signal to those that still run."""

    def __init__(self, world: int, arguments: list[str]) -> None:
        pipes = [os.pipe() for _ in range(world - 1)]
        writers, readers = [writer for _, writer in pipes], [reader for reader, _ in pipes]
        common = os.environ | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        self.processes = []
        for rank in range(world):
            mine = writers if rank == 0 else readers[rank - 1 : rank]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), MEETING: ",".join(map(str, mine))}
            command = [sys.executable, "-m", RANK_MODULE, *arguments]
            self.processes.append(subprocess.Popen(command, env=common | own, pass_fds=mine))
        for end in writers + readers:
            os.close(end)

    def codes(self) -> dict[int, int]:
        """Of those that have ended."""
        return {rank: code for rank, child in enumerate(self.processes) if (code := child.poll()) is not None}

    def tell(self, signum: int) -> None:
        for child in self.processes:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signum)


def main(argv: list[str]) -> int:
    """Runs the job; returns its exit code."""
    came: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _frame: came.append(number))
    ranks = Ranks(int(argv[0]), argv[1:])
    codes: dict[int, int] = {}
    told, deadline = 0, float("inf")
    while len(codes := ranks.codes()) < len(ranks.processes):
        if not told and (came or any(codes.values())):
            told, deadline = (came[0] if came else signal.SIGTERM), time.monotonic() + GRACE_S
            failed = {rank: code for rank, code in codes.items() if code}
            ranks.tell(told)
        if time.monotonic() > deadline:
            ranks.tell(signal.SIGKILL)
        time.sleep(POLL_S)
    if came:
        return 128 + came[0]
    first = failed if told else {rank: code for rank, code in codes.items() if code}
    if not first:
        return 0
    code = codes[0]
    if code < 0 and -code not in OURS:
        print(f"ended: rank 0 (pid {ranks.processes[0].pid}) was killed by {signal.Signals(-code).name}", flush=True)
    return exit_code({rank: code for rank, code in codes.items() if code})


def exit_code(codes: Mapping[int, int]) -> int:
    """The job's, from those of the ranks that failed (negative: killed by that signal), as a shell has it.

    A rank that was killed from outside is the cause of whatever the others say; else rank 0 speaks for all.
    """
    killed = [-code for code in codes.values() if code < 0 and -code not in OURS]
    if killed:
        return 128 + killed[0]
    code = codes.get(0) or next(iter(codes.values()))
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
