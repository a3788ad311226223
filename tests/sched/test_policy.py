"""Gates: when what would be better is done."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.sched.planner import Allocation
from pearl.sched.policy import (
    SwitchGate,
    append_limit,
    hazard,
    return_lead_s,
    useful_life_s,
    weigh_borrow,
    weigh_expand,
)
from pearl.sched.predictor import Prediction
from pearl.sched.published import qwen3_8b_h800, software_engineering
from pearl.sched.settings import BorrowSettings, ExpandSettings, PdSettings, SchedulerSettings
from pearl.sched.shape import Shape

MIXED, SPLIT, OTHER = Shape(mixed=5), Shape(prefill=2, decode=3), Shape(prefill=3, decode=2)


def allocation(shape: Shape, makespan: float, borrowed: int = 0, reach: float = 1.0) -> Allocation:
    prediction = Prediction(shape=shape, makespan_s=makespan, reach=reach)
    return Allocation(shape=shape, borrowed=borrowed, score_s=makespan, prediction=prediction)


PD = PdSettings(mode_threshold=0.10, ratio_threshold=0.05, unsure_penalty=0.10, cooldown_s=60.0)


def test_a_change_of_mode_needs_more_than_a_change_of_ratio() -> None:
    gate = SwitchGate(PD)
    stay = allocation(SPLIT, 100.0)
    assert gate.weigh(stay, allocation(OTHER, 94.0), cost_s=0.0, now=0.0).act
    assert not gate.weigh(stay, allocation(OTHER, 96.0), cost_s=0.0, now=0.0).act
    assert not gate.weigh(stay, allocation(MIXED, 94.0), cost_s=0.0, now=0.0).act
    verdict = gate.weigh(stay, allocation(MIXED, 89.0), cost_s=0.0, now=0.0)
    assert verdict.act and verdict.gain_s == 11.0 and verdict.threshold_s == pytest.approx(10.0)
    assert not gate.weigh(stay, allocation(OTHER, 94.0), cost_s=7.0, now=0.0).act, "must pay for itself"
    for reach, threshold in ((1.0, 5.0), (1.6, 7.0), (4.0, 15.0), (100.0, 15.0)):
        guess = gate.weigh(stay, allocation(OTHER, 94.0, reach=reach), cost_s=0.0, now=0.0)
        assert guess.act == (threshold < 6) and guess.threshold_s == pytest.approx(threshold), "the further, the more gain"
    assert not gate.weigh(stay, None, cost_s=0.0, now=0.0).act and not gate.weigh(stay, stay, cost_s=0.0, now=0.0).act


def test_a_forced_change_passes_always() -> None:
    gate = SwitchGate(PD)
    gate.changed(SPLIT, 0.0)
    verdict = gate.weigh(None, allocation(SPLIT, 1e6), cost_s=1e9, now=1.0)
    assert verdict.act and verdict.forced


def test_cooling_down_ends_with_time_or_with_the_number_of_workers() -> None:
    gate = SwitchGate(PD)
    gate.changed(SPLIT, 100.0)
    stay, best = allocation(SPLIT, 100.0), allocation(OTHER, 50.0)
    assert gate.weigh(stay, best, cost_s=0.0, now=159.0).reason == "cooling down"
    assert gate.weigh(stay, best, cost_s=0.0, now=160.0).act
    smaller = allocation(Shape(prefill=1, decode=3), 100.0)
    assert gate.weigh(smaller, allocation(Shape(mixed=4), 50.0), cost_s=0.0, now=101.0).act


@settings(deadline=None, max_examples=60)
@given(times=st.lists(st.tuples(st.floats(0.1, 40), st.floats(1, 200), st.floats(1, 200)), min_size=1, max_size=60))
def test_no_two_changes_within_a_cooldown(times) -> None:
    """Whatever is measured, at one number of workers: there and back again takes at least the cool-down."""
    gate, now, shape, changed_at = SwitchGate(PD), 0.0, SPLIT, -math.inf
    for wait, here, there in times:
        now += wait
        other = OTHER if shape == SPLIT else SPLIT
        if gate.weigh(allocation(shape, here), allocation(other, there), cost_s=0.0, now=now).act:
            assert now - changed_at >= PD.cooldown_s and there < 0.95 * here
            gate.changed(other, now)
            shape, changed_at = other, now


def test_borrowing_pays_when_what_is_left_gains_more_than_the_toggle() -> None:
    without, lent = allocation(MIXED, 100.0), allocation(Shape(mixed=7), 80.0, borrowed=2)
    s = BorrowSettings()
    assert weigh_borrow(without, lent, weight=0.5, toggle_s=9.9, s=s).act
    refused = weigh_borrow(without, lent, weight=0.5, toggle_s=10.0, s=s)
    assert not refused.act and refused.gain_s == pytest.approx(10.0)
    assert weigh_borrow(without, lent, weight=0.5, toggle_s=99.0, s=BorrowSettings(workers="2")).act, "a fixed number is fixed"
    assert not weigh_borrow(without, lent, weight=0.5, toggle_s=99.0, s=BorrowSettings(workers="all_or_none")).act
    assert weigh_borrow(None, lent, weight=0.0, toggle_s=99.0, s=s).forced
    assert not weigh_borrow(without, without, weight=1.0, toggle_s=0.0, s=s).act


def test_the_expected_life_of_a_gpu() -> None:
    assert hazard(0, 0.0, 3600.0) == pytest.approx(1 / 3600)
    assert hazard(9, 32_400.0, 3600.0) == pytest.approx(10 / 36_000)
    assert useful_life_s(1 / 100, 0.0) == pytest.approx(100)
    assert useful_life_s(1 / 100, 100.0) == pytest.approx(100 / math.e)
    assert useful_life_s(1e-9, 60.0, 100.0) == pytest.approx(40, rel=1e-6) and useful_life_s(1 / 100, 60.0, 50.0) == 0
    steps = [math.exp(-t / 100) * 0.1 for t in (60 + 0.1 * number for number in range(400))]
    assert useful_life_s(1 / 100, 60.0, 100.0) == pytest.approx(sum(steps), rel=1e-2)


def test_expanding_weighs_that_life_against_its_cost() -> None:
    now, more, s = allocation(MIXED, 100.0), allocation(Shape(mixed=6), 90.0), ExpandSettings()
    gain = 300 * (100 / 90 - 1)
    verdict = weigh_expand(now, more, life_s=300.0, pause_s=11.0, cold_s=1.0, s=s)
    assert verdict.act and verdict.gain_s == pytest.approx(gain) and verdict.cost_s == 12.0
    assert not weigh_expand(now, more, life_s=100.0, pause_s=11.0, cold_s=1.0, s=s).act
    assert weigh_expand(now, more, life_s=0.0, pause_s=11.0, cold_s=1.0, s=ExpandSettings(external="always")).act
    assert not weigh_expand(now, more, life_s=1e9, pause_s=0.0, cold_s=0.0, s=ExpandSettings(external="never")).act
    assert weigh_expand(None, more, life_s=1.0, pause_s=99.0, cold_s=0.0, s=s).forced


def test_returns_begin_early_enough() -> None:
    s = BorrowSettings(return_margin=2.0, return_extra_s=1.0)
    assert return_lead_s(3.0, 4.0, s) == 7.0 and return_lead_s(3.0, 20.0, s) == 21.0


def test_settings_name_what_is_wrong() -> None:
    for build, match in (
        (lambda: PdSettings(mode="both"), "pd.mode='both'.*hybrid"),
        (lambda: PdSettings(ratio="3/5"), "pd.ratio='3/5'"),
        (lambda: PdSettings(ratio="0:5"), "pd.ratio"),
        (lambda: PdSettings(mode_threshold=0.01, ratio_threshold=0.02), "pd.mode_threshold=0.01"),
        (lambda: PdSettings(predictor="magic"), "pd.predictor"),
        (lambda: BorrowSettings(workers="some"), "borrow.workers='some'"),
        (lambda: BorrowSettings(return_margin=0.5), "borrow.return_margin"),
        (lambda: ExpandSettings(external="maybe"), "expand.external"),
        (lambda: SchedulerSettings(tries=0), "sched.tries"),
    ):
        with pytest.raises(ValueError, match=match):
            build()
    assert PdSettings(ratio="3:5").parts() == (3, 5)


def test_appends_run_on_decode_workers_as_long_as_they_hold_up_few() -> None:
    load, costs = software_engineering(), replace(qwen3_8b_h800(), transfer_base_s=0.02)
    alone, crowded = (
        append_limit(Prediction(shape=SPLIT, makespan_s=1.0, decode_batch=batch), load, costs) for batch in (0.0, 16.0)
    )
    assert alone == 4096 and crowded == 0
    some = Prediction(shape=SPLIT, makespan_s=1.0, decode_batch=0.5)
    limit = append_limit(some, load, costs)
    launched = (costs.eager - 1) * float(costs.decode.seconds(1, load.context))
    beside = float(costs.prefill.seconds(limit, load.context))
    here = beside + 0.5 * costs.step_overhead_s + 0.5 * (beside + launched)  # alone it pays for its step, beside others not
    assert 0 < limit < 4096 and limit % 64 == 0
    assert here <= float(costs.prefill_s(limit + load.generated, load.context)) + 0.02 + limit * 147_456 / 87e9
    assert append_limit(some, load, replace(costs, eager=9.0)) <= limit
    assert limit <= append_limit(replace(some, prefill_busy=0.8), load, costs)
