"""FrozenLake on maps never seen before: every training seed has a map of its own, evaluation plays other ones.

The quickstart's eight maps can be learnt by heart; here the policy has to read the grid. Random play wins one episode in
eight. The evaluation seeds are apart from all training seeds, so `eval_success_rate` is of unseen maps.
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
        recipe="frozenlake_random",
        rollout_batch_size=128,
        group_size=8,
        max_steps=300,
        save_steps=50,
        eval_steps=25,
        eval_episodes=128,
        model=ModelOptions(hidden_size=96, intermediate_size=256, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16),
        env=EnvOptions(name="frozen_lake", options={"size": 4, "num_maps": 0, "random_start": True}, max_turns=8),
        rollout=RolloutOptions(max_tokens=8),
        algorithm=AlgorithmOptions(kl_coef=0.003, kl_estimator="exact"),
        optimizer=OptimizerOptions(lr=1e-3, schedule="linear", warmup_steps=4, mini_batch_size=32),
        warmup=WarmupOptions(steps=120, episodes=16, lr=2e-3),
        engine=EngineConfig(dtype="float32", block_size=16, max_model_len=512, max_num_seqs=256, max_batch_tokens=4096),
    )
