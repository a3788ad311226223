"""Memory of this machine: how much is left, and shared memory that is there when it is used, asked for first, never to shrink.

Owns the reservation. It does not know what lies in the memory. Torch-free. Invariant: memory that was given can be touched
without SIGBUS, whatever happens to the node afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def available_bytes() -> int:
    """How much memory this process could still take, as the node and its control group (version 2) say."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _text(GROUP / "memory.max")
    if limit in ("", "max"):
        return free
    counts = dict(line.split() for line in _text(GROUP / "memory.stat").splitlines())
    used = int(_text(GROUP / "memory.current") or 0) - int(counts.get("inactive_file", 0))
    return min(free, int(limit) - used)


def reserve(name: str, nbytes: int) -> int:
    """An open memfd of `nbytes` zeros, all of them reserved. MemoryError says how many there are if that is not enough."""
    available = available_bytes()
    if nbytes > available:
        raise MemoryError(f"{name}: needs {nbytes} bytes of host memory, {available} are available")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryError(f"{name}: needs {nbytes} bytes of host memory; {error}") from error
        raise
    return fd


def address_of(fd: int, name: str) -> str:
    """How another process of this node finds memory that was reserved here under this name."""
    return f"{os.getpid()}:{fd}:{name}"


def open_address(address: str, mode: int = os.O_RDONLY) -> int:
    """Opens what `address_of` in another process names. ValueError if it is gone, or not on this node."""
    pid, number, name = address.split(":")
    path = f"/proc/{pid}/fd/{number}"
    try:
        if name not in os.readlink(path):
            raise FileNotFoundError(path)
        return os.open(path, mode | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{address}: its owner has gone, or is not on this node ({error})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
