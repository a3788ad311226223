"""Norms, SiLU, rotary embedding and the writing of the pool by the CPU kernels, against the reference and plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_problems import NAMES, laid_out, machine, pool_of
from torch import Tensor

from pearl import _C
from pearl.engine.kernels.reference import ReferenceKernels

ISAS = _C.cpu.supported_isas()
FP32, BF16 = torch.float32, torch.bfloat16
REFERENCE = ReferenceKernels()
SIZES = [1, 3, 16, 17, 30, 64, 576, 1000]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


def assert_same(out: Tensor, expected: Tensor) -> None:
    """fp32: the last digits. bf16: the last one, where a tie of the rounding falls the other way."""
    relative, absolute = (2e-6, 2e-6) if out.dtype == FP32 else (2**-7, 1e-6)
    torch.testing.assert_close(out, expected, rtol=relative, atol=absolute)
    if out.dtype == BF16 and out.numel() > 1000:
        assert float((out != expected).double().mean()) < 0.01


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    out = torch.full_like(x, float("nan")) if out is None else out
    place = 0 if residual is None else residual.data_ptr()
    _C.cpu.rms_norm(*x.shape, NAMES[x.dtype], x.data_ptr(), place, weight.data_ptr(), 1e-5, out.data_ptr())
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norms(isa: str, dtype: torch.dtype) -> None:
    with machine(isa):
        for size in SIZES:
            x, residual = numbers(5, size, dtype=dtype), numbers(5, size, dtype=dtype, seed=1)
            weight = numbers(size, dtype=dtype, seed=2)
            assert_same(rms_norm(x, weight), REFERENCE.rms_norm(x, weight, 1e-5))
            normed, total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
            own = residual.clone()
            assert_same(rms_norm(x, weight, own), normed)
            assert torch.equal(own, total)  # the sum is rounded once, like torch's
            in_place = x.clone()
            rms_norm(in_place, weight, residual.clone(), out=in_place)
            assert torch.equal(in_place, rms_norm(x, weight, residual.clone()))
        assert rms_norm(numbers(0, 8, dtype=dtype), weight).shape == (0, 8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_silu_and_mul(isa: str, dtype: torch.dtype) -> None:
    with machine(isa):
        for size in SIZES:
            gate_up = 20 * numbers(4, 2 * size, dtype=dtype)
            out = torch.full((4, size), float("nan"), dtype=dtype)
            _C.cpu.silu_and_mul(4, size, NAMES[dtype], gate_up.data_ptr(), out.data_ptr())
            assert_same(out, REFERENCE.silu_and_mul(gate_up))


def tables(positions: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines whose halves differ, so that a table read in the wrong place shows."""
    return numbers(positions, dim, dtype=FP32, seed=8), numbers(positions, dim, dtype=FP32, seed=9)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope(isa: str, dtype: torch.dtype, normed: bool) -> None:
    with machine(isa):
        for dim in (2, 6, 16, 64, 80, 96, 128, 256):
            x, weight = numbers(5, 3, dim, dtype=dtype), numbers(dim, dtype=dtype, seed=1) if normed else None
            cos, sin = tables(5, dim)
            out = torch.full_like(x, float("nan"))
            place = 0 if weight is None else weight.data_ptr()
            arguments = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), place, 1e-5)
            _C.cpu.norm_rope(5, 3, dim, NAMES[dtype], *arguments, out.data_ptr())
            expected = REFERENCE.qk_norm_rope(x, x, cos, sin, weight, weight, 1e-5)[0]
            torch.testing.assert_close(out, expected, rtol=2**-7 if dtype == BF16 else 1e-5, atol=1e-5)
            _C.cpu.norm_rope(5, 3, dim, NAMES[dtype], *arguments, x.data_ptr())
            assert torch.equal(x, out)


# ---------------------------------------------------------------------------------------------------- the pool


