"""Llama: no norm on queries and keys, optional biases on attention and MLP."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig, dense_fields


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Llama `config.json`."""
    return ModelConfig(
        architecture="LlamaForCausalLM", qk_norm=False, mlp_bias=bool(hf.get("mlp_bias") or False), **dense_fields(hf)
    )
