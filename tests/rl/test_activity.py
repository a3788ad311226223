"""Busy shares and spans: what a rank did, counted once, in the period in which it did it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.metrics.trace import read_trace
from pearl.protocol import Tokens, TokenUpdate
from pearl.rl.activity import Activity

ROLES = {0: "train", 1: "mixed", 2: "decode"}


def tokens(rank: int, seconds: float, *versions: int, running: int = 2, waiting: int = 1) -> Tokens:
    updates = [
        TokenUpdate(request_id=f"{number}", token_ids=[1], logprobs=[0.0], weight_versions=[version])
        for number, version in enumerate(versions)
    ]
    return Tokens(rank=rank, updates=updates, seconds=seconds, waiting=waiting, running=running, free_blocks=9)


def shares(activity: Activity, now: float) -> list[float]:
    state = activity.status("", 0.0, {}, ROLES, now)
    return [state.workers[f"rank{rank}"].busy_share for rank in range(3)]


def spans(path: Path, track: str) -> list[tuple[str, float, float]]:
    events = [event for event in read_trace(path) if event["ph"] == "X" and event["cat"] == track]
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events]


def test_a_command_counts_from_when_it_was_sent_until_it_was_done() -> None:
    activity = Activity(None, now=100.0)
    activity.begin(0, "TrainStep", 101.0)
    activity.end(0, 103.0)
    assert shares(activity, 104.0) == pytest.approx([0.5, 0, 0])
    assert shares(activity, 105.0) == [0, 0, 0]


def test_a_command_under_way_counts_in_every_period_it_lasts() -> None:
    activity = Activity(None, now=0.0)
    activity.begin(0, "TrainStep", 0.5)
    assert shares(activity, 1.0) == pytest.approx([0.5, 0, 0])
    assert shares(activity, 2.0) == pytest.approx([1.0, 0, 0])
    activity.end(0, 2.25)
    assert shares(activity, 3.0) == pytest.approx([0.25, 0, 0])


def test_engine_steps_count_by_their_seconds_and_never_beyond_the_period() -> None:
    activity = Activity(None, now=0.0)
    activity.stepped(tokens(1, 0.2, 4), 0.5)
    activity.stepped(tokens(1, 0.1, 4), 0.9)
    activity.stepped(tokens(2, 5.0, 4), 1.0)
    assert shares(activity, 1.0) == pytest.approx([0, 0.3, 1.0])
    activity.begin(1, "Publish", 1.0)
    activity.stepped(tokens(1, 1.0, 4), 2.0)
    assert shares(activity, 2.0)[1] == 1.0


@pytest.mark.parametrize("asked", [False, True], ids=["unseen", "seen while it lasts"])
def test_beginning_to_serve_is_no_work(tmp_path: Path, asked: bool) -> None:
    activity = Activity(tmp_path / "trace.json", now=0.0)
    activity.begin(1, "Serve", 0.0)
    if asked:
        assert shares(activity, 0.5) == [0, 0, 0]
    activity.end(1, 0.9)
    assert shares(activity, 1.0) == [0, 0, 0]
    activity.close(9.0)
    assert spans(tmp_path / "trace.json", "rank1/commands") == []


def test_the_state_has_load_versions_and_roles() -> None:
    activity = Activity(None, now=0.0)
    activity.stepped(tokens(1, 0.1, 3, 5, running=7, waiting=2), 0.5)
    activity.stepped(tokens(1, 0.1, running=6, waiting=0), 0.6)
    state = activity.status("a batch", 1.5, {"ready groups": 2}, ROLES, 1.0)
    assert (state.waiting_for, state.waited_s, state.queues) == ("a batch", 1.5, {"ready groups": 2})
    one = state.workers["rank1"]
    assert (one.role, one.running, one.waiting, one.weight_version) == ("mixed", 6, 0, 5)
    assert (state.workers["rank0"].role, state.workers["rank0"].weight_version) == ("train", -1)


def test_the_trace_has_every_second_once(tmp_path: Path) -> None:
    activity = Activity(tmp_path / "trace.json", now=0.0)
    activity.begin(0, "TrainStep", 1.0)
    activity.stepped(tokens(1, 0.5, 0), 2.0)
    activity.status("", 0.0, {}, ROLES, 3.0)
    activity.end(0, 4.0)
    activity.close(9.0)
    trained = spans(tmp_path / "trace.json", "rank0/commands")
    assert {name for name, _, _ in trained} == {"TrainStep"}
    assert sorted((start, end) for _, start, end in trained) == [(1.0, 3.0), (3.0, 4.0)]
    assert spans(tmp_path / "trace.json", "rank1/engine") == [("engine steps", 1.5, 2.0)]


def test_an_answer_without_a_command_is_no_work() -> None:
    activity = Activity(None, now=0.0)
    activity.end(2, 0.7)
    assert shares(activity, 1.0) == [0, 0, 0]


def test_the_trace_has_the_time_in_each_role(tmp_path: Path) -> None:
    activity = Activity(tmp_path / "trace.json", now=0.0)
    activity.note_roles(ROLES, 1.0)
    activity.note_roles(ROLES | {1: "mixed > prefill"}, 2.0)
    activity.note_roles(ROLES | {1: "prefill", 5: "mixed"}, 3.0)
    activity.note_roles({0: "train", 1: "prefill", 2: "decode"}, 4.0)  # worker 5 is gone
    activity.close(9.0)
    path = tmp_path / "trace.json"
    assert spans(path, "rank1/role") == [("mixed", 1, 2), ("mixed > prefill", 2, 3), ("prefill", 3, 9)]
    assert spans(path, "rank5/role") == [("mixed", 3, 4)]
    assert spans(path, "rank2/role") == [("decode", 1, 9)]
