"""The reference's kernels in bf16 where it would widen to fp32: what trains on a CPU with bf16 products.

Owns attention and the activation of such a pass, as torch's bf16 models compute them (scores and shares rounded to bf16,
sums in fp32), and products of bf16 factors whose result stays in fp32. Invariant: whatever is not a bf16 tensor, and
attention over longer sequences than LONGEST, is computed as the reference does. Shapes as in `reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.engine.kernels.cpu import native_cpu, wide_linear
from pearl.engine.kernels.padding import LengthGroup, pad_rows, unpad_rows
from pearl.engine.kernels.reference import ReferenceKernels

LONGEST = 512
"""Up to this many tokens whole matrices of scores (tokens x tokens) are quicker than pieces of them, and small."""

LOWEST = -1e30


class NarrowKernels(ReferenceKernels):
    """Implements `interface.Kernels` like the reference, with bf16 attention and activation for bf16 tensors."""

    name = "narrow"

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        if gate_up_TF2.dtype != torch.bfloat16:
            return super().silu_and_mul(gate_up_TF2)
        gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
        return F.silu(gate_TF) * up_TF

    def attend_group(
        self, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, group: LengthGroup, scale: float, window: int
    ) -> Tensor:
        if q_THB.dtype != torch.bfloat16 or group.longest > LONGEST or 0 < window < group.longest:
            return super().attend_group(q_THB, k_TGB, v_TGB, group, scale, window)
        o_SLHB = _attention(*(pad_rows(x, group) for x in (q_THB, k_TGB, v_TGB)), scale)
        return unpad_rows(o_SLHB, group)


def _attention(q_SLHB: Tensor, k_SLGB: Tensor, v_SLGB: Tensor, scale: float) -> Tensor:
    """Causal attention over whole matrices of scores; the query heads of a kv head are rows of one product."""
    sequences, length, heads, dim = q_SLHB.shape
    kv_heads = k_SLGB.shape[2]
    batches, shape = sequences * kv_heads, (sequences, kv_heads, heads // kv_heads, length)
    q = (q_SLHB * scale).view(sequences, length, *shape[1:3], dim).permute(0, 2, 3, 1, 4).reshape(batches, -1, dim)
    k, v = (x.transpose(1, 2).reshape(batches, length, dim) for x in (k_SLGB, v_SLGB))
    hidden_LL = torch.full((length, length), LOWEST, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.bmm(q, k.transpose(1, 2)).view(*shape, length) + hidden_LL
    o = torch.bmm(scores.softmax(-1).view(batches, -1, length), v)
    return o.view(*shape, dim).permute(0, 3, 1, 2, 4).reshape(q_SLHB.shape)


def wide_product(x_ND: Tensor, weight_CD: Tensor) -> Tensor:
    """`x @ weight.T` of factors rounded to bf16, added up and given in fp32. No gradient."""
    x_ND, weight_CD = x_ND.to(torch.bfloat16), weight_CD.to(torch.bfloat16)
    if x_ND.is_cuda:
        return torch.mm(x_ND, weight_CD.T, out_dtype=torch.float32)
    return wide_linear(x_ND, weight_CD) if native_cpu()[0] is not None else x_ND.float() @ weight_CD.float().T
