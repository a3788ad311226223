"""Qwen2 and Qwen2.5: always biases on queries, keys and values and never on the output, windows by layer."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.hf_fields import decoder_fields, decoder_to_hf, layer_windows, layer_windows_to_hf


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Qwen2 `config.json`."""
    fields = decoder_fields(hf) | {"attention_bias": True, "windows": layer_windows(hf)}
    return ModelConfig(architecture="Qwen2ForCausalLM", qk_norm=False, **fields)


def to_hf(config: ModelConfig) -> dict:
    """The `config.json` of a Qwen2."""
    return decoder_to_hf(config) | layer_windows_to_hf(config)
