"""The frame around code that `sandbox.py` runs: limits first, then the code, in a process nobody shares anything with.

    python -I -B -S sandbox_runner.py CPU_S MEMORY_MIB FILE_MIB REPORT_FD SCRIPT [ARGUMENT ...]

Owns the limits, from inside. It imports nothing of pearl. Invariant: the code runs with its limits or not at all. In
namespaces of its own (Linux, where users may make them) it has no network, and as their first process takes all others
with it when it ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID = 0x10000000, 0x40000000, 0x20000000
"""Of linux/sched.h."""
PR_SET_PDEATHSIG = 1
MIB = 1 << 20


def isolated() -> bool:
    """Tries to leave the network and the other processes behind; children are in the new namespaces."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID) == 0
    except (OSError, AttributeError):
        return False


def limit(cpu_s: int, memory_mib: int, file_mib: int) -> None:
    """Of this process and its children each; no core files."""
    for what, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mib * MIB),
        (resource.RLIMIT_FSIZE, file_mib * MIB),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def main(argv: list[str]) -> None:
    cpu_s, memory_mib, file_mib, report = map(int, argv[:4])
    apart = isolated()
    os.write(report, b"isolated\n" if apart else b"\n")
    child = os.fork()
    if child:
        os.close(report)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(cpu_s, memory_mib, file_mib)
    sys.argv = [argv[4], argv[3], *argv[5:]]
    sys.path.append(os.getcwd())  # behind the standard library: no module of the folder takes its place
    runpy.run_path(argv[4], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
