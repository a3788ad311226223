"""The decoder: embedding, layers, final norm and head, in one definition for the trainer and the engine.

Owns the parameters (named exactly as `param_specs` says) and the rotary tables; does not know caches, batches or files: how a
layer attends is the `Attend` it is given, made by `paged_attend` or `varlen_attend`. Invariant: parameters are allocated once,
so their addresses never change. Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.engine.kernels.interface import Attend, Kernels, PackedBatch, PagedBatch
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.layers import DecoderLayer, add_parameter, parameter, rope_tables, wide_head
from pearl.engine.models.params import param_specs

INIT_STD = 0.02


class Decoder(nn.Module):
    """A dense decoder in `dtype` on `device`. Parameters are zero until loaded or `init_weights` is called."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embed = nn.Module()
        self.layers = nn.ModuleList(DecoderLayer(config, kernels, index) for index in range(config.num_layers))
        for spec in param_specs(config):
            add_parameter(self, spec.name, nn.Parameter(torch.zeros(spec.shape, dtype=dtype, device=device)))
        # Plain attributes: neither `.to(dtype)` nor a state dict may touch them.
        self.rope_cos, self.rope_sin = rope_tables(config, device)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Final-normed hidden states [T, D]. Positions are int64 in [0, max_position)."""
        eps = self.config.rms_eps
        cos_TB, sin_TB = self.rope_cos.index_select(0, positions_T), self.rope_sin.index_select(0, positions_T)
        residual_TD = F.embedding(input_ids_T, parameter(self, "embed"))
        layers = list(self.layers)
        x_TD = self.kernels.rms_norm(residual_TD, parameter(layers[0], "input_norm"), eps)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_TB, sin_TB, attend)
            # A layer's output is added inside the norm that follows it: one kernel instead of two.
            weight_D = parameter(self, "norm") if following is None else parameter(following, "input_norm")
            x_TD, residual_TD = self.kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 logits [T, V] of final-normed hidden states."""
        return wide_head(hidden_TD, parameter(self, "embed" if self.config.tie_embeddings else "lm_head"))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Random weights (normal, std 0.02; norms 1, biases 0), the same for a seed on every machine and in every dtype."""
        parameters = dict(self.named_parameters())
        for index, spec in enumerate(param_specs(self.config)):
            if spec.init == "normal":
                # numpy's Philox stream is specified bit for bit; torch's normal_ depends on the vector width.
                draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
                value = torch.from_numpy(draw.standard_normal(spec.shape, dtype=np.float32)).mul_(INIT_STD)
                parameters[spec.name].copy_(value)
            else:
                parameters[spec.name].fill_(1.0 if spec.init == "ones" else 0.0)


def paged_attend(kernels: Kernels, kv_pool: Tensor, batch: PagedBatch, config: ModelConfig) -> Attend:
    """Attention over the paged pool kv[layer, 2, block, kv_head, ...]: this step's keys and values are stored first."""
    scale = config.head_dim**-0.5

    def attend(layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor:
        kv_2NG__ = kv_pool[layer]
        kernels.store_kv(k_TGB, v_TGB, kv_2NG__, batch.slot_mapping_T)
        return kernels.paged_attention(q_THB, kv_2NG__, batch, scale)

    return attend


def varlen_attend(kernels: Kernels, batch: PackedBatch, config: ModelConfig) -> Attend:
    """Attention inside each sequence of a packed batch, without a cache; what the trainer and `score` use."""
    scale = config.head_dim**-0.5

    def attend(_layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor:
        return kernels.varlen_attention(q_THB, k_TGB, v_TGB, batch, scale)

    return attend
