"""Llama and what shares its file format (SmolLM2, ...): no norm on queries and keys, optional biases on attention and MLP."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.hf_fields import attention_biases, decoder_fields, decoder_to_hf, flag


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Llama `config.json`."""
    fields = decoder_fields(hf) | attention_biases(hf) | {"mlp_bias": flag(hf, "mlp_bias")}
    return ModelConfig(architecture="LlamaForCausalLM", qk_norm=False, **fields)


def to_hf(config: ModelConfig) -> dict:
    """The `config.json` of a Llama."""
    return decoder_to_hf(config) | {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
