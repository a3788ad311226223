"""Fits of measurements that scatter: what made them is found, sums are kept, and what is absurd is left out."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.sched.fit import total_fit

TRUE = np.array([4e-4, 1.5e-5, 6e-8])


def measured(count: int, scatter: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a batch and its tokens, and their seconds, whose logarithms scatter to one side, as a busy machine's do."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 65, count).astype(float)
    rows = np.stack([np.ones(count), batch, batch * rng.uniform(20, 400, count)], 1)
    noise = np.exp(np.abs(rng.normal(0.0, scatter, count))) if scatter else 1.0
    return rows, rows @ TRUE * noise


def test_the_coefficients_that_made_the_times_are_found() -> None:
    rows, seconds = measured(60, 0.0)
    found, error = total_fit(rows, seconds)
    assert found == pytest.approx(TRUE.tolist(), rel=1e-4) and error < 1e-5


def test_what_is_predicted_adds_up_to_what_was_measured() -> None:
    rows, seconds = measured(400, 0.3)
    found, error = total_fit(rows, seconds)
    assert float((rows @ found).sum()) == pytest.approx(float(seconds.sum()), rel=1e-3)
    assert 0.02 < error < 0.3


def test_steps_in_which_the_processor_did_something_else_are_left_out() -> None:
    rows, seconds = measured(200, 0.0)
    seconds[::20] *= 50
    found, error = total_fit(rows, seconds)
    assert found == pytest.approx(TRUE.tolist(), rel=1e-2) and error < 1e-2


def test_what_is_known_is_left_out_of_the_coefficients() -> None:
    rows, seconds = measured(80, 0.0)
    (found,), _ = total_fit(rows[:, 2:], seconds, rows[:, :2] @ TRUE[:2])
    assert found == pytest.approx(TRUE[2], rel=1e-4)
    (nothing,), _ = total_fit(rows[:, 2:], seconds, seconds * 1.1)
    assert nothing == 0.0, "what is explained already costs no more"


def test_no_coefficient_is_negative() -> None:
    rows, seconds = measured(80, 0.0)
    found, _ = total_fit(np.hstack([rows, -rows[:, 1:2] + 100]), seconds)
    assert min(found) >= 0


@pytest.mark.parametrize(
    ("rows", "seconds"), [([], []), ([[1.0]], [1.0, 2.0]), ([[1.0], [1.0]], [1.0, 0.0]), ([[0.0], [0.0]], [1.0, 1.0])]
)
def test_what_cannot_be_fitted_is_refused(rows: list[list[float]], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="rows"):
        total_fit(rows, seconds)
