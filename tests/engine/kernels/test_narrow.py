"""Kernels of a bf16 training pass against the same numbers in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pearl.engine.kernels import narrow
from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.narrow import NarrowKernels, wide_product
from pearl.engine.kernels.reference import ReferenceKernels

BF16 = 2**-8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def attended(kernels: ReferenceKernels, parts: list[Tensor], lengths: tuple[int, ...], window: int) -> list[Tensor]:
    """Output and gradients of attention whose output is weighed by fixed numbers."""
    batch = PackedBatch(positions_T=torch.cat([torch.arange(n) for n in lengths]), lengths=lengths)
    leaves = [part.detach().requires_grad_() for part in parts]
    out = kernels.varlen_attention(*leaves, batch, 0.25, window)
    out.backward(draw(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("lengths", [(7,), (1, 40, 5, 6, 1, 22), (33, 33, 33)])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
def test_attention(heads: tuple[int, int], lengths: tuple[int, ...], window: int) -> None:
    parts = [draw(sum(lengths), count, 16, seed=seed) for seed, count in enumerate((*heads, heads[1]))]
    ours = attended(NarrowKernels(), parts, lengths, window)
    exact = attended(ReferenceKernels(), [part.double() for part in parts], lengths, window)
    for found, expected in zip(ours, exact, strict=True):
        assert found.dtype == torch.bfloat16 and relative(found, expected) < 2 * BF16


def test_long_sequences_and_other_dtypes_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (9, 12)
    parts = [draw(21, count, 16, seed=count) for count in (4, 2, 2)]
    short = attended(NarrowKernels(), parts, lengths, 0)
    monkeypatch.setattr(narrow, "LONGEST", 8)
    reference = attended(ReferenceKernels(), parts, lengths, 0)
    assert all(map(torch.equal, attended(NarrowKernels(), parts, lengths, 0), reference))
    assert not torch.equal(short[0], reference[0])
    monkeypatch.undo()
    wide = [part.float() for part in parts]
    assert all(map(torch.equal, attended(NarrowKernels(), wide, lengths, 0), attended(ReferenceKernels(), wide, lengths, 0)))


def test_silu_and_mul() -> None:
    x = draw(5, 24)
    ours, exact = NarrowKernels().silu_and_mul(x), ReferenceKernels().silu_and_mul(x.double())
    assert ours.dtype == torch.bfloat16 and relative(ours, exact) < 2 * BF16
    assert torch.equal(NarrowKernels().silu_and_mul(x.float()), ReferenceKernels().silu_and_mul(x.float()))


def test_wide_products_round_factors_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(6, 64).float() + 1e-3, draw(50, 64)
    exact = x.bfloat16().double() @ weight.double().T
    native = wide_product(x, weight)
    monkeypatch.setattr(narrow, "native_cpu", lambda: (None, "not built"))
    plain = wide_product(x, weight)
    for found in (native, plain):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
    assert float((native.bfloat16().double() - exact).abs().max()) > 1e-3
