"""Sokoban in text: push every box onto a goal; boxes cannot be pulled, and only one is pushed at a time.

Owns levels of its own making and the rules. The text is the usual one of level files: # wall, - floor, . goal, $ box, * box
on a goal, @ player, + player on a goal. Levels are made backwards, by pulling the boxes away from their goals, so each can
be solved. Invariant: the same options, seed and actions give the same episode, and an unreadable turn moves nothing.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pearl.rl.envs.directions import ACTIONS, INVALID, MOVES, read_answer

SYSTEM_PROMPT = "Push every $ onto a . (you are @, # is wall). Reply <answer>Left</answer>, Down, Right or Up."
CELLS = "#-.$*@+"
DRAWS = 10_000
"""So many rooms are drawn for a level before one counts as impossible: where a few pushes have to do, one in 160 will."""

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A start: cells as (row, column). `floor` holds every cell that is not wall, goals included."""

    size: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


class Sokoban:
    """Reward 1 when all boxes stand on goals, `box_reward` for a box pushed onto a goal (taken back when it is pushed off),
    `-invalid_penalty` for a turn that could not be read.

    Observation: `size` lines. Options: `num_levels` levels fixed by `level_seed`, env seed s playing level s % num_levels
    (0: every seed has a level of its own); `num_boxes`; `scramble` backward moves away from the solved room, which bounds the
    shortest solution and so how hard it is; `walls` is the share of inner cells drawn as wall; the episode is truncated
    after `max_turns` turns. `info["pushed"]` says whether the turn moved a box.
    """

    def __init__(
        self,
        *,
        size: int = 6,
        num_boxes: int = 1,
        num_levels: int = 0,
        level_seed: int = 0,
        scramble: int = 12,
        walls: float = 0.1,
        max_turns: int = 12,
        box_reward: float = 0.0,
        invalid_penalty: float = 0.1,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> None:
        whole = {"num_levels": num_levels, "level_seed": level_seed, "scramble": scramble, "max_turns": max_turns}
        self.check_options(size=size, num_boxes=num_boxes, walls=walls, **whole)
        self.num_levels, self.num_tasks, self.max_turns = num_levels, num_levels, max_turns
        self.box_reward, self.invalid_penalty, self.system_prompt = box_reward, invalid_penalty, system_prompt
        self._kind = (size, num_boxes, scramble, float(walls), level_seed)
        self._level: Level | None = None
        self._boxes: frozenset[Cell] = frozenset()
        self._player = (0, 0)
        self._turns = 0
        self._ended = True

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError naming the first option of a bad value and the valid ones."""
        lowest = {"size": 4, "num_boxes": 1, "num_levels": 0, "level_seed": 0, "scramble": 1, "max_turns": 1}
        for name, low in lowest.items():
            value = options.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"sokoban option {name}={value!r}: must be an integer >= {low}")
        inner = (options.get("size", 4) - 2) ** 2
        if options.get("num_boxes", 1) > inner // 4:
            raise ValueError(f"sokoban option num_boxes={options['num_boxes']}: at most {inner // 4} with {inner} inner cells")
        walls = options.get("walls", 0.0)
        if not isinstance(walls, int | float) or not 0 <= walls <= 0.3:
            raise ValueError(f"sokoban option walls={walls!r}: must be in [0, 0.3]")

    @property
    def words(self) -> Sequence[str]:
        """The system prompt, what rows are spelled with, the actions and their tags."""
        prompt = (self.system_prompt,) if self.system_prompt else ()
        return (*prompt, *row_words(self._kind[0]), *ACTIONS, "<answer>", "</answer>", INVALID)

    def reset(self, seed: int) -> tuple[str, dict]:
        self._level = level = self.level_of(seed)
        self._boxes, self._player = level.boxes, level.player
        self._turns, self._ended = 0, False
        return self._grid(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._ended or self._level is None:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        out = self._turns >= self.max_turns
        number = read_answer(action)
        if number is None:
            self._ended = out
            return INVALID + self._grid(), -self.invalid_penalty, False, out, {"invalid": True, "success": False}
        before, at_goal = self._boxes, len(self._boxes & self._level.goals)
        self._player, self._boxes = moved(self._level, self._player, self._boxes, number)
        solved = self._boxes == self._level.goals
        reward = float(solved) + self.box_reward * (len(self._boxes & self._level.goals) - at_goal)
        self._ended = solved or out
        info = {"invalid": False, "success": solved, "pushed": self._boxes != before}
        return self._grid(), reward, solved, out and not solved, info

    def random_valid_action(self, rng: random.Random) -> str:
        """One of the ways that change something, each as likely."""
        assert self._level is not None, "reset first"
        here = (self._player, self._boxes)
        ways = [number for number in range(4) if moved(self._level, *here, number) != here]
        return f"<answer>{ACTIONS[rng.choice(ways or [0])]}</answer>"

    def level_of(self, seed: int) -> Level:
        """The level that env seed `seed` plays."""
        if seed < 0:
            raise ValueError(f"seed={seed}: must be >= 0")
        return _level(*self._kind, seed % self.num_levels if self.num_levels else seed)

    def _grid(self) -> str:
        assert self._level is not None
        return drawn(self._level, self._player, self._boxes)


def row_words(size: int) -> list[str]:
    """A row of walls, and cells by twos, together with the wall that they are next to: two words are a row of six cells."""
    pairs = [first + second for first in CELLS for second in CELLS]
    right = [f"{cells}#\n" for cells in ("", *CELLS, *pairs)]
    return ["#" * size + "\n", *(f"#{pair}" for pair in pairs), *right, *pairs]


def moved(level: Level, player: Cell, boxes: frozenset[Cell], number: int) -> tuple[Cell, frozenset[Cell]]:
    """Player and boxes after an action; unchanged if a wall or a stuck box is in the way."""
    target = _next(player, number)
    if target not in level.floor:
        return player, boxes
    if target in boxes:
        behind = _next(target, number)
        if behind not in level.floor or behind in boxes:
            return player, boxes
        boxes = boxes - {target} | {behind}
    return target, boxes


def drawn(level: Level, player: Cell, boxes: Iterable[Cell]) -> str:
    """The grid as lines."""
    standing = set(boxes)
    return "".join(
        "".join(_symbol((row, column), level, player, standing) for column in range(level.size)) + "\n"
        for row in range(level.size)
    )


def _symbol(cell: Cell, level: Level, player: Cell, boxes: set[Cell]) -> str:
    if cell not in level.floor:
        return "#"
    on_goal = cell in level.goals
    if cell == player:
        return "+" if on_goal else "@"
    if cell in boxes:
        return "*" if on_goal else "$"
    return "." if on_goal else "-"


def _next(cell: Cell, number: int) -> Cell:
    return cell[0] + MOVES[number][0], cell[1] + MOVES[number][1]


# ------------------------------------------------------------------------------------------------------------- levels


@functools.lru_cache(maxsize=1024)
def _level(size: int, num_boxes: int, scramble: int, walls: float, level_seed: int, own: int) -> Level:
    rng = random.Random(f"sokoban/{level_seed}/{own}")
    for _ in range(DRAWS):
        floor = _room(size, walls, rng)
        if len(floor) < 4 * num_boxes:
            continue
        level = _scrambled(size, floor, num_boxes, scramble, rng)
        if level is not None:
            return level
    raise ValueError(f"sokoban: no level of size={size} with num_boxes={num_boxes}, walls={walls} in {DRAWS} tries")


def _room(size: int, walls: float, rng: random.Random) -> frozenset[Cell]:
    """The largest connected part of a square with some inner cells walled up."""
    inner = range(1, size - 1)
    free = {(row, column) for row in inner for column in inner if rng.random() >= walls}
    best: set[Cell] = set()
    while free:
        part, edge = set(), [free.pop()]
        while edge:
            cell = edge.pop()
            part.add(cell)
            near = {_next(cell, number) for number in range(4)} & free
            free -= near
            edge += sorted(near)
        best = max(best, part, key=lambda cells: (len(cells), sorted(cells)))
    return frozenset(best)


def _scrambled(size: int, floor: frozenset[Cell], num_boxes: int, scramble: int, rng: random.Random) -> Level | None:
    """Goals with boxes on them, then up to `scramble` moves backwards; None if no box left its goal."""
    cells = rng.sample(sorted(floor), num_boxes + 1)
    goals, player = frozenset(cells[1:]), cells[0]
    level = Level(size=size, floor=floor, goals=goals, boxes=goals, player=player)
    boxes = goals
    for _ in range(scramble):
        ways = [state for number in range(4) for state in _backwards(level, player, boxes, number)]
        if not ways:
            return None
        pulls = [state for state in ways if state[1] != boxes]
        player, boxes = rng.choice(pulls if pulls and rng.random() < 0.5 else ways)
    return None if boxes & goals else Level(size=size, floor=floor, goals=goals, boxes=boxes, player=player)


def _backwards(level: Level, player: Cell, boxes: frozenset[Cell], number: int) -> list[tuple[Cell, frozenset[Cell]]]:
    """The states from which action `number` leads here: by a walk, or by the push of the box that is ahead now."""
    came_from = player[0] - MOVES[number][0], player[1] - MOVES[number][1]
    if came_from not in level.floor or came_from in boxes:
        return []
    ahead = _next(player, number)
    walked = [(came_from, boxes)]
    return [*walked, (came_from, boxes - {ahead} | {player})] if ahead in boxes else walked
