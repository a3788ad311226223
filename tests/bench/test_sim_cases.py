"""What the simulator's benches share: when a printed figure counts as hit, and how a case becomes a run."""

from __future__ import annotations

import itertools

import pytest

from bench.sim_cases import Printed, fixed, makespan, plans_of, run_system
from pearl.sched.sim.baselines import OURS, ROLL
from pearl.sched.sim.plans import EngineSizes, Hardware
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import preset_named

PRESET, FITTED = preset_named("qwen3-8b-h800"), read_fitted()[0]
COARSE = EngineSizes(block_size=1024)


@pytest.mark.parametrize(
    ("low", "high", "value", "hit"),
    [
        (2.17, 2.37, 2.25, True),
        (2.17, 2.37, 1.85, True),
        (2.17, 2.37, 1.84, False),
        (2.17, 2.37, 2.72, True),
        (2.17, 2.37, 2.73, False),
        (0.128, 0.153, 0.01, True),  # 1.01 over 1.128 is 10 % off
        (0.128, 0.153, -0.01, False),  # but a loss is no gain
        (-0.206, -0.206, -0.30, True),
        (-0.206, -0.206, 0.01, False),
        (0.269, 0.269, 0.05, False),
    ],
)
def test_a_figure_is_hit_within_15_percent_and_with_its_sign(low: float, high: float, value: float, hit: bool) -> None:
    assert Printed(low=low, high=high).hit(value) is hit


def test_plans_come_group_by_group_and_are_the_same_for_a_seed() -> None:
    first, again = (list(itertools.islice(plans_of(PRESET.family, 3, group=4), 12)) for _ in range(2))
    assert first == again and [plan.group for plan in first] == [0] * 4 + [1] * 4 + [2] * 4
    assert first != list(itertools.islice(plans_of(PRESET.family, 4, group=4), 12))


def test_a_fixed_system_borrows_and_moves_nothing_by_itself() -> None:
    system = fixed("split", "split", "3:5")
    assert (system.name, system.scheduler.pd.mode, system.scheduler.pd.ratio) == ("split", "split", "3:5")
    assert system.scheduler.borrow.workers == "none" and system.scheduler.tail_share == 0.0


def test_a_case_becomes_a_run_and_its_makespan_a_mean_over_seeds() -> None:
    options = {"batch": 16, "engine": COARSE, "max_steps": 1, "max_staleness": 0}
    hardware = Hardware(training_gpus=8, reserved_workers=4, tp=2)
    runs = [run_system(ROLL, PRESET, FITTED, segment="S9", seed=seed, hardware=hardware, **options) for seed in (0, 1)]
    assert [(run.policy, run.segment, run.seed) for run in runs] == [("ROLL", "S9", 0), ("ROLL", "S9", 1)]
    times = [run.result.steps[0].makespan_s for run in runs]
    assert times[0] != times[1] and all(len(run.result.steps) == 1 for run in runs)
    found = makespan(ROLL, PRESET, FITTED, workers=4, seeds=(0, 1), batch=16, engine=COARSE)
    assert found == pytest.approx(sum(times) / 2)


def test_external_gpus_are_for_those_who_use_them() -> None:
    assert OURS.external and not ROLL.external
