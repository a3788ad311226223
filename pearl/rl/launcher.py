"""Starts the ranks of `pearl run` on this machine and ends as they do: `python -m pearl.rl.launcher W ARGUMENTS...`

Owns the exit code and the silence: torch's launcher (torch.distributed.run, in this process) starts and watches the ranks, and
its reports, which say in thirty lines what rank 0 said in one, are left out. What rank 0 could not say any more (it was
killed) is said here. It knows nothing of what ranks do. Invariants: the ranks' parent is this process, as it is torchrun with
`torchrun -m pearl.rl.launch`; the exit code is 0 only if every rank's is.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from pearl.rl.plain_launcher import OURS, RANK_MODULE, exit_code


def main(argv: list[str]) -> int:
    """Runs the job; returns its exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupted)  # until torch's launcher, which takes seconds to load, has its own
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # one logger's level would not do, each of torch's modules sets its own
    world, *arguments = argv
    try:
        run.run(run.parse_args(["--standalone", f"--nproc_per_node={world}", "-m", RANK_MODULE, *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _tell(codes, error.failures)
        return exit_code(codes)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _tell(codes: Mapping[int, int], failures: Mapping[int, Any]) -> None:
    """Rank 0 prints for all, and cannot say how it was killed itself."""
    code = codes.get(0, 0)
    if code < 0 and -code not in OURS:
        print(f"ended: rank 0 (pid {failures[0].pid}) was killed by {signal.Signals(-code).name}", flush=True)


def _interrupted(signum: int, _frame: object) -> NoReturn:
    sys.stdout.write(f"pearl: interrupted by {signal.Signals(signum).name} before the start\n")
    sys.stdout.flush()
    os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
