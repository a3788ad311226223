"""How a Triton kernel is launched: one function that everything goes through, so that a launch can be looked at instead of run.

Owns nothing but that seam. Every operation of this package takes a `Launcher`; `run` is the real one. With tensors on torch's
meta device and a launcher that only records, the same code says which kernels a model of any size needs, with exactly the
arguments that a GPU would get: this is what is compiled ahead of time (`aot.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
import triton

PRECISION = {torch.float32: "ieee"}
"""Arithmetic of tl.dot by input dtype where it is not the default: TF32's 11 bits are too few for fp32 models."""


class Launcher(Protocol):
    """Runs `kernel` over `grid` with these arguments, on the current device and stream."""

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int = 1, **arguments: Any
    ) -> None: ...

    def chip(self, device: torch.device) -> int:
        """The compute capability times 10 that launches are for."""


class Run:
    """The launcher that launches. Off a GPU (in Triton's interpreter) the chip is a Hopper's."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int = 1, **arguments: Any) -> None:
        if 0 not in grid:  # CUDA refuses an empty grid
            kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)

    def chip(self, device: torch.device) -> int:
        return _chip(device) if device.type == "cuda" else 90


run = Run()


@lru_cache
def _chip(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tile_of(size: int, smallest: int = 1) -> int:
    """The power of two that holds `size` elements, at least `smallest`."""
    return max(smallest, triton.next_power_of_2(size))


def row_warps(size: int) -> int:
    """Warps for a program that holds a row of `size` elements: 8 to 32 elements a thread."""
    return min(16, max(1, size // 512))
