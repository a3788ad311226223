"""Lines, numbers and small curves: what they say, and that nothing odd in a row makes them raise."""

from __future__ import annotations

import math

import pytest

from pearl.metrics.console import count, duration, heartbeat_line, sparkline, step_line, worker_lines
from pearl.protocol import Status, WorkerStatus

ROW = {
    "step": 7,
    "max_steps": 120,
    "reward_mean": 0.25,
    "success_rate": 0.5,
    "tokens_per_s": 9717.4,
    "time_s": 0.6,
    "rollout_s": 0.43,
    "train_s": 0.16,
    "publish_s": 0.0,
    "eval_s": 0.0,
    "other_s": 0.01,
}


def worker(role: str = "mixed", version: int = 3, **changes: float) -> WorkerStatus:
    values = {"busy_share": 0.5, "running": 2, "waiting": 1} | changes
    return WorkerStatus(role=role, weight_version=version, **values)  # type: ignore[arg-type]


def test_a_step_is_one_line() -> None:
    assert step_line(ROW) == (
        "step    7/120  reward +0.250  success 0.50  9.7k tok/s  0.60 s (rollout 0.43 train 0.16 publish 0.00 other 0.01)"
    )


def test_a_step_line_shows_what_there_is() -> None:
    stale = {"staleness_mean": 0.8, "staleness_max": 1}
    line = step_line(ROW | stale | {"eval_success_rate": 0.75, "eval_s": 2.0, "logprob_gap": 5e-8})
    assert "eval 0.75" in line and "eval 2.00" in line and "stale 0.8" in line and line.endswith("gap 5e-08")


@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_a_step_line_never_raises(odd: float | None) -> None:
    assert "reward -  success -" in step_line({"reward_mean": odd, "success_rate": odd, "tokens_per_s": odd, "time_s": odd})


def test_a_heartbeat_names_the_wait_queues_roles_and_versions() -> None:
    workers = {"rank1": worker(busy_share=0.83, running=12), "rank0": worker("train", version=4)}
    status = Status(waiting_for="a batch", waited_s=95.2, queues={"in_flight": 96, "ready": 3}, workers=workers)
    assert heartbeat_line(status) == (
        "still waiting after 1 min 35 s for a batch | in flight 96, ready 3"
        " | rank0 train busy 50% running 2 waiting 1 v4 | rank1 mixed busy 83% running 12 waiting 1 v3"
    )


@pytest.mark.parametrize(("waited_s", "words"), [(0.0, "waiting for a batch"), (9.9, "waiting for a batch"), (10.0, "still")])
def test_a_short_wait_has_no_length(waited_s: float, words: str) -> None:
    status = Status(waiting_for="a batch", waited_s=waited_s, queues={}, workers={})
    assert heartbeat_line(status).startswith(words)


def test_a_heartbeat_of_many_workers_is_by_role() -> None:
    workers = {f"rank{index}": worker("decode" if index else "train", version=index) for index in range(64)}
    line = heartbeat_line(Status(waiting_for="", waited_s=0.0, queues={}, workers=workers))
    assert line == (
        "running | 1 rank train busy 50% running 2 waiting 1 v0 | 63 ranks decode busy 50% running 126 waiting 63 v1-63"
    )


def test_workers_stand_in_the_order_of_their_numbers_and_may_have_no_weights_yet() -> None:
    lines = worker_lines({"rank10": worker(version=-1), "rank9": worker(busy_share=math.nan)}, most=2)
    assert [(line.name, line.versions) for line in lines] == [("rank9", "v3"), ("rank10", "v-")]


def test_numbers() -> None:
    assert [count(value) for value in (0, 999, 1234, 2.5e6, 3e9, None)] == ["0", "999", "1.2k", "2.5M", "3.0G", "-"]
    assert [duration(value) for value in (0.4, 75.3, 3600 + 125, math.nan)] == ["0 s", "1 min 15 s", "1 h 2 min", "-"]


def test_a_sparkline_has_one_character_per_value_until_it_is_full() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 10) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 0, 7, 7, 7], 2) == "▁█"
    assert sparkline(range(1000), 10, ascii_only=True) == "__.-=+*%##"  # type: ignore[arg-type]


def test_a_sparkline_of_odd_values() -> None:
    assert sparkline([], 10) == "" and sparkline([None, math.nan], 10) == ""
    assert sparkline([3.0, 3.0], 10) == "▅▅", "no spread: half height"
    assert sparkline([0.0, None, 1.0], 10) == "▁ █"
    assert sparkline([-5.0, 0.5, 9.0], 10, low=0.0, high=1.0) == "▁▅█", "values outside the scale stay inside the line"
