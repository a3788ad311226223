"""Learn FrozenLake 4x4 from random weights in about a minute on one CPU thread: the smallest whole job.

Eight fixed maps without slipping, each with a start of its own, a Qwen3-shaped policy of 0.13 M parameters, a supervised
format warm-up on random valid play, then GRPO. What keeps lr 2e-3 from collapsing: four steps at a rising rate while Adam's
moments are young, a rate that falls to zero, and a small KL to the warm-up policy. An entropy bonus would break the answer
format once advantages vanish, so there is none.
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
    """The quickstart's Config."""
    return Config(
        recipe="quickstart",
        rollout_batch_size=128,
        group_size=8,
        max_steps=60,
        model=ModelOptions(),
        env=EnvOptions(name="frozen_lake", options={"size": 4, "num_maps": 8, "random_start": True}, max_turns=8),
        rollout=RolloutOptions(max_tokens=8),
        algorithm=AlgorithmOptions(kl_coef=0.003, kl_estimator="exact"),
        optimizer=OptimizerOptions(lr=2e-3, schedule="linear", warmup_steps=4, mini_batch_size=32),
        warmup=WarmupOptions(steps=80, episodes=16, lr=2e-3),
        engine=EngineConfig(dtype="float32", block_size=16, max_model_len=512, max_num_seqs=256, max_batch_tokens=4096),
    )
