"""Sokoban: every level can be solved, the rules by hand, and the text of what happens."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.rl.envs.directions import ACTIONS, INVALID
from pearl.rl.envs.sokoban import Level, Sokoban, drawn, moved


def answer(number: int) -> str:
    return f"<answer>{ACTIONS[number]}</answer>"


def shortest(level: Level) -> list[int]:
    """Breadth first over (player, boxes)."""
    start = (level.player, level.boxes)
    queue, seen = deque([(start, [])]), {start}
    while queue:
        state, path = queue.popleft()
        if state[1] == level.goals:
            return path
        for number in range(4):
            then = moved(level, *state, number)
            if then not in seen:
                seen.add(then)
                queue.append((then, [*path, number]))
    raise AssertionError(f"cannot be solved:\n{drawn(level, level.player, level.boxes)}")


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**40), size=st.integers(5, 7), boxes=st.integers(1, 2), scramble=st.integers(3, 20))
def test_every_level_is_solved_within_its_scramble(seed: int, size: int, boxes: int, scramble: int) -> None:
    game = Sokoban(size=size, num_boxes=boxes, scramble=scramble, max_turns=100)
    game.reset(seed)
    path = shortest(game.level_of(seed))
    assert 1 <= len(path) <= scramble
    turns = [game.step(answer(number)) for number in path]
    assert [turn[1] for turn in turns] == [0.0] * (len(path) - 1) + [1.0]
    assert turns[-1][2:4] == (True, False) and turns[-1][4]["success"]
    assert "$" not in turns[-1][0] and turns[-1][0].count("*") == boxes


@pytest.mark.parametrize("seed", range(20))
def test_few_pushes_of_two_boxes_in_a_large_room_are_seldom_drawn_but_found(seed: int) -> None:
    """Of 160 rooms with so few pushes one will do."""
    game = Sokoban(size=7, num_boxes=2, scramble=3, max_turns=100)
    game.reset(seed)
    assert 1 <= len(shortest(game.level_of(seed))) <= 3


def level(text: str) -> Level:
    """A Level from its picture."""
    cells = {(row, column): sign for row, line in enumerate(text.split()) for column, sign in enumerate(line)}
    return Level(
        size=len(text.split()),
        floor=frozenset(cell for cell, sign in cells.items() if sign != "#"),
        goals=frozenset(cell for cell, sign in cells.items() if sign in ".*+"),
        boxes=frozenset(cell for cell, sign in cells.items() if sign in "$*"),
        player=next(cell for cell, sign in cells.items() if sign in "@+"),
    )


@pytest.mark.parametrize(
    ("before", "action", "after"),
    [
        ("##### #@--# #-$-# #--.# #####", "Right", "##### #-@-# #-$-# #--.# #####"),
        ("##### #@--# #-$-# #--.# #####", "Left", "##### #@--# #-$-# #--.# #####"),
        ("##### #@$-# #-$-# #--.# #####", "Right", "##### #-@$# #-$-# #--.# #####"),
        ("##### #-@$# #---# #--.# #####", "Right", "##### #-@$# #---# #--.# #####"),  # against the wall
        ("###### #@$$-# #---.# #---.# #----# ######", "Right", "###### #@$$-# #---.# #---.# #----# ######"),  # two at a time
        ("##### #-@-# #-$-# #-.-# #####", "Down", "##### #---# #-@-# #-*-# #####"),
        ("##### #-@-# #-*-# #---# #####", "Down", "##### #---# #-+-# #-$-# #####"),
    ],
)
def test_the_rules_by_hand(before: str, action: str, after: str) -> None:
    start = level(before)
    player, boxes = moved(start, start.player, start.boxes, ACTIONS.index(action))
    assert drawn(start, player, boxes).split() == after.split()


def test_an_unreadable_turn_moves_nothing_and_the_last_one_truncates() -> None:
    game = Sokoban(max_turns=2)
    first, _ = game.reset(3)
    assert game.step("push it") == (INVALID + first, -0.1, False, False, {"invalid": True, "success": False})
    _, reward, terminated, truncated, _ = game.step("")
    assert (reward, terminated, truncated) == (-0.1, False, True)
    with pytest.raises(RuntimeError, match="after the end"):
        game.step(answer(0))


def test_a_box_on_its_goal_pays_and_costs_when_it_leaves() -> None:
    game = Sokoban(size=7, num_boxes=2, scramble=30, box_reward=0.25, max_turns=100)
    for seed in range(30):
        game.reset(seed)
        rewards = [game.step(answer(number))[1] for number in shortest(game.level_of(seed))]
        assert sum(rewards) == pytest.approx(1.0 + 2 * 0.25)


def test_levels_are_fixed_by_their_seed_and_differ() -> None:
    game = Sokoban()
    levels = [game.level_of(seed) for seed in range(100)]
    assert levels == [Sokoban().level_of(seed) for seed in range(100)]
    assert len(set(levels)) > 95
    assert Sokoban(level_seed=1).level_of(0) != game.level_of(0)
    few = Sokoban(num_levels=4)
    assert few.level_of(9) == few.level_of(1)
    assert not {game.level_of(seed) for seed in range(50)} & {game.level_of(10**9 + seed) for seed in range(50)}


def test_random_play_changes_something_each_turn() -> None:
    rng, game = random.Random(0), Sokoban(max_turns=100)
    observation = game.reset(1)[0]
    for _ in range(40):
        then, _, terminated, _, _ = game.step(game.random_valid_action(rng))
        assert then != observation
        observation = then
        if terminated:
            break


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 3}, "size=3: must be an integer >= 4"),
        ({"num_boxes": 5}, "num_boxes=5: at most 4 with 16"),
        ({"walls": 0.9}, r"walls=0.9: must be in \[0, 0.3\]"),
        ({"scramble": 0}, "scramble=0"),
        ({"max_turns": True}, "max_turns=True"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sokoban(**{"size": 6, **options})
