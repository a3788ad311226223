"""One decoder layer and the pieces around it, as functions over parameters and a `Kernels` value.

Owns the order of operations of a decoder layer, dense or of experts; does not know where keys and values live (that is
`Attend`) nor how tensors are called on disk. Invariant: every operation on activations goes through `Kernels`, so a layer is
the same code in training and in serving. Shapes: T tokens, D hidden, H query heads, G kv heads, B head_dim, F
intermediate.

Tensor parallelism: each rank has its heads, its part of the MLP and its experts; what leaves attention and MLP is summed over
the ranks (for serving: the sum has no gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pearl.engine.comm.communicator import Communicator
from pearl.engine.kernels.interface import Attend, Kernels
from pearl.engine.models.config import Experts, ModelConfig
from pearl.engine.models.params import Shard

HEAD_ROWS = 8192
"""Vocabulary rows of a 16-bit head that are widened to fp32 at a time."""


class DecoderLayer(nn.Module):
    """Parameters of layer `index` (added by the decoder under their ParamSpec names) and its forward pass.

    `config` has the heads of this rank (see `params.local_config`); `comm` is the tensor-parallel group, None: there is none.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, index: int, shard: Shard, comm: Communicator | None) -> None:
        super().__init__()
        self.config, self.kernels, self.index, self.comm = config, kernels, index, comm
        self.routing = config.experts if config.experts is not None and index in config.experts.layers else None
        self.first_expert = 0 if self.routing is None else shard.share(self.routing.count)[0]

    def forward(
        self, delta_TD: Tensor | None, residual_TD: Tensor, cos_TB: Tensor, sin_TB: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Takes the output of the layer before, not yet added (None: there is none), and the residual stream.

        Returns the same pair: the MLP's output, and the stream. A layer reads no parameter but its own, so that each layer
        can be sharded by itself; the addition is left to the norm that comes next: one kernel instead of two.
        """
        eps, weight_D = self.config.rms_eps, parameter(self, "input_norm")
        if delta_TD is None:
            x_TD = self.kernels.rms_norm(residual_TD, weight_D, eps)
        else:
            x_TD, residual_TD = self.kernels.add_rms_norm(delta_TD, residual_TD, weight_D, eps)
        attention_TD = self._attention(x_TD, cos_TB, sin_TB, attend)
        x_TD, residual_TD = self.kernels.add_rms_norm(attention_TD, residual_TD, parameter(self, "post_norm"), eps)
        mlp_TD = self._dense(x_TD) if self.routing is None else self._experts(x_TD, self.routing)
        return mlp_TD, residual_TD

    def _attention(self, x_TD: Tensor, cos_TB: Tensor, sin_TB: Tensor, attend: Attend) -> Tensor:
        q_THB, k_TGB, v_TGB = split_heads(self._linear(x_TD, "qkv"), self.config)
        q_weight_B, k_weight_B = optional_parameter(self, "q_norm"), optional_parameter(self, "k_norm")
        q_THB, k_TGB = self.kernels.qk_norm_rope(q_THB, k_TGB, cos_TB, sin_TB, q_weight_B, k_weight_B, self.config.rms_eps)
        return self._summed_linear(attend(self.index, q_THB, k_TGB, v_TGB).flatten(1), "o")

    def _dense(self, x_TD: Tensor) -> Tensor:
        return self._summed_linear(self.kernels.silu_and_mul(self._linear(x_TD, "gate_up")), "down")

    def _experts(self, x_TD: Tensor, routing: Experts) -> Tensor:
        out_TD = self.kernels.moe(
            x_TD,
            parameter(self, "router"),
            parameter(self, "experts", "gate_up"),
            parameter(self, "experts", "down"),
            top_k=routing.top_k,
            normalise=routing.norm_topk_prob,
            first=self.first_expert,
        )
        if self.comm is not None:
            self.comm.all_reduce_sum(out_TD)
        return out_TD

    def _summed_linear(self, x: Tensor, name: str) -> Tensor:
        """A projection of which each rank has some columns; the bias, whole on each, is added once."""
        if self.comm is None:
            return self._linear(x, name)
        out_TD = self.kernels.linear(x, parameter(self, name))
        self.comm.all_reduce_sum(out_TD)
        bias_D = optional_parameter(self, name, "bias")
        return out_TD if bias_D is None else out_TD + bias_D

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self.kernels.linear(x, parameter(self, name), optional_parameter(self, name, "bias"))


def split_heads(qkv_TE: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection's rows as contiguous q_THB, k_TGB, v_TGB."""
    kv = config.num_kv_heads * config.head_dim
    parts = qkv_TE.split((config.num_heads * config.head_dim, kv, kv), dim=-1)
    q, k, v = (part.contiguous().view(part.shape[0], -1, config.head_dim) for part in parts)
    return q, k, v


def wide_head(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits [T, V] in fp32 (fp64 for an fp64 model): `h.float() @ W.float().T`, a slice of the vocabulary at a time.

    Served on a GPU it is one product that keeps its fp32 sums and reads the weights as they are: 16-bit factors have exact
    fp32 products. (That one has no derivative, and CPUs do not have it.)
    """
    if hidden_TD.dtype in (torch.float32, torch.float64):
        return hidden_TD @ weight_VD.T
    if hidden_TD.is_cuda and torch.is_inference_mode_enabled():
        return torch.mm(hidden_TD, weight_VD.T, out_dtype=torch.float32)
    wide_TD = hidden_TD.float()
    return torch.cat([wide_TD @ rows.float().T for rows in weight_VD.split(HEAD_ROWS)], dim=-1)


def add_parameter(root: nn.Module, name: str, value: nn.Parameter) -> None:
    """Registers `value` as the dotted `name` under `root`, making the bare modules between where they are missing."""
    *path, leaf = name.split(".")
    module = root
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module.register_parameter(leaf, value)


def parameter(module: nn.Module, name: str, kind: str = "weight") -> Tensor:
    """`module.<name>.<kind>`, read from the dictionaries: nn.Module's attribute look-up costs more than a small kernel.

    Looked up at every use, because a sharding wrapper replaces parameters behind our back.
    """
    return module._modules[name]._parameters[kind]  # type: ignore[union-attr, return-value]


def optional_parameter(module: nn.Module, name: str, kind: str = "weight") -> Tensor | None:
    """Like `parameter`, None where the model has none."""
    child = module._modules.get(name)
    return None if child is None else child._parameters.get(kind)