def placed(k: Tensor, v: Tensor, slots: list[int], blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The pool in plain order with NaN elsewhere, and which of its cells were written."""
    plain = torch.full((2, blocks, k.shape[1], block_size, k.shape[2]), float("nan"), dtype=k.dtype)
    for which, rows in enumerate((k, v)):
        for row, slot in zip(rows, slots, strict=True):
            plain[which, slot // block_size, :, slot % block_size] = row
    return plain, ~plain.isnan()


SLOTS = {
    "a prompt over two blocks": list(range(40, 80)),
    "a chunk that begins and ends within a pair": list(range(33, 46)),
    "decoded tokens": [5, 36, 71, 100],
    "backwards": [11, 10, 9, 8],
    "a pair whose halves come apart": [20, 64, 21],
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS.keys())
def test_store_kv(isa: str, dtype: torch.dtype, slots: list[int]) -> None:
    """Written cells hold their numbers, all others what they held."""
    with machine(isa):
        for block_size, dim in ((32, 64), (16, 6), (5, 16), (1, 4)):
            blocks = 128 // block_size + 1
            k, v = (numbers(len(slots), 2, dim, dtype=dtype, seed=seed) for seed in (0, 1))
            plain, written = placed(k, v, slots, blocks, block_size)
            pool = torch.full_like(plain, float("nan"))
            places = torch.tensor(slots)
            _C.cpu.store_kv(pool_of(pool), len(slots), k.data_ptr(), v.data_ptr(), places.data_ptr())
            expected, where = laid_out(plain), laid_out(written.to(dtype)).bool()
            assert torch.equal(pool[where], expected[where])
            assert bool(pool[~where].isnan().all())


def test_the_second_half_of_a_pair_keeps_the_first() -> None:
    """Token by token, with stale numbers in the pool: the same as all at once."""
    slots = list(range(16, 29))
    k, v = (numbers(len(slots), 2, 16, dtype=BF16, seed=seed) for seed in (0, 1))
    at_once, by_token = (torch.full((2, 3, 2, 16, 16), 7.0, dtype=BF16) for _ in range(2))
    places = torch.tensor(slots)
    _C.cpu.store_kv(pool_of(at_once), len(slots), k.data_ptr(), v.data_ptr(), places.data_ptr())
    for i in range(len(slots)):
        _C.cpu.store_kv(pool_of(by_token), 1, k[i].data_ptr(), v[i].data_ptr(), places[i:].data_ptr())
    assert torch.equal(at_once, by_token)
    pairs = at_once[1, 1].view(2, 8, 16, 2)
    assert bool((pairs[:, 6, :, 1] == 7).all()) and bool((pairs[:, 7] == 7).all())
    assert torch.equal(pairs[:, 3, :, 1], v[7])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norm_rope_store(threads: int, dtype: torch.dtype) -> None:
    """The fused call against its parts: odd chunk borders of prompts, decoded tokens between them."""
    heads, kv_heads, dim, block_size = 6, 2, 64, 16
    slots = [*range(3, 50), 67, *range(81, 180)]
    tokens = len(slots)
    qkv = numbers(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q_weight, k_weight = numbers(dim, dtype=dtype, seed=1), numbers(dim, dtype=dtype, seed=2)
    cos, sin = tables(500, dim)
    positions = torch.from_numpy(np.random.default_rng(3).integers(0, 500, tokens))
    q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
    q, k = REFERENCE.qk_norm_rope(q, k, cos[positions], sin[positions], q_weight, k_weight, 1e-5)
    pool = torch.full((2, 12, kv_heads, block_size, dim), float("nan"), dtype=dtype)
    places = torch.tensor(slots)
    tensors = (qkv, positions, cos, sin, q_weight, k_weight)
    with machine(threads=threads):
        _C.cpu.norm_rope_store(tokens, heads, *(x.data_ptr() for x in tensors), 1e-5, pool_of(pool), places.data_ptr())
    tolerance = {"rtol": 2**-7 if dtype == BF16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(qkv[:, :heads], q, **tolerance)
    plain, written = placed(k, v, slots, 12, block_size)
    where = laid_out(written.to(dtype)).bool()
    torch.testing.assert_close(pool[where], laid_out(plain)[where], **tolerance)
    assert torch.equal(pool[1][where[1]], laid_out(plain)[1][where[1]])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_do_not_depend_on_others_or_threads(dtype: torch.dtype) -> None:
    x, weight = numbers(300, 576, dtype=dtype), numbers(576, dtype=dtype, seed=1)
    with machine(threads=1):
        alone = rms_norm(x, weight)
        assert torch.equal(rms_norm(x[7:9].contiguous(), weight), alone[7:9])
    with machine(threads=3):
        assert torch.equal(rms_norm(x, weight), alone)


def test_refusals() -> None:
    x = numbers(2, 8, dtype=FP32)
    with pytest.raises(ValueError, match="size=0: must be >= 1"):
        _C.cpu.rms_norm(2, 0, "float32", x.data_ptr(), 0, x.data_ptr(), 1e-5, x.data_ptr())
    with pytest.raises(ValueError, match="weight: must be an address, got none"):
        _C.cpu.rms_norm(2, 8, "float32", x.data_ptr(), 0, 0, 1e-5, x.data_ptr())
    with pytest.raises(ValueError, match="dtype=int8: must be float32 or bfloat16"):
        _C.cpu.silu_and_mul(2, 4, "int8", x.data_ptr(), x.data_ptr())
    with pytest.raises(ValueError, match="head_dim=7: must be even"):
        _C.cpu.norm_rope(2, 1, 7, "float32", *[x.data_ptr()] * 3, 0, 1e-5, x.data_ptr())
    pool, slot = torch.zeros(2, 2, 1, 4, 8), torch.tensor([8])
    with pytest.raises(ValueError, match="slots=8 of token 0: must be from 0 to 7"):
        _C.cpu.store_kv(pool_of(pool), 1, x.data_ptr(), x.data_ptr(), slot.data_ptr())
