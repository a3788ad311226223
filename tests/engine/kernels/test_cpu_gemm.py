"""Matrix products of the CPU kernels against float64, on every instruction set: shapes, epilogues, padding, and their bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from native_cases import ISAS, Packed, aligned, cpu, gemm, pack, same_bits, using
from torch import Tensor

FP32, BF16 = torch.float32, torch.bfloat16
ROWS = [1, 2, 3, 5, 7, 8, 9, 12, 33, 130]
SHAPES = [(48, 32), (96, 64), (50, 33), (1, 1), (47, 7), (200, 577)]

each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(x: Tensor, weight: Tensor) -> Tensor:
    """How far a sum in fp32 over k terms, in any order, may be from the exact one."""
    k = x.shape[1]
    return (x.double().abs() @ weight.double().abs().T) * 2 * math.sqrt(k) * 2**-24 + 1e-30


def assert_close(y: Tensor, exact: Tensor, error: Tensor) -> None:
    """Within `error`, and half a unit in the last place of bf16 where y is rounded to it."""
    rounding = exact.abs() * 2**-8 if y.dtype == BF16 else 0
    assert bool(torch.isfinite(y).all())
    assert bool(((y.double() - exact).abs() <= error + rounding).all())


@each_isa
@each_dtype
def test_products_are_right(isa: str, dtype: torch.dtype) -> None:
    with using(isa):
        for n, k in SHAPES:
            weight = numbers(n, k, dtype=dtype, seed=n)
            packed = pack(weight)
            for rows in ROWS:
                x = numbers(rows, k, dtype=dtype, seed=rows)
                exact, error = x.double() @ weight.double().T, tolerance(x, weight)
                assert_close(gemm(x, packed), exact, error)
                wide = gemm(x, packed, "wide")
                assert wide.dtype == FP32
                assert_close(wide, exact, error)


@each_isa
@each_dtype
def test_bias_and_residual_are_added_before_the_rounding(isa: str, dtype: torch.dtype) -> None:
    n, k = 100, 37
    weight, bias, packed = numbers(n, k, dtype=dtype, seed=1), numbers(n, dtype=dtype, seed=2), None
    with using(isa):
        packed = pack(weight)
        for rows in (1, 4, 9):
            x, residual = numbers(rows, k, dtype=dtype, seed=3), numbers(rows, n, dtype=dtype, seed=4)
            error = tolerance(x, weight) + 1e-6
            product = x.double() @ weight.double().T
            assert_close(gemm(x, packed, bias=bias), product + bias.double(), error)
            assert_close(gemm(x, packed, "wide", bias=bias), product + bias.double(), error)
            assert_close(gemm(x, packed, "residual", residual=residual), product + residual.double(), error)
            both = gemm(x, packed, "residual", bias=bias, residual=residual)
            assert_close(both, product + bias.double() + residual.double(), error)


@each_isa
@each_dtype
@pytest.mark.parametrize("n", [2, 96, 110, 290])
def test_gated_products(isa: str, dtype: torch.dtype, n: int) -> None:
    """Columns j of silu(gate) * up from rows j and n/2 + j of one weight."""
    weight, bias = numbers(n, 45, dtype=dtype, seed=n), numbers(n, dtype=dtype, seed=2)
    with using(isa):
        packed = pack(weight, halves=True)
        for rows in (1, 8, 13, 40):
            x = numbers(rows, 45, dtype=dtype, seed=rows) * 3
            for shift in (None, bias):
                product = x.double() @ weight.double().T + (0 if shift is None else shift.double())
                gate, up = product.chunk(2, dim=-1)
                error = 2 * (tolerance(x, weight) + 1e-5).reshape(rows, 2, -1).amax(1) * (1 + product.abs().amax())
                assert_close(gemm(x, packed, "silu_mul", bias=shift), F.silu(gate) * up, error)


@each_isa
def test_gates_far_from_zero(isa: str) -> None:
    """silu over the whole range of fp32: exp neither overflows into NaN nor loses its last digits."""
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])])[:, None]
    with using(isa):
        y = gemm(x, pack(torch.ones(2, 1), halves=True), "silu_mul")[:, 0].double()
    gate = x[:, 0].double()
    exact = torch.sigmoid(gate) * gate * gate
    kept = exact.abs() < 3e38
    assert bool(((y - exact).abs()[kept] <= 5e-7 * exact.abs()[kept] + 1e-34).all())
    assert not bool(torch.isnan(y).any())


@each_isa
@each_dtype
def test_a_row_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    n, k = 150, 131
    weight = numbers(n, k, dtype=dtype, seed=1)
    x = numbers(300, k, dtype=dtype, seed=2)
    with using(isa):
        for packed, epilogue in ((pack(weight), "none"), (pack(weight), "wide"), (pack(weight, halves=True), "silu_mul")):
            alone = torch.cat([gemm(row[None], packed, epilogue) for row in x])
            for rows in (2, 6, 7, 8, 9, 31, 129, 300):
                for first in {0, 300 - rows}:
                    assert same_bits(gemm(x[first : first + rows], packed, epilogue), alone[first : first + rows])


@each_isa
@each_dtype
def test_a_column_has_the_same_bits_in_every_weight(isa: str, dtype: torch.dtype) -> None:
    weight, x = numbers(130, 60, dtype=dtype, seed=1), numbers(9, 60, dtype=dtype, seed=2)
    with using(isa):
        whole = gemm(x, pack(weight), "wide")
        for low, high in ((0, 50), (50, 130), (129, 130)):
            assert same_bits(gemm(x, pack(weight[low:high]), "wide"), whole[:, low:high].contiguous())


@each_dtype
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    weight, x = numbers(700, 200, dtype=dtype, seed=1), numbers(260, 200, dtype=dtype, seed=2)
    packed = pack(weight)
    for rows in (1, 8, 33, 260):
        alone = gemm(x[:rows], packed)
        with using(threads=threads):
            assert same_bits(pack(weight).memory, packed.memory)
            for _ in range(20):
                assert same_bits(gemm(x[:rows], packed), alone)


@each_isa
@each_dtype
def test_nothing_past_a_row_counts(isa: str, dtype: torch.dtype) -> None:
    """x is a part of a wider array of NaN; the last element of an odd k has a NaN right behind it."""
    weight = numbers(50, 33, dtype=dtype, seed=1)
    wide = torch.full((9, 40), math.nan, dtype=dtype)
    wide[:, :33] = numbers(9, 33, dtype=dtype, seed=2)
    with using(isa):
        packed = pack(weight)
        assert same_bits(gemm(wide[:, :33], packed), gemm(wide[:, :33].contiguous(), packed))


@each_isa
@each_dtype
def test_not_finite_inputs_stay_in_their_row(isa: str, dtype: torch.dtype) -> None:
    weight, x = numbers(50, 64, dtype=dtype, seed=1), numbers(9, 64, dtype=dtype, seed=2)
    broken = x.clone()
    broken[4, 7] = math.nan
    broken[5, 9] = math.inf
    with using(isa):
        packed = pack(weight)
        y, good = gemm(broken, packed), gemm(x, packed)
    assert bool(torch.isnan(y[4]).all())
    assert not bool(torch.isfinite(y[5]).any())
    kept = [0, 1, 2, 3, 6, 7, 8]
    assert same_bits(y[kept], good[kept])


@each_isa
def test_bf16_is_rounded_to_the_nearest_even(isa: str) -> None:
    """1 times any number of fp32, as the sum of three of bf16: exact sums, of which only the rounding is seen."""
    bits = torch.randint(0, 2**31 - 1, (500,), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    ties = (bits & ~0xFFFF) | 0x8000
    values = torch.cat([bits, ties]).to(torch.int32).view(FP32)
    values = values[(values.abs() > 1e-20) & (values.abs() < 1e20)]
    high = values.to(BF16)
    middle = (values - high.float()).to(BF16)
    low = (values - high.float() - middle.float()).to(BF16)
    x = torch.stack([high, middle, low], dim=1)
    assert bool((x.float().sum(1) == values).all())
    with using(isa):
        y = gemm(x, pack(torch.ones(1, 3, dtype=BF16)))[:, 0]
    assert torch.equal(y, values.to(BF16))


def test_an_empty_batch_does_nothing() -> None:
    packed = pack(torch.ones(50, 33))
    assert gemm(torch.empty(0, 33), packed).shape == (0, 50)


def test_the_residual_may_be_the_output() -> None:
    weight, x, stream = (numbers(*shape, dtype=BF16, seed=1) for shape in ((50, 32), (9, 32), (9, 50)))
    packed = pack(weight)
    expected = gemm(x, packed, "residual", residual=stream)
    address = stream.data_ptr()
    cpu.gemm(x.data_ptr(), 9, 32, packed.weight, address, 50, "residual", residual=address, residual_stride=50)
    assert same_bits(stream, expected)


@each_isa
def test_every_instruction_set_reads_the_same_packing(isa: str) -> None:
    weight = numbers(290, 45, dtype=BF16, seed=1)
    for halves in (False, True):
        plainest = pack(weight, halves=halves).memory
        with using(isa):
            assert torch.equal(pack(weight, halves=halves).memory, plainest)


def call(packed: Packed, **changes: object) -> None:
    x, y = torch.zeros(2, 32), torch.zeros(2, 96)
    arguments = {"x": x.data_ptr(), "rows": 2, "x_stride": 32, "weight": packed.weight, "y": y.data_ptr(), "y_stride": 96}
    cpu.gemm(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": -1}, "rows=-1: must be >= 0"),
        ({"x": 0}, "x: must be an address"),
        ({"x_stride": 31}, "x_stride=31: must be >= 32"),
        ({"y_stride": 95}, "y_stride=95: must be >= 96"),
        ({"epilogue": "relu"}, "epilogue=relu: must be one of none, residual, silu_mul, wide"),
        ({"epilogue": "silu_mul"}, "epilogue=silu_mul: must be silu_mul for a weight in halves"),
        ({"epilogue": "residual"}, "residual: must be an address"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    packed = pack(torch.zeros(96, 32))
    call(packed)
    with pytest.raises(ValueError, match=message):
        call(packed, **changes)


def test_wrong_weights_are_named() -> None:
    with pytest.raises(ValueError, match="n=0: must be >= 1"):
        cpu.packed_bytes(0, 4, "float32")
    with pytest.raises(ValueError, match="n=3: must be even"):
        cpu.packed_bytes(3, 4, "float32", True)
    with pytest.raises(ValueError, match="dtype=float16: must be one of bfloat16, float32"):
        cpu.packed_bytes(4, 4, "float16")
    weight, memory = torch.zeros(48, 4), aligned(48 * 4 * 4)
    with pytest.raises(ValueError, match="bytes=767: must be >= 768"):
        cpu.pack(weight.data_ptr(), 48, 4, "float32", False, memory.data_ptr(), 767)
    with pytest.raises(ValueError, match="dst: must be the address of memory aligned to 64 bytes"):
        cpu.pack(weight.data_ptr(), 48, 4, "float32", False, memory.data_ptr() + 4, 768)
