"""A mixture of experts: routing, tokens sorted by expert, two grouped matrix products, and the sum of the shares.

Owns the kernels and their launches. A *pair* is (token, one of its K experts), numbered token * K + choice. Pairs of one expert
are laid in tiles of M rows, the last filled up, so that a tile needs one expert's weights only. All of it is on the device:
nothing is read back, grids are upper bounds. No atomics: sums are in the order of the choices, so results repeat bit for bit.
It rounds where `experts.py` does: after each product, after the activation, at the end.
Shapes: T tokens, D hidden, E experts, K chosen of them, F intermediate, P pairs, M rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.triton.launch import PRECISION, Launcher, run, tile_of

ROUTE_ROWS = 16
SCAN = 1024
"""Pairs that the sorting kernels look at in one go."""


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    x, router, experts, shares, tokens,
    DIM: tl.constexpr, EXPERTS: tl.constexpr, EXPERT_TILE: tl.constexpr, TOP_K: tl.constexpr, CHOICE_TILE: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens: fp32 logits of all experts, softmax, and TOP_K times the greatest that is left, the lowest of equals."""
    row_T = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here_T = row_T < tokens
    expert_E = tl.arange(0, EXPERT_TILE)
    real_E = expert_E < EXPERTS
    step_D = tl.arange(0, STEP)
    logit_TE = tl.zeros([ROWS, EXPERT_TILE], tl.float32)
    for start in tl.range(0, DIM, STEP):
        dim_D = start + step_D
        inside_D = dim_D < DIM
        x_TD = tl.load(x + row_T[:, None] * DIM + dim_D[None, :], mask=here_T[:, None] & inside_D[None, :], other=0.0)
        w_DE = tl.load(router + expert_E[None, :] * DIM + dim_D[:, None], mask=real_E[None, :] & inside_D[:, None], other=0.0)
        logit_TE = tl.dot(x_TD, w_DE, logit_TE, input_precision=PRECISION)
    logit_TE = tl.where(real_E[None, :], logit_TE, float("-inf"))
    power_TE = tl.exp(logit_TE - tl.max(logit_TE, 1)[:, None])
    share_TE = power_TE / tl.sum(power_TE, 1)[:, None]
    # NaN compares as false: such tokens take the first experts, with NaN as their shares.
    left_TE = tl.where(real_E[None, :], tl.where(share_TE == share_TE, share_TE, 2.0), -1.0)
    choice_K = tl.arange(0, CHOICE_TILE)
    pick_TK = tl.zeros([ROWS, CHOICE_TILE], tl.int32)
    share_TK = tl.zeros([ROWS, CHOICE_TILE], tl.float32)
    for choice in tl.static_range(TOP_K):
        best_T = tl.max(left_TE, 1)
        pick_T = tl.min(tl.where(left_TE == best_T[:, None], expert_E[None, :], EXPERT_TILE), 1)
        picked_TE = expert_E[None, :] == pick_T[:, None]
        share_T = tl.sum(tl.where(picked_TE, share_TE, 0.0), 1)
        pick_TK = tl.where(choice_K[None, :] == choice, pick_T[:, None], pick_TK)
        share_TK = tl.where(choice_K[None, :] == choice, share_T[:, None], share_TK)
        left_TE = tl.where(picked_TE, -1.0, left_TE)
    if NORMALISE:
        share_TK /= tl.sum(share_TK, 1)[:, None]
    place_TK = row_T[:, None] * TOP_K + choice_K[None, :]
    inside_TK = here_T[:, None] & (choice_K < TOP_K)[None, :]
    tl.store(experts + place_TK, pick_TK, mask=inside_TK)
    tl.store(shares + place_TK, share_TK, mask=inside_TK)


