"""The Triton kernels as a `Kernels` value.

Owns which combinations they serve; the operations are in the other files of this package, dense products are torch's (cuBLAS).
They have no backward pass: training goes through `reference`, and for the log-probs at its end through `token_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.engine.kernels.interface import Drawn, DrawRows, PackedBatch, PagedBatch, ScoreChanges, ServedModel
from pearl.engine.kernels.triton import attention_plan, elementwise, moe, norm_rope, penalties, sampling
from pearl.engine.kernels.triton.launch import Launcher, run
from pearl.engine.models.config import ModelConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
LARGEST_HIDDEN = 32768


class TritonKernels:
    """Implements `interface.Kernels` on NVIDIA GPUs from compute capability 8.0 on. `launch` is `run` but for looking."""

    name = "triton"
    kv_layout = "plain"
    row_invariant = False

    def __init__(self, launch: Launcher = run) -> None:
        self._launch = launch

    def refusal(self, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        if device.type != "cuda":
            return f"device={device.type}: the Triton kernels need a CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]}: must be 8.0 or later"
        return unsupported(dtype, model, block_size)

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        return F.linear(x_TD, weight_ED, bias_E)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return norm_rope.rms_norm(x_TD, weight_D, eps, self._launch)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm_rope.add_rms_norm(x_TD, residual_TD, weight_D, eps, self._launch)

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
        return norm_rope.qk_norm_rope(q_THB, k_TGB, cos_TB, sin_TB, q_weight_B, k_weight_B, eps, self._launch)

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        return elementwise.silu_and_mul(gate_up_TF2, self._launch)

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
        return moe.moe(
            x_TD, router_ED, gate_up_EFD, down_EDF, top_k=top_k, normalise=normalise, first=first, launch=self._launch
        )

    def store_kv(self, k_TGB: Tensor, v_TGB: Tensor, kv_2NG__: Tensor, slot_mapping_T: Tensor) -> None:
        elementwise.store_kv(k_TGB, v_TGB, kv_2NG__, slot_mapping_T, self._launch)

    def paged_attention(self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0) -> Tensor:
        return attention_plan.paged_attention(q_THB, kv_2NG__, batch, scale, window, self._launch)

    def varlen_attention(
        self, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, batch: PackedBatch, scale: float, window: int = 0
    ) -> Tensor:
        """ValueError if a gradient is wanted: it would be lost without a word."""
        if torch.is_grad_enabled() and (q_THB.requires_grad or k_TGB.requires_grad or v_TGB.requires_grad):
            raise ValueError("kernels='triton' have no backward pass: train with kernels='reference'")
        return attention_plan.varlen_attention(q_THB, k_TGB, v_TGB, batch, scale, window, self._launch)

    def draw(self, scores_SV: Tensor, logits_SV: Tensor, rows: DrawRows) -> Drawn:
        return sampling.draw(scores_SV.contiguous(), logits_SV.contiguous(), rows, self._launch)

    def queue_draw(
        self, logits_SV: Tensor, rows: DrawRows, changes: ScoreChanges
    ) -> tuple[Tensor, Callable[[], Drawn]]:
        logits_SV = logits_SV.contiguous()
        return sampling.queue(penalties.changed(logits_SV, changes, self._launch), logits_SV, rows, self._launch)

    def serve(self, model: ServedModel, kv_pool: Tensor, memory: object) -> None:
        return None


def unsupported(dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
    """What of a model these kernels are not made for, whatever the GPU."""
    if dtype not in DTYPES:
        return f"dtype={dtype}: must be one of {', '.join(str(known) for known in DTYPES)}"
    if block_size < 1:
        return f"block_size={block_size}: must be >= 1"
    if model.head_dim > attention_plan.LARGEST_DIM or model.head_dim % 2:
        return f"head_dim={model.head_dim}: must be even and at most {attention_plan.LARGEST_DIM}"
    group = model.num_heads // model.num_kv_heads
    if group > attention_plan.LARGEST_GROUP:
        return f"{group} query heads per kv head: at most {attention_plan.LARGEST_GROUP}"
    if model.hidden_size > LARGEST_HIDDEN:
        return f"hidden_size={model.hidden_size}: at most {LARGEST_HIDDEN}"
    return None
