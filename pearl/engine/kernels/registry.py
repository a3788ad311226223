"""Which kernels serve a combination of device, dtype, model and block size. Owns the choice, no arithmetic.

"auto" takes the first set in the device's `PREFERENCE` that does not refuse; a name takes that set or raises with its reason.
The answer carries `why`, which start-up logs print: a choice is never silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pearl.engine.kernels.cpu import CpuKernels
from pearl.engine.kernels.interface import Kernels
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig


def _triton() -> Kernels:
    from pearl.engine.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def _flashinfer() -> Kernels:
    from pearl.engine.kernels.flashinfer import FlashInferKernels

    return FlashInferKernels()


KERNELS: dict[str, Callable[[], Kernels]] = {
    "cpu": CpuKernels,
    "triton": _triton,
    "flashinfer": _flashinfer,
    "reference": ReferenceKernels,
}
"""Those of a GPU are imported when they are asked for: Triton is an extra and takes a second."""
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}
"""By type of device. FlashInfer only by name: it was not compared with Triton yet."""


class KernelChoice(NamedTuple):
    """The kernels and the reason in words."""

    kernels: Kernels
    why: str


def choose(name: str, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> KernelChoice:
    """The kernels called `name`, or for "auto" the first that serves the combination. ValueError says why none does."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"kernels={name!r}: must be one of auto, {', '.join(KERNELS)}")
    refusals: list[str] = []
    for candidate in PREFERENCE.get(device.type, ("reference",)) if name == "auto" else (name,):
        try:
            kernels = KERNELS[candidate]()
        except ImportError as error:
            refusals.append(f"{candidate}: {error}")
            continue
        reason = kernels.refusal(device=device, dtype=dtype, model=model, block_size=block_size)
        if reason is None:
            passed_over = f"; passed over {'; '.join(refusals)}" if refusals else ""
            return KernelChoice(kernels, f"{candidate} ({name}, {device.type}, {dtype}){passed_over}")
        refusals.append(f"{candidate}: {reason}")
    raise ValueError(f"kernels={name!r}: {'; '.join(refusals)}")
