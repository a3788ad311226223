"""Attention of the Triton kernels against the reference in float64: pages, chunks, windows, splits, poisoned pools."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from triton_cases import DEVICE, DTYPES, HALF, NAN, TOLERANCE, Problem, gap, normal, paged, uninitialised_memory_is_nan

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.kernels.triton import attention_plan
from pearl.engine.kernels.triton.attention_plan import plan_chunks, plan_decode
from pearl.engine.kernels.triton.kernels import TritonKernels

KERNELS = TritonKernels()


def answer(problem: Problem) -> torch.Tensor:
    return KERNELS.paged_attention(problem.q_THB, problem.pool, problem.batch, problem.scale, problem.window)


def assert_right(problem: Problem) -> None:
    found = answer(problem)
    assert found.dtype == problem.q_THB.dtype
    assert gap(found, problem.expected()) < TOLERANCE[problem.q_THB.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "block_size"),
    [((14, 2), 8, 8), ((10, 2), 16, 3), ((12, 2), 96, 16), ((6, 1), 80, 8), ((3, 3), 2, 1), ((4, 1), 256, 256)],
)
def test_a_mixed_batch(heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Decode rows, whole prompts, chunks after a cached prefix; groups of 7 and 5 heads; head sizes that are no power of 2."""
    contexts, queries = [1, 17, 70, 9, 40, 3], [1, 1, 1, 9, 13, 2]
    assert_right(paged(contexts, queries, heads=heads, dim=dim, block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_tiles_of_many_queries(dtype: torch.dtype) -> None:
    """A chunk of several tiles with whole tiles of keys that no row has to mask, and one that begins within a tile of keys."""
    assert_right(paged([300, 150], [150, 150], heads=(2, 1), dim=32, block_size=16, dtype=dtype))
    assert_right(paged([20, 333], [1, 70], heads=(3, 1), dim=64, block_size=32, dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 17, 100])
def test_windows(window: int) -> None:
    """Keys that left the window are NaN in the pool, those that share a block with a seen one too."""
    assert_right(paged([1, 3, 4, 5, 40, 9, 30, 4], [1, 1, 1, 1, 1, 9, 6, 3], block_size=4, window=window))


@pytest.mark.parametrize("window", [64, 90, 130])
def test_windows_of_several_tiles(window: int) -> None:
    """Tiles before, across and after the edge of the window, and between the edges."""
    assert_right(paged([400, 333], [120, 140], heads=(2, 1), dim=16, block_size=16, window=window, dtype=HALF[0]))


def test_neighbouring_windows_differ() -> None:
    outs = [answer(dataclasses.replace(paged([9, 12], [1, 5]), window=window)) for window in (0, 3, 4, 5)]
    assert min(float((a - b).abs().max()) for i, a in enumerate(outs) for b in outs[:i]) > 0.02


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf, 1e30])
def test_what_is_no_key_is_not_read(poison: float) -> None:
    assert_right(paged([1, 3, 5, 5, 9], [1, 1, 1, 5, 2], block_size=4, poison=poison))


@pytest.mark.parametrize("window", [0, 150, 300])
def test_keys_split_among_programs(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits, the last one short, rows of which some have none in some split; the parts begin as NaN."""
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 128)
    monkeypatch.setattr(attention_plan, "CHUNK_SPLIT_KEYS", 64)
    with uninitialised_memory_is_nan():
        assert_right(paged([1, 128, 129, 300, 257, 40], [1, 1, 1, 1, 30, 40], heads=(2, 1), block_size=16, window=window))


@pytest.mark.parametrize("window", [0, 1200])
def test_more_splits_than_are_added_up_at_a_time(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 11, 8, 9 and 1 of them; in a window the parts' slots are used in turn."""
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 128)
    with uninitialised_memory_is_nan():
        assert_right(paged([1300, 1024, 1025, 5], [1] * 4, heads=(2, 1), block_size=16, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 6])
def test_three_chunks_give_what_one_gives(window: int, dtype: torch.dtype) -> None:
    """A prompt of 21 tokens at once, and as 8, 8 and 5 over what the chunks before have written."""
    whole = paged([21], [21], block_size=4, window=window, dtype=dtype)
    found = []
    for begin, end in ((0, 8), (8, 16), (16, 21)):
        batch = dataclasses.replace(
            whole.batch,
            positions_T=whole.batch.positions_T[begin:end],
            query_starts_S1=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            context_lens_S=torch.tensor([end], dtype=torch.int32, device=DEVICE),
            max_query_len=end - begin,
            max_context_len=end,
        )
        pool = whole.pool.clone()
        for place in whole.batch.slot_mapping_T[end:].tolist():
            pool[:, place // 4, :, place % 4] = NAN
        found.append(answer(dataclasses.replace(whole, q_THB=whole.q_THB[begin:end], pool=pool, batch=batch)))
    assert gap(torch.cat(found), answer(whole)) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 128)
    contexts = [1200, 20, 1025]
    problem = paged(contexts, [1, 1, 1], block_size=16)
    together = answer(problem)
    for row, context in enumerate(contexts):
        batch = dataclasses.replace(
            problem.batch,
            positions_T=problem.batch.positions_T[row : row + 1],
            query_starts_S1=problem.batch.query_starts_S1[:2],
            context_lens_S=problem.batch.context_lens_S[row : row + 1],
            block_tables_SN=problem.batch.block_tables_SN[row : row + 1],
            num_decodes=1,
            max_context_len=context,
        )
        alone = answer(dataclasses.replace(problem, q_THB=problem.q_THB[row : row + 1], batch=batch))
        assert torch.equal(alone[0], together[row])


