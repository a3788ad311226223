"""FrozenLake against gymnasium's own environment, its text, and the registry's checks."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config import EnvOptions
from pearl.rl.envs import registry
from pearl.rl.envs.base import random_player, system_prompt_of, tasks_of, words_of
from pearl.rl.envs.frozen_lake import ACTIONS, INVALID, FrozenLake, grid_rows, read_answer


def answer(number: int) -> str:
    return f"<answer>{ACTIONS[number]}</answer>"


def grid_of(oracle: FrozenLakeEnv) -> str:
    rows = [[cell.decode().replace("S", "F") for cell in row] for row in oracle.desc]
    rows[oracle.s // oracle.ncol][oracle.s % oracle.ncol] = "P"
    return "".join("".join(row) + "\n" for row in rows)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 6), seed=st.integers(0, 2**40), slippery=st.booleans(), actions=st.lists(st.integers(0, 3), max_size=30)
)
def test_every_step_is_gymnasiums(size: int, seed: int, slippery: bool, actions: list[int]) -> None:
    lake = FrozenLake(size=size, num_maps=0, slippery=slippery, max_turns=100)
    first, _ = lake.reset(seed)
    oracle = FrozenLakeEnv(desc=list(lake.map_of(seed)), is_slippery=slippery)
    oracle.reset(seed=seed)
    assert first == grid_of(oracle)
    for action in actions:
        observation, reward, terminated, truncated, info = lake.step(answer(action))
        _, expected_reward, expected_end, _, _ = oracle.step(action)
        assert (observation, reward, terminated, truncated) == (grid_of(oracle), expected_reward, expected_end, False)
        assert info == {"invalid": False, "success": expected_reward == 1}
        if terminated:
            with pytest.raises(RuntimeError, match="after the end"):
                lake.step(answer(action))
            return


def path_to_goal(rows: tuple[str, ...]) -> list[int]:
    size, queue, seen = len(rows), deque([((0, 0), [])]), {(0, 0)}
    while queue:
        (row, column), path = queue.popleft()
        if rows[row][column] == "G":
            return path
        for number, (down, right) in enumerate([(0, -1), (1, 0), (0, 1), (-1, 0)]):
            place = (row + down, column + right)
            inside = 0 <= place[0] < size and 0 <= place[1] < size
            if inside and place not in seen and rows[place[0]][place[1]] != "H":
                seen.add(place)
                queue.append((place, [*path, number]))
    raise AssertionError("no path")


def test_the_eight_maps_differ_and_can_be_won() -> None:
    lake = FrozenLake()
    assert len({lake.map_of(seed) for seed in range(8)}) == 8
    assert lake.map_of(3) == lake.map_of(11) == FrozenLake().map_of(3)
    assert [lake.map_of(seed) for seed in range(8)] != [FrozenLake(map_seed=1).map_of(seed) for seed in range(8)]
    for seed in range(8):
        path = path_to_goal(lake.map_of(seed))
        lake.reset(seed)
        steps = [lake.step(answer(number)) for number in path]
        assert [step[1] for step in steps] == [0.0] * (len(path) - 1) + [1.0]
        assert steps[-1][2:] == (True, False, {"invalid": False, "success": True})


def test_small_grids_have_fewer_maps_than_asked_for() -> None:
    lake = FrozenLake(size=2, num_maps=8)
    assert len({lake.map_of(seed) for seed in range(8)}) <= 3
    assert lake.map_of(7) == lake.map_of(15)


def test_an_unreadable_turn_costs_and_moves_nothing() -> None:
    lake = FrozenLake(max_turns=3)
    grid, _ = lake.reset(0)
    assert lake.step("I go right") == (INVALID + grid, -0.1, False, False, {"invalid": True, "success": False})
    assert lake.step("<answer>North</answer>") == (INVALID + grid, -0.1, False, False, {"invalid": True, "success": False})
    assert lake.step("") == (INVALID + grid, -0.1, False, True, {"invalid": True, "success": False})
    with pytest.raises(RuntimeError, match="after the end"):
        lake.step("")


def test_the_last_turn_truncates_unless_it_terminates() -> None:
    lake = FrozenLake(max_turns=2)
    lake.reset(0)
    lake.step(answer(0))
    assert lake.step(answer(0))[2:4] == (False, True)
    path = path_to_goal(lake.map_of(0))
    lake = FrozenLake(max_turns=len(path))
    lake.reset(0)
    assert [lake.step(answer(number))[2:4] for number in path][-1] == (True, False)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<answer>Left</answer>", 0),
        ("<ANSWER> down\n</Answer>", 1),
        ("left or right? <answer>RIGHT</answer> it is", 2),
        ("<answer>Up</answer>", 3),
        ("Up", None),
        ("", None),
        ("<answer>Up", None),
        ("Up</answer>", None),
        ("<answer></answer>", None),
        ("<answer>Up Up</answer>", None),
        ("<answer>Up</answer><answer>Up</answer>", None),
        ("<answer><answer>Up</answer>", None),
        ("<answer>Up</answer></answer>", None),
        ("</answer>Up<answer>", None),
        ("<answer>2</answer>", None),
    ],
)
def test_exactly_one_answer_is_read(text: str, number: int | None) -> None:
    assert read_answer(text) == number


def test_words_cover_every_row_that_is_ever_shown() -> None:
    words = set(words_of(FrozenLake()))
    assert len(grid_rows(4)) == 68 and set(grid_rows(4)) < words
    rng = random.Random(0)
    lake = FrozenLake(num_maps=0)
    for seed in range(200):
        observation, ended = lake.reset(seed)[0], False
        while not ended:
            assert {f"{line}\n" for line in observation.splitlines()} <= words
            observation, _, terminated, truncated, _ = lake.step(lake.random_valid_action(rng))
            ended = terminated or truncated
    assert system_prompt_of(lake) in words
    assert grid_rows(6) == []


def test_random_play_is_valid_and_uses_every_action() -> None:
    lake = FrozenLake(frozen=1.0, max_turns=100)
    lake.reset(0)
    player, rng, seen = random_player(lake), random.Random(0), set()
    for _ in range(60):
        before, action = lake._state, read_answer(player(rng))
        assert action is not None
        seen.add(action)
        if lake.step(f"<answer>{ACTIONS[action]}</answer>")[2]:
            lake.reset(0)
        else:
            assert lake._state != before  # it never tries to leave the grid
    assert seen == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="random_valid_action"):
        random_player(object())
    assert (system_prompt_of(object()), words_of(object())) == ("", ())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("frozen_lak", {}, r"did you mean 'frozen_lake'\? \(or package.module:ClassName"),
        ("chess", {}, r"must be one of calculator, coding, frozen_lake, .*\(or package.module:ClassName"),
        ("frozen_lake", {"sise": 4}, "sise.*valid: size, num_maps"),
        ("frozen_lake", {"size": 1}, "size=1: must be an integer >= 2"),
        ("frozen_lake", {"size": 4.0}, "size=4.0"),
        ("frozen_lake", {"size": True}, "size=True"),
        ("frozen_lake", {"frozen": 0.0}, "frozen=0.0"),
        ("frozen_lake", {"frozen": "x"}, "frozen='x'"),
        ("no_such_module:Env", {}, "cannot be imported"),
        ("pearl.rl.envs.frozen_lake:Lake", {}, "such are: .*FrozenLake"),
        ("pearl.rl.envs.frozen_lake:", {}, "package.module:ClassName"),
    ],
)
def test_a_bad_choice_is_refused_before_anything_starts(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.check(name, options)
    with pytest.raises(ValueError, match=message):
        registry.make(name, **options)


def test_the_jobs_turn_limit_reaches_an_environment_that_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
    assert registry.constructor_options(EnvOptions(max_turns=20)) == {"max_turns": 20}
    assert registry.constructor_options(EnvOptions(max_turns=20, options={"max_turns": 5})) == {"max_turns": 5}
    registry.register("plain", f"{FrozenLake.__module__}:FrozenLake")
    assert isinstance(registry.make("plain", size=3), FrozenLake)
    with pytest.raises(ValueError, match="is taken"):
        registry.register("plain", "other.module:Other")


def test_the_environment_side_loads_no_torch() -> None:
    modules = ("rl.envs.pool", "rl.envs.frozen_lake", "rl.warmup", "rl.buffer", "rl.packing", "sched.router", "sched.admission")
    code = f"import sys, {', '.join(f'pearl.{name}' for name in modules)}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_random_start_belongs_to_the_map_and_can_reach_the_goal() -> None:
    lake = FrozenLake(random_start=True)
    for seed in range(8):
        rows = lake.map_of(seed)
        assert rows == lake.map_of(seed + 8)
        assert "".join(rows).count("S") == 1
        table, reached = FrozenLakeEnv(desc=list(rows), is_slippery=False).P, {"".join(rows).index("S")}
        for _ in range(16):
            reached |= {moves[action][0][1] for state in reached for moves in [table[state]] for action in moves}
        assert 15 in reached
        assert lake.reset(seed)[0].replace("\n", "") == "".join(rows).replace("S", "P")
    assert len({"".join(lake.map_of(seed)).index("S") for seed in range(8)}) > 3


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("frozen_lake", {"num_maps": 8, "random_start": True}, 8),
        ("frozen_lake", {"num_maps": 0}, 0),
        ("sokoban", {"size": 5, "num_levels": 3}, 3),
        ("sokoban", {"size": 5, "num_levels": 0}, 0),
    ],
)
def test_tasks_are_counted_where_seeds_share_them(name: str, options: dict[str, Any], count: int) -> None:
    environment = registry.make(name, **options)
    beginnings = {environment.reset(seed)[0] for seed in range(24)}
    assert tasks_of(environment) == count
    assert len(beginnings) == count or (count == 0 and len(beginnings) > 8)
