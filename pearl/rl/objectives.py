"""Policy objectives: what is maximised for each token, given its log-ratio and its advantage.

Owns the formulae and `sequence_sums`. It does not know models, KL, importance of old data or aggregation.
Invariants: a value has a gradient only through the log-ratio; an advantage of zero gives a gradient of exactly zero; rows
of one sequence are consecutive.

Shapes: N trained tokens (rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.rl.algorithms import Algorithm

MAX_LOG_RATIO = 80.0
"""Where the clip takes the gradient anyway, ratios are at most e^80: infinity times zero would be NaN."""


class Surrogate(NamedTuple):
    """`values_N` are maximised; `clipped_N`: the clip cut the ratio (of `clip` and `gspo`: and took the gradient away)."""

    values_N: Tensor
    clipped_N: Tensor


def sequence_sums(values_N: Tensor, sequence_N: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the sum of `values_N` over its sequence, and the number of its sequence's rows."""
    _, place_N, counts_S = torch.unique_consecutive(sequence_N, return_inverse=True, return_counts=True)
    sums_S = values_N.new_zeros(len(counts_S)).index_add(0, place_N, values_N)
    return sums_S[place_N], counts_S[place_N]


def clip(log_ratio_N: Tensor, advantages_N: Tensor, sequence_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """min(r A, clip(r) A) (PPO, Schulman et al. 2017); two bounds as in DAPO (Yu et al. 2025).

    With a dual clip c (Ye et al. 2020), a negative advantage's value is at least c A, however large the ratio.
    """
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    dual = algorithm.options.dual_clip
    # A bad action's ratio has no bound but the dual clip: without one, an update that overflows is refused as not finite.
    bad_ceiling = math.inf if dual is None else math.log(dual)
    bad_N = advantages_N < 0
    ratio_N = torch.where(bad_N, log_ratio_N.clamp(max=bad_ceiling), log_ratio_N.clamp(max=MAX_LOG_RATIO)).exp()
    values_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    clipped_N = torch.where(bad_N, (ratio_N < low) | (log_ratio_N > bad_ceiling), ratio_N > high) & (advantages_N != 0)
    return Surrogate(values_N, clipped_N)


def gspo(log_ratio_N: Tensor, advantages_N: Tensor, sequence_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """`clip` with the sequence's ratio, the geometric mean of its tokens' ratios (GSPO, Zheng et al. 2025)."""
    sums_N, counts_N = sequence_sums(log_ratio_N, sequence_N)
    return clip(sums_N / counts_N, advantages_N, sequence_N, algorithm)


def cispo(log_ratio_N: Tensor, advantages_N: Tensor, sequence_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """sg(clip(r)) A log p: the weight is clipped, no token loses its gradient (CISPO, MiniMax-M1 2025)."""
    ratio_N = log_ratio_N.detach().exp()
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    weight_N = ratio_N.clamp(low, high)
    return Surrogate(weight_N * advantages_N * log_ratio_N, (weight_N != ratio_N) & (advantages_N != 0))


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, Algorithm], Surrogate]] = {"clip": clip, "gspo": gspo, "cispo": cispo}
