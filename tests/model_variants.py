"""Tiny models that each differ from the plain one in something an engine may get wrong. Fixtures only, no tests.

`IGNORING` says what a decoder that overlooked the variant's point would have read: tests check that it is visibly wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hf_models
from transformers import PreTrainedModel

from pearl.engine.models.config import ModelConfig


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Overrides for a scaled rotary embedding."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32}
YARN_128 = YARN | {"original_max_position_embeddings": 128}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}

VARIANTS: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any]]] = {
    "dense": (hf_models.dense, {}),
    "dense-tied": (hf_models.dense, {"tie_word_embeddings": True}),
    "dense-bias": (hf_models.dense, {"attention_bias": True}),
    "dense-theta-1e4": (hf_models.dense, {"rope_theta": 1e4}),
    "dense-large-eps": (hf_models.dense, {"rms_norm_eps": 0.5}),
    "dense-no-groups": (hf_models.dense, {"num_key_value_heads": 4}),
    "dense-one-kv-head-of-5": (hf_models.dense, {"num_attention_heads": 5, "num_key_value_heads": 1}),
    "dense-groups-of-7": (hf_models.dense, {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8}),
    "dense-head-80": (hf_models.dense, {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 80}),
    "dense-head-96": (hf_models.dense, {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 96}),
    "dense-head-256": (hf_models.dense, {"head_dim": 256}),
    "dense-window": (hf_models.dense, WINDOW | {"max_window_layers": 0}),
    "dense-window-1": (hf_models.dense, WINDOW | {"max_window_layers": 0, "sliding_window": 1}),
    "dense-window-late": (hf_models.dense, WINDOW | {"max_window_layers": 1}),
    "dense-window-mixed": (hf_models.dense, WINDOW | MIXED),
    "dense-linear": (hf_models.dense, rope("linear", factor=4.0)),
    "dense-dynamic": (hf_models.dense, rope("dynamic", factor=4.0)),
    "dense-yarn": (hf_models.dense, rope("yarn", **YARN)),
    "dense-window-yarn": (hf_models.dense, WINDOW | {"max_window_layers": 0, "sliding_window": 7} | rope("yarn", **YARN)),
    "llama": (hf_models.llama, {}),
    "llama-tied": (hf_models.llama, {"tie_word_embeddings": True}),
    "llama-biases": (hf_models.llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": (hf_models.llama, {"mlp_bias": True}),
    "llama-head-96": (hf_models.llama, {"head_dim": 96}),
    "llama-groups-of-5": (hf_models.llama, {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 2}),
    "llama-llama3": (hf_models.llama, LLAMA3),
    "llama-yarn-attention-factor": (hf_models.llama, rope("yarn", attention_factor=1.0, **YARN)),
    "llama-yarn-mscale": (hf_models.llama, rope("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN)),
    "llama-yarn-betas": (hf_models.llama, rope("yarn", beta_fast=2.0, beta_slow=0.5, **YARN_128)),
    "llama-yarn-not-truncated": (hf_models.llama, rope("yarn", truncate=False, **YARN)),
    "qwen2": (hf_models.qwen2, {}),
    "qwen2-tied": (hf_models.qwen2, {"tie_word_embeddings": True}),
    "qwen2-window": (hf_models.qwen2, WINDOW | {"max_window_layers": 0}),
    "mistral": (hf_models.mistral, {"sliding_window": None}),
    "mistral-window": (hf_models.mistral, {"sliding_window": 5}),
}


def _replaced(**fields: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: dataclasses.replace(config, **fields)


def _rescaled(**fields: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, **fields))


def _window_off_by(step: int) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: dataclasses.replace(config, windows=tuple(w + step if w else 0 for w in config.windows))


UNSCALED, UNBOUNDED = _replaced(rope_scaling=None), _replaced(windows=())
IGNORING: list[tuple[str, Callable[[ModelConfig], ModelConfig]]] = [
    ("dense-theta-1e4", _replaced(rope_theta=1e6)),
    ("dense-large-eps", _replaced(rms_eps=1e-6)),
    ("dense-window", UNBOUNDED),
    ("dense-window", _window_off_by(1)),
    ("dense-window", _window_off_by(-1)),
    ("dense-window-1", UNBOUNDED),
    ("dense-window-late", _replaced(windows=(4, 4))),
    ("dense-window-late", _replaced(windows=(4, 0))),
    ("dense-window-mixed", _replaced(windows=(4, 4, 4))),
    ("dense-linear", UNSCALED),
    ("dense-yarn", UNSCALED),
    ("dense-window-yarn", UNSCALED),
    ("dense-window-yarn", UNBOUNDED),
    ("llama-llama3", UNSCALED),
    ("llama-yarn-attention-factor", _rescaled(attention_factor=None)),
    ("llama-yarn-mscale", _rescaled(attention_factor=None)),
    ("llama-yarn-betas", _rescaled(beta_fast=32.0)),
    ("llama-yarn-betas", _rescaled(beta_slow=1.0)),
    ("llama-yarn-not-truncated", _rescaled(truncate=True)),
    ("qwen2-window", UNBOUNDED),
    ("mistral-window", UNBOUNDED),
]
