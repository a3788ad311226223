"""Qwen3 (dense): per-head RMSNorm on queries and keys, windows by layer. Everything else is the common decoder."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.hf_fields import attention_biases, decoder_fields, decoder_to_hf, layer_windows, layer_windows_to_hf


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Qwen3 `config.json`."""
    fields = decoder_fields(hf, head_dim=128) | attention_biases(hf)
    return ModelConfig(architecture="Qwen3ForCausalLM", qk_norm=True, windows=layer_windows(hf), **fields)


def to_hf(config: ModelConfig) -> dict:
    """The `config.json` of a Qwen3."""
    return decoder_to_hf(config) | layer_windows_to_hf(config) | {"attention_bias": config.attention_bias}
