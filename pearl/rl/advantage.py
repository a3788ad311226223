"""Advantages of siblings: how much better a trajectory did than the others that started from the same state.

Owns two formulae. It does not know tokens, tensors or models.
Invariant: a group whose rewards are all equal (a group of one too) has advantages of exactly 0.0, never a quotient of
rounding errors, so that its policy gradient is exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

EPSILON = 1e-6
"""Added to the standard deviation, so that rewards that differ in their last bits only have negligible advantages."""


def group_advantages(rewards: list[float], groups: list[int], *, normalize_std: bool) -> list[float]:
    """One advantage per trajectory: (reward - mean) / (std + EPSILON) inside its group, in float64.

    GRPO's group-relative advantage (Shao et al. 2024, DeepSeekMath), with the population standard deviation: two
    trajectories with different rewards get +1 and -1. Without `normalize_std` it is reward - mean, which does not weigh
    up groups that are nearly decided (Liu et al. 2025, Dr. GRPO). `groups[i]` is the group of trajectory i; a group may
    have any number of members, in any order. ValueError for lists of unequal length and for a reward that is not finite.
    """
    return _by_group(rewards, groups, lambda members: _normalized(members, normalize_std))


def leave_one_out_advantages(rewards: list[float], groups: list[int]) -> list[float]:
    """Each reward less the mean of the others of its group (RLOO, Ahmadian et al. 2024); arguments as above."""

    def baseline(members: list[float]) -> list[float]:
        scale = len(members) / max(1, len(members) - 1)
        return [scale * value for value in _normalized(members, False)]

    return _by_group(rewards, groups, baseline)


def _by_group(rewards: list[float], groups: list[int], estimate: Callable[[list[float]], list[float]]) -> list[float]:
    if len(rewards) != len(groups):
        raise ValueError(f"groups has {len(groups)} entries: must have one per reward, {len(rewards)}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}]={reward}: must be finite")
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        for index, value in zip(indices, estimate([float(rewards[index]) for index in indices]), strict=True):
            advantages[index] = value
    return advantages


def _normalized(rewards: list[float], normalize_std: bool) -> list[float]:
    # The mean of equal floats can differ from them in the last bit, hence the comparison of the rewards themselves.
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    # In a unit (a power of two, so no bit changes) in which not even squares of the largest floats overflow.
    unit = 2.0 ** max(0, math.frexp(max(map(abs, rewards)))[1] - 400)
    mean = math.fsum(reward / unit for reward in rewards) / len(rewards)
    centred = [reward / unit - mean for reward in rewards]
    if not normalize_std:
        return [value * unit for value in centred]
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (std + EPSILON / unit) for value in centred]
