"""An arena's memory on a GPU: tensors in regions that are given back to the device and taken again at the same addresses.

Owns how tensors are laid into regions, and the doors by which other processes find a region's memory; what a region is,
`pearl._C` knows (CUDA's virtual memory management). Invariants: a tensor keeps its address for life and its region alive as
long as it is used; all regions of an arena have memory, or none has; a door is shut before its memory goes, and opened again
with another number. After `take` the contents are undefined. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

REGION_BYTES = 64 << 20
"""Small tensors share regions of this size; memory comes in steps of 2 MiB, which a norm's weight would fill with nothing."""
ALIGNMENT = 512
"""As torch's own allocations: what kernels are compiled for."""


class Region(Protocol):
    """Memory at `address`, of `bytes` bytes (what was asked for, rounded up)."""

    address: int
    bytes: int

    def give_back(self) -> None: ...

    def take(self) -> None: ...

    def export_file(self) -> int:
        """A new open file, by which other processes can map the memory that is there now. RuntimeError if there is none."""


class DoorWords:
    """Where a door stands, int64 [2], possibly in memory that others read: its generation, and the number of an open file.

    The generation is odd while the door is open. It changes before the file is closed, so whoever has taken the file and finds
    the generation as it was before has the right one. One writer.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(2, dtype=np.int64)


class Door:
    """By which other processes find the memory of a region of `nbytes` bytes, while it has some."""

    def __init__(self, region: Region) -> None:
        self.nbytes, self.words = region.bytes, DoorWords()
        self._region = region
        self._files: list[int] = []
        weakref.finalize(self, _close_all, self._files)

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def open(self) -> None:
        """Stays shut where the region's memory cannot be shared: then it moves by other ways."""
        if not self._files:
            with contextlib.suppress(RuntimeError):
                self._files.append(self._region.export_file())
                self.words.memory[1] = self._files[0]
                self.words.memory[0] += 1

    def shut(self) -> None:
        if self._files:
            self.words.memory[0] += 1
            _close_all(self._files)


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


class DeviceArena:
    """Tensors whose memory goes and comes together. `make` makes a region of so many bytes, `view` sees bytes of it."""

    def __init__(self, make: Callable[[int], Region], view: Callable[[Region, int, int], Tensor]) -> None:
        self._make, self._view = make, view
        self._regions: list[Region] = []
        self._doors: dict[int, Door] = {}
        """By the address of the region."""
        self._room: tuple[Region, int] | None = None
        """A region that is not full, and where its free part begins."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros. RuntimeError if the memory cannot be had."""
        nbytes = math.prod(shape) * dtype.itemsize
        region, start = self._place(nbytes)
        return self._view(region, start, nbytes).view(dtype).view(shape).zero_()

    def _place(self, nbytes: int) -> tuple[Region, int]:
        """A large tensor, and whatever does not fit beside the others, begins a region."""
        if self._room is not None and self._room[1] + nbytes <= self._room[0].bytes:
            region, start = self._room
        else:
            region, start = self._make(max(nbytes, REGION_BYTES)), 0
            self._regions.append(region)
        end = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        # Of two regions that are not full the emptier one is filled up next.
        if self._room is None or region is self._room[0] or region.bytes - end > self._room[0].bytes - self._room[1]:
            self._room = (region, end)
        return region, start

    def door(self, tensor: Tensor) -> tuple[Door, int] | None:
        """The door of the region in which a tensor of this arena lies, and where in it; None if it cannot be opened."""
        place = tensor.data_ptr()
        found = (region for region in self._regions if 0 <= place - region.address < region.bytes)
        region = next(found, None)
        if region is None:
            return None
        door = self._doors.get(region.address) or Door(region)
        door.open()
        if not door.is_open:
            return None
        self._doors[region.address] = door
        return door, place - region.address

    def give_back(self) -> None:
        """Returns all memory to the device, once nothing that is queued can use it any more. What another process has mapped
        comes free when that one lets it go."""
        for door in self._doors.values():
            door.shut()
        for region in self._regions:
            region.give_back()

    def take(self) -> None:
        """Takes all of it again. RuntimeError if there is not enough: then none is taken."""
        try:
            for region in self._regions:
                region.take()
        except RuntimeError:
            self.give_back()
            raise
        for door in self._doors.values():
            door.open()


def on_device(device: torch.device) -> tuple[DeviceArena | None, str]:
    """An arena on a GPU; None, with the reason, where its memory cannot be given back."""
    try:
        module = importlib.import_module("pearl._C")
    except ImportError as error:
        return None, f"pearl._C is not built ({error})"
    if not module.has_cuda:
        return None, "pearl._C was built without CUDA"
    index = torch.cuda.current_device() if device.index is None else device.index
    if refusal := module.region_refusal(index):
        return None, refusal
    return DeviceArena(lambda nbytes: module.DeviceRegion(nbytes, index), _bytes_of(torch.device("cuda", index))), ""


def _bytes_of(device: torch.device) -> Callable[[Any, int, int], Tensor]:
    def view(region: Any, start: int, nbytes: int) -> Tensor:
        tensor = torch.as_tensor(_Bytes(region, start, nbytes), device=device)
        if tensor.data_ptr() != region.address + start:
            raise RuntimeError(f"torch copied memory at {region.address + start} on {device} instead of using it")
        return tensor

    return view


class _Bytes:
    """Part of a region as other packages see it (CUDA array interface, version 3). A tensor made of it holds it, and with it
    the region."""

    def __init__(self, region: Any, start: int, nbytes: int) -> None:
        self.region = region
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (region.address + start, False), "strides": None, "version": 3,
        }  # fmt: skip
