"""The decoder: embedding, layers, final norm and head, in one definition for the trainer and the engine.

Owns the parameters (named exactly as `param_specs` says) and the rotary tables; does not know caches, batches or files: how a
layer attends is the `Attend` it is given, made by `paged_attend` or `varlen_attend`. Invariant: parameters are allocated once,
so their addresses never change (unless a trainer shards them). Shapes: T tokens, N chosen tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """A dense decoder in `dtype` on `device`. Parameters are zero until loaded or `init_weights` is called.

    `allocate=False` gives parameters shapes but no memory (torch's meta device), for whoever shards them first.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        allocate: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embed = nn.Module()
        self.layers = nn.ModuleList(DecoderLayer(config, kernels, index) for index in range(config.num_layers))
        place = device if allocate else "meta"
        for spec in param_specs(config):
            add_parameter(self, spec.name, nn.Parameter(torch.zeros(spec.shape, dtype=dtype, device=place)))
        # Plain attributes: neither `.to(dtype)` nor a state dict may touch them.
        self.rope_cos, self.rope_sin = rope_tables(config, device)

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend, *, logits_of_N: Tensor | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, D]; or, with row numbers `logits_of_N`, the fp32 logits [N, V] of those rows.

        Positions are int64 in [0, max_position). A sharded decoder has its own parameters whole only inside this call.
        """
        cos_TB, sin_TB = self.rope_cos.index_select(0, positions_T), self.rope_sin.index_select(0, positions_T)
        delta_TD, residual_TD = None, F.embedding(input_ids_T, parameter(self, "embed"))
        for layer in self.layers:
            delta_TD, residual_TD = layer(delta_TD, residual_TD, cos_TB, sin_TB, attend)
        x_TD, _ = self.kernels.add_rms_norm(delta_TD, residual_TD, parameter(self, "norm"), self.config.rms_eps)
        return x_TD if logits_of_N is None else self.logits(x_TD[logits_of_N])

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """fp32 logits [T, V] of final-normed hidden states."""
        return wide_head(hidden_TD, parameter(self, "embed" if self.config.tie_embeddings else "lm_head"))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Random weights, see `random_weights`."""
        parameters = dict(self.named_parameters())
        for name, value in random_weights(self.config, seed):
            parameters[name].copy_(value)


def random_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """fp32 values (normal, std 0.02; norms 1, biases 0) of all parameters, the same for a seed on every machine."""
    for index, spec in enumerate(param_specs(config)):
        if spec.init == "normal":
            # numpy's Philox stream is specified bit for bit; torch's normal_ depends on the vector width.
            draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
            value = torch.from_numpy(draw.standard_normal(spec.shape, dtype=np.float32)).mul_(INIT_STD)
        else:
            value = torch.full(spec.shape, 1.0 if spec.init == "ones" else 0.0)
        yield spec.name, value


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
