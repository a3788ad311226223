"""The trace: a file that viewers load whenever the process ends, bounded, and the overlap computed from it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.metrics.trace import TraceWriter, overlap_seconds, read_trace


def example(path: Path) -> TraceWriter:
    trace = TraceWriter(path)
    trace.span("rank0/train", "update", 1.0, 3.5, step=4)
    trace.span("rank1/engine", "decode", 2.0, 2.25)
    trace.counter("queues", 2.5, in_flight=96, ready=3)
    return trace


def test_a_closed_trace_is_the_documented_format(tmp_path: Path) -> None:
    """Keys, phases and units as in Google's Trace Event Format: microseconds, metadata that names processes and threads."""
    example(tmp_path / "trace.json").close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert spans["update"]["ts"] == 1_000_000 and spans["update"]["dur"] == 2_500_000 and spans["update"]["args"] == {"step": 4}
    [counter] = [event for event in events if event["ph"] == "C"]
    assert counter["args"] == {"in_flight": 96, "ready": 3} and counter["ts"] == 2_500_000
    metadata = [event for event in events if event["name"].endswith("_name")]
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in metadata}
    update = spans["update"]
    assert names["process_name", update["pid"], 0] == "rank0"
    assert names["thread_name", update["pid"], update["tid"]] == "train"
    assert all({"ph", "name", "pid", "tid"} <= set(event) for event in events)


def test_tracks_of_one_process_are_its_rows(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    for track in ("rank0/train", "rank0/publish", "rank1/train", "rank0/train"):
        trace.span(track, "x", 0.0, 1.0)
    places = [(event["pid"], event["tid"]) for event in read_trace(trace.path) if event["ph"] == "X"]
    assert places == [(1, 1), (1, 2), (2, 1), (1, 1)]
    named = [event for event in read_trace(trace.path) if event["name"] in ("process_name", "thread_name")]
    assert len(named) == 2 + 3, "each is named once"


def test_spans_nest_and_never_partly_overlap(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    for start, end in ((2.0, 3.0), (1.0, 4.0), (3.5, 5.0), (4.5, 5.0), (5.0, 6.0)):
        trace.span("a", "x", start, end)
    trace.span("b", "x", 5.5, 7.0)
    times = [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in read_trace(trace.path) if event["ph"] == "X"]
    assert times == [(2.0, 3.0), (1.0, 4.0), (4.0, 5.0), (4.5, 5.0), (5.0, 6.0), (5.5, 7.0)]


def test_a_killed_process_leaves_a_trace_that_lacks_only_its_bracket(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pearl.metrics.trace import TraceWriter\n"
        "trace = TraceWriter(sys.argv[1]); trace.span('a', 'x', 0.0, 1.0); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "trace.json"
    assert subprocess.run([sys.executable, "-c", script, str(path)], timeout=60).returncode == -signal.SIGKILL
    assert [event["name"] for event in json.loads(path.read_text() + "]") if event["ph"] == "X"] == ["x"]


def test_reading_is_the_same_before_and_after_the_end_and_without_a_cut_line(tmp_path: Path) -> None:
    trace = example(tmp_path / "trace.json")
    before = read_trace(trace.path)
    trace.close()
    assert read_trace(trace.path) == before == json.loads(trace.path.read_text())
    (tmp_path / "cut.json").write_bytes(trace.path.read_bytes()[:-30])
    assert read_trace(tmp_path / "cut.json") == before[:-1]


def test_a_trace_without_events_is_valid(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == read_trace(tmp_path / "trace.json") == []


def test_a_full_trace_says_so_and_stops(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", max_events=3)
    for index in range(10):
        trace.span("a", f"x{index}", float(index), index + 0.5)
    size = trace.path.stat().st_size
    trace.span("another", "y", 0.0, 1.0)
    trace.close()
    events = json.loads(trace.path.read_text())
    assert [event["name"] for event in events if event["ph"] == "X"] == ["x0", "x1", "x2"]
    assert [event["name"] for event in events if event["ph"] == "i"] == [trace.stopped] == ["the trace ends here: max_events=3"]
    assert trace.dropped == 8 and trace.path.stat().st_size == size


def test_a_full_disk_ends_the_trace_and_nothing_else() -> None:
    trace = TraceWriter("/dev/full")
    trace.span("a", "x", 0.0, 1.0)
    trace.counter("c", 0.0, value=1)
    trace.close()
    assert trace.stopped is not None and "/dev/full" in trace.stopped


def test_impossible_times_are_refused(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    for start, end in ((2.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="start_s"):
            trace.span("a", "x", start, end)
    with pytest.raises(ValueError, match="time_s"):
        trace.counter("c", float("nan"), value=1)
    with pytest.raises(ValueError, match="max_events=0"):
        TraceWriter(tmp_path / "other.json", max_events=0)
    trace.counter("c", 0.0, value=float("nan"))
    assert read_trace(trace.path) == [], "a counter without a finite value is no event"


# ------------------------------------------------------------------------------------------------------------- overlap


def spans(track: str, name: str, times: list[tuple[float, float]]) -> list[dict]:
    return [{"ph": "X", "cat": track, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6} for start, end in times]


def test_overlap_of_training_and_rollout() -> None:
    events = spans("rank0/train", "update", [(0, 10), (20, 30)]) + spans("rank1/engine", "step", [(5, 8), (9, 21), (29, 40)])
    assert overlap_seconds(events, "rank0/train", "update", "rank1/engine", "step") == pytest.approx(3 + 1 + 1 + 1)
    assert overlap_seconds(events, "rank0/train", "update", "rank1/engine", "other") == 0.0
    assert overlap_seconds(events, "rank1/engine", "step", "rank0/train", "update") == pytest.approx(6)


def test_one_after_the_other_is_no_overlap() -> None:
    events = spans("a", "x", [(0, 1), (2, 3)]) + spans("b", "y", [(1, 2), (3, 4)])
    assert overlap_seconds(events, "a", "x", "b", "y") == 0.0


starts_and_lengths = st.tuples(st.integers(0, 30), st.integers(0, 8))
intervals = st.lists(starts_and_lengths.map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8)


@settings(max_examples=200, deadline=None)
@given(left=intervals, right=intervals)
def test_overlap_equals_counting_seconds(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def covers(times: list[tuple[int, int]], second: int) -> bool:
        return any(start <= second < end for start, end in times)

    events = spans("a", "x", left) + spans("b", "y", right)  # type: ignore[arg-type]
    expected = sum(covers(left, second) and covers(right, second) for second in range(40))
    assert overlap_seconds(events, "a", "x", "b", "y") == pytest.approx(expected)


def test_overlap_of_a_written_trace(tmp_path: Path) -> None:
    trace = example(tmp_path / "trace.json")
    assert overlap_seconds(read_trace(trace.path), "rank0/train", "update", "rank1/engine", "decode") == pytest.approx(0.25)
