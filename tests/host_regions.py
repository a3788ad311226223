"""A stand-in for CUDA's virtual memory management on the host: addresses that are reserved, memory that comes and goes there
and is shared by an open file. What is not mapped cannot be read: it ends the process. No tests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from types import ModuleType

import torch
from migration_cases import make_pool
from torch import Tensor

from pearl.engine.device_arena import DeviceArena
from pearl.engine.migration.blocks import native
from pearl.engine.migration.cuda_ipc import Gpu
from pearl.engine.migration.transport import Pool
from pearl.kv_transfer import KVLayout

STEP = 2 << 20
MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address: int | None, nbytes: int, rights: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, nbytes, rights, flags, file, 0)
    if found == ctypes.c_void_p(-1).value:
        raise RuntimeError(f"mapping of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return found


def _reserve(address: int | None, nbytes: int) -> int:
    fixed = 0 if address is None else MAP_FIXED
    return _map(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1)


class FileRegion:
    """As `pearl._C.DeviceRegion`; `sharing`: whether its memory can be shared."""

    sharing = True

    def __init__(self, nbytes: int) -> None:
        self.bytes = -(-nbytes // STEP) * STEP
        self.address = _reserve(None, self.bytes)
        self._file: int | None = None
        self.take()

    def take(self) -> None:
        if self._file is None:
            self._file = os.memfd_create("region")
            os.ftruncate(self._file, self.bytes)
            _map(self.address, self.bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, self._file)

    def give_back(self) -> None:
        if self._file is not None:
            _reserve(self.address, self.bytes)
            os.close(self._file)
            self._file = None

    def export_file(self) -> int:
        if self._file is None or not self.sharing:
            raise RuntimeError("the region has no memory to share")
        return os.dup(self._file)


class MappedFile:
    """As `pearl._C.OpenedRegion`."""

    def __init__(self, file: int, nbytes: int) -> None:
        try:
            size = os.fstat(file).st_size
        except OSError as error:
            raise RuntimeError(f"import of memory of {nbytes} bytes: {error}") from error
        if size != nbytes:
            raise RuntimeError(f"mapping of {nbytes} bytes: invalid argument")
        self.address, self._bytes = _map(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file), nbytes

    def close(self) -> None:
        _libc.munmap(self.address, self._bytes)
        self.address = 0


class HostGpu(Gpu):
    """Copies run when they are queued, unless they are held back."""

    def __init__(self) -> None:
        super().__init__()
        self.hold, self.held = False, list[Callable[[], None]]()

    def module(self) -> tuple[ModuleType | None, str]:
        return native("cpu")

    def holds(self, pool: Pool) -> bool:
        return True

    def map_region(self, file: int, nbytes: int, device: int) -> MappedFile:
        return MappedFile(file, nbytes)

    def follow(self, device: int) -> None:
        return None

    def copy(self, device: int, queue: Callable[[], None]) -> Callable[[], bool]:
        self.held.append(queue)
        if not self.hold:
            self.run()
        return lambda: not self.held

    def idle(self, device: int) -> bool:
        return not self.held

    def run(self) -> None:
        while self.held:
            self.held.pop(0)()


def region_arena() -> DeviceArena:
    def view(region: FileRegion, start: int, nbytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(region.address + start), dtype=torch.uint8)

    return DeviceArena(FileRegion, view)


def make_region_pool(shape: KVLayout, num_blocks: int, seed: int | None, device: str = "cpu") -> Pool:
    """As `make_pool`, in a region behind something else that is in it."""
    plain, arena = make_pool(shape, num_blocks, seed), region_arena()
    arena.zeros((100,), torch.float32)
    tensor = arena.zeros(tuple(plain.tensor.shape), plain.tensor.dtype)
    tensor.copy_(plain.tensor)
    return Pool(tensor=tensor, memory=arena, layout=shape, leases=plain.leases)
