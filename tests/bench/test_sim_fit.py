"""The search for the simulator's free numbers: what is drawn, and what counts as how far off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.sim_fit import PICKS, RANGES, TARGETS, alone_s, cuts, drawn, error_of, predicted
from pearl.sched.sim.baselines import believed
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import preset_named

FITTED = read_fitted()[0]


def test_draws_are_in_their_ranges_and_the_same_for_a_seed() -> None:
    first, again = ([drawn(np.random.default_rng(seed)) for seed in range(20)] for _ in range(2))
    assert first == again and len(set(first)) == 20
    for name, (low, high) in RANGES.items():
        values = [getattr(one, name) for one in first]
        assert low <= min(values) < max(values) <= high


def test_printed_figures_are_no_error_and_others_count_in_their_units() -> None:
    printed = {name: value for name, (value, _) in TARGETS.items()}
    assert error_of(printed) == 0.0
    assert error_of(printed | {"cut_24": 0.103 - 0.04}) == pytest.approx(4.0), "two units of 2 %"
    e = float(np.e)
    assert error_of(printed | {"rollout_s": 934.0 / e}) == error_of(printed | {"rollout_s": 934.0 * e}) == pytest.approx(1.0)


def test_cuts_are_of_the_time_at_16() -> None:
    assert cuts(100.0, 90.0, 81.0) == pytest.approx({"cut_24": 0.10, "cut_32": 0.09})


@pytest.mark.parametrize("name", ["step_overhead_s", "prefill_overhead_s", "miss_share", "overhead_s"])
def test_a_mean_trajectory_alone_takes_longer_the_slower_its_parts(name: str) -> None:
    preset, slower = preset_named("qwen3-8b-h800"), replace(FITTED, **{name: getattr(FITTED, name) + 0.1})
    loads = [believed(one.family(preset.family), one, 64, barrier=True) for one in (FITTED, slower)]
    base, more = (alone_s(load, one) for load, one in zip(loads, (FITTED, slower), strict=True))
    assert more > base > loads[0].turns * loads[0].env_s


def test_the_model_gives_every_figure_that_is_wanted() -> None:
    found = predicted(FITTED)
    assert found.keys() >= TARGETS.keys() and error_of(found) < 1000
    assert all(1 <= found[f"best_{batch}"] <= 7 for batch in (32, 48, 64, 80, 96))
    assert all(found[f"pick_{batch}"] >= 0 for batch in PICKS), "nothing is better than the best"
