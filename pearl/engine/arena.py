"""Memory at addresses that never change, which can be given back to the system and taken again.

Owns where tensors lie; does not know what is in them. On a CPU each tensor is a mapping of its own, given back page by page
and taken again by touching it: private memory, or a memfd that other processes of the node may be let into. On CUDA they lie in
regions (`device_arena.py`) that are given back and taken again as a whole; where there are none, in ordinary allocations,
which cannot be given back without moving.
Invariants: a tensor keeps its address and shape for life, also while its memory is away; whoever gives memory back must not
count on the contents any more (on a CPU they read as zeros afterwards). A memfd has no name and can never shrink: nothing is
left of it when the last process that has it is gone, however it went, and no access to it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import math
import mmap
import os
import weakref

import torch
from torch import Tensor

from pearl.engine.device_arena import Door, on_device

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MADV_REMOVE, MADV_DONTFORK, MADV_HUGEPAGE = 9, 10, 14
"""madvise(2): punch a hole into the file behind a mapping; keep a mapping out of forked children; use large pages."""
LARGE_BYTES = 8 << 20
"""Mappings from this size on ask for large pages."""

_files: set[int] = set()
"""Open memfds of this process."""


class Arena:
    """Tensors on one device that are given back together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._private: list[mmap.mmap] = []
        self._shared: list[tuple[torch.UntypedStorage, int]] = []
        """(memory, file)."""
        self._regions, self._no_regions = (None, "") if device.type == "cpu" else on_device(device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros, committed page by page as it is written on a CPU.

        Raises OSError, OverflowError or RuntimeError if the memory cannot be had.
        """
        count = math.prod(shape)
        if self._regions is not None and count:
            return self._regions.zeros(shape, dtype)
        if self._device.type != "cpu" or not count:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        region = _private_memory(count * dtype.itemsize)
        self._private.append(region)
        return torch.frombuffer(region, dtype=dtype, count=count).view(shape)

    def shared_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `zeros`, but on a CPU in a memfd of exactly this tensor, which begins at its byte 0.

        Touching a page for the first time costs 1.4 times as much as in private memory (0.8-1.2 against 1.1-1.7 GB/s),
        nothing after that: reads and scattered copies are as fast. Forked children do not have it.
        """
        count = math.prod(shape)
        if self._device.type != "cpu" or not count:
            return self.zeros(shape, dtype)
        nbytes = count * dtype.itemsize
        _private_memory(nbytes).close()  # the kernel refuses what it could never give, which a memfd would only show later
        file = _memfd(nbytes)
        storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, nbytes)
        weakref.finalize(self, _close, file).atexit = False
        _advise(storage.data_ptr(), nbytes, MADV_DONTFORK)
        self._shared.append((storage, file))
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)

    def file(self, tensor: Tensor) -> int | None:
        """The open memfd behind a tensor that `shared_zeros` made, None for any other. It is closed with the arena."""
        return next((file for storage, file in self._shared if storage.data_ptr() == tensor.data_ptr()), None)

    def door(self, tensor: Tensor) -> tuple[Door, int] | None:
        """By which other processes find the memory of a tensor on a GPU, and where it begins there; None: they cannot."""
        return None if self._regions is None else self._regions.door(tensor)

    def check_returnable(self) -> None:
        """ValueError saying why the memory cannot be given back, if it cannot."""
        if self._device.type != "cpu" and self._regions is None:
            raise ValueError(
                f"device={str(self._device)!r}: its memory cannot be given back and taken again at the same addresses: "
                f"{self._no_regions}"
            )

    def give_back(self) -> None:
        """Returns the memory of all tensors to the system until `take`. ValueError if it cannot."""
        self.check_returnable()
        if self._regions is not None:
            self._regions.give_back()
        for region in self._private:
            region.madvise(mmap.MADV_DONTNEED)
        for storage, _ in self._shared:
            _advise(storage.data_ptr(), storage.nbytes(), MADV_REMOVE)

    def take(self) -> None:
        """Takes it again: RuntimeError, and nothing taken, if there is not enough. On a CPU pages come as they are touched."""
        if self._regions is not None:
            self._regions.take()


def _private_memory(nbytes: int) -> mmap.mmap:
    """In large pages, where the system has them: touched for the first time at several times the speed."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= LARGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(MADV_HUGEPAGE)
    return region


def _memfd(nbytes: int) -> int:
    """A file of zeros without a name, which cannot change its size. Programs that this process starts do not inherit it."""
    _keep_from_children()
    file = os.memfd_create("pearl-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _files.add(file)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        _close(file)
        raise
    return file


@functools.cache
def _keep_from_children() -> None:
    """A forked child that goes on without exec would otherwise hold the memory as long as it lives."""
    os.register_at_fork(after_in_child=lambda: [_close(file) for file in [*_files]])


def _close(file: int) -> None:
    if file in _files:
        _files.remove(file)
        os.close(file)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2) of whole pages; OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), advice):
        raise OSError(ctypes.get_errno(), f"madvise({nbytes} bytes, {advice})")
