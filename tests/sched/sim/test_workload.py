"""Trajectories that are drawn, or taken from a run, and what predictions are told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pearl.sched.sim.plans import TrajectoryPlan, TurnPlan
from pearl.sched.sim.workload import FAMILIES, SOFTWARE, LogNormal, family_named, replay, workload_of


def plans_of(name: str, groups: int = 24) -> list[TrajectoryPlan]:
    return [plan for number in range(groups) for plan in FAMILIES[name].group(number, 16, seed=1)]


def test_a_lognormal_has_its_mean() -> None:
    drawn = LogNormal(mean=600.0, spread=1.0).draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(600.0, rel=0.02) and np.log(drawn).std() == pytest.approx(1.0, rel=0.02)
    assert LogNormal(mean=5.0).draw(np.random.default_rng(0), 3) == pytest.approx(5.0)
    with pytest.raises(ValueError, match="spread=-1"):
        LogNormal(mean=1.0, spread=-1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_plans_keep_the_limits(name: str) -> None:
    family = FAMILIES[name]
    for plan in plans_of(name, 8):
        assert plan.tokens <= family.context_limit and plan.turns[0].appended == 0
        assert family.first_prompt[0] <= plan.first_prompt <= family.first_prompt[1]
        assert 1 <= len(plan.turns) <= family.turns.high
        assert all(turn.generated >= 1 and turn.env_s >= 0 for turn in plan.turns)


def test_groups_are_the_same_however_many_are_drawn_and_share_their_prompt() -> None:
    first = [plan for _, group in zip(range(3), SOFTWARE.groups(4, seed=9), strict=False) for plan in group]
    assert first[4:8] == SOFTWARE.group(1, 4, seed=9) != SOFTWARE.group(1, 4, seed=8)
    assert [(plan.trajectory, plan.group) for plan in first] == [(number, number // 4) for number in range(12)]
    assert len({plan.first_prompt for plan in first[:4]}) == 1 and len({plan.turns for plan in first[:4]}) == 4


def test_software_tasks_have_the_published_statistics() -> None:
    """28.6 K tokens under a limit of 32 K, mean context 17.2 K; environment 4 s per turn, its median below half a second."""
    plans = plans_of("software", 64)
    load = workload_of(plans, 64)
    assert np.mean([plan.tokens for plan in plans]) == pytest.approx(28_600, rel=0.05)
    assert load.context == pytest.approx(17_200, rel=0.05) and load.longest <= 32_768
    assert load.generated == pytest.approx(148, rel=0.05)
    turns = [turn for plan in plans for turn in plan.turns]
    assert np.mean([turn.env_s for turn in turns]) == pytest.approx(4.0, rel=0.1)
    assert 0.3 <= np.median([turn.env_s for turn in turns]) <= 0.5
    assert np.mean([turn.env_s > 100 for turn in turns]) == pytest.approx(0.01, rel=0.25)


def test_a_slow_environment_is_slow_all_along() -> None:
    uneven = replace(SOFTWARE, slowness=0.8, stall_share=0.0)
    means = [np.mean([turn.env_s for turn in plan.turns]) for number in range(24) for plan in uneven.group(number, 16, 0)]
    even = replace(uneven, slowness=0.0)
    plain = [np.mean([turn.env_s for turn in plan.turns]) for number in range(24) for plan in even.group(number, 16, 0)]
    assert np.mean(means) == pytest.approx(np.mean(plain), rel=0.15) and np.std(means) > 1.5 * np.std(plain)


def test_what_predictions_are_told() -> None:
    turns = (TurnPlan(appended=0, generated=10, env_s=1.0), TurnPlan(appended=20, generated=30, env_s=3.0))
    plan = TrajectoryPlan(trajectory=0, group=0, first_prompt=100, turns=turns, reset_s=2.0)
    load = workload_of([plan, plan], 8, overhead_s=0.25, miss_share=0.1)
    assert (load.batch, load.turns, load.appended, load.generated, load.first_prompt) == (8, 2, 10, 20, 100)
    assert load.context == pytest.approx((10 * 105 + 30 * 145) / 40) and load.longest == 160
    assert load.env_s == pytest.approx((2 + 1 + 3) / 2) and (load.overhead_s, load.miss_share) == (0.25, 0.1)
    assert load.turn_quantiles == (1.0,) * 5
    with pytest.raises(ValueError, match="at least one"):
        workload_of([], 8)


def test_a_run_is_played_again(tmp_path: Path) -> None:
    masks = [[0, 0, 0, 1, 1, 0, 1], [0, 0, 1], [0, 0], [0, 0, 0, 1, 0, 0, 1, 1, 1, 0]]
    rows = [{"loss_mask": mask, "env_seed": seed} for mask, seed in zip(masks, (7, 8, 8, 7), strict=True)]
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    groups = replay(path, env_s=0.5)
    assert [[plan.trajectory for plan in group] for group in groups] == [[0, 2], [1]], "who sampled nothing is left out"
    first, last = groups[0]
    assert first.first_prompt == 3 and [(t.appended, t.generated, t.env_s) for t in first.turns] == [(0, 2, 0.5), (1, 1, 0.5)]
    assert [(t.appended, t.generated) for t in last.turns] == [(0, 1), (2, 3)] and last.group == 0
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no trajectory"):
        replay(path)


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    assert family_named("software") is SOFTWARE
    with pytest.raises(ValueError, match="software, search, maths, frozenlake"):
        family_named("chess")
