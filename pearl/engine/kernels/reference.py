"""Plain torch kernels: the oracle of all others, and the ones that train on a CPU.

Owns the arithmetic of every `Kernels` operation; knows no parameter name and no scheduler. Everything is computed in fp32
(fp64 for fp64 inputs) and rounded to the input's dtype once. Invariant: no value of a pool slot at or past a sequence's
context length reaches a result, whatever it holds (0 * NaN is NaN, so such values are dropped, not multiplied by 0).
Shapes: T tokens, H query heads, G kv heads, B head_dim, S sequences, N blocks, Q queries, L keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.engine.kernels.decode_rows import DecodePlan, Scratch, decode_attention, plan_decode, widened
from pearl.engine.kernels.experts import mix, route
from pearl.engine.kernels.interface import Draw, PackedBatch, PagedBatch, ServedModel
from pearl.engine.kernels.padding import LengthGroup, length_groups, pad_rows, unpad_rows
from pearl.engine.models.config import ModelConfig


class ReferenceKernels:
    """Implements `interface.Kernels` on any device torch knows; all but the paged pair are differentiable."""

    name = "reference"
    kv_layout = "plain"
    row_invariant = False
    draw: Draw | None = None

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._planned: tuple[PagedBatch, dict[int, list[DecodePlan]]] | None = None

    def refusal(self, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return f"dtype={dtype}: reference computes in float64, float32, bfloat16 and float16"
        if block_size < 1:
            return f"block_size={block_size}: must be >= 1"
        return None

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return F.linear(x_TD, weight_ED, bias_E)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return _norm(widened(x_TD), weight_D, eps).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def qk_norm_rope(
        self,
        q_THB: Tensor,
        k_TGB: Tensor,
        cos_TB: Tensor,
        sin_TB: Tensor,
        q_weight_B: Tensor | None,
        k_weight_B: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        half = sin_TB.shape[-1] // 2
        signed_sin_T1B = torch.cat((-sin_TB[:, :half], sin_TB[:, half:]), dim=-1)[:, None]
        cos_T1B = cos_TB[:, None]
        return (
            _norm_rope(q_THB, cos_T1B, signed_sin_T1B, q_weight_B, eps),
            _norm_rope(k_TGB, cos_T1B, signed_sin_T1B, k_weight_B, eps),
        )

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        gate_TF, up_TF = widened(gate_up_TF2).chunk(2, dim=-1)
        return (F.silu(gate_TF) * up_TF).to(gate_up_TF2.dtype)

    def moe(
        self,
        x_TD: Tensor,
        router_ED: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        *,
        top_k: int,
        normalise: bool,
        first: int = 0,
    ) -> Tensor:
        experts_TK, shares_TK = route(x_TD, router_ED, top_k, normalise)
        return mix(x_TD, experts_TK, shares_TK, gate_up_EFD, down_EDF, first)

    def store_kv(self, k_TGB: Tensor, v_TGB: Tensor, kv_2NG__: Tensor, slot_mapping_T: Tensor) -> None:
        block_size = kv_2NG__.shape[3]
        block_T = torch.div(slot_mapping_T, block_size, rounding_mode="floor")
        offset_T = slot_mapping_T - block_T * block_size
        # The pool outlives the step: detached, so that it can never hold on to a graph.
        kv_2NG__[0, block_T, :, offset_T] = k_TGB.detach()
        kv_2NG__[1, block_T, :, offset_T] = v_TGB.detach()

    @torch.no_grad()
    def paged_attention(
        self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0
    ) -> Tensor:
        o_THB = torch.empty_like(q_THB)
        for plan in self._decode_plans(batch, kv_2NG__, window):
            o_THB[plan.rows] = decode_attention(q_THB[plan.rows], kv_2NG__, plan, scale, self._scratch)
        lengths = batch.context_lens_S.tolist()
        starts = batch.query_starts_S1.tolist()
        for s in range(batch.num_decodes, len(lengths)):
            span = slice(starts[s], starts[s + 1])
            o_THB[span] = _chunk_attention(q_THB[span], kv_2NG__, batch.block_tables_SN[s], lengths[s], scale, window)
        return o_THB

    def _decode_plans(self, batch: PagedBatch, kv_2NG__: Tensor, window: int) -> list[DecodePlan]:
        """The plan of a batch is the same in all layers of one window: kept until another batch (a frozen value) comes."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, {})
        plans = self._planned[1]
        if window not in plans:
            plans[window] = plan_decode(batch, kv_2NG__, window)
        return plans[window]

    def varlen_attention(
        self, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, batch: PackedBatch, scale: float, window: int = 0
    ) -> Tensor:
        if sum(batch.lengths) != q_THB.shape[0]:
            raise ValueError(f"lengths sum to {sum(batch.lengths)}: must be the number of tokens, {q_THB.shape[0]}")
        if not batch.positions_T.numel():
            return q_THB
        groups = length_groups(batch.lengths, q_THB.device)
        outputs = [self.attend_group(q_THB, k_TGB, v_TGB, group, scale, window) for group in groups]
        if len(groups) == 1:
            return outputs[0]
        order_T = torch.cat([group.tokens_T for group in groups])
        return torch.cat(outputs).index_select(0, torch.argsort(order_T))

    def attend_group(
        self, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, group: LengthGroup, scale: float, window: int
    ) -> Tensor:
        """The packed tokens of one group's sequences, in the group's order. Causality hides the padding on the right."""
        q, k, v = (pad_rows(x, group).transpose(1, 2) for x in (q_THB, k_TGB, v_TGB))
        return unpad_rows(_causal_attention(q, k, v, scale, window).transpose(1, 2), group)

    def serve(self, model: ServedModel, kv_pool: Tensor, memory: object) -> None:
        return None


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _norm_rope(x_THB: Tensor, cos_T1B: Tensor, signed_sin_T1B: Tensor, weight_B: Tensor | None, eps: float) -> Tensor:
    """Half-split rotary embedding (Su et al. 2021, in the pairing of GPT-NeoX): x cos + (-x2, x1) sin."""
    wide = widened(x_THB)
    if weight_B is not None:
        wide = _norm(wide, weight_B, eps)
    swapped = torch.roll(wide, wide.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos_T1B.to(wide.dtype), swapped, signed_sin_T1B.to(wide.dtype)).to(x_THB.dtype)


