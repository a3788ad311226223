"""What the GPU suite asks of the kernels of attention: random problems, their answers in float64, and who else does it.

Owns the problems (`gpu_row_cases.py` has those of the other operations, in the same form). A problem is made on a GPU, in
Triton's interpreter (small), or of torch's meta tensors, whose launches are compiled for a chip that is not there. Invariant:
answers are computed by a few lines of float64 that share nothing with the kernels. Not run on a GPU yet.
Shapes: S sequences, T queries, H heads, G kv heads, B head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_measure import gap
from pearl.engine.kernels.flashinfer import FlashInferKernels
from pearl.engine.kernels.interface import PackedBatch, PagedBatch
from pearl.engine.kernels.triton.attention_plan import paged_attention, varlen_attention
from pearl.engine.kernels.triton.launch import Launcher

ROWS_LOOKED_AT = 64
"""Queries of a sequence that are compared, where there are more."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OF_BANDWIDTH, OF_MATRIX = 0.85, 0.6


@dataclass(frozen=True, slots=True)
class Inputs:
    """Fresh random numbers on a device; on the meta device nothing but shapes."""

    device: torch.device
    dtype: torch.dtype
    random: np.random.Generator

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty(shape, dtype=torch.float32, device=self.device)
        if self.device.type != "meta":
            source = torch.Generator(self.device).manual_seed(int(self.random.integers(1 << 60)))
            made.normal_(generator=source).mul_(scale)
        return made.to(dtype or self.dtype)

    def place(self, array: np.ndarray | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One use of an operation. `run` gives its outputs, `check` their gap to float64 (any two of one problem are alike)."""

    run: Callable[[Launcher], tuple[Tensor, ...]]
    check: Callable[[tuple[Tensor, ...]], float]
    nbytes: int
    flop: int = 0
    others: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`make(inputs, **sizes)`: `small` sizes are checked in every dtype, `real` ones in bf16 are checked and timed.

    `target`: share of the ceiling (bandwidth or matrix rate, whichever binds) that is demanded of the real one.
    """

    section: str
    name: str
    make: Callable[..., Problem]
    small: dict[str, Any]
    real: dict[str, Any]
    target: float | None = None


def paged_batch(inputs: Inputs, contexts: Sequence[int], queries: Sequence[int], page: int) -> tuple[PagedBatch, int]:
    """(batch, number of blocks): sequences in random blocks, those with one query first."""
    blocks = [-(-context // page) for context in contexts]
    free = inputs.random.permutation(sum(blocks)).astype(np.int32)
    tables_SN = np.zeros((len(contexts), max(blocks)), dtype=np.int32)
    for row, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables_SN[row, :count] = free[end - count : end]
    pairs = list(zip(contexts, queries, strict=True))
    positions_T = np.concatenate([np.arange(context - asking, context) for context, asking in pairs])
    rows_T = np.repeat(np.arange(len(contexts)), queries)
    slots_T = tables_SN[rows_T, positions_T // page].astype(np.int64) * page + positions_T % page
    batch = PagedBatch(
        positions_T=inputs.place(positions_T, torch.int64),
        slot_mapping_T=inputs.place(slots_T, torch.int64),
        query_starts_S1=inputs.place(np.cumsum([0, *queries]), torch.int32),
        context_lens_S=inputs.place(contexts, torch.int32),
        block_tables_SN=inputs.place(tables_SN, torch.int32),
        num_decodes=sum(asking == 1 for asking in queries),
        max_query_len=max(queries),
        max_context_len=max(contexts),
    )
    return batch, sum(blocks)


def attention_exact(q_QHB: Tensor, k_KGB: Tensor, v_KGB: Tensor, scale: float, window: int) -> Tensor:
    """Float64 attention of the last Q of K tokens, each seeing the keys up to its own (the `window` last ones of them)."""
    queries, heads, _ = q_QHB.shape
    keys, kv_heads, _ = k_KGB.shape
    k_KHB, v_KHB = (each.double().repeat_interleave(heads // kv_heads, dim=1) for each in (k_KGB, v_KGB))
    score_HQK = torch.einsum("qhb,khb->hqk", q_QHB.double(), k_KHB) * scale
    position_Q1 = torch.arange(keys - queries, keys, device=q_QHB.device)[:, None]
    key_K = torch.arange(keys, device=q_QHB.device)
    seen_QK = key_K <= position_Q1
    if window:
        seen_QK &= key_K > position_Q1 - window
    return torch.einsum("hqk,khb->qhb", score_HQK.masked_fill(~seen_QK, -math.inf).softmax(-1), v_KHB)


def paged(
    inputs: Inputs, *, contexts: list[int], queries: list[int], heads: tuple[int, int], dim: int, page: int = 16,
    window: int = 0,
) -> Problem:  # fmt: skip
    """Paged attention. What is read: the keys and values that are seen, queries and results."""
    batch, blocks = paged_batch(inputs, contexts, queries, page)
    pool = inputs.normal(2, blocks, heads[1], page, dim)
    q_THB = inputs.normal(sum(queries), heads[0], dim)
    scale = dim**-0.5

    def gathered(sequence: int) -> tuple[Tensor, Tensor]:
        table = batch.block_tables_SN[sequence, : -(-contexts[sequence] // page)]
        k_KGB, v_KGB = (side[table].transpose(1, 2).flatten(0, 1)[: contexts[sequence]] for side in pool)
        return k_KGB, v_KGB

    def check(found: tuple[Tensor, ...]) -> float:
        gaps = []
        for sequence in dict.fromkeys((0, len(contexts) // 2, len(contexts) - 1)):
            end = sum(queries[: sequence + 1])
            rows = slice(end - min(queries[sequence], ROWS_LOOKED_AT), end)
            gaps.append(gap(found[0][rows], attention_exact(q_THB[rows], *gathered(sequence), scale, window)))
        return max(gaps, key=lambda value: math.inf if math.isnan(value) else value)

    others: dict[str, Callable[[], object]] = {}
    if inputs.device.type == "cuda" and not window:
        others = _others(q_THB, pool, batch, [gathered(row) for row in range(len(contexts))], queries, scale)
    seen = [min(context, window + asking) if window else context for context, asking in zip(contexts, queries, strict=True)]
    pairs = sum((2 * c - n + 1) * n // 2 for c, n in zip(contexts, queries, strict=True))
    return Problem(
        run=lambda launch: (paged_attention(q_THB, pool, batch, scale, window, launch),),
        check=check,
        nbytes=2 * sum(seen) * heads[1] * dim * pool.element_size() + 2 * q_THB.nbytes,
        flop=4 * pairs * heads[0] * dim if not window else 0,
        others=others,
    )


def _others(
    q_THB: Tensor, pool: Tensor, batch: PagedBatch, keys: list[tuple[Tensor, Tensor]], queries: list[int], scale: float
) -> dict[str, Callable[[], object]]:
    """Torch over contiguous keys and values (which nobody has in a paged pool), where all sequences are alike; FlashInfer."""
    count, asking = len(queries), queries[0]
    found: dict[str, Callable[[], object]] = {}
    if len({len(k) for k, _ in keys}) == len(set(queries)) == 1:
        k_SGKB, v_SGKB = (torch.stack([pair[side] for pair in keys]).transpose(1, 2).contiguous() for side in (0, 1))
        kv_heads, dim = pool.shape[2], pool.shape[4]
        if asking == 1:  # the heads of a group as so many queries: the same sums without repeated keys
            q_SGQB = q_THB.view(count, kv_heads, -1, dim)
            found["torch sdpa"] = partial(F.scaled_dot_product_attention, q_SGQB, k_SGKB, v_SGKB, scale=scale)
        elif asking == k_SGKB.shape[2]:
            q_SHQB = q_THB.view(count, asking, -1, dim).transpose(1, 2)
            found["torch sdpa"] = partial(
                F.scaled_dot_product_attention, q_SHQB, k_SGKB, v_SGKB, scale=scale, is_causal=True, enable_gqa=True
            )
            found["torch flex"] = _flex(q_SHQB, k_SGKB, v_SGKB, scale)
    flashinfer = FlashInferKernels()
    found["flashinfer"] = lambda: flashinfer.paged_attention(q_THB, pool, batch, scale)
    return found


def _flex(q_SHQB: Tensor, k_SGKB: Tensor, v_SGKB: Tensor, scale: float) -> Callable[[], object]:
    """Made and compiled at its first call."""
    made: list[Callable[[], object]] = []

    def call() -> object:
        if not made:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            size = q_SHQB.shape[2]
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, size, size, device=str(q_SHQB.device))
            made.append(
                partial(torch.compile(flex_attention), q_SHQB, k_SGKB, v_SGKB, block_mask=mask, scale=scale, enable_gqa=True)
            )
        return made[0]()

    return call


def packed(inputs: Inputs, *, lengths: list[int], heads: tuple[int, int], dim: int) -> Problem:
    """Causal attention of packed sequences without a pool."""
    tokens = sum(lengths)
    q_THB, k_TGB, v_TGB = inputs.normal(tokens, heads[0], dim), *(inputs.normal(tokens, heads[1], dim) for _ in range(2))
    positions = np.concatenate([np.arange(length) for length in lengths])
    batch = PackedBatch(positions_T=inputs.place(positions, torch.int64), lengths=tuple(lengths))
    scale, start = dim**-0.5, tokens - lengths[-1]

    def check(found: tuple[Tensor, ...]) -> float:
        rows = slice(tokens - min(lengths[-1], ROWS_LOOKED_AT), tokens)
        return gap(found[0][rows], attention_exact(q_THB[rows], k_TGB[start:], v_TGB[start:], scale, 0))

    return Problem(
        run=lambda launch: (varlen_attention(q_THB, k_TGB, v_TGB, batch, scale, 0, launch),),
        check=check,
        nbytes=2 * q_THB.nbytes + 2 * k_TGB.nbytes,
        flop=4 * sum(length * (length + 1) // 2 for length in lengths) * heads[0] * dim,
    )


def attention_cases() -> list[Case]:
    """Decode rows and chunks at the sizes of Qwen3-8B (32 heads over 8) and Qwen3-30B-A3B (32 over 4)."""
    small = dict(heads=(10, 2), dim=48, page=8)
    mixed = dict(contexts=[1, 70, 33, 9, 40], queries=[1, 1, 1, 9, 13], **small)

    def decode(name: str, kv_heads: int, count: int, context: int, target: float | None = None, window: int = 0) -> Case:
        real = dict(contexts=[context] * count, queries=[1] * count, heads=(32, kv_heads), dim=128, window=window)
        few = dict(contexts=[1, 70, 33], queries=[1, 1, 1], **small, window=window and 9)
        return Case(section="attention", name=f"decode {name}", make=paged, small=few, real=real, target=target)

    def chunk(name: str, count: int, asking: int, context: int, target: float | None = None) -> Case:
        real = dict(contexts=[context] * count, queries=[asking] * count, heads=(32, 8), dim=128)
        return Case(section="attention", name=f"chunk {name}", make=paged, small=mixed, real=real, target=target)

    together = dict(lengths=[2048] * 4, heads=(32, 8), dim=128)
    apart = dict(lengths=[5, 40], heads=(4, 2), dim=16)
    return [
        decode("64 x 8K, 32/8 heads", 8, 64, 8192, OF_BANDWIDTH),
        decode("64 x 8K, 32/4 heads", 4, 64, 8192),
        decode("1 x 32K, 32/8 heads", 8, 1, 32768),
        decode("64 x 8K, window 1024", 8, 64, 8192, window=1024),
        chunk("4 x 2K after 6K", 4, 2048, 8192),
        chunk("64 after 32K", 1, 64, 32768),
        Case(section="attention", name="packed 4 x 2K", make=packed, small=apart, real=together),
        chunk("8K whole", 1, 8192, 8192, OF_MATRIX),  # last: torch compiles its flex attention for it
    ]
