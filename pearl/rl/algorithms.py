"""Algorithms by name: each a choice of advantage estimator, policy objective and loss aggregation over one training loop.

Owns what the names stand for; options that are set override it. docs/algorithms.md has formulae and sources. It does not
know tensors. Invariant: an Algorithm has a value for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pearl.training_options import AlgorithmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """`advantage`: group, rloo, global or gae; `objective`: clip, gspo or cispo; the rest is as in AlgorithmOptions."""

    advantage: str
    objective: str
    aggregation: str
    clip_low: float
    clip_high: float
    filter_zero_variance: bool
    options: AlgorithmOptions

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def shares_trunk(self) -> bool:
        """The critic is a head on the policy."""
        return self.has_critic and self.options.critic == "trunk"

    @property
    def kl_in_loss(self) -> bool:
        return self.options.kl_coef > 0 and self.options.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.options.kl_coef > 0 and self.options.kl_in == "reward"


_CLIP: dict[str, Any] = {
    "objective": "clip",
    "aggregation": "token_mean",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "filter_zero_variance": False,
}
_GROUP: dict[str, Any] = {"advantage": "group"}

NAMED: dict[str, dict[str, Any]] = {
    "grpo": _CLIP | _GROUP,
    "dapo": _CLIP | _GROUP | {"filter_zero_variance": True},
    "rloo": _CLIP | {"advantage": "rloo"},
    "reinforce++": _CLIP | {"advantage": "global"},
    "ppo": _CLIP | {"advantage": "gae"},
    "gspo": _CLIP | _GROUP | {"objective": "gspo", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": _CLIP | _GROUP | {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}
"""What a name says where the options are None."""


def algorithm_of(options: AlgorithmOptions) -> Algorithm:
    """The algorithm that these options describe."""
    parts = dict(NAMED[options.name])
    for name in ("aggregation", "clip_low", "clip_high", "filter_zero_variance"):
        value = getattr(options, name)
        if value is not None:
            parts[name] = value
    return Algorithm(**parts, options=options)


def token_weights(counts: Sequence[int], aggregation: str, divisor: int | None) -> list[float]:
    """By what each sequence's token losses are multiplied before they are summed over an update; the weights see all of it.

    `counts` are the trained tokens of the update's sequences (over all ranks and micro-batches). Sequences without one
    count nowhere. `token_mean`: one over all tokens. `sequence_mean`: the mean over sequences of their token means.
    `sequence_sum`: the mean over sequences of their sums. `fixed`: that, divided by `divisor` tokens.
    """
    sequences = max(1, sum(count > 0 for count in counts))
    if aggregation == "token_mean":
        return [1.0 / max(1, sum(counts))] * len(counts)
    if aggregation == "sequence_mean":
        return [1.0 / (sequences * max(1, count)) for count in counts]
    return [1.0 / (sequences * (divisor or 1))] * len(counts)
