"""Results of simulated runs with round numbers."""

from __future__ import annotations

from typing import Any

from pearl.sched.sim.results import IntervalRecord, SimResult, StepRecord
from pearl.sched.sim.tables import Run


def step_record(number: int, began_s: float, makespan_s: float, **options: Any) -> StepRecord:
    """A step whose training takes 10 s, and publishing 1 s."""
    values: dict[str, Any] = dict(generated=600, computed=400, trained_tokens=1000, trajectories=8, predicted_s=None)
    values |= dict(shape="2M", steady=True, workers=2.0, staleness_mean=0.5)
    times = dict(began_s=began_s, collected_s=began_s + makespan_s, trained_s=began_s + makespan_s + 10.0)
    return StepRecord(step=number, makespan_s=makespan_s, ended_s=began_s + makespan_s + 11.0, **times, **(values | options))


def result_of(makespans: list[float], predicted: list[float | None] | None = None, **options: Any) -> SimResult:
    """Steps one after the other, a minute's record for every minute that began."""
    steps: list[StepRecord] = []
    for number, makespan_s in enumerate(makespans):
        began = steps[-1].ended_s if steps else 0.0
        told = predicted[number] if predicted else None
        steps.append(step_record(number, began, makespan_s, predicted_s=told))
    end = steps[-1].ended_s if steps else 0.0
    roles = {"mixed": 2.0, "prefill": 1.0, "decode": 1.0, "borrowed": 1.0}
    minutes = [
        IntervalRecord(at_s=60.0 * number, seconds=60.0, generated=5, computed=5, roles=roles, in_flight=8, kv_use=0.2)
        for number in range(int(end // 60) + 1)
    ]
    return SimResult(seconds=end, steps=tuple(steps), intervals=tuple(minutes), transitions=(), **options)


def run_of(policy: str, segment: str, seed: int, makespan_s: float) -> Run:
    return Run(policy=policy, segment=segment, seed=seed, result=result_of([makespan_s, makespan_s]))
