"""What a simulated run is given is checked before it runs."""

from __future__ import annotations

import pytest

from pearl.sched.published import qwen3_8b_h800, software_engineering
from pearl.sched.sim.plans import Availability, Hardware, SimSettings, TrajectoryPlan, TurnPlan


def test_availability_rows_must_make_sense() -> None:
    Availability(events=((0.0, 1, ("a", "b")), (5.0, -1, ("a",)), (5.0, 1, ("a",))))
    for events in (
        ((0.0, -1, ("a",)),),
        ((0.0, 1, ("a",)), (1.0, 1, ("a",))),
        ((2.0, 1, ("a",)), (1.0, 1, ("b",))),
        ((0.0, 2, ("a",)),),
    ):
        with pytest.raises(ValueError, match=r"availability\.events"):
            Availability(events=events)


def test_settings_name_what_is_wrong() -> None:
    given = dict(costs=qwen3_8b_h800(), workload=software_engineering(), max_steps=1)
    with pytest.raises(ValueError, match="batch=60: must be a multiple of group=16"):
        SimSettings(**given, batch=60)
    with pytest.raises(ValueError, match="one of them must say when the run ends"):
        SimSettings(**given | {"max_steps": None})
    with pytest.raises(ValueError, match="semantics='x'"):
        SimSettings(**given, semantics="x")
    with pytest.raises(ValueError, match="multiple of tp=2"):
        Hardware(training_gpus=7)


def test_trajectory_counts_its_tokens() -> None:
    turns = (TurnPlan(appended=0, generated=5), TurnPlan(appended=7, generated=3))
    plan = TrajectoryPlan(trajectory=0, group=0, first_prompt=10, turns=turns)
    assert (plan.tokens, plan.generated) == (25, 8)
    with pytest.raises(ValueError, match=r"turns=\(\)"):
        TrajectoryPlan(trajectory=0, group=0, first_prompt=10, turns=())
