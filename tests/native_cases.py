"""What the tests of `pearl._C.cpu` share: aligned memory, packed weights, products by address, and each instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl import _C

cpu = _C.cpu
ISAS: list[str] = cpu.supported_isas()
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@contextmanager
def using(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Runs the body on this instruction set and so many threads."""
    before = cpu.isa() if isa is None else cpu.use_isa(isa)
    count = cpu.threads()
    try:
        cpu.set_threads(threads or count)
        yield
    finally:
        cpu.use_isa(before)
        cpu.set_threads(count)


def aligned(bytes_: int) -> Tensor:
    """So many bytes at a multiple of 64, every one of them 0xFF (NaN in either format)."""
    memory = torch.full((bytes_ + 64,), 255, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + bytes_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed weight and the memory that it lies in."""

    weight: object
    memory: Tensor
    columns: int


def pack(weight_NK: Tensor, *, halves: bool = False) -> Packed:
    n, k = weight_NK.shape
    dtype = DTYPES[weight_NK.dtype]
    memory = aligned(cpu.packed_bytes(n, k, dtype, halves))
    packed = cpu.pack(weight_NK.contiguous().data_ptr(), n, k, dtype, halves, memory.data_ptr(), len(memory))
    return Packed(weight=packed, memory=memory, columns=n // 2 if halves else n)


def gemm(
    x_MK: Tensor, packed: Packed, epilogue: str = "none", *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The product in fresh memory, behind whose rows nothing may be written (checked)."""
    dtype = torch.float32 if epilogue == "wide" else x_MK.dtype
    stride = packed.columns + 3
    y = torch.full((len(x_MK), stride), 77.0, dtype=dtype)
    cpu.gemm(
        x_MK.data_ptr(),
        len(x_MK),
        x_MK.stride(0),
        packed.weight,
        y.data_ptr(),
        stride,
        epilogue,
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
    )
    assert bool((y[:, packed.columns :] == 77.0).all())
    return y[:, : packed.columns].contiguous()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