@triton.jit(do_not_specialize=["pairs", "first"])
def count_kernel(experts, counts, pairs, first, SCAN: tl.constexpr):
    """How many pairs expert `first + program` has."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        own = tl.load(experts + pair, mask=pair < pairs, other=-1) - first == expert
        count += tl.sum((own & (pair < pairs)).to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["pairs", "first", "tiles"])
def sort_kernel(
    experts, counts, order, tile_experts, pairs, first, tiles,
    EXPERTS: tl.constexpr, EXPERT_TILE: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Lays expert `program`'s pairs, in their order, in tiles of ROWS after those of the experts before it.

    `order` gives the pair of each row, `pairs` where there is none; `tile_experts` each tile's expert, -1 past the last one.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERT_TILE)
    needed = (tl.load(counts + index, mask=index < EXPERTS, other=0) + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(index < expert, needed, 0), 0)
    own_tiles = tl.sum(tl.where(index == expert, needed, 0), 0)
    for number in range(own_tiles):
        tl.store(tile_experts + first_tile + number, expert)
    place = first_tile * ROWS
    for start in range(0, pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        own = (tl.load(experts + pair, mask=pair < pairs, other=-1) - first == expert) & (pair < pairs)
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=own)
        place += tl.sum(own.to(tl.int32), 0)
    row = tl.arange(0, ROWS)
    tl.store(order + place + row, pairs, mask=place + row < (first_tile + own_tiles) * ROWS)
    if expert == EXPERTS - 1:
        for number in range(first_tile + own_tiles, tiles):
            tl.store(tile_experts + number, -1)


@triton.jit(do_not_specialize=["pairs"])
def grouped_product_kernel(
    x, weight, out, order, tile_experts, pairs,
    DIM: tl.constexpr, WIDTH: tl.constexpr, DIVIDE: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of pairs times COLS rows of their expert's weight [WIDTH (twice if GATED), DIM]; row pair // DIVIDE of x.

    GATED: the first half's product goes through silu and multiplies the second's.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair_M = tl.load(order + tile * ROWS + tl.arange(0, ROWS))
    real_M = pair_M < pairs
    row_M = (pair_M // DIVIDE).to(tl.int64)
    col_N = tl.program_id(1) * COLS + tl.arange(0, COLS)
    there_N = col_N < WIDTH
    step_D = tl.arange(0, STEP)
    first_MN = tl.zeros([ROWS, COLS], tl.float32)
    second_MN = tl.zeros([ROWS, COLS], tl.float32)
    HEIGHT: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    weight += expert * (HEIGHT * DIM)
    for start in tl.range(0, DIM, STEP):
        dim_D = start + step_D
        inside_D = dim_D < DIM
        x_MD = tl.load(x + row_M[:, None] * DIM + dim_D[None, :], mask=real_M[:, None] & inside_D[None, :], other=0.0)
        place_DN = col_N[None, :].to(tl.int64) * DIM + dim_D[:, None]
        inside_DN = there_N[None, :] & inside_D[:, None]
        w_DN = tl.load(weight + place_DN, mask=inside_DN, other=0.0)
        first_MN = tl.dot(x_MD, w_DN, first_MN, input_precision=PRECISION)
        if GATED:
            u_DN = tl.load(weight + WIDTH * DIM + place_DN, mask=inside_DN, other=0.0)
            second_MN = tl.dot(x_MD, u_DN, second_MN, input_precision=PRECISION)
    if GATED:
        gate_MN = first_MN.to(out.dtype.element_ty).to(tl.float32)
        up_MN = second_MN.to(out.dtype.element_ty).to(tl.float32)
        first_MN = gate_MN / (1.0 + tl.exp(-gate_MN)) * up_MN
    place_MN = pair_M[:, None].to(tl.int64) * WIDTH + col_N[None, :]
    tl.store(out + place_MN, first_MN.to(out.dtype.element_ty), mask=real_M[:, None] & there_N[None, :])


@triton.jit(do_not_specialize=["first"])
def sum_shares_kernel(
    x, experts, shares, out, first,
    EXPERTS: tl.constexpr, DIM: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE elements of one token: its experts' results times their shares, of those experts that are here."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dim < DIM
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        own = tl.load(experts + pair) - first
        if (own >= 0) & (own < EXPERTS):
            total += tl.load(x + pair * DIM + dim, mask=inside, other=0.0).to(tl.float32) * tl.load(shares + pair)
    tl.store(out + token * DIM + dim, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedPlan:
    """Tiles of `rows` pairs and `cols` outputs, `step` inputs at a time; at most `tiles` of them."""

    rows: int
    cols: int
    step: int
    tiles: int
    num_warps: int
    num_stages: int


def plan_grouped(*, pairs: int, experts: int, itemsize: int) -> GroupedPlan:
    """Tall tiles where an expert has many pairs; every expert that has any may have one tile that is not full."""
    mean = pairs / experts
    rows = 16 if mean <= 16 else 64 if mean <= 128 or itemsize > 2 else 128
    return GroupedPlan(
        rows=rows,
        cols=64,
        step=64 if itemsize == 2 else 32,
        tiles=pairs // rows + min(experts, pairs),
        num_warps=8 if rows == 128 else 4,
        num_stages=4 if itemsize == 2 else 2,
    )


def route(x_TD: Tensor, router_ED: Tensor, top_k: int, normalise: bool, launch: Launcher = run) -> tuple[Tensor, Tensor]:
    """Numbers (int32) and shares (fp32) [T, K] of each token's experts."""
    tokens, dim = x_TD.shape
    experts_TK = x_TD.new_empty((tokens, top_k), dtype=torch.int32)
    shares_TK = x_TD.new_empty((tokens, top_k), dtype=torch.float32)
    launch(
        route_kernel,
        (triton.cdiv(tokens, ROUTE_ROWS),),
        x=x_TD,
        router=router_ED,
        experts=experts_TK,
        shares=shares_TK,
        tokens=tokens,
        DIM=dim,
        EXPERTS=len(router_ED),
        EXPERT_TILE=tile_of(len(router_ED), 16),
        TOP_K=top_k,
        CHOICE_TILE=tile_of(top_k),
        NORMALISE=normalise,
        ROWS=ROUTE_ROWS,
        STEP=64 if x_TD.element_size() == 2 else 32,
        PRECISION=PRECISION.get(x_TD.dtype, "tf32"),
        num_warps=4,
        num_stages=3 if x_TD.element_size() == 2 else 2,
    )
    return experts_TK, shares_TK


