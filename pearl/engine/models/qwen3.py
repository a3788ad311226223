"""Qwen3 (dense): per-head RMSNorm on queries and keys. Everything else is the common decoder."""

from __future__ import annotations

from pearl.engine.models.config import ModelConfig, dense_fields


def parse(hf: dict) -> ModelConfig:
    """ModelConfig of a Qwen3 `config.json`. Sliding-window layers are refused by name."""
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window=True: this engine serves full attention only")
    fields = dense_fields(hf) | {"head_dim": hf.get("head_dim") or 128}
    return ModelConfig(architecture="Qwen3ForCausalLM", qk_norm=True, **fields)
