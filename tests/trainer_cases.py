"""Data of the trainer's tests: folders, sequences and commands. Fixtures only, no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pearl.config import AlgorithmOptions, Config, OptimizerOptions, TrainerOptions
from pearl.protocol import PackingPlan, TrainSequence, TrainStep

VOCAB = 40
UNCLIPPED = 1e9
ALGORITHM = AlgorithmOptions(kl_coef=0.3, entropy_coef=0.02)


NARROW = {"trainer": TrainerOptions(compute_dtype="bfloat16")}
"""bf16 products and attention; weights and gradients in fp32."""

ACTOR_CRITIC = {
    "algorithm": AlgorithmOptions(
        name="ppo", gae_level="turn", kl_coef=0.2, kl_in="reward", importance_level="sequence", importance_cap=2.0
    ),
    "trainer": TrainerOptions(train_layers=1, checkpoint_layers=True, logits_rows=3),
}
"""Settings with everything that ranks must agree on: a critic, rewards with KL in them, frozen and recomputed layers."""


ON_TRUNK = {"algorithm": AlgorithmOptions(name="ppo", critic="trunk", kl_coef=0.1)}
"""A value head on the policy."""


def folder(path: Path, **changes: Any) -> Path:
    """A model folder without weights; `changes` to its config.json."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 192,
        "tie_word_embeddings": True,
        "dtype": "float32",
    } | changes
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def config(*, algorithm: AlgorithmOptions = ALGORITHM, optimizer: dict[str, Any] | None = None, **fields: Any) -> Config:
    options = OptimizerOptions(**({"max_grad_norm": UNCLIPPED} | (optimizer or {})))
    return Config(**({"algorithm": algorithm, "optimizer": options, "max_steps": 10} | fields))


def sequences(count: int = 12, *, seed: int = 0, longest: int = 30, version: int = 0) -> list[TrainSequence]:
    """Random play in groups of four: about a third of the tokens is sampled, with log-probs near the random model's."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        size = int(rng.integers(3, longest))
        mask = (rng.random(size) < 0.35).astype(int)
        mask[0], mask[-1] = 0, 1
        made.append(
            TrainSequence(
                token_ids=rng.integers(0, VOCAB, size).tolist(),
                loss_mask=mask.tolist(),
                logprobs=np.where(mask, rng.normal(-3.7, 0.3, size), 0.0).tolist(),
                weight_versions=np.where(mask, version, -1).tolist(),
                reward=float(rng.normal()),
                group=index // 4,
            )
        )
    return made


def command(made: list[TrainSequence], updates: list | None = None, **fields: Any) -> TrainStep:
    """One TrainStep; without `updates`, all sequences are one micro-batch of one update on one rank."""
    plan = PackingPlan(updates=updates or [[[list(range(len(made)))]]])
    defaults = {"number": 0, "step": 1, "objective": "policy", "weight_version": 0}
    return TrainStep(sequences=made, plan=plan, **(defaults | fields))
