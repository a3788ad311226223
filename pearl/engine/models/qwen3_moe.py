"""Qwen3-MoE: Qwen3 with experts in place of the MLP in all or some layers, and one window for all layers."""

from __future__ import annotations

from pearl.engine.models.config import Experts, ModelConfig
from pearl.engine.models.hf_fields import (
    attention_biases,
    decoder_fields,
    decoder_to_hf,
    flag,
    switched_window,
    uniform_windows,
    whole,
)


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE `config.json`. A `layer_types` in it counts for nothing, as in transformers."""
    fields = decoder_fields(hf) | attention_biases(hf)
    return ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        windows=uniform_windows(switched_window(hf), fields["num_layers"]),
        experts=_experts(hf, fields["num_layers"]),
        **fields,
    )


def to_hf(config: ModelConfig) -> dict:
    """The `config.json` of a Qwen3-MoE. Its layers with a dense MLP are listed one by one."""
    experts = config.experts
    sparse = experts.layers if experts else ()
    hf = decoder_to_hf(config) | {
        "attention_bias": config.attention_bias,
        "use_sliding_window": bool(config.windows),
        "sliding_window": max(config.windows, default=0) or None,
        "num_experts": experts.count if experts else 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in sparse],
    }
    if experts:
        hf["num_experts_per_tok"] = experts.top_k
        hf["moe_intermediate_size"] = experts.intermediate_size
        hf["norm_topk_prob"] = experts.norm_topk_prob
    return hf


def _experts(hf: dict, num_layers: int) -> Experts | None:
    # Two names of one number; where a file has both, transformers takes the newer.
    count = whole(hf, "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts", least=0)
    step = whole(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers={dense!r}: must be a list of layer numbers")
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not count or not layers:
        return None
    top_k = whole(hf, "num_experts_per_tok")
    if top_k > count:
        raise ValueError(f"num_experts_per_tok={top_k}: must not exceed num_experts={count}")
    return Experts(
        count=count,
        top_k=top_k,
        intermediate_size=whole(hf, "moe_intermediate_size"),
        norm_topk_prob=flag(hf, "norm_topk_prob"),
        layers=layers,
    )
