"""The sections of a job's configuration that say how the policy is trained: algorithm, optimizer, trainer, warm-up.

Owns the fields, what they may be and their defaults. What an algorithm's name stands for is in `rl/algorithms.py`, and
docs/algorithms.md has the formulae.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pearl.field_checks import above_zero, at_least, below_one, one_of, within

ALGORITHMS = ("grpo", "dapo", "rloo", "reinforce++", "ppo", "gspo", "cispo")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmOptions:
    """The policy's loss (docs/algorithms.md). `name` chooses how advantages are estimated, the objective, and what None stands
    for in `clip_low`, `clip_high`, `aggregation` and `filter_zero_variance`.

    Ratios are clipped to at least 1 - `clip_low` and at most 1 + `clip_high`; with `dual_clip` (>= 1), a bad action's term
    goes no lower than that many advantages (None: no such limit). `normalize_std`: advantages are divided by their standard
    deviation. `aggregation` of token losses over an optimizer update: their mean, the mean of the sequences' means, of their
    sums, or of their sums over `loss_divisor` tokens ("fixed"; it is None for the others). `filter_zero_variance`: groups
    whose members all got the same reward are replaced by others (dynamic sampling).

    `kl_coef` (0: none, and no reference is kept) times the KL to the reference, the policy that RL began with, is in the loss
    or taken off the rewards (`kl_in`). `kl_estimator`: "exact" (over the vocabulary) or one of the sampled token, never
    clamped. `entropy_coef` times the entropy is taken off the loss.

    Tokens of an older policy (`importance_of="all"`: all tokens) are weighted by their importance (`importance_level`: of the
    token, or of its whole sequence). `importance_rule`: it is truncated at `importance_cap` (1, as in V-trace, is steady; 2
    learns faster and sometimes collapses), or the token is masked where it leaves [1/cap, cap].

    With a critic (ppo): discount `gamma`, `gae_lambda`, both per token or per turn (`gae_level`). `critic`: a model of its
    "own", with its own learning rate `critic_lr` (None: the policy's), or a head on the policy's "trunk", whose loss counts
    `value_coef` times.
    """

    name: Literal["grpo", "dapo", "rloo", "reinforce++", "ppo", "gspo", "cispo"] = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    normalize_std: bool = True
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed"] | None = None
    loss_divisor: int | None = None
    filter_zero_variance: bool | None = None
    importance_cap: float = 1.0
    importance_level: Literal["token", "sequence"] = "token"
    importance_rule: Literal["truncate", "mask"] = "truncate"
    importance_of: Literal["stale", "all"] = "stale"
    kl_coef: float = 0.0
    kl_estimator: Literal["exact", "k1", "k2", "k3"] = "exact"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_level: Literal["token", "turn"] = "token"
    critic: Literal["own", "trunk"] = "own"
    critic_lr: float | None = None
    value_coef: float = 0.5

    def __post_init__(self) -> None:
        self._check_choices()
        at_least(self, "algorithm", 0, "kl_coef", *(name for name in ("clip_high",) if getattr(self, name) is not None))
        if self.clip_low is not None:
            within(self, "algorithm", 0, 1, "clip_low")
        if self.dual_clip is not None:
            at_least(self, "algorithm", 1, "dual_clip")
        at_least(self, "algorithm", -math.inf, "entropy_coef")
        at_least(self, "algorithm", 1, "importance_cap")
        if self.importance_rule == "mask" and self.importance_cap == 1:
            raise ValueError("algorithm.importance_cap=1: must be > 1 with importance_rule=mask, which would mask all tokens")
        if (self.loss_divisor is None) == (self.aggregation == "fixed"):
            wanted = "a number of tokens with" if self.loss_divisor is None else "none without"
            raise ValueError(f"algorithm.loss_divisor={self.loss_divisor}: must be {wanted} aggregation=fixed")
        if self.loss_divisor is not None:
            at_least(self, "algorithm", 1, "loss_divisor", whole=True)
        if self.filter_zero_variance and self.name in ("ppo", "reinforce++"):
            raise ValueError(
                f"algorithm.filter_zero_variance=True: name={self.name} learns from equal rewards too, must be false"
            )
        within(self, "algorithm", 0, 1, "gamma", "gae_lambda")
        above_zero(self, "algorithm", "value_coef")
        if self.critic_lr is not None:
            above_zero(self, "algorithm", "critic_lr")
            if self.critic == "trunk":
                raise ValueError(f"algorithm.critic_lr={self.critic_lr}: must be none with critic=trunk, see value_coef")

    def _check_choices(self) -> None:
        one_of("algorithm.name", self.name, ALGORITHMS)
        one_of("algorithm.aggregation", self.aggregation, (None, *AGGREGATIONS))
        one_of("algorithm.importance_level", self.importance_level, ("token", "sequence"))
        one_of("algorithm.importance_rule", self.importance_rule, ("truncate", "mask"))
        one_of("algorithm.importance_of", self.importance_of, ("stale", "all"))
        one_of("algorithm.kl_estimator", self.kl_estimator, ("exact", "k1", "k2", "k3"))
        one_of("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        one_of("algorithm.gae_level", self.gae_level, ("token", "turn"))
        one_of("algorithm.critic", self.critic, ("own", "trunk"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW. One schedule step per RL step (not per update). `mini_batch_size` trajectories per optimizer update.

    `lr` is the highest rate: it is reached over `warmup_steps` RL steps, and then stays or falls to 0 at `max_steps`
    (`schedule`). `weight_decay` is decoupled, and of matrices alone; `beta1`, `beta2` and `eps` are Adam's. Gradients whose
    norm is above `max_grad_norm` are scaled down to it. `micro_batch_tokens`: tokens of one pass (a longer trajectory has a
    pass of its own); it changes memory and speed, not the gradient.
    """

    lr: float = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    mini_batch_size: int = 32
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        above_zero(self, "optimizer", "lr", "max_grad_norm", "eps")
        at_least(self, "optimizer", 1, "mini_batch_size", "micro_batch_tokens")
        at_least(self, "optimizer", 0, "warmup_steps", "weight_decay")
        below_one(self, "optimizer", "beta1", "beta2")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupOptions:
    """Supervised steps on the environment's own random valid play before RL, so that the format is known.

    `steps` updates (0: none), each on `episodes` new episodes, at the learning rate `lr`.
    """

    steps: int = 0
    episodes: int = 16
    lr: float = 2e-3

    def __post_init__(self) -> None:
        at_least(self, "warmup", 0, "steps")
        at_least(self, "warmup", 1, "episodes")
        above_zero(self, "warmup", "lr")


def check_layers(trainer: TrainerOptions, num_layers: int, source: str) -> None:
    """ValueError if more layers are to be trained than the model (`source` says its number) has."""
    if trainer.train_layers is not None and trainer.train_layers > num_layers:
        most = f"must be at most {source}={num_layers}, or none for the whole model"
        raise ValueError(f"trainer.train_layers={trainer.train_layers}: {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How a training rank computes. `train_layers`: only the last so many layers and the final norm are trained (None: all).

    With `compute_dtype` bfloat16, factors of matrix products and attention are in bf16; weights, gradients, optimizer, norms,
    residuals and logits stay in fp32. `checkpoint_layers` keeps only the layers' inputs for the backward pass and computes the
    rest again. Log-probs are made of as many logits at a time as `logits_rows` tokens have.
    """

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    train_layers: int | None = None
    checkpoint_layers: bool = False
    logits_rows: int = 128

    def __post_init__(self) -> None:
        one_of("trainer.compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        at_least(self, "trainer", 1, "logits_rows", whole=True)
        if self.train_layers is not None:
            at_least(self, "trainer", 1, "train_layers", whole=True)
