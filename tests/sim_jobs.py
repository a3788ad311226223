"""Small simulated jobs: workloads by seed, settings with round numbers; shared by the simulator's tests, no tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sched_cases import COSTS, LOAD

from pearl.sched.cost_profile import ChangeCost, CostProfile
from pearl.sched.sim.plans import Availability, EngineSizes, Hardware, SimSettings, TrajectoryPlan, TurnPlan
from pearl.sched.sim.simulator import Simulation

SMALL: CostProfile = replace(COSTS, kv_capacity_tokens=4000, prepare=ChangeCost(fixed_s=2.0), finalise=ChangeCost(fixed_s=0.5))
"""A pool of few blocks: sequences give way now and then, and books are checked quickly."""


def plans(seed: int = 0, *, group: int = 4, turns: int = 6, longest: int = 900, tokens: int = 120) -> Iterator[TrajectoryPlan]:
    """Trajectories without end, of at most `turns` turns and `longest` tokens, at most `tokens` being drawn in a turn."""
    rng = random.Random(seed)
    for number in itertools.count():
        if number % group == 0:
            first = 4 * rng.randint(5, longest // 24)
        kept: list[TurnPlan] = []
        left = longest - first
        for turn in range(rng.randint(1, turns)):
            appended, generated = rng.randint(1, 5 * tokens // 4) if turn else 0, rng.randint(1, tokens)
            left -= appended + generated
            if left < 0:
                break
            kept.append(TurnPlan(appended=appended, generated=generated, env_s=rng.expovariate(1.0)))
        yield TrajectoryPlan(
            trajectory=number, group=number // group, first_prompt=first, turns=tuple(kept), reset_s=rng.random()
        )


def settings(**changes: Any) -> SimSettings:
    """8 trajectories in groups of 4; two reserved workers and two that can be borrowed."""
    base: dict[str, Any] = dict(
        costs=SMALL,
        workload=replace(LOAD, batch=8, turns=4, appended=75, generated=60, first_prompt=85, context=300, longest=900),
        hardware=Hardware(training_gpus=2, reserved_workers=2, tp=1),
        engine=EngineSizes(block_size=16, max_num_seqs=32, max_batch_tokens=256, decode_prefill_tokens=32, max_model_len=1024),
        batch=8,
        group=4,
        train_s_per_token=2e-3,
        publish_s=0.5,
        overhead_s=0.01,
        max_steps=3,
    )
    return SimSettings(**(base | changes))


def external(*, until: float = 1e9, notice_s: float = 0.0) -> Availability:
    """One GPU that is always there, two that come at 3 s and go at `until`."""
    events = [(0.0, 1, ("x0",)), (3.0, 1, ("x1", "x2"))]
    if until < 1e9:
        events.append((until, -1, ("x1", "x2")))
    return Availability(events=tuple(events), notice_s=notice_s)


def run_checked(simulation: Simulation, every: int = 1) -> int:
    """To the end, the books checked after every so many events; returns how many there were."""
    events = 0
    while simulation.step():
        events += 1
        if events % every == 0:
            simulation.check()
    simulation.check()
    return events