def _chunk_attention(
    q_QHB: Tensor, kv_2NG__: Tensor, table_N: Tensor, context: int, scale: float, window: int
) -> Tensor:
    """The last Q tokens of one sequence against its `context` keys, of which those that no query sees are not read."""
    kv_heads, block_size, dim = kv_2NG__.shape[2:]
    unseen = max(0, context - len(q_QHB) + 1 - window) if window else 0
    first = unseen // block_size
    blocks = kv_2NG__[:, table_N[first : -(-context // block_size)].long()]
    kept = slice(unseen - first * block_size, context - first * block_size)
    k_GLB, v_GLB = blocks.transpose(1, 2).reshape(2, kv_heads, -1, dim)[:, :, kept]
    return _causal_attention(q_QHB.transpose(0, 1)[None], k_GLB[None], v_GLB[None], scale, window)[0].transpose(0, 1)


def _causal_attention(q_SHQB: Tensor, k_SGLB: Tensor, v_SGLB: Tensor, scale: float, window: int) -> Tensor:
    """Softmax attention where query i of Q sees keys 0 .. L - Q + i, or the `window` last of these."""
    queries, keys = q_SHQB.shape[2], k_SGLB.shape[2]
    narrow = 0 < window < keys
    mask = None
    if narrow or queries != keys:  # `is_causal` would align the corner at the top left
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q_SHQB.device).tril(keys - queries)
    if mask is not None and narrow:
        mask = mask.triu(keys - queries - window + 1)
    q, k, v = widened(q_SHQB), widened(k_SGLB), widened(v_SGLB)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.to(q_SHQB.dtype)
