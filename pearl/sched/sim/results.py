"""What a simulated run gives: per step, per interval of time, and in all. Frozen values; who fills them is `recorder.py`.

Owns the types; what is made of them is `tables.py`. Seconds, tokens; GPUs where it says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One RL step: `began_s` the first of its trajectories was started, `collected_s` its batch was complete, `trained_s` it
    was trained and `ended_s` its weights were published.

    `generated`, `computed`: tokens drawn, and prompt tokens computed, from the end of the step before to this one's.
    `trained_tokens`: of its trajectories. `makespan_s` = collected - began. `predicted_s`: the makespan that the scheduler
    predicted at `began_s` for the shape it then had (`shape`), None if it had predicted none; `steady`: the shape was the same
    all the while. `staleness_mean` in versions, at consumption. `workers`: those that served, averaged over the rollout.
    """

    step: int
    began_s: float
    collected_s: float
    trained_s: float
    ended_s: float
    generated: int
    computed: int
    trained_tokens: int
    trajectories: int
    makespan_s: float
    predicted_s: float | None
    shape: str
    steady: bool
    workers: float
    staleness_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRecord:
    """`seconds` from `at_s` on: tokens drawn, prompt tokens computed, and workers (averaged) by what they were.

    `roles`: "mixed", "prefill", "decode": serving; of them "borrowed" and "external"; "changing": in a transition;
    "training": GPUs, not workers, that train. `in_flight`: trajectories under way, at its end; `kv_use` likewise: the share
    of the serving workers' pools that is in use.
    """

    at_s: float
    seconds: float
    generated: int
    computed: int
    roles: dict[str, float]
    in_flight: int
    kv_use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """All of a run. `transitions`: rows of `sched.decision.Decision.row`. `counts`: by name, such as "turns", "preemptions",
    "transfers", "transferred_tokens", "refused_handoffs", "interrupted", "tokens_lost" and "dropped_trajectories"."""

    seconds: float
    steps: tuple[StepRecord, ...]
    intervals: tuple[IntervalRecord, ...]
    transitions: tuple[dict[str, Any], ...]
    counts: dict[str, int] = field(default_factory=dict)
    events: int = 0
    trainer_waited_s: float = 0.0
    """For GPUs that were lent, in all."""

    @property
    def generated(self) -> int:
        return sum(interval.generated for interval in self.intervals)
