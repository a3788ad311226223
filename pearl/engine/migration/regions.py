"""Regions of other processes' GPU memory on this machine, mapped through their open files, and let go when they have changed.

Owns the addresses of regions, the way to another process's file, and when a mapping goes. It does not know what lies there.
Invariants: a file is used only if its door stood as before after it was taken, so it is the one that was meant; a mapping is of
one generation of a door and is never read as another; it is let go soon after its memory was given back or its owner has gone,
but not before what is queued on it has run. Not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from pearl.engine.device_arena import Door
from pearl.engine.migration.shared_memory import FileAddress, Mappings, lives, share

PIDFD_GETFD = 438
"""The number of pidfd_getfd(2) on every architecture. A GPU's file cannot be opened through /proc, only duplicated."""
SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)
"""prctl(2): where Yama restricts it, who may duplicate files of this process (the same user's processes, as anywhere else)."""

FOR_GOOD = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""What the system refuses this process will be refused again; anything else (no descriptor left, no memory) may pass."""
AGAIN_S = 30.0
"""For so long after a failure that may pass, others' memory is had in another way."""


class RegionAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A region of `nbytes` bytes: where its door's words are."""

    words: FileAddress
    nbytes: int


def own_region(door: Door) -> RegionAddress:
    """How others find a region of this process."""
    ctypes.CDLL(None).prctl(SET_PTRACER, ANY_PROCESS, 0, 0, 0)
    return RegionAddress(words=share(door.words), nbytes=door.nbytes)


def take_file(pid: int, file: int) -> int:
    """A descriptor of this process for what another one has open as number `file`. OSError says why not."""
    handle = os.pidfd_open(pid)
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, handle, file, 0)
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
        return found
    finally:
        os.close(handle)


class Mapped(Protocol):
    """A region's memory as this process has it."""

    address: int

    def close(self) -> None: ...


class Key(NamedTuple):
    """Whose door, in which generation, mapped for which device."""

    words: FileAddress
    generation: int
    device: int


class OpenRegions:
    """Regions of others, each mapped once for a device. `map_file` maps (file, bytes, device); RuntimeError if it cannot.

    Not thread-safe.
    """

    def __init__(self, map_file: Callable[[int, int, int], Mapped]) -> None:
        self._map_file = map_file
        self._mappings = Mappings()
        self._open: dict[Key, tuple[Mapped, np.ndarray]] = {}
        """With the door's words."""
        self._refused: dict[FileAddress, tuple[str, float]] = {}
        """Why, and until when."""
        self.failures = 0
        """Regions that could not be taken or mapped so far."""

    def __len__(self) -> int:
        return len(self._open)

    def refusal(self, address: RegionAddress) -> str | None:
        """Why regions of this owner could not be mapped, whatever their generation, when that was tried; None if they could, or
        if it is time to try again."""
        reason, until = self._refused.get(address.words, ("", -math.inf))
        return reason if time.monotonic() < until else None

    def find(self, address: RegionAddress, device: int) -> Key:
        """The region as it is now, mapped. ValueError if there is nothing behind its door, RuntimeError if it cannot be had."""
        words, pid = self._mappings.numbers(address.words), address.words.pid
        generation, file = int(words[0]), int(words[1])
        if generation % 2 == 0:
            raise ValueError(f"process {pid} has given back the memory of its region")
        key = Key(address.words, generation, device)
        if key not in self._open:
            try:
                taken = take_file(pid, file)
            except OSError as error:
                raise self._refusing(address, error) from error
            try:
                if int(words[0]) != generation or not lives(address.words):
                    raise ValueError(f"process {pid} has given back the memory of its region")
                self._open[key] = self._map_file(taken, address.nbytes, device), words
            except RuntimeError as error:
                self._refuse(address, str(error), AGAIN_S)
                raise
            finally:
                os.close(taken)
        return key

    def place(self, key: Key) -> int:
        """Where it is here. ValueError once it has been let go."""
        if key not in self._open:
            raise ValueError(f"process {key.words.pid} has given back the memory of its region")
        return self._open[key][0].address

    def tidy(self, idle: Callable[[int], bool]) -> None:
        """Lets go what is behind its door no more. `idle`: whether nothing is queued for a device that could read it."""
        self._mappings.tidy()
        for key, (mapped, words) in list(self._open.items()):
            gone = int(words[0]) != key.generation or not lives(key.words)
            if gone and idle(key.device):
                del self._open[key]
                mapped.close()
        for owner in [owner for owner in self._refused if not lives(owner)]:
            del self._refused[owner]

    def _refusing(self, address: RegionAddress, error: OSError) -> Exception:
        """What a file that cannot be taken means: its owner has shut its door or gone, or this process may not."""
        reason = f"the memory of process {address.words.pid} cannot be had: {error}"
        if error.errno in (errno.EBADF, errno.ESRCH):
            return ValueError(reason)
        self._refuse(address, reason, math.inf if error.errno in FOR_GOOD else AGAIN_S)
        return RuntimeError(reason)

    def _refuse(self, address: RegionAddress, reason: str, seconds: float) -> None:
        self.failures += 1
        self._refused[address.words] = reason, time.monotonic() + seconds
