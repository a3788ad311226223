"""Admission: the counting rule, and what it promises about staleness when a whole job is played through."""

from __future__ import annotations

import random

import pytest

from pearl.sched.admission import Admission, is_stale


def test_synchronous_starts_one_batch_at_a_time() -> None:
    admission = Admission(groups_per_batch=4, max_staleness=0)
    assert admission.may_start(started=0, trained_batches=0) == 4
    assert admission.may_start(started=3, trained_batches=0) == 1
    assert admission.may_start(started=4, trained_batches=0) == 0
    assert admission.may_start(started=4, trained_batches=1) == 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_group_k_starts_exactly_when_its_batch_is_near_enough(staleness: int) -> None:
    admission = Admission(groups_per_batch=3, max_staleness=staleness)
    for trained in range(5):
        for started in range(40):
            allowed = started // 3 <= trained + staleness
            assert (admission.may_start(started=started, trained_batches=trained) > 0) == allowed


def test_dropped_groups_are_replaced() -> None:
    admission = Admission(groups_per_batch=4)
    assert admission.may_start(started=4, trained_batches=0, dropped=2) == 2
    assert admission.may_start(started=6, trained_batches=0, dropped=2) == 0


def test_nothing_is_started_beyond_the_last_batch() -> None:
    admission = Admission(groups_per_batch=4, max_staleness=2)
    assert admission.may_start(started=0, trained_batches=0, total_batches=2) == 8
    assert admission.may_start(started=8, trained_batches=1, total_batches=2) == 0
    assert admission.may_start(started=8, trained_batches=1, total_batches=2, dropped=1) == 1


def test_with_a_barrier_one_batch_is_collected_at_a_time() -> None:
    admission = Admission(groups_per_batch=4, max_staleness=2, barrier=True)
    assert admission.may_start(started=0, trained_batches=0) == 4
    assert admission.may_start(started=4, trained_batches=0, collected_batches=0) == 0
    assert admission.may_start(started=4, trained_batches=0, collected_batches=1) == 4
    assert admission.may_start(started=8, trained_batches=0, collected_batches=2) == 4
    assert admission.may_start(started=12, trained_batches=0, collected_batches=3) == 0  # as stale as may be


def test_staleness_counts_versions() -> None:
    admission = Admission(groups_per_batch=1, max_staleness=1)
    stale = {version: admission.too_stale(oldest_version=version, weight_version=5) for version in (5, 4, 3, -1)}
    assert stale == {5: False, 4: False, 3: True, -1: False}
    assert is_stale(4, 5, 0) and not is_stale(5, 5, 0)


@pytest.mark.parametrize("sizes", [{"groups_per_batch": 0}, {"groups_per_batch": 1, "max_staleness": -1}])
def test_bad_sizes_are_named(sizes: dict) -> None:
    with pytest.raises(ValueError, match="must be >= 1 and >= 0"):
        Admission(**sizes)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_job_in_group_order_never_trains_on_anything_too_stale(staleness: int) -> None:
    """Every group is as old as it can be (all its tokens from its start) and each start happens as early as allowed."""
    rng = random.Random(staleness)
    admission = Admission(groups_per_batch=3, max_staleness=staleness)
    started_at: list[int] = []
    ages = []
    for version in range(12):
        for _ in range(admission.may_start(started=len(started_at), trained_batches=version, total_batches=12)):
            started_at.append(version)
        batch = started_at[3 * version : 3 * version + 3]
        assert len(batch) == 3
        rng.shuffle(batch)
        ages += [version - born for born in batch]
        assert not any(admission.too_stale(oldest_version=born, weight_version=version) for born in batch)
    assert max(ages) == staleness and len(started_at) == 36
