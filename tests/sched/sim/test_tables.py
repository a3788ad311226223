"""What tables say of simulated runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_cases import result_of, run_of

from pearl.sched.sim.results import SimResult
from pearl.sched.sim.tables import (
    as_text,
    counts_line,
    gain,
    prediction_error,
    prediction_pairs,
    spread_of,
    step_table,
    throughput,
    throughput_table,
    transition_table,
)

NOTHING = SimResult(seconds=5.0, steps=(), intervals=(), transitions=())


def test_throughput_counts_each_token_once_in_rollout_and_once_in_training() -> None:
    assert throughput(result_of([89.0, 89.0])) == pytest.approx(2 * 2000 / 200)
    again = result_of([89.0, 89.0])
    wasteful = replace(again, steps=tuple(replace(step, computed=10**6) for step in again.steps))
    assert throughput(wasteful) == throughput(again), "what is computed again is no output"
    assert throughput(NOTHING) == 0.0


def test_gains_pair_segments_and_seeds() -> None:
    ours = [run_of("a", "S1", 0, 39.0), run_of("a", "S1", 1, 39.0)]
    theirs = [run_of("b", "S1", 1, 89.0), run_of("b", "S1", 0, 64.0)]
    found = gain(ours, theirs)
    assert found.mean == pytest.approx((0.5 + 1.0) / 2) and found.deviation == pytest.approx(0.5 / 2**0.5) and found.count == 2
    with pytest.raises(ValueError, match="same segments and seeds"):
        gain(ours, theirs[:1])
    with pytest.raises(ValueError, match="nothing to average"):
        spread_of([])


def test_the_table_has_spreads_and_gains() -> None:
    cases = (("ours", 0, 39.0), ("ours", 1, 49.0), ("base", 0, 89.0), ("base", 1, 89.0))
    runs = [run_of(policy, "S1", seed, makespan_s) for policy, seed, makespan_s in cases]
    rows = throughput_table(runs, "base")
    assert rows[0] == ["policy", "tokens/s (S1)", "over base"] and rows[1][0] == "ours" and rows[1][2] == "+83.3 ± 23.6 %"
    assert rows[2][1:] == ["20 ± 0", "+0.0 ± 0.0 %"]
    text = as_text(rows)
    assert text.splitlines()[0].startswith("policy") and len({len(line) for line in text.splitlines()}) == 1


def test_the_table_says_what_its_numbers_are_in_digits() -> None:
    runs = [run_of("base", segment, 0, 89.0) for segment in ("none", "1", "12", "S2")]
    names = ["no external GPUs", "1 external worker", "12 external workers", "S2"]
    assert throughput_table(runs)[0] == ["policy", *(f"tokens/s ({name})" for name in names)]
    shown = [str(spread_of([value])) for value in (13120.4, 1000.0, 999.4, 20.0, 0.0123, 0.0)]
    assert shown == ["13,120", "1,000", "999.4", "20", "0.0123", "0"]
    assert str(spread_of([13000.0, 14500.0])) == "13,750 ± 1,061" and str(spread_of([1.5, 2.5])) == "2 ± 0.71"


def test_steps_and_transitions_as_tables() -> None:
    rows = step_table(result_of([89.0, 189.0], [80.0, None]))
    assert rows[1] == ["0", "2M", "89", "80", "10", "100", "1000", "2.0", "0.50"] and rows[2][3] == "-" and rows[2][5] == "200"
    decisions = ({"kind": "switch", "ok": True, "seconds": 0.5}, {"kind": "switch", "ok": False, "seconds": None})
    table = transition_table(replace(NOTHING, transitions=decisions))
    assert table[1:] == [["switch", "2", "1", "0.5"]]
    assert counts_line({"a": 1, "b": 0, "c": 7}) == "c 7, a 1"


def test_errors_of_predictions_count_steady_steps_alone() -> None:
    result = result_of([100.0] * 20, [100.0 + number for number in range(20)])
    changed = replace(result, steps=(*result.steps[:-1], replace(result.steps[-1], steady=False, predicted_s=900.0)))
    found = prediction_error(prediction_pairs([changed]))
    assert found.count == 19 and found.median == pytest.approx(0.09) and found.p95 == pytest.approx(0.18)
    assert prediction_error([]).count == 0 and prediction_error([]).median == float("inf")
