"""What a checkpoint holds of the control plane comes back, to the last bit."""

from __future__ import annotations

import math

import msgspec
import pytest

from pearl.rl import controller_state
from pearl.rl.buffer import Buffer, Unplayed
from pearl.rl.controller_state import ControllerState, capture, decode, encode, restore
from pearl.rl.types import Trajectory, Turn


def played(name: str, group: int, env_seed: int) -> Trajectory:
    turn = Turn(text="left ⇐", num_sampled=2, observation="o", reward=0.1, info={"invalid": True, "at": [1, {"x": None}]})
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        env_seed=env_seed,
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.1, -1 / 3],
        weight_versions=[-1, 3, 4],
        turns=[turn],
        reward=0.1 + 0.2,
        success=True,
        outcome="done",
    )


def buffer_of_two_groups() -> Buffer:
    """Group 4 is complete; of group 5 one member is done and one runs."""
    buffer = Buffer()
    buffer.dispatch(4, 104, ["4-0", "4-1"])
    for name in ("4-1", "4-0"):
        buffer.finish(played(name, 4, 104))
    buffer.dispatch(5, 105, ["5-0", "5-1"])
    buffer.finish(played("5-1", 5, 105))
    return buffer


def test_everything_comes_back() -> None:
    buffer = buffer_of_two_groups()
    state = capture(
        buffer,
        step=4,
        weight_version=4,
        started=6,
        successes=[0.1, 0.25, 1 / 3, 1.0],
        counters={"elapsed_s": 12.5, "tokens": 7},
    )
    again = decode(encode(state))
    assert again == state
    assert (again.step, again.weight_version, again.started) == (4, 4, 6)
    assert again.successes == [0.1, 0.25, 1 / 3, 1.0] and again.counters == {"elapsed_s": 12.5, "tokens": 7}
    restored, unplayed = restore(again)
    assert unplayed == [Unplayed(trajectory_id="5-0", group_id=5, env_seed=105)]
    assert restored.counts() == {"dispatched": 5, "trained": 0, "in_flight": 4, "dropped_resume": 1}
    assert restored.take(1, weight_version=4, max_staleness=1) == buffer.take(1, weight_version=4, max_staleness=1)
    restored.finish(played("5-0", 5, 105))
    (group,) = restored.take(1, weight_version=4, max_staleness=1) or []
    assert group.trajectories == [played("5-0", 5, 105), played("5-1", 5, 105)]


def test_staleness_goes_on_counting_from_the_tokens() -> None:
    state = decode(encode(capture(buffer_of_two_groups(), step=5, weight_version=5, started=6, successes=[])))
    restored, _ = restore(state)
    assert restored.take(1, weight_version=5, max_staleness=1) is None
    assert restored.dropped["stale"] == 2


def test_a_snapshot_does_not_follow_the_buffer() -> None:
    buffer = buffer_of_two_groups()
    successes, counters = [0.5], {"tokens": 1}
    state = capture(buffer, step=1, weight_version=1, started=6, successes=successes, counters=counters)
    before = encode(state)
    buffer.finish(played("5-0", 5, 105))
    buffer.take(2, weight_version=4, max_staleness=9)
    successes.append(0.75)
    counters["tokens"] = 2
    assert encode(state) == before


def test_not_a_number_survives() -> None:
    state = capture(Buffer(), step=1, weight_version=1, started=0, successes=[math.nan, math.inf])
    assert math.isnan(decode(encode(state)).successes[0]) and decode(encode(state)).successes[1] == math.inf


def test_impossible_states_are_refused() -> None:
    buffer = buffer_of_two_groups()
    for numbers, message in (
        ({"step": -1}, "step=-1"),
        ({"weight_version": -2}, "weight_version=-2"),
        ({"started": 5}, r"started=5: groups \[5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            capture(buffer, **({"step": 1, "weight_version": 1, "started": 6, "successes": []} | numbers))
    state = capture(buffer, step=1, weight_version=1, started=6, successes=[])
    with pytest.raises(ValueError, match=r"started=4: groups \[4, 5\]"):
        restore(msgspec.structs.replace(state, started=4))
    buffer.trained += 1
    with pytest.raises(RuntimeError, match="do not add up"):
        capture(buffer, step=1, weight_version=1, started=6, successes=[])


def test_foreign_bytes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    state = capture(Buffer(), step=1, weight_version=1, started=0, successes=[])
    data = encode(state)
    for damaged in (b"", data[:-1], b"\xff" + data[1:], msgspec.msgpack.encode({"format": 1}), b"PK\x03\x04"):
        with pytest.raises(ValueError, match="not a controller's state"):
            decode(damaged)
    with pytest.raises(ValueError, match="format=2: this release reads 1"):
        decode(msgspec.msgpack.encode({"format": 2, "other": "fields"}))
    monkeypatch.setattr(controller_state, "FORMAT", 3)
    with pytest.raises(ValueError, match="format=1: this release reads 3"):
        decode(data)
    assert ControllerState.__struct_fields__[0] == "format"
