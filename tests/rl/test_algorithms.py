"""What algorithms' names stand for, what is refused, and the weights of each aggregation by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.rl.algorithms import NAMED, Algorithm, algorithm_of, token_weights
from pearl.rl.objectives import OBJECTIVES
from pearl.training_options import AGGREGATIONS, ALGORITHMS, AlgorithmOptions


def test_every_name_is_whole():
    assert set(NAMED) == set(ALGORITHMS)
    for name in ALGORITHMS:
        algorithm = algorithm_of(AlgorithmOptions(name=name))
        assert algorithm.objective in OBJECTIVES and algorithm.aggregation in AGGREGATIONS
        assert all(getattr(algorithm, field.name) is not None for field in dataclasses.fields(Algorithm))


def test_what_is_set_overrides_the_name():
    plain = algorithm_of(AlgorithmOptions(name="gspo"))
    assert (plain.clip_low, plain.clip_high, plain.aggregation) == (3e-4, 4e-4, "sequence_mean")
    changed = algorithm_of(AlgorithmOptions(name="gspo", clip_high=0.5, aggregation="token_mean"))
    assert (changed.clip_low, changed.clip_high, changed.aggregation) == (3e-4, 0.5, "token_mean")
    assert algorithm_of(AlgorithmOptions(clip_low=0.0)).clip_low == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a2c"}, "algorithm.name='a2c'.*grpo, dapo, rloo"),
        ({"aggregation": "mean"}, "algorithm.aggregation='mean'"),
        ({"aggregation": "fixed"}, "algorithm.loss_divisor=None: must be a number of tokens"),
        ({"loss_divisor": 100}, "algorithm.loss_divisor=100: must be none without aggregation=fixed"),
        ({"aggregation": "fixed", "loss_divisor": 0}, "algorithm.loss_divisor=0"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip=0.5"),
        ({"clip_high": -1.0}, "algorithm.clip_high=-1.0"),
        ({"clip_low": 1.5}, r"algorithm.clip_low=1.5: must be in \[0, 1\]"),
        ({"importance_rule": "mask"}, "algorithm.importance_cap=1: must be > 1"),
        ({"gae_lambda": 1.1}, "algorithm.gae_lambda=1.1"),
        ({"critic_lr": 0.0}, "algorithm.critic_lr=0.0"),
        ({"kl_in": "advantage"}, "algorithm.kl_in='advantage'.*loss, reward"),
        ({"name": "ppo", "filter_zero_variance": True}, "algorithm.filter_zero_variance=True: name=ppo"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator='k4'"),
    ],
)
def test_refused(fields: dict, words: str):
    with pytest.raises(ValueError, match=words):
        AlgorithmOptions(**fields)


def test_weights_by_hand():
    counts = [2, 0, 6]
    assert token_weights(counts, "token_mean", None) == [1 / 8] * 3
    weights = token_weights(counts, "sequence_mean", None)
    assert (weights[0], weights[2]) == (1 / 4, 1 / 12)
    assert token_weights(counts, "sequence_sum", None) == [1 / 2] * 3
    assert token_weights(counts, "fixed", 10) == [1 / 20] * 3
    assert all(weight > 0 for aggregation in AGGREGATIONS for weight in token_weights([0, 0], aggregation, 5))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_means_weigh_one_in_all(counts: list[int]):
    for aggregation in ("token_mean", "sequence_mean"):
        total = sum(count * weight for count, weight in zip(counts, token_weights(counts, aggregation, None), strict=True))
        assert total == pytest.approx(1.0 if sum(counts) else 0.0)
