"""Planning against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_cases import COSTS, LOAD, busy_load

import pearl.sched.planner as planner
from pearl.sched.planner import Budget, fixed_borrow, plan_allocation
from pearl.sched.predictor import PaperPredictor, Predictor
from pearl.sched.published import qwen3_8b_h800, qwen3_30b_a3b_h800
from pearl.sched.settings import PdSettings
from pearl.sched.shape import Shape

FREE = PdSettings(hybrid_margin=0.0)


def by_hand(predictor, budget: Budget) -> float:
    """The least score of all shapes, one by one."""
    least = float("inf")
    for borrowed in range(budget.least_borrowed, budget.lendable + 1):
        total = budget.fixed + borrowed
        for mixed in range(total + 1):
            for prefill in range(total - mixed + 1):
                shape = Shape(mixed=mixed, prefill=prefill, decode=total - mixed - prefill)
                kept = shape.mixed >= budget.keep.mixed and shape.prefill >= budget.keep.prefill
                if kept and shape.decode >= budget.keep.decode and shape.mode not in ("broken", "empty"):
                    time = predictor.predict(shape).makespan_s
                    least = min(least, budget.weight * time + budget.toggle_s[borrowed])
    return least


LOADS = st.builds(
    lambda batch, env, appended, generated, miss, context: replace(
        busy_load(batch), env_s=env, appended=appended, generated=generated, miss_share=miss, context=context
    ),
    st.integers(4, 200),
    st.floats(0.05, 5),
    st.floats(20, 4000),
    st.floats(10, 1500),
    st.sampled_from((0.0, 0.2)),
    st.floats(1000, 20000),
)


@settings(deadline=None, max_examples=25)
@given(
    load=LOADS,
    fixed=st.integers(1, 6),
    lendable=st.integers(0, 2),
    base=st.floats(0, 30),
    moe=st.booleans(),
    paper=st.booleans(),
)
def test_small_clusters_are_searched_exactly(load, fixed, lendable, base, moe, paper) -> None:
    costs = qwen3_30b_a3b_h800() if moe else qwen3_8b_h800()
    predictor = PaperPredictor(load, costs) if paper else Predictor(load, costs)
    toggle = tuple(0.0 if not k else base + k for k in range(lendable + 1))
    budget = Budget(fixed=fixed, lendable=lendable, toggle_s=toggle, weight=0.7)
    choice = plan_allocation(predictor, budget, FREE)
    assert choice.best.score_s == pytest.approx(by_hand(predictor, budget), rel=planner.NEAR)
    assert choice.best.shape.total == fixed + choice.best.borrowed


@settings(deadline=None, max_examples=12)
@given(load=LOADS, total=st.integers(8, 60), lent=st.integers(0, 20), moe=st.booleans())
def test_the_refined_grid_finds_what_the_full_search_finds(load, total, lent, moe) -> None:
    predictor = Predictor(replace(load, batch=load.batch * 4), qwen3_30b_a3b_h800() if moe else qwen3_8b_h800())
    lent = min(lent, total - 2)
    budget = Budget(fixed=total - lent, lendable=lent, toggle_s=tuple(0.3 * k for k in range(lent + 1)))
    exact, planner.EXACT_LIMIT = planner.EXACT_LIMIT, 10**9
    try:
        full = plan_allocation(predictor, budget, FREE)
        planner.EXACT_LIMIT = 20
        quick = plan_allocation(predictor, budget, FREE)
    finally:
        planner.EXACT_LIMIT = exact
    assert quick.best.score_s <= full.best.score_s * 1.005
    for mode in ("mixed", "split"):
        assert quick.best_by_mode[mode][2] <= full.best_by_mode[mode][2] * (1 + 2 * planner.NEAR)
    assert quick.tried < 1500


def test_keeping_roles_restricts_and_ties_go_to_fewer_changes() -> None:
    predictor = Predictor(busy_load(), qwen3_8b_h800())
    keep = Shape(prefill=1, decode=3)
    grown = plan_allocation(predictor, Budget(fixed=6, keep=keep, now=keep), FREE).best
    assert grown.shape.prefill >= 1 and grown.shape.decode >= 3 and grown.shape.mode == "split"
    assert plan_allocation(predictor, Budget(fixed=4, keep=keep, now=keep), FREE).best.shape == keep
    flat = Predictor(replace(LOAD, env_s=500.0), COSTS)  # shapes make no difference beside such an environment
    for now in (Shape(mixed=5), Shape(prefill=2, decode=3), Shape(prefill=3, decode=2)):
        best = plan_allocation(flat, Budget(fixed=5, now=now), PdSettings(mode=now.mode)).best
        assert best.shape == now


def test_what_is_dropped_has_a_reason() -> None:
    predictor = Predictor(busy_load(), qwen3_8b_h800())
    nobody = plan_allocation(predictor, Budget(fixed=0), FREE)
    assert nobody.best is None and nobody.dropped
    one = plan_allocation(predictor, Budget(fixed=1), FREE)
    assert str(one.best.shape) == "1M" and one.dropped["1 workers are too few for split"] == 1
    small = PaperPredictor(replace(LOAD, batch=100.0), COSTS)
    choice = plan_allocation(small, Budget(fixed=6), PdSettings(predictor="paper", mode="split"))
    assert choice.dropped["the decode pool cannot hold the batch"] == 3


def test_a_hybrid_must_be_better_by_its_margin() -> None:
    predictor = Predictor(busy_load(256), qwen3_8b_h800())
    free = plan_allocation(predictor, Budget(fixed=7), FREE)
    best = min(free.best_by_mode.values(), key=lambda found: found[2])
    assert free.best.score_s == best[2]
    strict = plan_allocation(predictor, Budget(fixed=7), PdSettings(hybrid_margin=0.5))
    assert strict.best.shape.mode != "hybrid"
    assert plan_allocation(predictor, Budget(fixed=7), PdSettings(mode="hybrid")).best.shape.mode == "hybrid"


def test_a_fixed_ratio_is_met_as_nearly_as_the_number_allows() -> None:
    predictor = Predictor(busy_load(), qwen3_8b_h800())
    for workers, expected in ((8, "3P5D"), (16, "6P10D"), (2, "1P1D"), (400, "150P250D")):
        assert str(plan_allocation(predictor, Budget(fixed=workers), PdSettings(ratio="3:5")).best.shape) == expected


def test_budgets_and_borrow_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="least_borrowed=3"):
        Budget(fixed=1, lendable=2, least_borrowed=3, toggle_s=(0.0, 1.0, 2.0))
    with pytest.raises(ValueError, match="must have lendable"):
        Budget(fixed=1, lendable=2)
    numbers = {name: list(fixed_borrow(name, 1, 3)) for name in ("auto", "all", "none", "2", "9")}
    assert numbers == {"auto": [0, 1, 2, 3], "all": [3], "none": [0], "2": [1], "9": [3]}
    assert np.isfinite(plan_allocation(Predictor(LOAD, COSTS), Budget(fixed=3), FREE).best.score_s)
