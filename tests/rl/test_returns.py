"""GAE by hand and against its definition as a double sum; turns as the actions."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.rl.returns import gae, last_tokens, returns_to_go, token_gae, token_rewards, turn_gae


def test_gae_by_hand():
    # V = 1, 2, 3 and a reward of 5 at the end; gamma .5, lambda .8.
    # delta = 0 + 1 - 1 = 0;  0 + 1.5 - 2 = -.5;  5 - 3 = 2.  A2 = 2; A1 = -.5 + .4 * 2 = .3; A0 = 0 + .4 * .3 = .12
    advantages, returns = token_gae(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 3.0]), 0.5, 0.8)
    assert advantages == pytest.approx([0.12, 0.3, 2.0], abs=1e-15)
    assert returns == pytest.approx([1.12, 2.3, 5.0], abs=1e-15)


def test_gae_is_the_discounted_sum_of_the_errors():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=30), rng.normal(size=30)
    for gamma, lam in ((0.9, 0.7), (1.0, 1.0), (1.0, 0.0), (0.5, 1.0)):
        deltas = rewards + gamma * np.append(values[1:], 0.0) - values
        expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(30 - t)) for t in range(30)]
        assert gae(rewards, values, gamma, lam) == pytest.approx(expected, abs=1e-12)
    assert gae(rewards, values, 1.0, 1.0) == pytest.approx(returns_to_go(rewards) - values)


def test_rewards_are_at_the_ends_of_turns():
    turns = [(2, 1.0), (0, 0.25), (3, -2.0)]
    assert last_tokens(turns, 5) == [1, 1, 4]
    assert token_rewards(turns, 99.0, np.full(5, 0.5)).tolist() == [-0.5, 0.75, -0.5, -0.5, -2.5]
    assert token_rewards([], 3.0, np.zeros(4)).tolist() == [0.0, 0.0, 0.0, 3.0]
    assert token_rewards([(0, 7.0), (2, 1.0)], 8.0, np.zeros(2)).tolist() == [7.0, 1.0]


def test_turns_are_the_actions():
    # Two turns (2 and 3 tokens), values at their first tokens 1 and 3, rewards 1 and -2; gamma .5, lambda .8:
    # delta1 = -2 - 3 = -5, delta0 = 1 + 1.5 - 1 = 1.5; A0 = 1.5 + .4 * -5 = -.5.
    values = np.array([1.0, 70.0, 3.0, 80.0, 90.0])
    for turns in ([(2, 1.0), (3, -2.0)], [(0, 0.0), (2, 1.0), (0, 0.0), (3, -2.0)]):
        rewards = token_rewards(turns, 0.0, np.zeros(5))
        advantages, returns = turn_gae(rewards, values, turns, 0.5, 0.8)
        assert advantages == pytest.approx([-0.5, -0.5, -5.0, -5.0, -5.0])
        assert returns == pytest.approx([0.5, 0.5, -2.0, -2.0, -2.0])


def test_one_turn_is_the_whole_trajectory():
    advantages, returns = turn_gae(np.array([0.0, 0.0, 4.0]), np.array([1.0, 2.0, 3.0]), [], 0.9, 0.9)
    assert advantages.tolist() == [3.0] * 3 and returns.tolist() == [4.0] * 3


def test_with_tokens_of_one_both_levels_agree():
    rng = np.random.default_rng(1)
    values, turns = rng.normal(size=6), [(1, float(reward)) for reward in rng.normal(size=6)]
    rewards = token_rewards(turns, 0.0, np.zeros(6))
    for ours, theirs in zip(turn_gae(rewards, values, turns, 0.9, 0.8), token_gae(rewards, values, 0.9, 0.8), strict=True):
        assert ours == pytest.approx(theirs)
