"""Systems to compare are settings of one scheduler, and presets are what they run on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pearl.sched.settings import PdSettings, SchedulerSettings
from pearl.sched.sim.baselines import (
    EXTENSIONS,
    OURS,
    PAPER,
    RLBOOST,
    ROLL,
    one_less,
    one_more,
    roll_large,
    static,
    system_named,
    with_extensions,
)
from pearl.sched.sim.plans import EngineSizes, Hardware
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import PRESETS, preset_named
from pearl.sched.sim.simulator import Simulation

FITTED = read_fitted()[0]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_cost_more_for_more_work(name: str) -> None:
    preset = preset_named(name)
    costs = preset.costs
    assert costs.decode_step_s(1, 1000.0) < costs.decode_step_s(32, 1000.0) < costs.decode_step_s(32, 8000.0)
    assert costs.prefill_s(100, 0) < costs.prefill_s(1000, 0) < costs.prefill_s(1000, 8000)
    assert costs.source and preset.train_s_per_token > 0
    with pytest.raises(ValueError, match="qwen3-8b-h800"):
        preset_named("gpt-2")


def test_an_h200_is_no_slower_than_an_h800_and_holds_more() -> None:
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        old, new = (preset_named(f"{model}-{gpu}").costs for gpu in ("h800", "h200"))
        assert new.decode_step_s(16, 16_000.0) < old.decode_step_s(16, 16_000.0)
        assert new.prefill_s(600, 16_000.0) == pytest.approx(float(old.prefill_s(600, 16_000.0)), rel=0.15)
        assert new.kv_capacity_tokens > 1.8 * old.kv_capacity_tokens


def test_ours_is_the_scheduler_with_its_defaults_and_the_paper_differs_in_the_extensions_alone() -> None:
    assert OURS.scheduler == SchedulerSettings() and not OURS.rebuilds
    assert with_extensions((), PAPER.name) == PAPER
    for name, change in EXTENSIONS.items():
        assert change(PAPER) != PAPER and change(OURS) == OURS, name
    assert len({str(replace(system, name="")) for system in (*one_more(), *one_less(), PAPER, OURS)}) == 2 * len(EXTENSIONS) + 2
    with pytest.raises(ValueError, match="hybrid pools"):
        with_extensions(("magic",), "x")


def test_ours_alone_has_caches_that_keep() -> None:
    hardware, preset = Hardware(), preset_named("qwen3-8b-h800")
    for system, eviction in ((ROLL, "lru"), (RLBOOST, "lru"), (PAPER, "lru"), (OURS, "keep")):
        for engine in (EngineSizes(block_size=512), EngineSizes(block_size=512, eviction="lru")):
            sizes = system.settings(preset, FITTED, hardware=hardware, engine=engine, max_steps=1).engine
            assert sizes == replace(engine, eviction=eviction)
    with pytest.raises(ValueError, match="engine.eviction='mru': must be one of lru, keep"):
        EngineSizes(eviction="mru")


def test_a_prefill_worker_that_is_too_small_computes_less_with_a_cache_that_keeps() -> None:
    """One of two workers computes the prompts of 16 trajectories and holds some 12 contexts."""
    preset, computed = preset_named("qwen3-8b-h800"), {}
    preset = replace(preset, costs=replace(preset.costs, kv_capacity_tokens=200_000.0))
    forced = replace(ROLL.scheduler, pd=PdSettings(mode="split", ratio="1:1", append_on_decode="0"))
    for eviction in ("lru", "keep"):
        system = replace(ROLL, scheduler=forced, eviction=eviction)
        sizes = EngineSizes(block_size=512)
        settings = system.settings(preset, FITTED, hardware=Hardware(), batch=16, engine=sizes, max_steps=1)
        simulation = Simulation(settings, FITTED.family(preset.family).group(0, 16, seed=0))
        counts = simulation.run().counts
        simulation.check()
        computed[eviction] = counts["computed"]
    assert computed["keep"] < 0.9 * computed["lru"], computed


def test_baselines_may_do_what_they_may() -> None:
    for system in (ROLL, RLBOOST):
        assert system.scheduler.pd.mode == "mixed" and system.scheduler.borrow.workers == "none"
    assert (ROLL.external, RLBOOST.external, RLBOOST.scheduler.expand.external) == (False, True, "always")
    assert static(3, 5).scheduler.pd.parts() == (3, 5) and static(3, 5).scheduler.borrow == PAPER.scheduler.borrow
    assert system_named("2:1") == static(2, 1) and system_named("ours") is OURS
    with pytest.raises(ValueError, match="roll, rlboost, paper, ours"):
        system_named("best")


def test_a_system_becomes_settings() -> None:
    preset = preset_named("qwen3-8b-h800")
    hardware = Hardware(training_gpus=16, reserved_workers=2, tp=2)
    made = PAPER.settings(preset, FITTED, hardware=hardware, max_steps=3, seed=5, semantics="slots")
    assert (made.seed, made.max_steps, made.batch, made.workload.batch) == (5, 3, 64, 64) and not made.workload.barrier
    assert made.costs.switch.fixed_s == preset.rebuild_s and made.costs.step_overhead_s == FITTED.step_overhead_s
    assert made.workload.overhead_s == made.overhead_s == FITTED.overhead_s and made.workload.miss_share == made.miss_share
    ours = OURS.settings(preset, FITTED, hardware=hardware, max_steps=3)
    assert ours.costs.switch.fixed_s == 0.4 and ours.workload.barrier and ours.hardware == hardware
    assert ours.workload == replace(made.workload, barrier=True), "everybody is told the same"
    assert roll_large(7).settings(preset, FITTED, hardware=hardware, max_steps=1).hardware.reserved_workers == 7


def test_fitted_numbers_have_a_hash_and_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"overhead_s": 0.1}')
    with pytest.raises(ValueError, match="a.json: not a file of fitted numbers"):
        read_fitted(tmp_path / "a.json")
    frozen, digest = read_fitted()
    text = (Path(__file__).parents[3] / "pearl/sched/sim/presets/fitted.json").read_text()
    (tmp_path / "b.json").write_text(text)
    assert read_fitted(tmp_path / "b.json") == (frozen, digest) and len(digest) == 12
    (tmp_path / "c.json").write_text(text.replace('"miss_share": ', '"miss_share": 9'))
    with pytest.raises(ValueError, match="miss_share"):
        read_fitted(tmp_path / "c.json")
    (tmp_path / "d.json").write_text(text + " ")
    assert read_fitted(tmp_path / "d.json")[1] != digest
