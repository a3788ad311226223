"""Sokoban with one box in a 6 x 6 room, a level of its own for every seed, from random weights on the CPU.

Levels are at most 12 moves from solved, and twelve turns are allowed; random play, which never walks into walls, solves about
one in four. Evaluation plays levels that training never sees.
"""

from __future__ import annotations

from pearl.config import (
    AlgorithmOptions,
    Config,
    EngineConfig,
    EnvOptions,
    ModelOptions,
    OptimizerOptions,
    RolloutOptions,
    WarmupOptions,
)


def recipe() -> Config:
    """The recipe's Config."""
    return Config(
        recipe="sokoban",
        rollout_batch_size=128,
        group_size=8,
        max_steps=300,
        save_steps=50,
        eval_steps=25,
        eval_episodes=128,
        model=ModelOptions(
            hidden_size=96, intermediate_size=256, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16, max_position=1024
        ),
        env=EnvOptions(name="sokoban", options={"size": 6, "num_boxes": 1, "scramble": 12}, max_turns=12),
        rollout=RolloutOptions(max_tokens=8),
        algorithm=AlgorithmOptions(kl_coef=0.003, kl_estimator="exact"),
        optimizer=OptimizerOptions(lr=1e-3, schedule="linear", warmup_steps=4, mini_batch_size=32),
        warmup=WarmupOptions(steps=120, episodes=16, lr=2e-3),
        engine=EngineConfig(dtype="float32", block_size=16, max_model_len=1024, max_num_seqs=256, max_batch_tokens=4096),
    )
