"""The KV pool: one allocation, and how many blocks it has.

Owns sizing and memory; who holds which block is the block manager's, what a block contains the kernels'. Invariant: the pool
is one tensor `kv[layer, 2, block, kv_head, block_size, head_dim]` whose address never changes while the engine lives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.config import EngineConfig
from pearl.engine.arena import Arena
from pearl.engine.host_memory import available_bytes
from pearl.engine.models.config import ModelConfig


def plan_num_blocks(config: EngineConfig, model: ModelConfig, max_model_len: int, available_bytes: int) -> int:
    """Blocks of the pool: `num_blocks` if it is set, else what a share of the memory holds, but never more than requests use.

    Pure. `available_bytes` is the memory free now, of which `kv_memory_fraction` may be taken. Raises ValueError when that
    does not hold one sequence of `max_model_len` tokens.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    per_sequence = -(-max_model_len // config.block_size)
    block_bytes = model.kv_bytes_per_token * config.block_size
    budget = int(available_bytes * config.kv_memory_fraction)
    fit = budget // block_bytes
    if fit < per_sequence:
        raise ValueError(
            f"max_model_len={max_model_len}: one sequence needs {per_sequence * block_bytes} bytes of KV, but only {budget} "
            f"are there (kv_memory_fraction={config.kv_memory_fraction} of {available_bytes} free); valid: max_model_len up to "
            f"{fit * config.block_size}"
        )
    return min(fit, config.max_num_seqs * per_sequence)


def available_memory(device: torch.device) -> int:
    """Bytes free on the device now; on a CPU the least of what the machine and its control group have left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def allocate_pool(
    model: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    memory: Arena,
    fill: float | None = None,
) -> Tensor:
    """The pool kv_L2NG__ in `memory`: zeros, or `fill` everywhere. ValueError if it cannot be had."""
    shape = (model.num_layers, 2, num_blocks, model.num_kv_heads, block_size, model.head_dim)
    try:
        pool = memory.shared_zeros(shape, dtype)
    except (RuntimeError, OSError, OverflowError) as error:
        size = model.kv_bytes_per_token * block_size * num_blocks
        raise ValueError(f"num_blocks={num_blocks}: a pool of {size} bytes cannot be had") from error
    return pool if fill is None else pool.fill_(fill)
