"""Sokoban with one box in a 5 x 5 room, a level of its own for every seed, from random weights on the CPU.

Levels are at most 6 moves from solved, and eight turns are allowed; random play, which never walks into walls, solves about
one in four. Evaluation plays levels that training never sees. A rate of 1e-3, which FrozenLake stands, breaks the format of
answers here within a few steps; two updates of 64 trajectories at 3e-4 and a firmer KL do not.
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
        max_steps=150,
        save_steps=50,
        eval_steps=25,
        eval_episodes=128,
        model=ModelOptions(hidden_size=96, intermediate_size=256, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16),
        env=EnvOptions(name="sokoban", options={"size": 5, "num_boxes": 1, "scramble": 6}, max_turns=8),
        rollout=RolloutOptions(max_tokens=8),
        algorithm=AlgorithmOptions(kl_coef=0.01, kl_estimator="exact"),
        optimizer=OptimizerOptions(lr=3e-4, schedule="linear", warmup_steps=4, mini_batch_size=64),
        warmup=WarmupOptions(steps=200, episodes=16, lr=1e-3),
        engine=EngineConfig(dtype="float32", block_size=16, max_model_len=512, max_num_seqs=256, max_batch_tokens=4096),
    )
