"""A whole job as an outsider sees it: started by torchrun, watched through /proc, hit by signals, waited for.

Owns finding out which process is who, whether it runs, and what is left of a job. It knows nothing of the job's insides
beyond the names of its modules. Invariant: `close` leaves no process of the job, and only processes that carry the job's own
tag in their environment are ever looked at or killed. Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = "PEARL_JOB_TAG"
POLL_S = 0.02
MODULES = (
    (b"pearl.rl.controller", "controller"), (b"pearl.rl.envs.host", "environment"), (b"pearl.rl.join", "external"),
    (b"pearl.rl.availability", "availability"),
)  # fmt: skip


class JobProcess:
    """A job in a session of its own; its output goes to `folder`/out.txt. Use it in a `with`."""

    def __init__(self, process: subprocess.Popen, folder: Path, tag: str, log: Path) -> None:
        self.process, self.folder, self.tag, self.log = process, folder, tag, log

    @classmethod
    def start(
        cls,
        folder: Path,
        arguments: list[str],
        *,
        world: int,
        module: str = "pearl.rl.launch",
        environment: dict[str, str] | None = None,
        name: str = "out",
    ) -> JobProcess:
        """Runs `torchrun --nproc_per_node=world -m module arguments`, with temporary files in `folder`/tmp."""
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", "-m", module]
        return cls.command(folder, [*command, *arguments], environment=environment, name=name)

    @classmethod
    def command(
        cls, folder: Path, command: list[str], *, environment: dict[str, str] | None = None, name: str = "out"
    ) -> JobProcess:
        """Runs Python with any arguments, such as "-m pearl run RECIPE"."""
        tag, log = secrets.token_hex(8), folder / f"{name}.txt"
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary), TAG: tag}
        own |= environment or {}
        return cls(_spawned(command, log, own), folder, tag, log)

    def beside(self, command: list[str], name: str) -> subprocess.Popen:
        """Starts Python with these arguments as another process of the job, with its output in `folder`/NAME.txt."""
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", TAG: self.tag}
        return _spawned(command, self.folder / f"{name}.txt", own)

    def __enter__(self) -> JobProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what is left of the job."""
        deadline = time.monotonic() + 10
        while (left := self.family()) and time.monotonic() < deadline:
            for pid in left:
                send(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()

    # ------------------------------------------------------------------------------------------------ who is who

    def family(self) -> dict[int, str]:
        """Pid and role ("torchrun", "rank0", or one of MODULES, or "other") of all but zombies."""
        mark, found = f"{TAG}={self.tag}".encode(), {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                    found[int(entry.name)] = self._role(entry)
        return found

    def pid_of(self, role: str) -> int | None:
        """The process of this role, None if there is none (or several)."""
        pids = [pid for pid, its in self.family().items() if its == role]
        return pids[0] if len(pids) == 1 else None

    def _role(self, entry: Path) -> str:
        if int(entry.name) == self.process.pid:
            return "torchrun"
        command = (entry / "cmdline").read_bytes()
        for part, role in MODULES:
            if part in command:
                return role
        rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (entry / "environ").read_bytes())
        is_child = parent_of(int(entry.name)) == self.process.pid
        return f"rank{int(rank[1])}" if rank and is_child else "other"

    # ------------------------------------------------------------------------------------------------ what it does

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def run_directory(self) -> Path | None:
        """The run that the job writes, once it has said so."""
        said = re.search(r"run directory (\S+)", self.output())
        return Path(said[1]) if said else None

    def wait_for(self, text: str, seconds: float, count: int = 1) -> None:
        """Until the output has `text` so many times; AssertionError if that takes longer, or the job ends before."""
        deadline = time.monotonic() + seconds
        while self.output().count(text) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{text!r} was not printed {count} times within {seconds:g} s:\n{self.output()}")
            time.sleep(POLL_S)

    def wait_until_gone(self, seconds: float) -> float | None:
        """The seconds until no process of the job runs, None if some still do after `seconds`."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            self.process.poll()
            if not self.family():
                return time.monotonic() - started
            time.sleep(5 * POLL_S)
        return None


def _spawned(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Python in a session of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def send(pid: int, signum: int) -> None:
    """A signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def cpu_seconds(pid: int) -> float | None:
    """Processor seconds that a process has taken, in user and in system mode; None if there is none."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def zombie_exit_code(pid: int) -> int | None:
    """How a process ended that nobody has waited for yet (negative: by that signal); None if it is no zombie."""
    fields = _stat(pid)
    if not fields or fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))
