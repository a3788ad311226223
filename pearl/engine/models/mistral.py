"""Mistral: Llama without biases and with one window for all layers."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.hf_fields import decoder_fields, decoder_to_hf, plain_window, uniform_windows


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Mistral `config.json`."""
    fields = decoder_fields(hf)
    windows = uniform_windows(plain_window(hf), fields["num_layers"])
    return ModelConfig(architecture="MistralForCausalLM", qk_norm=False, windows=windows, **fields)


def to_hf(config: ModelConfig) -> dict:
    """The `config.json` of a Mistral."""
    return decoder_to_hf(config) | {"sliding_window": max(config.windows, default=0) or None}
