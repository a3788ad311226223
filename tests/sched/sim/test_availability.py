"""Traces of external machines: read, cut, scaled, and drawn with given statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pearl.sched.sim.availability import (
    EXTERNAL_GPUS,
    G4DN_LIKE,
    P3_LIKE,
    SEGMENTS,
    TraceStatistics,
    draw_trace,
    external_gpus,
    read_trace,
    segment_gpus,
    statistics,
    steady,
    window,
)
from pearl.sched.sim.plans import Availability

HOUR = 3600.0
TEXT = "0,add,a\n0,add,b\n60000,add,c\n120000,remove,a\n240000,add,d\n300000,remove,c\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TEXT)
    return path


def mean_gpus(availability: Availability, length_s: float) -> float:
    """GPUs that are there, on average over `length_s`."""
    return sum(sign * len(gpus) * max(0.0, length_s - at_s) for at_s, sign, gpus in availability.events) / length_s


def test_a_trace_is_read_with_its_statistics(file: Path) -> None:
    trace = read_trace(file)
    assert trace.counts() == [(0.0, 2), (60.0, 3), (120.0, 2), (240.0, 3), (300.0, 2)] and trace.length_s == 300.0
    found = statistics(trace)
    assert found.mean == pytest.approx((2 * 60 + 3 * 60 + 2 * 120 + 3 * 60) / 300) and (found.low, found.high) == (2, 3)
    assert found.change_share == pytest.approx(4 / 5) and found.life_mean_s == pytest.approx((120 + 240) / 2)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("x,add,a\n", ":1:"),
        ("0,join,a\n", "add or remove"),
        ("0,add,a\n0,add,a\n", "a is already there"),
        ("0,remove,a\n", "a is not there"),
        ("60000,add,a\n0,add,b\n", "earlier than the line before"),
        ("", "no changes"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read_trace(path)


def test_a_window_begins_with_what_is_there(file: Path) -> None:
    part = window(read_trace(file), 90.0, 270.0)
    assert part.counts() == [(0.0, 3), (30.0, 2), (150.0, 3)] and part.length_s == 180.0
    with pytest.raises(ValueError, match="first_s=200"):
        window(read_trace(file), 200.0, 100.0)


@pytest.mark.parametrize("like", [P3_LIKE, G4DN_LIKE], ids=["p3", "g4dn"])
def test_drawn_traces_have_the_statistics_that_were_asked_for(like: TraceStatistics) -> None:
    found = statistics(draw_trace(like, 300 * HOUR, np.random.default_rng(3)))
    assert found.mean == pytest.approx(like.mean, rel=0.06)
    assert found.low >= like.low and found.high <= like.high and found.high - found.low > 0.9 * (like.high - like.low)
    assert found.change_share == pytest.approx(like.change_share, rel=0.06)
    assert found.life_mean_s == pytest.approx(like.life_mean_s, rel=0.06)
    assert found.life_median_s == pytest.approx(like.life_median_s, rel=0.15), "exponential lives, recorded ones are not quite"


def test_the_same_seed_draws_the_same_trace_and_impossible_statistics_are_refused() -> None:
    draws = [draw_trace(P3_LIKE, 2 * HOUR, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    wrong = TraceStatistics(mean=40.0, low=0, high=24, change_share=0.2, life_mean_s=600.0, life_median_s=400.0)
    with pytest.raises(ValueError, match="low <= mean <= high"):
        draw_trace(wrong, HOUR, np.random.default_rng(0))


def test_nodes_become_whole_workers(file: Path) -> None:
    rng = np.random.default_rng(0)
    gpus = external_gpus(read_trace(file), most_nodes=3, gpus=6, tp=4, rng=rng, notice_s=30.0)
    assert [(at, sign, len(names)) for at, sign, names in gpus.events] == [(0.0, 1, 4)], "2 of 3 nodes are 4 of 6 GPUs, 3 are 6"
    pairs = external_gpus(read_trace(file), most_nodes=3, gpus=6, tp=2, rng=rng)
    assert [(at, sign) for at, sign, _ in pairs.events] == [(0.0, 1), (0.0, 1), (60.0, 1), (120.0, -1), (240.0, 1), (300.0, -1)]
    assert mean_gpus(pairs, 300.0) == pytest.approx(2 * statistics(read_trace(file)).mean) and gpus.notice_s == 30.0
    assert mean_gpus(steady(3, 2), 100.0) == 6.0


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.name)
def test_segments_without_a_folder_are_drawn(segment) -> None:
    gpus, source = segment_gpus(segment, None, tp=2, seed=5)
    assert "drawn" in source and 0 < mean_gpus(gpus, 2 * HOUR) <= EXTERNAL_GPUS
    assert gpus == segment_gpus(segment, None, tp=2, seed=5)[0] != segment_gpus(segment, None, tp=2, seed=6)[0]


def test_segments_of_a_folder_are_cut_and_scaled(tmp_path: Path) -> None:
    rows = [f"0,add,n{number}" for number in range(32)] + ["15000000,remove,n0", "30000000,add,late"]
    (tmp_path / "spot_trace_p3.csv").write_text("\n".join(rows) + "\n")
    gpus, source = segment_gpus(SEGMENTS[0], tmp_path, tp=2, seed=0)
    assert source == "spot_trace_p3.csv, minutes 225 to 345"
    assert [(at, sign) for at, sign, _ in gpus.events] == [(0.0, 1)] * 6 + [(1500.0, -1)], "31 of 32 nodes are 11 of 12 GPUs"


def test_a_trace_that_is_not_there_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"spot_trace_g4dn\.csv: is not there; it is g4dn-trace\.csv of github\.com/"):
        segment_gpus(SEGMENTS[1], tmp_path, tp=2, seed=0)
