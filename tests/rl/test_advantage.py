"""Group advantages against hand-computed numbers, and the cases where a quotient of rounding errors must not appear."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.rl.advantage import EPSILON, group_advantages, leave_one_out_advantages


def test_two_groups_by_hand():
    # Group 7: rewards 1, 3 (mean 2, std 1). Group 2: rewards 0, 0, 3 (mean 1, std sqrt 2). Interleaved.
    rewards, groups = [1.0, 0.0, 3.0, 0.0, 3.0], [7, 2, 7, 2, 2]
    root = math.sqrt(2.0)
    expected = [-1 / (1 + EPSILON), -1 / (root + EPSILON), 1 / (1 + EPSILON), -1 / (root + EPSILON), 2 / (root + EPSILON)]
    assert group_advantages(rewards, groups, normalize_std=True) == pytest.approx(expected, abs=1e-15)
    assert group_advantages(rewards, groups, normalize_std=False) == [-1.0, -1.0, 1.0, -1.0, 2.0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.0, -1.7, 1e300, 1e-300])
def test_equal_rewards_are_exactly_zero(reward: float, normalize: bool):
    assert group_advantages([reward] * 8, [0] * 8, normalize_std=normalize) == [0.0] * 8


@pytest.mark.parametrize("normalize", [True, False])
def test_group_of_one_is_exactly_zero(normalize: bool):
    assert group_advantages([5.0, 1.0, 2.0], [0, 1, 1], normalize_std=normalize)[0] == 0.0


def test_rewards_that_differ_by_rounding_only_are_negligible():
    nearly = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert max(nearly) != min(nearly)
    assert max(map(abs, group_advantages(nearly, [0] * 4, normalize_std=True))) < 1e-9


def test_no_rewards():
    assert group_advantages([], [], normalize_std=True) == []


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), max_size=24))
def test_mean_zero_and_unit_spread(pairs: list[tuple[float, int]]):
    rewards, groups = [reward for reward, _ in pairs], [group for _, group in pairs]
    advantages = group_advantages(rewards, groups, normalize_std=True)
    for group in set(groups):
        values = [value for value, member in zip(advantages, groups, strict=True) if member == group]
        inside = [reward for reward, member in zip(rewards, groups, strict=True) if member == group]
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        if statistics.pstdev(inside) > 0.1:
            assert statistics.pstdev(values) == pytest.approx(1.0, abs=1e-4)


def test_errors_name_the_field():
    with pytest.raises(ValueError, match=r"groups has 1 entries: must have one per reward, 2"):
        group_advantages([1.0, 2.0], [0], normalize_std=True)
    with pytest.raises(ValueError, match=r"rewards\[1\]=nan: must be finite"):
        group_advantages([1.0, math.nan], [0, 0], normalize_std=True)


def test_leave_one_out_by_hand():
    # Group 0: 1, 2, 6: the others' means are 4, 3.5, 1.5. Group 1 has one member, group 2 equal ones.
    rewards, groups = [1.0, 9.0, 2.0, 6.0, 0.1, 0.1, 0.1], [0, 1, 0, 0, 2, 2, 2]
    expected = [-3.0, 0.0, -1.5, 4.5, 0.0, 0.0, 0.0]
    assert leave_one_out_advantages(rewards, groups) == pytest.approx(expected, abs=1e-15)
    with pytest.raises(ValueError, match="groups has 1"):
        leave_one_out_advantages([1.0, 2.0], [0])
