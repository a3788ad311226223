"""Cost profiles: what hand-overs cost, what cannot be, and files that are older than a field."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from sched_cases import COSTS

from pearl.sched.cost_profile import HandOverCost, find_profile, read_profiles, write_profiles


def test_what_the_target_of_a_hand_over_pays() -> None:
    costs = replace(COSTS, transfer_base_s=0.5, hand_over=HandOverCost(take_s=2.0))
    assert costs.transfer_s(1000) == pytest.approx(0.5 + 1000 * 1e5 / 1e10)
    assert costs.taking_s(1000) == 2.0
    copied = replace(costs, hand_over=HandOverCost(take_s=2.0, copies=True))
    assert copied.taking_s(1000) == pytest.approx(2.0 + 1000 * 1e5 / 1e10), "words on their way are no work of the host"


@pytest.mark.parametrize("field", ["give_s", "take_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_hand_over_costs_no_less_than_nothing(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"hand_over.{field}={value}"):
        HandOverCost(**{field: value})


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = replace(COSTS, hand_over=HandOverCost(give_s=0.1, take_s=0.2, copies=True))
    write_profiles(path, [costs])
    assert read_profiles(path) == [costs] and find_profile([costs], costs.key) is costs


def test_files_from_before_hand_overs_were_priced_are_read(tmp_path: Path) -> None:
    path, values = tmp_path / "costs.json", asdict(COSTS)
    for name in ("hand_over", "mixing", "step_overhead_s"):
        del values[name]
    del values["prefill"]["per_prompt_s"]
    path.write_text(json.dumps({"profiles": [values]}))
    assert read_profiles(path) == [COSTS]
