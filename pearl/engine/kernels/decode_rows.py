"""Attention of decode rows (one query each) over the paged pool in plain torch: a padded gather and two batched products.

Owns the plan of a step (which pool rows are gathered, which gathered cells are unused) and the scratch memory; knows nothing
of chunks of several queries. Invariant: cells outside a row's window or context are zeroed and masked before they meet a
number that counts; blocks outside the window are not read. Shapes: D rows, G kv heads, R query heads per kv head, H = G * R,
L padded length, B head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PagedBatch
from pearl.engine.kernels.padding import LengthGroup, length_groups

MAX_ELEMENTS = 1 << 24
"""Elements of K (and of V) that are gathered at once; more rows make a further group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One rectangle of decode rows. `rows` picks them out of the batch; `length` is L, a multiple of the block size.

    `gather` are (block, head) rows of the pool in [D, G, block] order; `bias_D1L` is -inf on the cells that do not exist, else
    0; `unseen` are the flat cells of [D, G, L] that are gathered from slots that the row never wrote or no longer sees.
    """

    rows: slice | Tensor
    length: int
    gather: Tensor
    bias_D1L: Tensor
    unseen: Tensor


class Scratch:
    """Buffers that are kept between calls: a fresh allocation of some megabytes costs more in page faults than its use."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, valid until the same name is taken again."""
        key = (name, dtype or like.dtype, like.device)
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # must stay writable outside inference mode
                buffer = torch.empty(size + size // 4, dtype=key[1], device=key[2])
            self._buffers[key] = buffer
        return buffer[:size].view(shape)


def widened(x: Tensor) -> Tensor:
    """The tensor in the dtype that the reference computes in: fp32, or fp64 for fp64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def plan_decode(batch: PagedBatch, kv_2NG__: Tensor, window: int = 0) -> list[DecodePlan]:
    """Rectangles that cover the batch's decode rows; valid for every layer of this window of a pool of this shape."""
    _, _, kv_heads, block_size, dim = kv_2NG__.shape
    contexts = batch.context_lens_S[: batch.num_decodes].tolist()
    spans = tuple(context - (_first_seen(context, window) // block_size) * block_size for context in contexts)
    groups = length_groups(spans, kv_2NG__.device, MAX_ELEMENTS // (kv_heads * dim))
    return [_plan_group(batch, group, kv_heads, block_size, window) for group in groups]


def _first_seen(context: int, window: int) -> int:
    """The first position that the newest of `context` tokens sees."""
    return max(0, context - window) if window else 0


def _plan_group(batch: PagedBatch, group: LengthGroup, kv_heads: int, block_size: int, window: int) -> DecodePlan:
    """Positions count from the first block that a row sees something of."""
    rows = slice(0, batch.num_decodes) if group.rows is None else group.rows
    context_D1 = batch.context_lens_S[rows].long()[:, None]
    seen_D1 = (context_D1 - window).clamp_(min=0) if window else torch.zeros_like(context_D1)
    first_D1 = seen_D1 // block_size
    end_D1, start_D1 = context_D1 - first_D1 * block_size, seen_D1 - first_D1 * block_size
    blocks = -(-group.longest // block_size)
    block_N = torch.arange(blocks, device=context_D1.device)
    # Missing blocks are read from the row's first one: numbers that are read anyway, so that only the ends of the row's own
    # cells have to be cleaned.
    source_DN = torch.where(block_N * block_size < end_D1, block_N, 0)
    table_DN = batch.block_tables_SN[rows].long().gather(1, first_D1 + source_DN)
    offset_B = torch.arange(block_size, device=context_D1.device)
    place_DL = (source_DN[:, :, None] * block_size + offset_B).flatten(1)
    unseen_DL = (place_DL >= end_D1) | (place_DL < start_D1)
    length = blocks * block_size
    cell_L = torch.arange(length, device=context_D1.device)
    bias_DL = torch.zeros(len(table_DN), length, dtype=torch.float32, device=context_D1.device)
    bias_DL.masked_fill_((cell_L >= end_D1) | (cell_L < start_D1), float("-inf"))
    # (block, head) is one contiguous row of the pool: gathered in [row, head, block] order, nothing is transposed later.
    head_G1 = torch.arange(kv_heads, device=context_D1.device)[:, None]
    return DecodePlan(
        rows=rows,
        length=length,
        gather=(table_DN[:, None] * kv_heads + head_G1).flatten(),
        bias_D1L=bias_DL[:, None],
        unseen=unseen_DL[:, None].expand(-1, kv_heads, -1).flatten().nonzero()[:, 0],
    )


def decode_attention(q_DHB: Tensor, kv_2NG__: Tensor, plan: DecodePlan, scale: float, scratch: Scratch) -> Tensor:
    """Softmax attention of one query per row over its cells, in the dtype of q."""
    rows, heads, dim = q_DHB.shape
    kv_heads = kv_2NG__.shape[2]
    pairs, per_head = rows * kv_heads, heads // kv_heads
    k = _gather("k", kv_2NG__[0], plan, scratch).view(pairs, plan.length, dim)
    v = _gather("v", kv_2NG__[1], plan, scratch).view(pairs, plan.length, dim)
    q = (widened(q_DHB) * scale).view(pairs, per_head, dim)
    scores = torch.bmm(q, k.transpose(1, 2)).view(rows, heads, plan.length)
    weights = torch.softmax(scores.add_(plan.bias_D1L), dim=-1).view(pairs, per_head, plan.length)
    return torch.bmm(weights, v).view(rows, heads, dim).to(q_DHB.dtype)


def _gather(name: str, pool_NG__: Tensor, plan: DecodePlan, scratch: Scratch) -> Tensor:
    """The plan's cells [D * G * L, B], widened, with 0 where nothing may be seen (a weight of 0 does not undo a NaN)."""
    _, _, block_size, dim = pool_NG__.shape
    rows = pool_NG__.view(-1, block_size * dim)
    shape = (len(plan.gather), rows.shape[1])
    out = torch.index_select(rows, 0, plan.gather, out=scratch.take(name, shape, rows))
    if out.dtype not in (torch.float32, torch.float64):
        out = scratch.take(name + "_wide", shape, rows, torch.float32).copy_(out)
    return out.view(-1, dim).index_fill_(0, plan.unseen, 0.0)
