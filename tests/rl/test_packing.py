"""Packing plans: every index once, bins within the budget, equal numbers of micro-batches, balanced loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.rl.packing import plan_packing, split_updates


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    mini=st.integers(1, 20),
    budget=st.integers(1, 120),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_every_plan_keeps_the_rules(lengths: list[int], mini: int, budget: int, ranks: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    plan = plan_packing(lengths, mini_batch_size=mini, micro_batch_tokens=budget, ranks=ranks, order=order)
    assert plan == plan_packing(lengths, mini_batch_size=mini, micro_batch_tokens=budget, ranks=ranks, order=order)
    flat = [index for update in plan.updates for rank in update for micro in rank for index in micro]
    assert sorted(flat) == list(range(len(lengths)))
    expected = [set(members) for members in split_updates(order.tolist(), mini)]
    assert [{index for rank in update for micro in rank for index in micro} for update in plan.updates] == expected
    for update in plan.updates:
        assert len(update) == ranks and len({len(rank) for rank in update}) == 1
        for micro in (micro for rank in update for micro in rank):
            assert sum(lengths[index] for index in micro) <= budget or len(micro) == 1
        used = [micro for rank in update for micro in rank if micro]
        assert all(any(rank[place] for rank in update) for place in range(len(update[0]))) or len(used) < ranks


def test_consecutive_runs_of_the_order_are_the_updates() -> None:
    assert split_updates(range(8), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert split_updates(range(7), 4) == [[0, 1, 2, 3], [4, 5, 6]]
    assert split_updates(range(9), 4) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert split_updates(range(1), 4) == [[0]]
    assert split_updates([], 4) == []
    assert [len(run) for run in split_updates(range(127), 32)] == [32, 32, 32, 31]
    assert [len(run) for run in split_updates(range(129), 32)] == [32, 32, 32, 33]


def test_the_longest_have_a_bin_of_their_own_and_the_rest_is_even() -> None:
    lengths = [100, 10, 10, 10, 10, 10, 10]
    plan = plan_packing(lengths, mini_batch_size=7, micro_batch_tokens=40, ranks=1, order=range(7))
    bins = plan.updates[0][0]
    assert [0] in bins and sorted(len(micro) for micro in bins) == [1, 3, 3]


def test_fewer_sequences_than_ranks_leaves_some_empty() -> None:
    plan = plan_packing([5], mini_batch_size=4, micro_batch_tokens=10, ranks=3, order=[0])
    assert plan.updates == [[[[0]], [[]], [[]]]]
    assert plan_packing([], mini_batch_size=4, micro_batch_tokens=10, ranks=3, order=[]).updates == []


def test_ranks_share_the_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 200, size=128).tolist()
    plan = plan_packing(lengths, mini_batch_size=32, micro_batch_tokens=512, ranks=4, order=rng.permutation(128))
    for update in plan.updates:
        loads = [sum(lengths[index] for micro in rank for index in micro) for rank in update]
        assert max(loads) < 1.15 * min(loads)
        total = sum(loads)
        assert 4 * len(update[0]) <= 4 * -(-(total // 512 + 3) // 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mini_batch_size": 0}, "mini_batch_size=0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
        ({"ranks": 0}, "ranks=0"),
        ({"order": [0, 0]}, r"permutation of 0\.\.1"),
        ({"order": [0]}, "has 1 entries"),
        ({"lengths": [3, 0]}, "the least is 0"),
    ],
)
def test_bad_sizes_are_named(change: dict, message: str) -> None:
    given_sizes = {"lengths": [3, 4], "mini_batch_size": 2, "micro_batch_tokens": 8, "ranks": 1, "order": [0, 1], **change}
    with pytest.raises(ValueError, match=message):
        plan_packing(**given_sizes)


def test_evenness_never_breaks_the_budget() -> None:
    plan = plan_packing([3, 3, 2, 2, 2], mini_batch_size=5, micro_batch_tokens=6, ranks=1, order=range(5))
    assert sorted(plan.updates[0][0]) == [[0, 1], [2, 3, 4]]
