"""A real model on a task of several turns, on the CPU: SmolLM2-135M-Instruct learns to guess a number.

Numbers from 1 to 10 and four guesses, which halving always makes do with; one such game is shown as an example. In its steps
the model learns to reply with a number and to mind "higher" and "lower", not yet to halve. Only the last six layers are
trained: what lies below them stays as it was pretrained and needs no backward pass. The small bonus for entropy keeps the
policy from settling on one order of guesses while it still learns to reply with a number at all. Products are in bf16, in
engine and trainer alike. The model folder is made by

    python -m pearl.engine.smollm2 models/SmolLM2-135M-Instruct
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


def recipe() -> Config:
    """The recipe's Config."""
    return Config(
        recipe="smollm2_hilo",
        rollout_batch_size=64,
        group_size=8,
        max_steps=30,
        save_steps=10,
        eval_steps=5,
        eval_episodes=96,
        model=ModelOptions(path="models/SmolLM2-135M-Instruct"),
        env=EnvOptions(name="hi_lo", options={"low": 1, "high": 10}, max_turns=4),
        rollout=RolloutOptions(max_tokens=8),
        algorithm=AlgorithmOptions(entropy_coef=0.01),
        optimizer=OptimizerOptions(lr=1e-4, schedule="linear", warmup_steps=2, mini_batch_size=64, micro_batch_tokens=4096),
        trainer=TrainerOptions(train_layers=6, compute_dtype="bfloat16"),
        engine=EngineConfig(dtype="bfloat16", block_size=16, max_model_len=512, max_num_seqs=96, max_batch_tokens=2048),
    )
