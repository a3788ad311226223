"""The search for the simulator's free numbers: what is drawn, and what counts as how far off."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import sim_fit
from bench.sim_fit import DENSE, EXPERTS, PICKS, RANGES, SPLITS, TARGETS, alone_s, drawn, error_of, fitted_of, predicted
from pearl.sched.sim.baselines import believed
from pearl.sched.sim.presets.fitted import read_fitted

FITTED = read_fitted()[0]
PRINTED = {name: value for name, (value, _) in TARGETS.items()}


def test_draws_are_in_their_ranges_and_the_same_for_a_seed() -> None:
    first, again = ([drawn(np.random.default_rng(seed), None) for seed in range(20)] for _ in range(2))
    assert first == again
    for name, (low, high) in RANGES.items():
        values = [one[name] for one in first]
        assert low <= min(values) < max(values) <= high


def test_later_draws_are_near_the_best() -> None:
    best = {name: low for name, (low, _) in RANGES.items()}
    rows = [drawn(np.random.default_rng(seed), best) for seed in range(60)]
    near = [max(abs(math.log(one[name] / best[name])) for name in best) < 5 * sim_fit.CHANGE for one in rows]
    assert 0.5 < sum(near) / len(near) < 1.0, "most of them, not all"


def test_drawn_numbers_become_settings_of_both_models() -> None:
    values = {name: low for name, (low, _) in RANGES.items()}
    fitted = fitted_of(values)
    assert fitted.prompt_s == {DENSE.costs.key.model: values["dense_s"], EXPERTS.costs.key.model: values["experts_s"]}
    assert fitted.overhead_s == values["overhead_s"] and fitted.step_overhead_s == sim_fit.STEP_OVERHEAD_S


def test_printed_figures_are_no_error_and_others_count_in_their_units() -> None:
    assert error_of(PRINTED) == 0.0
    value, unit = TARGETS["cut_24"]
    assert error_of(PRINTED | {"cut_24": value - 2 * unit}) == pytest.approx(4.0)
    assert error_of(PRINTED | {"rollout_s": 934.0 / math.e}) == pytest.approx(1.0), "of the logarithm"
    assert error_of({"rollout_s": 934.0 * math.e}) == pytest.approx(1.0), "what was not found is no error yet"


@pytest.mark.parametrize("name", ["step_overhead_s", "miss_share", "overhead_s", "prompt_s"])
def test_a_mean_trajectory_alone_takes_longer_the_slower_its_parts(name: str) -> None:
    given = getattr(FITTED, name)
    more = {model: seconds + 0.1 for model, seconds in given.items()} if isinstance(given, dict) else given + 0.1
    both = (FITTED, replace(FITTED, **{name: more}))
    loads = [believed(one.family(DENSE.family), one, 64, barrier=True) for one in both]
    fast, slow = (alone_s(load, one) for load, one in zip(loads, both, strict=True))
    assert slow > fast > loads[0].turns * loads[0].env_s


def test_what_is_hopeless_is_not_simulated_further(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def makespan(system: Any, preset: Any, fitted: Any, *, workers: int, seeds: tuple[int, ...], **more: Any) -> float:
        asked.append(preset.name)
        return 100.0 if system.name != "4:4" else 90.0

    monkeypatch.setattr(sim_fit, "makespan", makespan)
    assert sim_fit.simulated(FITTED, (0,), worst=0.0).keys() == {"cut_24", "cut_32", "alone_s", "rollout_s"}
    assert len(asked) == 3
    found = sim_fit.simulated(FITTED, (0,))
    assert found.keys() >= TARGETS.keys() and len(asked) == 6 + 4 * len(SPLITS)
    assert found["split_32"] == pytest.approx(100 / 90 - 1) and found["best_32"] == 4
    assert found["pick_48"] == 0.0 and found["pick_64"] == pytest.approx(100 / 90 - 1)


def test_the_model_gives_what_is_shown_beside() -> None:
    found = predicted(FITTED)
    assert found.keys() <= TARGETS.keys() | {f"{name}_{batch}" for name in ("best", "split") for batch in SPLITS}
    assert all(1 <= found[f"best_{batch}"] <= 7 for batch in SPLITS)
    assert all(found.get(f"pick_{batch}", 0.0) >= 0 for batch in PICKS), "nothing is better than the best"
