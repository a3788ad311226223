"""Qwen3-8B repairs repositories, in the sizes of PEARL's experiments: batch 64, groups of 16, 32K tokens, staleness 1.

For a GPU cluster; `pearl run qwen3_8b_swe --print` shows every setting anywhere. The experiments trained on 16 of 32 GPUs
(`--set cluster.train_ranks=16`) with SWE-bench; the repositories here are the small ones of the `coding` environment: set
`env.name` to your own for another benchmark. What the paper does not state is a common choice: rate, clip range, turns.
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
    TrainerOptions,
)

CONTEXT = 32768
HUB_NAME = "Qwen/Qwen3-8B"


def recipe() -> Config:
    """The recipe's Config."""
    return Config(
        recipe="qwen3_8b_swe",
        rollout_batch_size=64,
        group_size=16,
        max_staleness=1,
        max_steps=200,
        save_steps=10,
        eval_steps=20,
        eval_episodes=64,
        model=ModelOptions(path="models/Qwen3-8B"),
        env=EnvOptions(name="coding", max_turns=50, workers=8, timeout_s=60.0),
        rollout=RolloutOptions(max_tokens=4096, request_timeout_s=900.0),
        algorithm=AlgorithmOptions(name="grpo", clip_low=0.2, clip_high=0.28),
        optimizer=OptimizerOptions(lr=1e-6, weight_decay=0.01, warmup_steps=5, mini_batch_size=64, micro_batch_tokens=CONTEXT),
        trainer=TrainerOptions(checkpoint_layers=True),
        engine=EngineConfig(dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=64, max_batch_tokens=8192),
    )
