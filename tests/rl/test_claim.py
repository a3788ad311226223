"""When the trainers have their ranks, and what the scheduler hears of it."""

from __future__ import annotations

from typing import Any

from pearl.rl.claim import IDLE_S, PROGRESS_EVERY_S, TrainersClaim
from pearl.sched.events import BatchProgress, TrainingBegins, TrainingFinished


def claim(**options: Any) -> tuple[TrainersClaim, list[Any]]:
    told: list[Any] = []
    settings = {"lends": True, "weighed": True, "deadline_s": 30.0, "now": 0.0} | options
    return TrainersClaim(lambda event, now: told.append(event), **settings), told


def test_where_nobody_lends_sessions_begin_at_once_and_nobody_hears_of_them() -> None:
    held, told = claim(lends=False)
    for session in (1, 2, 3):
        assert held.begin(1.0) == session == held.may_begin
        assert held.begin(1.5) == session  # it has them
        held.finish(4, 2.0)
    assert told == []


def test_a_moment_of_idleness_is_not_told() -> None:
    held, told = claim()
    first = held.begin(0.0)
    held.may_begin = first
    held.finish(4, 1.0)
    held.turn(1.0 + IDLE_S / 2)
    assert held.begin(1.2) == first
    assert told == [TrainingBegins(step=1, deadline=30.0)]
    held.finish(4, 2.0)
    held.turn(2.0 + IDLE_S)
    assert told[1:] == [BatchProgress(unfinished=4), TrainingFinished(step=1)]
    assert held.begin(3.0) == 2 and told[-1] == TrainingBegins(step=2, deadline=33.0)
    held.turn(9.0)
    assert len(told) == 4


def test_fixed_lending_is_told_at_once() -> None:
    held, told = claim(weighed=False)
    held.finish(4, 0.0)  # it has none
    held.begin(0.0)
    held.finish(7, 1.0)
    assert told[1:] == [BatchProgress(unfinished=7), TrainingFinished(step=1)]


def test_progress_is_told_when_it_changes_and_not_too_often() -> None:
    held, told = claim()
    for turn in range(100):
        held.progress(10 - turn // 20, turn * PROGRESS_EVERY_S / 10)
    assert told == [BatchProgress(unfinished=left) for left in (10, 9, 8, 7, 6)]
