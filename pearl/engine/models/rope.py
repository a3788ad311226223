"""Rotary frequencies under every kind of scaling, and the tables of cosines and sines made from them.

Owns the formulae; does not know how they are spelled in a file nor who rotates what. Invariant: angles are computed in fp64
and the tables are fp32 whatever the model's dtype (positions beyond 256 are not distinct in bf16).
Shapes: B head_dim, F frequencies (B / 2).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pearl.engine.models.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """fp32 cos and sin [max_position, B], both times yarn's attention factor: they are never cast with the model."""
    frequency_F, amplitude = rope_frequencies(config)
    angle = np.outer(np.arange(config.max_position, dtype=np.float64), frequency_F)
    halves = (torch.from_numpy((amplitude * turned(angle)).astype(np.float32)) for turned in (np.cos, np.sin))
    cos, sin = (torch.cat((half, half), dim=-1).to(device) for half in halves)
    return cos, sin


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """fp64 radians per position [F], and what cosines and sines are multiplied by."""
    plain_F = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # dynamic changes nothing up to max_position
        return plain_F, 1.0
    if scaling.kind == "linear":
        return plain_F / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain_F, scaling), 1.0
    amplitude = scaling.attention_factor
    if amplitude is None:
        amplitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return _yarn(plain_F, config, scaling), amplitude


def _llama3(plain_F: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Frequencies by how often they turn within the original length (Grattafiori et al. 2024, Llama 3.1's reference code)."""
    turns_F = scaling.original_max_position * plain_F / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = np.clip((turns_F - low) / (high - low), 0.0, 1.0)
    return plain_F * (kept_F + (1 - kept_F) / scaling.factor)


def _yarn(plain_F: np.ndarray, config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """A linear ramp over the dimensions from kept to divided frequencies (Peng et al. 2023, section 3.2)."""
    first, last = (_dimension_of(turns, config, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = last - first or 0.001
    divided_F = np.clip((np.arange(len(plain_F)) - first) / width, 0.0, 1.0)
    return plain_F * (1 - divided_F + divided_F / scaling.factor)


def _dimension_of(turns: float, config: ModelConfig, scaling: RopeScaling) -> float:
    """The (fractional) dimension whose frequency turns that often within the original length."""
    length = scaling.original_max_position
    assert length is not None, "yarn is checked to have one"
    return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