def moe(
    x_TD: Tensor,
    router_ED: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    *,
    top_k: int,
    normalise: bool,
    first: int = 0,
    launch: Launcher = run,
) -> Tensor:
    """As `interface.Kernels.moe` says. No gradient."""
    experts_TK, shares_TK = route(x_TD, router_ED, top_k, normalise, launch)
    tokens, dim = x_TD.shape
    here, _, width = down_EDF.shape
    pairs = tokens * top_k
    plan = plan_grouped(pairs=pairs, experts=here, itemsize=x_TD.element_size())
    order, tile_experts = _sorted_pairs(experts_TK, here, first, plan, launch)
    inner_PF = x_TD.new_empty((pairs, width))
    _product(x_TD, gate_up_EFD, inner_PF, order, tile_experts, plan, top_k, True, launch)
    result_PD = x_TD.new_empty((pairs, dim))
    _product(inner_PF, down_EDF, result_PD, order, tile_experts, plan, 1, False, launch)
    out_TD = torch.empty_like(x_TD)
    tile = min(1024, tile_of(dim))
    launch(
        sum_shares_kernel,
        (tokens, triton.cdiv(dim, tile)),
        x=result_PD,
        experts=experts_TK,
        shares=shares_TK,
        out=out_TD,
        first=first,
        EXPERTS=here,
        DIM=dim,
        TOP_K=top_k,
        TILE=tile,
        num_warps=4,
    )
    return out_TD


def _sorted_pairs(experts_TK: Tensor, here: int, first: int, plan: GroupedPlan, launch: Launcher) -> tuple[Tensor, Tensor]:
    """(pair of each row of the tiles, expert of each tile), int32."""
    pairs = experts_TK.numel()
    counts_E = experts_TK.new_empty(here)
    order = experts_TK.new_empty(plan.tiles * plan.rows)
    tile_experts = experts_TK.new_empty(plan.tiles)
    scan = min(SCAN, tile_of(pairs, 16))
    launch(count_kernel, (here,), experts=experts_TK, counts=counts_E, pairs=pairs, first=first, SCAN=scan, num_warps=4)
    launch(
        sort_kernel,
        (here,),
        experts=experts_TK,
        counts=counts_E,
        order=order,
        tile_experts=tile_experts,
        pairs=pairs,
        first=first,
        tiles=plan.tiles,
        EXPERTS=here,
        EXPERT_TILE=tile_of(here),
        ROWS=plan.rows,
        SCAN=scan,
        num_warps=4,
    )
    return order, tile_experts


def _product(
    x: Tensor, weight: Tensor, out: Tensor, order: Tensor, tile_experts: Tensor, plan: GroupedPlan, divide: int, gated: bool,
    launch: Launcher,
) -> None:  # fmt: skip
    pairs, width = out.shape
    launch(
        grouped_product_kernel,
        (plan.tiles, triton.cdiv(width, plan.cols)),
        x=x,
        weight=weight,
        out=out,
        order=order,
        tile_experts=tile_experts,
        pairs=pairs,
        DIM=x.shape[1],
        WIDTH=width,
        DIVIDE=divide,
        GATED=gated,
        ROWS=plan.rows,
        COLS=plan.cols,
        STEP=plan.step,
        PRECISION=PRECISION.get(x.dtype, "tf32"),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
