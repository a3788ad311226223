"""Attention over the paged pool and over packed sequences: one kernel for decode rows and for chunks of many queries.

Owns the device code; how large its tiles are and when keys are split among programs is `attention_plan.py`'s. A program holds
a tile of rows, each a (query, query head) pair of one kv head, so that all query heads of a kv head read its keys once; it
visits a range of keys with a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022). With splits (Flash-Decoding, Dao
et al. 2023) several programs share a tile's keys and `combine_kernel` adds up what they found.

Invariants: a slot at or past a sequence's context, or before the window of the tile's first query, is never loaded (0 * NaN
is NaN), neither is a split's part that nobody wrote; places in the pool are computed in 64 bits; what a row gets does not
depend on the other rows of the batch as long as the plan is the same.
Shapes: M rows of a tile, L keys of a tile, B head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

VARYING = ["first_sequence", "sequences", "first_token", "tokens", "table_width", "window", "split_keys", "slots"]
"""Arguments that change from batch to batch: the compiler makes nothing of their values, so they cost no new compilation."""


@triton.jit
def _visit(
    acc_MB, top_M, sum_M, q_MB, position_M, pool_k, pool_v, table, first_key, begin, low, end, window, scale,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr,
    PAGED: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `begin` (a multiple of TILE) to `end`; MASKED: only those from `low` on, and each row only those it sees."""
    tile_L = tl.arange(0, TILE)
    dim_B = tl.arange(0, DIM_TILE)
    for start in tl.range(begin, end, TILE):
        key_L = start + tile_L
        there_L = (key_L >= low) & (key_L < end)
        if PAGED:
            if MASKED:
                page_L = tl.load(table + key_L // PAGE, mask=there_L, other=0)
            else:
                page_L = tl.load(table + key_L // PAGE)
            place_L = page_L.to(tl.int64) * (KV_HEADS * PAGE * DIM) + (key_L % PAGE) * DIM
        else:
            place_L = (first_key + key_L) * (KV_HEADS * DIM)
        k_place_BL = place_L[None, :] + dim_B[:, None]
        v_place_LB = place_L[:, None] + dim_B[None, :]
        if MASKED:
            k_BL = tl.load(pool_k + k_place_BL, mask=there_L[None, :] & (dim_B < DIM)[:, None], other=0.0)
            v_LB = tl.load(pool_v + v_place_LB, mask=there_L[:, None] & (dim_B < DIM)[None, :], other=0.0)
        elif DIM == DIM_TILE:
            k_BL = tl.load(pool_k + k_place_BL)
            v_LB = tl.load(pool_v + v_place_LB)
        else:
            k_BL = tl.load(pool_k + k_place_BL, mask=(dim_B < DIM)[:, None], other=0.0)
            v_LB = tl.load(pool_v + v_place_LB, mask=(dim_B < DIM)[None, :], other=0.0)
        score_ML = tl.dot(q_MB, k_BL, input_precision=PRECISION)
        if MASKED:
            seen_ML = there_L[None, :] & (key_L[None, :] <= position_M[:, None])
            if WINDOW:
                seen_ML &= key_L[None, :] > position_M[:, None] - window
            score_ML = tl.where(seen_ML, score_ML, float("-inf"))
        # Scaled are the maxima, and the scores within the subtraction: one fused operation for each.
        new_top_M = tl.maximum(top_M, tl.max(score_ML, 1) * scale)
        # A row that has seen no key yet: -inf less -inf would be NaN.
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        weight_ML = tl.exp2(score_ML * scale - base_M[:, None])
        fade_M = tl.exp2(top_M - base_M)
        sum_M = sum_M * fade_M + tl.sum(weight_ML, 1)
        acc_MB = tl.dot(weight_ML.to(v_LB.dtype), v_LB, acc_MB * fade_M[:, None], input_precision=PRECISION)
        top_M = new_top_M
    return acc_MB, top_M, sum_M


@triton.jit
def _sequence_of(tile, starts, first_sequence, sequences, QUERIES: tl.constexpr):
    """(sequence of a tile of QUERIES queries, its number among that sequence's tiles), found by bisection.

    Sequence s begins at tile `(starts[s] - starts[first]) // QUERIES + (s - first)`: room for all its tiles, perhaps one more.
    """
    origin = tl.load(starts + first_sequence)
    low = first_sequence
    high = first_sequence + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(starts + middle) - origin) // QUERIES + middle - first_sequence
        if begins <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - ((tl.load(starts + low) - origin) // QUERIES + low - first_sequence)


@triton.jit(do_not_specialize=VARYING)
def attention_kernel(
    q, pool_k, pool_v, tables, starts, contexts, out, part_out, part_top, part_sum,
    scale, first_sequence, sequences, first_token, tokens, table_width, window, split_keys,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, DECODE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, kv head, split). `scale` has the factor log2(e) in it.

    Parts are [slot, token, head(, B)], of the `tokens` tokens from `first_token` on that this launch is about.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    if DECODE:
        sequence, number = first_sequence + tl.program_id(0), 0
    else:
        # The last tiles of a chunk have the most keys: they begin first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        sequence, number = _sequence_of(tile, starts, first_sequence, sequences, QUERIES)
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    first_query = number * QUERIES
    if first_query >= queries:
        return
    first_position = context - queries + first_query
    end = tl.minimum(first_position + QUERIES, context)
    low = tl.maximum(first_position + 1 - window, 0) if WINDOW else 0
    slot = 0
    if SPLIT:
        split = low // split_keys + tl.program_id(2)
        slot = split % tl.num_programs(2)
        low = tl.maximum(low, split * split_keys)
        past = end
        end = tl.minimum(end, (split + 1) * split_keys)
        if low >= end:
            return
    else:
        past = end

    row_M = tl.arange(0, ROWS)
    query_M = first_query + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    real_M = (row_M < QUERIES * GROUP) & (query_M < queries)
    position_M = context - queries + query_M
    row_place_M = (start + query_M).to(tl.int64) * HEADS + head_M
    dim_B = tl.arange(0, DIM_TILE)
    inside_MB = real_M[:, None] & (dim_B < DIM)[None, :]
    q_MB = tl.load(q + row_place_M[:, None] * DIM + dim_B[None, :], mask=inside_MB, other=0.0)
    acc_MB = tl.zeros([ROWS, DIM_TILE], tl.float32)
    top_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)

    HEAD_STRIDE: tl.constexpr = PAGE * DIM if PAGED else DIM
    pool_k += kv_head * HEAD_STRIDE
    pool_v += kv_head * HEAD_STRIDE
    table = tables + sequence.to(tl.int64) * table_width
    first_key = start.to(tl.int64)
    begin = low // TILE * TILE
    # fmt: off
    if DECODE:
        acc_MB, top_M, sum_M = _visit(
            acc_MB, top_M, sum_M, q_MB, position_M, pool_k, pool_v, table, first_key, begin, low, end, window, scale,
            KV_HEADS, PAGE, DIM, DIM_TILE, TILE, PAGED, True, WINDOW, PRECISION)
    else:
        # Between the edges of window and diagonal every row sees every key.
        full_begin = begin
        if WINDOW:
            full_begin = tl.maximum(begin, (tl.maximum(past - window, low) + TILE - 1) // TILE * TILE)
            acc_MB, top_M, sum_M = _visit(
                acc_MB, top_M, sum_M, q_MB, position_M, pool_k, pool_v, table, first_key,
                begin, low, tl.minimum(full_begin, end), window, scale,
                KV_HEADS, PAGE, DIM, DIM_TILE, TILE, PAGED, True, WINDOW, PRECISION)
        full_end = tl.minimum(end, first_position + 1) // TILE * TILE
        acc_MB, top_M, sum_M = _visit(
            acc_MB, top_M, sum_M, q_MB, position_M, pool_k, pool_v, table, first_key,
            full_begin, low, full_end, window, scale,
            KV_HEADS, PAGE, DIM, DIM_TILE, TILE, PAGED, False, WINDOW, PRECISION)
        acc_MB, top_M, sum_M = _visit(
            acc_MB, top_M, sum_M, q_MB, position_M, pool_k, pool_v, table, first_key,
            tl.maximum(full_begin, full_end), low, end, window, scale,
            KV_HEADS, PAGE, DIM, DIM_TILE, TILE, PAGED, True, WINDOW, PRECISION)
    # fmt: on
    if SPLIT:
        part_M = (slot.to(tl.int64) * tokens - first_token) * HEADS + row_place_M
        tl.store(part_out + part_M[:, None] * DIM + dim_B[None, :], acc_MB, mask=inside_MB)
        tl.store(part_top + part_M, top_M, mask=real_M)
        tl.store(part_sum + part_M, sum_M, mask=real_M)
    else:
        result_MB = (acc_MB / tl.where(real_M, sum_M, 1.0)[:, None]).to(q_MB.dtype)
        tl.store(out + row_place_M[:, None] * DIM + dim_B[None, :], result_MB, mask=inside_MB)


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    part_out, part_top, part_sum, positions, out, first_token, tokens, window, split_keys, slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, WINDOW: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Program (token, head): adds up the parts of the splits that hold a key this token sees, in the order of the keys."""
    number = tl.program_id(0).to(tl.int64)
    token = first_token + number
    position = tl.load(positions + token).to(tl.int32)
    first = tl.maximum(position + 1 - window, 0) // split_keys if WINDOW else 0
    last = position // split_keys
    dim_B = tl.arange(0, DIM_TILE)
    inside_B = dim_B < DIM
    acc_B = tl.zeros([DIM_TILE], tl.float32)
    top = float("-inf")
    total = 0.0
    # As many at a time as TOGETHER, so that their reads do not wait for each other; the first is always there.
    for begin in range(first, last + 1, TOGETHER):
        split_C = begin + tl.arange(0, TOGETHER)
        there_C = split_C <= last
        part_C = ((split_C % slots).to(tl.int64) * tokens + number) * HEADS + tl.program_id(1)
        inside_CB = there_C[:, None] & inside_B[None, :]
        part_CB = tl.load(part_out + part_C[:, None] * DIM + dim_B[None, :], mask=inside_CB, other=0.0)
        top_C = tl.load(part_top + part_C, mask=there_C, other=float("-inf"))
        sum_C = tl.load(part_sum + part_C, mask=there_C, other=0.0)
        new_top = tl.maximum(top, tl.max(top_C, 0))
        fade = tl.exp2(top - new_top)
        share_C = tl.exp2(top_C - new_top)
        acc_B = acc_B * fade + tl.sum(part_CB * share_C[:, None], 0)
        total = total * fade + tl.sum(sum_C * share_C, 0)
        top = new_top
    tl.store(out + (token * HEADS + tl.program_id(1)) * DIM + dim_B, (acc_B / total).to(out.dtype.element_ty), mask=inside_B)
