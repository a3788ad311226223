"""Returns and advantages along one trajectory, from rewards and a critic's values: numbers only, no tensors, no groups.

Owns generalised advantage estimation over tokens and over turns. Invariant: a trajectory's end has the value 0, whether it
terminated or was cut off.

Shapes: N trained tokens of one trajectory in order, K turns. All float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016)."""
    advantages = np.zeros_like(values)
    following, value = 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        following = rewards[t] + gamma * value - values[t] + gamma * lam * following
        advantages[t], value = following, values[t]
    return advantages


def last_tokens(turns: Sequence[tuple[int, float]], count: int) -> list[int]:
    """Of each turn, the place of its last sampled token among `count`; a turn without one counts to the turn before."""
    if not turns:
        return [count - 1]
    return [max(0, int(end) - 1) for end in np.cumsum([sampled for sampled, _ in turns])]


def token_rewards(turns: Sequence[tuple[int, float]], reward: float, penalties: Array) -> Array:
    """The reward of each trained token: each turn's at its last token (no `turns`: `reward` at the end), less penalties."""
    rewards = -penalties
    for place, (_, value) in zip(last_tokens(turns, len(penalties)), turns or [(len(penalties), reward)], strict=True):
        rewards[place] += value
    return rewards


def token_gae(rewards: Array, values: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """(advantages, returns for the critic) of each token; `values` are of the states the tokens are sampled in."""
    advantages = gae(rewards, values, gamma, lam)
    return advantages, advantages + values


def turn_gae(
    rewards: Array, values: Array, turns: Sequence[tuple[int, float]], gamma: float, lam: float
) -> tuple[Array, Array]:
    """The same with turns as the actions: a turn's value is that of its first token, and it bootstraps from the next turn's.

    All tokens of a turn get its advantage, and its return: within a turn nothing is discounted.
    """
    ends = sorted({int(end) for end in np.cumsum([sampled for sampled, _ in turns]) if end} or {len(values)})
    starts = [0, *ends[:-1]]
    sums = np.array([rewards[a:b].sum() for a, b in zip(starts, ends, strict=True)])
    advantages = gae(sums, values[starts], gamma, lam)
    sizes = np.diff([0, *ends])
    return np.repeat(advantages, sizes), np.repeat(advantages + values[starts], sizes)


def returns_to_go(rewards: Array) -> Array:
    """The sum of the rewards from each token on."""
    return np.cumsum(rewards[::-1])[::-1]
