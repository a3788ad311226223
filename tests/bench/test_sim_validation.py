"""Real engines on one clock: every trajectory is played to its end, by the same plans as in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import sim_validation
from bench.sim_validation import BLOCK_SIZE, CASES, CONFIG, RealRun, plans_of, simulated
from pearl.sched.cost_profile import CostKey, CostProfile, DecodeCost, HandOverCost, PrefillCost

COSTS = CostProfile(
    key=CostKey(gpu="x", model="x"),
    decode=DecodeCost(base_s=0.0, per_seq_s=1e-5),
    prefill=PrefillCost(base_s=1e-4, per_token_s=2e-6),
    step_overhead_s=4e-4,
    hand_over=HandOverCost(give_s=2e-4, take_s=3e-4, copies=True),
    kv_bytes_per_token=512.0,
    kv_capacity_tokens=float(sim_validation.BLOCKS * BLOCK_SIZE),
    transfer_bytes_per_s=4e8,
)


def test_plans_are_the_same_each_time_and_fit() -> None:
    plans = plans_of(8)
    assert plans == plans_of(8) and [plan.group for plan in plans] == [0] * 4 + [1] * 4
    assert all(plan.tokens < CONFIG.max_model_len for plan in plans)


@pytest.mark.parametrize("case", ["2 mixed", "1P1D"])
def test_real_engines_play_every_turn(case: str) -> None:
    plans = plans_of(8)
    run = RealRun(CASES[case])
    seconds = run.play(plans)
    assert not run.playing and run.turns == sum(len(plan.turns) for plan in plans)
    waited = max(sum(turn.env_s for turn in plan.turns) for plan in plans)
    assert seconds > waited and run.steps >= max(sum(turn.generated for turn in plan.turns) for plan in plans)
    for engine in run.engines.values():
        engine.check_integrity()
        assert not engine.has_unfinished() and engine.stats().num_steps > 0
    run.close()


def test_the_simulator_is_given_the_same_work() -> None:
    plans = plans_of(8)
    one, two, split = (simulated(CASES[name], plans, COSTS) for name in ("1 mixed", "2 mixed", "1P1D"))
    assert two < one, "two engines need less time"
    free = simulated(CASES["1P1D"], plans, replace(COSTS, hand_over=HandOverCost()))
    assert split > free, "hand-overs cost their engines time"
    slow = replace(COSTS, step_overhead_s=4e-3)
    assert simulated(CASES["1 mixed"], plans, slow) > 3 * one