def test_nan_stays_in_its_own_row() -> None:
    problem = paged([5, 9, 8], [1, 1, 4])
    expected = problem.expected()
    problem.q_THB[1] = NAN
    problem.q_THB[3, 1] = NAN
    found = answer(problem)
    assert bool(found[1].isnan().all()) and bool(found[3, 1].isnan().all())
    found[1], found[3, 1] = expected[1], expected[3, 1]
    assert gap(found, expected) < 1e-5


def test_places_beyond_two_billion_elements() -> None:
    """Block number times stride does not fit 32 bits; of the 8 GB only the pages that are touched exist off a GPU."""
    kv_heads, block_size, dim = 4, 64, 128
    stride = kv_heads * block_size * dim
    blocks = (1 << 31) // stride + 3
    small = paged([70, 20], [1, 20], heads=(4, 4), dim=dim, block_size=block_size, dtype=HALF[0])
    pool = torch.empty(2, blocks, kv_heads, block_size, dim, dtype=HALF[0], device=DEVICE)
    moved = small.batch.block_tables_SN + (blocks - small.pool.shape[1])
    pool[:, blocks - small.pool.shape[1] :] = small.pool
    assert int(moved.max()) * stride >= 1 << 31
    found = KERNELS.paged_attention(
        small.q_THB, pool, dataclasses.replace(small.batch, block_tables_SN=moved), small.scale
    )
    assert gap(found, small.expected()) < TOLERANCE[HALF[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "window"), [((5,), 0), ((1, 40, 0, 7, 1), 0), ((33, 12), 6), ((130, 70), 20)])
def test_packed_sequences(lengths: tuple[int, ...], window: int, dtype: torch.dtype) -> None:
    tokens = sum(lengths)
    q, k, v = (normal(tokens, heads, 16, dtype=dtype, seed=heads + i) for i, heads in enumerate((6, 2, 2)))
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    batch = PackedBatch(positions_T=positions, lengths=lengths)
    expected = ReferenceKernels().varlen_attention(q.double(), k.double(), v.double(), batch, 0.5, window)
    assert gap(KERNELS.varlen_attention(q, k, v, batch, 0.5, window), expected) < TOLERANCE[dtype]


def test_packed_sequences_are_checked() -> None:
    q, k = normal(5, 4, 16), normal(5, 2, 16)
    batch = PackedBatch(positions_T=torch.arange(5, device=DEVICE), lengths=(4,))
    with pytest.raises(ValueError, match="lengths sum to 4: must be the number of tokens, 5"):
        KERNELS.varlen_attention(q, k, k, batch, 1.0)
    with pytest.raises(ValueError, match="no backward pass"):
        KERNELS.varlen_attention(q.requires_grad_(), k, k, dataclasses.replace(batch, lengths=(5,)), 1.0)
    none = PackedBatch(positions_T=torch.arange(0, device=DEVICE), lengths=())
    with torch.no_grad():
        assert KERNELS.varlen_attention(q[:0], k[:0], k[:0], none, 1.0).shape == (0, 4, 16)


# ---------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [2, 64, 80, 128, 256])
def test_plans_are_made_of_whole_tiles(dim: int, itemsize: int) -> None:
    for context in (1, 511, 512, 513, 40000, 131072):
        decode = plan_decode(rows=3, group=5, dim=dim, itemsize=itemsize, max_context=context, window=0)
        assert decode.split_keys % decode.tile == 0 and decode.rows >= 5
        assert (decode.splits - 1) * decode.split_keys < context <= decode.splits * decode.split_keys
        assert decode.splits <= attention_plan.MAX_SPLITS
        for tokens in (1, 64, 4096):
            plan = plan_chunks(
                tokens=tokens, sequences=2, max_queries=tokens, kv_heads=2, group=3, dim=dim, itemsize=itemsize,
                max_context=max(context, tokens), window=0, chip=90,
            )  # fmt: skip
            assert plan.split_keys % plan.tile == 0 and plan.queries * 3 <= plan.rows
            assert (plan.splits - 1) * plan.split_keys < max(context, tokens) <= plan.splits * plan.split_keys
            assert plan.splits == 1 or plan.splits <= attention_plan.MAX_CHUNK_SPLITS


def test_decode_splits_do_not_depend_on_the_batch() -> None:
    """Up to the longest context for which the number of splits suffices, all have the same bounds."""
    bounds = {
        plan_decode(rows=rows, group=4, dim=128, itemsize=2, max_context=context, window=0).split_keys
        for rows in (1, 7, 256)
        for context in (1, 4096, attention_plan.MAX_SPLITS * attention_plan.SPLIT_KEYS)
    }
    assert bounds == {attention_plan.SPLIT_KEYS}


def test_a_window_needs_few_splits() -> None:
    """Every placing of a window of keys over the splits is covered, and no more than one split is added."""
    for window in (1, 2, 511, 512, 513, 514, 1024, 1025):
        plan = plan_decode(rows=1, group=1, dim=64, itemsize=2, max_context=8192, window=window)
        touched = max((last // 512) - (max(0, last + 1 - window) // 512) + 1 for last in range(8192))
        assert plan.splits == touched
