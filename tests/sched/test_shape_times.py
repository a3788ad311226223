"""Which shapes there were in a period, and for how long."""

from __future__ import annotations

import pytest

from pearl.sched import shape_times
from pearl.sched.shape import Shape
from pearl.sched.shape_times import ShapeTimes

TWO, FOUR = Shape(mixed=2), Shape(mixed=4)


def told() -> ShapeTimes:
    """2M from 10 s on, 4M from 30 s, 2M again from 45 s."""
    times = ShapeTimes()
    for at, shape in ((10.0, TWO), (20.0, TWO), (30.0, FOUR), (45.0, TWO), (50.0, TWO)):
        times.note(shape, at)
    return times


@pytest.mark.parametrize(
    ("began", "ended", "spent"),
    [
        (10.0, 60.0, {TWO: 35.0, FOUR: 15.0}),
        (25.0, 40.0, {TWO: 5.0, FOUR: 10.0}),
        (31.0, 32.0, {FOUR: 1.0}),
        (0.0, 12.0, {TWO: 2.0}),
        (0.0, 10.0, {}),
        (40.0, 40.0, {}),
    ],
)
def test_the_time_between_two_moments_is_shared_out(began: float, ended: float, spent: dict[Shape, float]) -> None:
    assert told().between(began, ended) == spent


def test_what_is_too_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_times, "REMEMBERED", 2)
    assert told().between(0.0, 60.0) == {FOUR: 15.0, TWO: 15.0}
    assert ShapeTimes().between(0.0, 60.0) == {}
