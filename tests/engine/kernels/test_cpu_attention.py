"""Attention of the CPU kernels against the reference in float64, over poisoned pools, on every instruction set; its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_problems import Problem, laid_out, machine, make_problem, pool_of, rows_of
from torch import Tensor

from pearl import _C

ISAS = _C.cpu.supported_isas()
FP32, BF16 = torch.float32, torch.bfloat16

SHAPES = [
    # heads, head_dim, block_size, window
    ((9, 3), 64, 16, 0),
    ((4, 4), 64, 32, 0),
    ((8, 1), 128, 16, 0),
    ((14, 2), 64, 128, 0),
    ((5, 5), 80, 16, 0),
    ((6, 2), 96, 48, 0),
    ((7, 1), 256, 16, 0),
    ((2, 1), 16, 16, 0),
    ((70, 1), 16, 16, 0),
    ((4, 2), 18, 16, 0),
    ((4, 2), 2, 16, 0),
    ((6, 2), 64, 1, 0),
    ((6, 2), 64, 8, 0),
    ((6, 2), 40, 5, 0),
    ((9, 3), 64, 16, 1),
    ((9, 3), 64, 16, 37),
    ((6, 2), 80, 7, 130),
    ((6, 2), 64, 256, 600),
]
BATCHES = [
    # contexts, queries
    ([1], [1]),
    ([16, 33, 130], [1, 1, 1]),
    ([7, 300, 31, 40, 150], [1, 1, 31, 3, 90]),
    ([513, 1100], [1, 1]),
    ([700], [200]),
]


def assert_right(problem: Problem) -> None:
    assert_close(problem.cpu(), problem.exact())


def assert_close(out: Tensor, exact: Tensor) -> None:
    """fp32: to its last digits. bf16: the weights and the output are rounded, no more."""
    assert bool(torch.isfinite(out).all())
    error = (out.double() - exact).abs()
    if out.dtype == FP32:
        assert float(error.max()) < 1e-5
    else:
        assert float((error - exact.abs() * 2**-8).max()) < 6e-3
        assert float(error.mean()) < 1.5e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_paged_attention(isa: str, dtype: torch.dtype) -> None:
    """Every shape with every batch; all slots that no query may see hold NaN."""
    with machine(isa):
        for heads, dim, block_size, window in SHAPES:
            for contexts, queries in BATCHES:
                shape = {"heads": heads, "dim": dim, "block_size": block_size, "window": window}
                assert_right(make_problem(contexts, queries, dtype=dtype, **shape))


def test_the_tolerance_tells_wrong_variants_apart() -> None:
    """One key more or less, a slightly other scale, another order of heads: each is outside of what is allowed."""
    for dtype in (FP32, BF16):
        right = make_problem([100], [1], dtype=dtype, window=64, poison=3.0)
        exact = right.exact()
        wrong = [
            replace(right, window=63),
            replace(right, window=65),
            replace(right, scale=right.scale * 1.05),
            replace(right, q_THB=right.q_THB.flip(1).contiguous()),
        ]
        for variant in wrong:
            with pytest.raises(AssertionError):
                assert_close(variant.cpu(), exact)
        assert_close(right.cpu(), exact)


def test_a_nan_that_counts_is_not_hidden() -> None:
    for dtype in (FP32, BF16):
        for isa in ISAS:
            problem = make_problem([70, 70], [1, 1], dtype=dtype, poison=float("nan"))
            with machine(isa):
                for which in (0, 1):
                    plain = problem.clean.clone()
                    block = int(problem.batch.block_tables_SN[0, 2])
                    plain[which, block, 0, 5, 3] = float("nan")
                    out = replace(problem, pool=laid_out(plain)).cpu()
                    group = problem.q_THB.shape[1] // 2
                    hit = out[0, :group].isnan()
                    assert bool(hit.all() if which == 0 else hit[:, 3].all())
                    assert not bool(out[0, group:].isnan().any() or out[1].isnan().any())


def test_nothing_and_sequences_without_queries() -> None:
    empty = make_problem([40], [1])
    nothing = replace(
        empty,
        q_THB=empty.q_THB[:0],
        batch=replace(
            empty.batch,
            query_starts_S1=torch.zeros(1, dtype=torch.int32),
            context_lens_S=empty.batch.context_lens_S[:0],
            block_tables_SN=empty.batch.block_tables_SN[:0],
        ),
    )
    assert nothing.cpu().shape == (0, 6, 64)
    assert_right(make_problem([40, 0, 20, 35], [1, 0, 0, 20]))


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "block_size", "window"), [(BF16, 16, 0), (FP32, 16, 0), (BF16, 5, 0), (BF16, 32, 100)])
def test_a_row_does_not_depend_on_its_batch(isa: str, dtype: torch.dtype, block_size: int, window: int) -> None:
    contexts, queries = [200, 1300, 33, 90, 640], [1, 1, 1, 90, 100]
    problem = make_problem(contexts, queries, heads=(9, 3), dtype=dtype, block_size=block_size, window=window)
    starts = problem.batch.query_starts_S1.tolist()
    with machine(isa, threads=1):
        whole = problem.cpu()
        for s in range(len(contexts)):
            assert torch.equal(rows_of(problem, [s]).cpu(), whole[starts[s] : starts[s + 1]])
        turned = rows_of(problem, [4, 2, 0]).cpu()
    assert torch.equal(turned, torch.cat([whole[starts[s] : starts[s + 1]] for s in (4, 2, 0)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "window"), [(BF16, 0), (FP32, 0), (BF16, 300)])
def test_a_token_does_not_depend_on_the_chunk_it_came_in(isa: str, dtype: torch.dtype, window: int) -> None:
    """A prompt of 700 at once, in chunks of several sizes, and its tokens one by one as if they had been decoded."""
    prompt = make_problem([700], [700], heads=(6, 2), dtype=dtype, window=window)
    with machine(isa, threads=1):
        whole = prompt.cpu()
        for first, last in ((0, 1), (0, 37), (37, 300), (300, 301), (511, 512), (512, 513), (301, 700), (699, 700)):
            chunk = replace(
                prompt,
                q_THB=prompt.q_THB[first:last].contiguous(),
                batch=replace(
                    prompt.batch,
                    query_starts_S1=torch.tensor([0, last - first], dtype=torch.int32),
                    context_lens_S=torch.tensor([last], dtype=torch.int32),
                ),
            )
            assert torch.equal(chunk.cpu(), whole[first:last])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """Few sequences with long contexts are cut among threads; many are not, nor is a prompt."""
    problems = [
        make_problem([2100], [1], heads=(6, 2), dtype=dtype),
        make_problem([2100, 1500], [1, 1], heads=(6, 2), dtype=dtype, window=1200),
        make_problem([300] * 12 + [400], [1] * 12 + [400], heads=(9, 3), dtype=dtype),
    ]
    for problem in problems:
        with machine(threads=1):
            alone = problem.cpu()
        for threads in (2, 3, 8):
            with machine(threads=threads):
                assert torch.equal(problem.cpu(), alone)
        assert_right(problem)


def test_whole_and_lone_rows_agree_among_many_heads() -> None:
    """Groups larger than an item are cut; which rows share an item changes nothing."""
    problem = make_problem([150, 150], [1, 20], heads=(140, 2), dim=16)
    whole = problem.cpu()
    assert torch.equal(rows_of(problem, [1]).cpu(), whole[1:])


# ---------------------------------------------------------------------------------------------------- what is refused


def test_the_layout_depends_on_dtype_and_block_size_alone() -> None:
    names = {size: [_C.cpu.kv_layout(dtype, size) for dtype in ("bfloat16", "float32")] for size in (1, 8, 16, 24, 256)}
    tiles = ["pairs16", "columns16"]
    assert names == {1: ["plain"] * 2, 8: ["plain"] * 2, 16: tiles, 24: ["plain"] * 2, 256: tiles}
    with pytest.raises(ValueError, match="dtype=float16: must be float32 or bfloat16"):
        _C.cpu.kv_layout("float16", 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (5, 2)}, "heads=5: must be a multiple of kv_heads=2"),
        ({"dim": 258}, "head_dim=258: must be even, from 2 to 256"),
        ({"dim": 17, "block_size": 5}, "head_dim=17: must be even"),
        ({"window": -1}, "window=-1: must be >= 0"),
    ],
)
def test_sizes_that_no_kernel_serves_are_refused(change: dict, message: str) -> None:
    problem = make_problem([20], [1], **change)
    with pytest.raises(ValueError, match=message):
        problem.cpu()


def test_batches_that_do_not_fit_are_refused() -> None:
    problem = make_problem([40, 20], [1, 3])

    def refused(message: str, **fields: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=message):
            replace(problem, batch=replace(problem.batch, **fields)).cpu()

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    refused("query_starts: must begin with 0 and end with the number of queries, 4", query_starts_S1=ints(0, 1, 5))
    refused("queries=3 of sequence 1: must be from 0 to its context of 2", context_lens_S=ints(40, 2))
    refused("context_lens=200 of sequence 0: its block table has 4 blocks of 16", context_lens_S=ints(200, 20))
    tables = problem.batch.block_tables_SN.clone()
    tables[1, 1] = 99
    refused("block_tables=99 of sequence 1: must be from 0 to 6", block_tables_SN=tables)
    with pytest.raises(ValueError, match="blocks=0: must be >= 1"):
        _C.cpu.KvPool(problem.pool.data_ptr(), 0, 2, 16, 64, "bfloat16")
    with pytest.raises(ValueError, match="kv: must be an address, got none"):
        _C.cpu.KvPool(0, 1, 2, 16, 64, "bfloat16")
    assert pool_of(problem.pool) is not None
