"""Memory of other processes of this node, opened through their files without a name, and kept open.

Owns the addresses of memfds, the checks before one is mapped, and when a mapping goes. It does not know what lies there.
Invariants: only a file that can never shrink is mapped, and only if it is the one that was meant and of the size that was
said, so no access fails, whatever becomes of its owner; it is mapped for reading; a mapping goes soon after its owner, so that
the memory of the dead is not kept.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from pearl.engine.arena import Arena
from pearl.engine.migration.transport import LeaseWords
from pearl.engine.node import node


class FileAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An open file of a process: `node` tells machines and pid namespaces apart, `start` processes that had the same pid."""

    node: str
    pid: int
    start: int
    file: int
    inode: int
    nbytes: int


def own_address(file: int) -> FileAddress:
    """How others find an open memfd of this process."""
    status = os.fstat(file)
    pid = os.getpid()
    start = _start(pid)
    assert start is not None
    return FileAddress(node=node(), pid=pid, start=start, file=file, inode=status.st_ino, nbytes=status.st_size)


def lives(address: FileAddress) -> bool:
    """Whether the file's owner is there and still has it open. False too where this process may not look."""
    try:
        return os.stat(_path(address)).st_ino == address.inode
    except OSError:
        return False


def unreachable(address: FileAddress) -> str | None:
    """Why this process could never read the file, whether its owner lives or not; None if there is no such reason."""
    if address.node != node():
        return f"process {address.pid} is on another node"
    try:
        os.stat(_path(address))
    except PermissionError as error:
        return f"the memory of process {address.pid} may not be read: {error}"
    except OSError:
        return None
    return None


class Words(Protocol):
    """Numbers (int64) that one process writes and others may read."""

    memory: np.ndarray


_shared: weakref.WeakKeyDictionary[Words, tuple[Arena, FileAddress]] = weakref.WeakKeyDictionary()
"""Words of this process that others may read. Their arenas are never given back."""


def share(words: Words) -> FileAddress:
    """Moves the words to where others can read them, once; they stay there as long as they live."""
    if words not in _shared:
        arena = Arena(torch.device("cpu"))
        memory = arena.shared_zeros(words.memory.shape, torch.int64)
        file = arena.file(memory)
        assert file is not None
        memory.numpy()[:] = words.memory
        words.memory = memory.numpy()
        _shared[words] = (arena, own_address(file))
    return _shared[words][1]


class Mappings:
    """Files of others, mapped once each. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: dict[FileAddress, Tensor] = {}

    def __len__(self) -> int:
        return len(self._memory)

    def memory(self, address: FileAddress) -> Tensor:
        """The file's bytes. ValueError saying why it cannot be read."""
        if address in self._memory and not lives(address):
            del self._memory[address]
        if address not in self._memory:
            self._memory[address] = _map(address)
        return self._memory[address]

    def words(self, address: FileAddress) -> LeaseWords:
        """The file's words, for reading, as they are at any moment. ValueError as above."""
        return LeaseWords(self.numbers(address))

    def numbers(self, address: FileAddress) -> np.ndarray:
        """The file as int64, likewise."""
        return self.memory(address).view(torch.int64).numpy()

    def tidy(self) -> None:
        """Looks at one of the mappings, in turn, and lets it go if its owner has. Cheap: for every step."""
        if self._memory:
            address = next(iter(self._memory))
            memory = self._memory.pop(address)
            if lives(address):
                self._memory[address] = memory


def _path(address: FileAddress) -> str:
    return f"/proc/{address.pid}/fd/{address.file}"


def _start(pid: int) -> int | None:
    """When the process was started, in ticks since boot; None if there is none, or only its remains."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except OSError:
        return None
    return None if not fields or fields[0] in b"ZX" else int(fields[19])


def _map(address: FileAddress) -> Tensor:
    reason = unreachable(address)
    if reason is not None:
        raise ValueError(reason)
    if _start(address.pid) != address.start:
        raise ValueError(f"process {address.pid} is gone")
    path = _path(address)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error
    try:
        _check(path, file, address)
        # Mapped privately: a stray write would stay in this process, and what the owner writes is seen all the same.
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", False, address.nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    finally:
        os.close(file)


def _check(path: str, file: int, address: FileAddress) -> None:
    status = os.fstat(file)
    if status.st_ino != address.inode:
        raise ValueError(f"{path} is another file by now")
    if status.st_size != address.nbytes or not address.nbytes:
        raise ValueError(f"{path} has nbytes={status.st_size}, must be {address.nbytes} and not 0")
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"{path} could shrink while it is read: it is not sealed")
