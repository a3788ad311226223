"""What moves or changes single elements: the gated activation, and keys and values into the paged pool.

Owns the two kernels. Invariant: a slot's place is computed in 64 bits, since block times stride passes 2**31 in large pools.
Shapes: T tokens, F intermediate, G kv heads, B head_dim, N blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.triton.launch import Launcher, run, tile_of

ACTIVATION_TILE = 1024


@triton.jit
def silu_and_mul_kernel(gate_up, out, DIM: tl.constexpr, TILE: tl.constexpr):
    """TILE elements of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dim < DIM
    value = tl.load(gate_up + token * 2 * DIM + dim, mask=inside, other=0.0)
    gate = value.to(tl.float32)
    up = tl.load(gate_up + token * 2 * DIM + DIM + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + dim, (gate / (1.0 + tl.exp(-gate)) * up).to(value.dtype), mask=inside)


@triton.jit
def store_kv_kernel(
    k, v, pool_k, pool_v, slots,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """One token per program: a row of every kv head, to wherever its slot is."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEAD_TILE)
    dim = tl.arange(0, DIM_TILE)
    inside = (head < KV_HEADS)[:, None] & (dim < DIM)[None, :]
    source = token * (KV_HEADS * DIM) + head[:, None] * DIM + dim[None, :]
    block = slot // PAGE
    target = block * (KV_HEADS * PAGE * DIM) + (slot - block * PAGE) * DIM
    target += head[:, None] * (PAGE * DIM) + dim[None, :]
    tl.store(pool_k + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(pool_v + target, tl.load(v + source, mask=inside), mask=inside)


def silu_and_mul(gate_up_TF2: Tensor, launch: Launcher = run) -> Tensor:
    """silu(first half) * second half of the last axis."""
    *tokens, double = gate_up_TF2.shape
    dim = double // 2
    out_TF = gate_up_TF2.new_empty((*tokens, dim))
    tile = min(ACTIVATION_TILE, tile_of(dim))
    launch(
        silu_and_mul_kernel,
        (gate_up_TF2.numel() // double, triton.cdiv(dim, tile)),
        gate_up=gate_up_TF2,
        out=out_TF,
        DIM=dim,
        TILE=tile,
        num_warps=4,
    )
    return out_TF


def store_kv(k_TGB: Tensor, v_TGB: Tensor, kv_2NG__: Tensor, slot_mapping_T: Tensor, launch: Launcher = run) -> None:
    """Writes one layer's keys and values (in the pool's dtype) to the slots `block * block_size + offset`, int64."""
    tokens, kv_heads, dim = k_TGB.shape
    head_tile, dim_tile = tile_of(kv_heads), tile_of(dim)
    launch(
        store_kv_kernel,
        (tokens,),
        k=k_TGB,
        v=v_TGB,
        pool_k=kv_2NG__[0],
        pool_v=kv_2NG__[1],
        slots=slot_mapping_T,
        KV_HEADS=kv_heads,
        PAGE=kv_2NG__.shape[3],
        DIM=dim,
        HEAD_TILE=head_tile,
        DIM_TILE=dim_tile,
        num_warps=min(4, max(1, head_tile * dim_tile // 256)),
    )
