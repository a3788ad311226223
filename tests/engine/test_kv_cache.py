"""Size and shape of the KV pool."""

from __future__ import annotations

import math

import pytest
import torch

from pearl.config import EngineConfig
from pearl.engine.arena import Arena
from pearl.engine.kv_cache import allocate_pool, available_memory, plan_num_blocks
from pearl.engine.models.config import ModelConfig

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def test_a_given_number_of_blocks_is_taken() -> None:
    assert plan_num_blocks(EngineConfig(num_blocks=3), MODEL, 256, 0) == 3


def test_memory_decides_until_requests_cannot_use_more() -> None:
    config = EngineConfig(block_size=16, kv_memory_fraction=0.5, max_num_seqs=4)
    block = 16 * TOKEN_BYTES
    assert plan_num_blocks(config, MODEL, 256, 2 * 17 * block) == 17
    assert plan_num_blocks(config, MODEL, 256, 2 * 17 * block - 2) == 16
    assert plan_num_blocks(config, MODEL, 256, 1 << 40) == 4 * 16
    assert plan_num_blocks(config, MODEL, 250, 1 << 40) == 4 * 16


def test_not_even_one_sequence_fits() -> None:
    config = EngineConfig(block_size=16, kv_memory_fraction=0.5)
    with pytest.raises(ValueError, match=rf"max_model_len=256.*{16 * 16 * TOKEN_BYTES} bytes.*up to 240"):
        plan_num_blocks(config, MODEL, 256, 2 * 15 * 16 * TOKEN_BYTES)


def test_the_pool_is_one_tensor_filled_as_asked() -> None:
    memory = Arena(torch.device("cpu"))
    pool = allocate_pool(MODEL, num_blocks=3, block_size=4, dtype=torch.bfloat16, memory=memory)
    assert pool.shape == (2, 2, 3, 2, 4, 16) and pool.dtype == torch.bfloat16 and pool.is_contiguous()
    poisoned = allocate_pool(MODEL, num_blocks=3, block_size=4, dtype=torch.float32, memory=memory, fill=math.nan)
    assert bool(poisoned.isnan().all())
    assert poisoned.nbytes == 3 * 4 * MODEL.kv_bytes_per_token


def test_this_machine_has_memory() -> None:
    assert available_memory(torch.device("cpu")) > 1 << 24
