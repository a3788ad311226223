"""Objectives by hand, and their gradients in float64 against the formulae written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pearl.rl.algorithms import algorithm_of
from pearl.rl.objectives import OBJECTIVES, Surrogate, sequence_sums
from pearl.training_options import AlgorithmOptions


def surrogate(log_ratios: Tensor, advantages: list[float], sequences: list[int], **options: object) -> Surrogate:
    algorithm = algorithm_of(AlgorithmOptions(**options))
    signed = torch.tensor(advantages, dtype=log_ratios.dtype)
    return OBJECTIVES[algorithm.objective](log_ratios, signed, torch.tensor(sequences), algorithm)


def logs(*ratios: float) -> Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


def test_sequence_sums():
    sums, counts = sequence_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([7, 7, 3, 9]))
    assert sums.tolist() == [3.0, 3.0, 4.0, 8.0] and counts.tolist() == [2, 2, 1, 1]
    empty = sequence_sums(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert [len(tensor) for tensor in empty] == [0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (2.0, -1.0, -2.0, -2.0),  # below the dual clip of 3: PPO's pessimistic branch
        (5.0, -1.0, -3.0, 0.0),  # bounded by it
        (5.0, 1.0, 1.28, 0.0),  # a good action is bounded by the clip already
        (0.5, -1.0, -0.8, 0.0),
        (1.1, 2.0, 2.2, 2.2),
    ],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, value: float, gradient: float):
    log_ratio = logs(ratio)
    result = surrogate(log_ratio, [advantage], [0], dual_clip=3.0)
    assert result.values_N.item() == pytest.approx(value)
    (found,) = torch.autograd.grad(result.values_N.sum(), log_ratio)
    assert found.item() == pytest.approx(gradient)
    assert bool(result.clipped_N) == (gradient == 0.0)


def test_gspo_by_hand():
    # Sequence 0: ratios 1.1 and 1.21 (geometric mean 1.1^1.5), sequence 1: one of 0.5, clipped for a bad action.
    log_ratio = logs(1.1, 1.21, 0.5)
    result = surrogate(log_ratio, [2.0, 2.0, -1.0], [0, 0, 1], name="gspo", clip_low=0.2, clip_high=0.3)
    mean = 1.1**1.5
    assert result.values_N.tolist() == pytest.approx([2 * mean, 2 * mean, -0.8])
    assert result.clipped_N.tolist() == [False, False, True]
    (gradient,) = torch.autograd.grad(result.values_N.sum(), log_ratio)
    assert gradient.tolist() == pytest.approx([2 * mean, 2 * mean, 0.0])  # each row's ratio moves with both tokens, by half
    clipped = surrogate(log_ratio, [2.0, 2.0, -1.0], [0, 0, 1], name="gspo")
    assert clipped.clipped_N.tolist() == [True, True, True] and clipped.values_N.tolist()[0] == pytest.approx(2 * 1.0004)


def test_gspo_with_sequences_of_one_token_is_the_clip():
    log_ratio, advantages = logs(0.5, 1.0, 1.2, 3.0), [1.0, -1.0, 2.0, -2.0]
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    ours = surrogate(log_ratio, advantages, [0, 1, 2, 3], name="gspo", **bounds)
    theirs = surrogate(log_ratio, advantages, [0, 0, 0, 0], name="grpo", **bounds)
    assert ours.values_N.tolist() == pytest.approx(theirs.values_N.tolist())


def test_cispo_by_hand():
    log_ratio = logs(0.01, 2.0, 10.0)
    result = surrogate(log_ratio, [1.0, -1.0, 1.0], [0, 0, 0], name="cispo")
    (gradient,) = torch.autograd.grad(result.values_N.sum(), log_ratio)
    assert gradient.tolist() == pytest.approx([0.01, -2.0, 5.0])  # of log p: the clipped weight times the advantage
    assert result.clipped_N.tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_extreme_ratios_stay_finite(name: str):
    """In fp32, up and down; bad actions with a dual clip, which bounds them."""
    log_ratio = torch.tensor([300.0, -300.0, 300.0, -300.0, 300.0], requires_grad=True)
    result = surrogate(log_ratio, [1.0, 1.0, -1.0, -1.0, 0.0], [0, 1, 2, 3, 4], name=name, dual_clip=10.0)
    result.values_N.sum().backward()
    assert bool(result.values_N.isfinite().all()) and bool(log_ratio.grad.isfinite().all())
    assert log_ratio.grad[4] == 0.0


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_on_policy_all_have_the_same_gradient_of_a_sequence(name: str):
    log_ratio = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    result = surrogate(log_ratio, [0.5, 0.5, -2.0, -2.0], [0, 0, 1, 1], name=name)
    (gradient,) = torch.autograd.grad(result.values_N.sum(), log_ratio)
    assert gradient.tolist() == [0.5, 0.5, -2.0, -2.0]
