"""How attention is cut into programs, and the launches that follow from it.

Owns tile sizes, splits and grids; the device code is in `attention.py`. Plans are pure functions of sizes known on the host
(nothing is read back from the device), so one may be captured in a graph. Decode rows are split at fixed multiples of
`SPLIT_KEYS` keys, whatever the batch: a row's bits do not depend on its neighbours until a context needs more than
`MAX_SPLITS` of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PackedBatch, PagedBatch
from pearl.engine.kernels.triton.attention import attention_kernel, combine_kernel
from pearl.engine.kernels.triton.launch import PRECISION, Launcher, run, tile_of

SPLIT_KEYS = 512
MAX_SPLITS = 64
LARGEST_DIM = 256
LARGEST_GROUP = 128

PROGRAMS = 256
"""As many keep the multiprocessors of a large GPU busy (108 to 148 of them); with fewer, a chunk's keys are split."""
CHUNK_SPLIT_KEYS = 1024
"""A split of a chunk's keys has at least as many."""
MAX_CHUNK_SPLITS = 16
COMBINED = 8
"""Splits that are added up at a time. Fixed: a row's bits do not depend on how many its neighbours have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """`rows` of a tile hold `queries` queries with all heads of a group; `tile` keys at a time; `splits` of `split_keys`."""

    tiles: int
    queries: int
    rows: int
    tile: int
    splits: int
    split_keys: int
    num_warps: int
    num_stages: int


def plan_decode(*, rows: int, group: int, dim: int, itemsize: int, max_context: int, window: int) -> AttentionPlan:
    """One tile for each of `rows` sequences with one query each."""
    tile = 128 if dim * itemsize <= 128 else 64 if dim * itemsize <= 256 else 32
    split_keys = max(SPLIT_KEYS, tile_of(math.ceil(max_context / MAX_SPLITS)))
    return AttentionPlan(
        tiles=rows,
        queries=1,
        rows=tile_of(group, 16),
        tile=tile,
        splits=_splits(max_context, split_keys, window, 1),
        split_keys=split_keys,
        num_warps=4,
        num_stages=3 if itemsize == 2 else 2,
    )


def plan_chunks(
    *, tokens: int, sequences: int, max_queries: int, kv_heads: int, group: int, dim: int, itemsize: int, max_context: int,
    window: int, chip: int,
) -> AttentionPlan:  # fmt: skip
    """Tiles for `tokens` queries of `sequences` sequences, of which the longest has `max_queries`.

    Before Hopper the scores of 64 keys do not fit into registers beside the rest.
    """
    largest = 128 if itemsize == 2 and dim <= 128 else 64 if itemsize == 2 else 32
    rows = max(tile_of(group, 16), min(largest, tile_of(max_queries * group, 16)))
    queries = rows // group
    tile = 64 if itemsize == 2 and dim <= 128 and chip >= 90 else 32
    tiles = tokens // queries + sequences
    wanted = min(math.ceil(PROGRAMS / (tiles * kv_heads)), max_context // CHUNK_SPLIT_KEYS, MAX_CHUNK_SPLITS)
    split_keys = math.ceil(max_context / max(wanted, 1) / tile) * tile
    return AttentionPlan(
        tiles=tiles,
        queries=queries,
        rows=rows,
        tile=tile,
        splits=_splits(max_context, split_keys, window, queries),
        split_keys=split_keys,
        num_warps=8 if rows * dim > 64 * 128 else 4,
        num_stages=(3 if dim <= 128 else 2) if itemsize == 2 else 1,
    )


def _splits(max_context: int, split_keys: int, window: int, queries: int) -> int:
    """The most splits in which the queries of one tile see a key."""
    every = math.ceil(max_context / split_keys)
    return min(every, math.ceil((window + queries - 2) / split_keys) + 1) if window else every


def paged_attention(
    q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0, launch: Launcher = run
) -> Tensor:
    """Causal attention of the batch's queries over the pool, as `interface.Kernels.paged_attention` says."""
    out_THB = torch.empty_like(q_THB)
    tokens, heads, dim = q_THB.shape
    kv_heads, itemsize = kv_2NG__.shape[2], q_THB.element_size()
    sequences, decodes = len(batch.context_lens_S), batch.num_decodes
    sizes = dict(group=heads // kv_heads, dim=dim, itemsize=itemsize, max_context=batch.max_context_len, window=window)
    keys = _Keys(kv_2NG__[0], kv_2NG__[1], kv_heads, batch.block_tables_SN, kv_2NG__.shape[3])
    where = (batch.query_starts_S1, batch.context_lens_S, batch.positions_T)
    if decodes:
        plan = plan_decode(rows=decodes, **sizes)
        _attend(q_THB, keys, where, out_THB, plan, slice(0, decodes), slice(0, decodes), scale, window, True, launch)
    if sequences > decodes:
        chunks, rest = slice(decodes, sequences), slice(decodes, tokens)
        plan = plan_chunks(
            tokens=tokens - decodes, sequences=sequences - decodes, max_queries=batch.max_query_len, kv_heads=kv_heads,
            chip=launch.chip(q_THB.device), **sizes,
        )  # fmt: skip
        _attend(q_THB, keys, where, out_THB, plan, chunks, rest, scale, window, False, launch)
    return out_THB


def varlen_attention(
    q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, batch: PackedBatch, scale: float, window: int = 0, launch: Launcher = run
) -> Tensor:
    """Causal attention inside each packed sequence. No gradient."""
    tokens, heads, dim = q_THB.shape
    if sum(batch.lengths) != tokens:
        raise ValueError(f"lengths sum to {sum(batch.lengths)}: must be the number of tokens, {tokens}")
    out_THB = torch.empty_like(q_THB)
    if not tokens:
        return out_THB
    kv_heads, longest = k_TGB.shape[1], max(batch.lengths)
    lengths_S = torch.tensor(batch.lengths, dtype=torch.int32)
    starts_S1 = torch.zeros(len(lengths_S) + 1, dtype=torch.int32)
    starts_S1[1:] = lengths_S.cumsum(0)
    plan = plan_chunks(
        tokens=tokens, sequences=len(lengths_S), max_queries=longest, kv_heads=kv_heads, group=heads // kv_heads, dim=dim,
        itemsize=q_THB.element_size(), max_context=longest, window=window,
        chip=launch.chip(q_THB.device),
    )  # fmt: skip
    lengths_S, starts_S1 = lengths_S.to(q_THB.device), starts_S1.to(q_THB.device)
    keys = _Keys(k_TGB, v_TGB, kv_heads, None, 1)
    where = (starts_S1, lengths_S, batch.positions_T)
    chunks, everything = slice(0, len(lengths_S)), slice(0, tokens)
    _attend(q_THB, keys, where, out_THB, plan, chunks, everything, scale, window, False, launch)
    return out_THB


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where keys and values are: in pages of a pool under block tables, or packed (no tables)."""

    k: Tensor
    v: Tensor
    heads: int
    tables_SN: Tensor | None
    page: int


def _attend(
    q_THB: Tensor, keys: _Keys, where: tuple[Tensor, Tensor, Tensor], out_THB: Tensor, plan: AttentionPlan,
    sequences: slice, rows: slice, scale: float, window: int, decode: bool, launch: Launcher,
) -> None:  # fmt: skip
    """The launches of one plan, for these sequences and the tokens (`rows`) that are theirs."""
    heads, dim = q_THB.shape[1:]
    tokens = rows.stop - rows.start
    starts_S1, contexts_S, positions_T = where
    split = plan.splits > 1
    parts = (plan.splits, tokens, heads) if split else (1, 1, 1)
    part_out = q_THB.new_empty((*parts, dim if split else 1), dtype=torch.float32)
    part_top, part_sum = (q_THB.new_empty(parts, dtype=torch.float32) for _ in range(2))
    launch(
        attention_kernel,
        (plan.tiles, keys.heads, plan.splits),
        q=q_THB,
        pool_k=keys.k,
        pool_v=keys.v,
        tables=contexts_S if keys.tables_SN is None else keys.tables_SN,
        starts=starts_S1,
        contexts=contexts_S,
        out=out_THB,
        part_out=part_out,
        part_top=part_top,
        part_sum=part_sum,
        scale=scale * math.log2(math.e),
        first_sequence=sequences.start,
        sequences=sequences.stop - sequences.start,
        first_token=rows.start,
        tokens=tokens,
        table_width=0 if keys.tables_SN is None else keys.tables_SN.shape[1],
        window=window,
        split_keys=plan.split_keys,
        HEADS=heads,
        KV_HEADS=keys.heads,
        DIM=dim,
        DIM_TILE=tile_of(dim, 16),
        PAGE=keys.page,
        QUERIES=plan.queries,
        ROWS=plan.rows,
        TILE=plan.tile,
        PAGED=keys.tables_SN is not None,
        DECODE=decode,
        WINDOW=window > 0,
        SPLIT=split,
        PRECISION=PRECISION.get(q_THB.dtype, "tf32"),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if split:
        launch(
            combine_kernel,
            (tokens, heads),
            part_out=part_out,
            part_top=part_top,
            part_sum=part_sum,
            positions=positions_T,
            out=out_THB,
            first_token=rows.start,
            tokens=tokens,
            window=window,
            split_keys=plan.split_keys,
            slots=plan.splits,
            HEADS=heads,
            DIM=dim,
            DIM_TILE=tile_of(dim, 16),
            WINDOW=window > 0,
            TOGETHER=COMBINED,
            num_warps=1,
        )
