"""Memory at addresses that never change, which can be given back to the system and taken again.

Owns where tensors lie; does not know what is in them. On a CPU each tensor is a private anonymous mapping, given back page by
page and taken again by touching it. On CUDA it is an ordinary allocation, which cannot be given back without moving.
Invariant: a tensor keeps its address and shape for life, also while its memory is away; whoever gives memory back must not
count on the contents any more (on a CPU they read as zeros afterwards).
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


class Arena:
    """Tensors on one device that are given back together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._regions: list[mmap.mmap] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros, committed page by page as it is written on a CPU.

        Raises OSError, OverflowError or RuntimeError if the memory cannot be had.
        """
        count = math.prod(shape)
        if self._device.type != "cpu" or not count:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        region = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._regions.append(region)
        return torch.frombuffer(region, dtype=dtype, count=count).view(shape)

    def check_returnable(self) -> None:
        """ValueError saying why the memory cannot be given back, if it cannot."""
        if self._device.type != "cpu":
            raise ValueError(
                f"device={str(self._device)!r}: its memory cannot be given back and taken again at the same addresses by this "
                "release, which does so on cpu"
            )

    def give_back(self) -> None:
        """Returns the memory of all tensors to the system; touching them takes it again, as zeros. ValueError if it cannot."""
        self.check_returnable()
        for region in self._regions:
            region.madvise(mmap.MADV_DONTNEED)
