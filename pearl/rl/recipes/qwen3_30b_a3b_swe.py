"""Qwen3-30B-A3B, a mixture of 128 experts of which 8 compute a token, in the setting of qwen3_8b_swe."""

from __future__ import annotations

from dataclasses import replace

from pearl.config import Config, ModelOptions
from pearl.rl.recipes import qwen3_8b_swe

HUB_NAME = "Qwen/Qwen3-30B-A3B"


def recipe() -> Config:
    """The recipe's Config: that of the 8B model with another model."""
    return replace(qwen3_8b_swe.recipe(), recipe="qwen3_30b_a3b_swe", model=ModelOptions(path="models/Qwen3-30B-A3B"))
