"""RMSNorm, alone or after adding the residual, and per-head norm with rotary embedding, each in one pass over its input.

Owns this arithmetic: fp32 inside, one rounding at the end, and at the points where `reference` rounds (a residual sum is
rounded to the model's dtype before it is normalised). Shapes: T tokens, D hidden, H query heads, G kv heads, B head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.triton.launch import Launcher, row_warps, run, tile_of

HEADS_PER_PROGRAM = 8


@triton.jit
def rms_norm_kernel(x, residual, weight, out, total, eps, DIM: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr):
    """One token per program."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, TILE)
    inside = dim < DIM
    value = tl.load(x + token * DIM + dim, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if ADD:
        wide += tl.load(residual + token * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(value.dtype)
        tl.store(total + token * DIM + dim, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / DIM + eps)
    normed = wide * scale * tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + dim, normed.to(value.dtype), mask=inside)


@triton.jit
def _norm_rope_heads(
    x, out, weight, cos, sin, token, first_head, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF_TILE: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token: both halves of a head are loaded side by side, since each turns with the other."""
    HALF: tl.constexpr = DIM // 2
    head = first_head + tl.arange(0, ROWS)
    dim = tl.arange(0, HALF_TILE)
    there = dim < HALF
    inside = (head < HEADS)[:, None] & there[None, :]
    place = (token * HEADS + head)[:, None] * DIM + dim[None, :]
    first = tl.load(x + place, mask=inside, other=0.0)
    a = first.to(tl.float32)
    b = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
        a = a * scale[:, None] * tl.load(weight + dim, mask=there, other=0.0).to(tl.float32)[None, :]
        b = b * scale[:, None] * tl.load(weight + HALF + dim, mask=there, other=0.0).to(tl.float32)[None, :]
    angle = token * DIM + dim
    turned_a = a * tl.load(cos + angle, mask=there, other=0.0)[None, :]
    turned_a -= b * tl.load(sin + angle, mask=there, other=0.0)[None, :]
    turned_b = b * tl.load(cos + angle + HALF, mask=there, other=0.0)[None, :]
    turned_b += a * tl.load(sin + angle + HALF, mask=there, other=0.0)[None, :]
    tl.store(out + place, turned_a.to(first.dtype), mask=inside)
    tl.store(out + place + HALF, turned_b.to(first.dtype), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_TILE: tl.constexpr, ROWS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """Programs of a token: first those of its query heads, then those of its keys."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    # fmt: off
    if part < Q_PARTS:
        _norm_rope_heads(q, q_out, q_weight, cos, sin, token, part * ROWS, eps, HEADS, DIM, HALF_TILE, ROWS, Q_NORM)
    else:
        _norm_rope_heads(
            k, k_out, k_weight, cos, sin, token, (part - Q_PARTS) * ROWS, eps, KV_HEADS, DIM, HALF_TILE, ROWS, K_NORM)
    # fmt: on


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, launch: Launcher = run) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    out_TD = torch.empty_like(x_TD)
    _launch_norm(x_TD, x_TD, weight_D, out_TD, out_TD, eps, False, launch)
    return out_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, launch: Launcher = run
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual)."""
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch_norm(x_TD, residual_TD, weight_D, out_TD, total_TD, eps, True, launch)
    return out_TD, total_TD


def _launch_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, out_TD: Tensor, total_TD: Tensor, eps: float, add: bool,
    launch: Launcher,
) -> None:  # fmt: skip
    dim = x_TD.shape[-1]
    launch(
        rms_norm_kernel,
        (x_TD.numel() // dim,),
        x=x_TD,
        residual=residual_TD,
        weight=weight_D,
        out=out_TD,
        total=total_TD,
        eps=eps,
        DIM=dim,
        TILE=tile_of(dim),
        ADD=add,
        num_warps=row_warps(dim),
    )


def qk_norm_rope(
    q_THB: Tensor,
    k_TGB: Tensor,
    cos_TB: Tensor,
    sin_TB: Tensor,
    q_weight_B: Tensor | None,
    k_weight_B: Tensor | None,
    eps: float,
    launch: Launcher = run,
) -> tuple[Tensor, Tensor]:
    """Per-head RMSNorm where weights are given, then rotary embedding in half-split pairs (Su et al. 2021)."""
    tokens, heads, dim = q_THB.shape
    kv_heads = k_TGB.shape[1]
    q_out, k_out = torch.empty_like(q_THB), torch.empty_like(k_TGB)
    rows = min(HEADS_PER_PROGRAM, tile_of(max(heads, kv_heads)))
    launch(
        qk_norm_rope_kernel,
        (tokens, triton.cdiv(heads, rows) + triton.cdiv(kv_heads, rows)),
        q=q_THB,
        k=k_TGB,
        q_out=q_out,
        k_out=k_out,
        q_weight=q_THB if q_weight_B is None else q_weight_B,
        k_weight=k_TGB if k_weight_B is None else k_weight_B,
        cos=cos_TB,
        sin=sin_TB,
        eps=eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF_TILE=tile_of(dim // 2),
        ROWS=rows,
        Q_NORM=q_weight_B is not None,
        K_NORM=k_weight_B is not None,
        num_warps=2,
    )
    return q_out, k_out
