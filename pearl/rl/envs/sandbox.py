"""Python code of unknown origin, run in a process of its own with limits.

Owns the process: its time, what it may use, and that nothing of it is left when `run` returns. It does not know what is run
or what it means. Limits: processor seconds, address space, size of files, wall time; no network and no sight of other
processes where the kernel lets a user have namespaces of his own (`Ran.isolated` says whether). Files are those of the user
who runs the job: this keeps accidents away, it is no wall against an attacker.
Invariants: `run` returns within `wall_s` and a second; its process group is dead by then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

RUNNER = Path(__file__).with_name("sandbox_runner.py")
LONGEST_OUTPUT = 4000
"""Bytes of output that are kept, half from its beginning and half from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds on the clock and of the processor, MiB of address space and of each file."""

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_mib: int = 512
    file_mib: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How it went: `code` is the exit code (negative: a signal), `report` what the code's frame wrote to its own pipe."""

    code: int
    timed_out: bool
    output: str
    report: str
    isolated: bool


def run(folder: Path, script: Path, arguments: Sequence[str] = (), limits: Limits | None = None) -> Ran:
    """Runs a Python file in `folder` with the standard library alone, standard input empty.

    `script` gets the number of a pipe as its first argument, which becomes `report`; then `arguments`.
    """
    limits = limits or Limits()
    reader, writer = os.pipe()
    numbers = [str(limits.cpu_s), str(limits.memory_mib), str(limits.file_mib), str(writer)]
    command = [sys.executable, "-I", "-B", "-S", str(RUNNER), *numbers, str(script), *arguments]
    environment = {"PATH": os.defpath, "HOME": str(folder), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    with tempfile.TemporaryFile() as output, os.fdopen(reader, "rb") as report:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        timed_out = False
        try:
            process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(report.fileno(), False)  # a process that left the group may hold the other end for ever
        told = (report.read(1 << 16) or b"").decode(errors="replace")
        frame, _, rest = told.partition("\n")
        return Ran(
            code=process.returncode,
            timed_out=timed_out,
            output=_kept(output),
            report=rest,
            isolated=frame == "isolated",
        )


def _kept(file: IO[bytes]) -> str:
    descriptor, half = file.fileno(), LONGEST_OUTPUT // 2
    size = os.fstat(descriptor).st_size
    if size <= LONGEST_OUTPUT:
        return os.pread(descriptor, size, 0).decode(errors="replace")
    first, last = os.pread(descriptor, half, 0), os.pread(descriptor, half, size - half)
    between = f"\n... {size - 2 * half} bytes left out ...\n"
    return first.decode(errors="replace") + between + last.decode(errors="replace")
