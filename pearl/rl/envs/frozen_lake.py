"""FrozenLake in text: walk over a grid from its start to G without stepping on a hole H.

Maps and dynamics are gymnasium's (`gymnasium.envs.toy_text.frozen_lake`: `generate_random_map` and the transition table of
`FrozenLakeEnv`); this file adds the text around them. Rows of the grid are written so that each can be one token.
Invariant: an unreadable turn never moves the agent, and the same options, seed and actions give the same episode.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from gymnasium.envs.toy_text.utils import categorical_sample
from gymnasium.utils import seeding

from pearl.rl.envs.directions import ACTIONS, INVALID, read_answer

SYSTEM_PROMPT = "Move P to G, avoid H. Reply <answer>Left</answer>, Down, Right or Up."
LARGEST_ROW_WORD = 5
"""Up to this size every row that can occur is a word (68 rows for size 4, 160 for size 5)."""


class FrozenLake:
    """Reward 1 at the goal, 0 in a hole, `-invalid_penalty` for a turn that could not be read.

    Observation: `size` lines over F (ice), H (hole), G (goal) and P (the agent, whatever it stands on); after an unreadable
    turn a line that says so comes first. Options: `num_maps` maps fixed by `map_seed`, env seed s playing map s % num_maps
    (0: every seed has a map of its own); `frozen` is the share of ice; `slippery` as in gymnasium (one third each for the
    chosen way and its two sides); `random_start` draws with each map where it starts, among the cells from which the goal
    can be reached (random play wins one episode in 8 then, and one in 150 from the corner); the episode is truncated after
    `max_turns` turns.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        num_maps: int = 8,
        map_seed: int = 0,
        frozen: float = 0.8,
        slippery: bool = False,
        random_start: bool = False,
        max_turns: int = 8,
        invalid_penalty: float = 0.1,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> None:
        self.check_options(size=size, num_maps=num_maps, map_seed=map_seed, frozen=frozen, max_turns=max_turns)
        self.size, self.num_maps, self.map_seed, self.frozen = size, num_maps, map_seed, frozen
        self.num_tasks = num_maps
        self.slippery, self.max_turns, self.invalid_penalty = slippery, max_turns, invalid_penalty
        self.random_start = random_start
        self.system_prompt = system_prompt
        self._rows: tuple[str, ...] = ()
        self._transitions: dict[int, dict[int, list[tuple]]] = {}
        self._random = np.random.default_rng(0)
        self._state = 0
        self._turns = 0
        self._ended = True

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError naming the first option of a bad value and the valid ones."""
        for name, low in (("size", 2), ("num_maps", 0), ("map_seed", 0), ("max_turns", 1)):
            value = options.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"frozen_lake option {name}={value!r}: must be an integer >= {low}")
        frozen = options.get("frozen", 1.0)
        if not isinstance(frozen, int | float) or not 0.3 <= frozen <= 1:
            raise ValueError(f"frozen_lake option frozen={frozen!r}: must be in [0.3, 1]; with less ice few maps have a path")

    @property
    def words(self) -> Sequence[str]:
        """The system prompt, the rows, the actions and their tags, each to be one token."""
        prompt = (self.system_prompt,) if self.system_prompt else ()
        return (*prompt, *grid_rows(self.size), *ACTIONS, "<answer>", "</answer>", INVALID)

    def reset(self, seed: int) -> tuple[str, dict]:
        self._rows = tuple(self.map_of(seed))
        self._transitions = _transitions(self._rows, self.slippery)
        self._random, _ = seeding.np_random(seed)
        self._random.random()  # gymnasium draws the start state first: the slips that follow are then the same as its own
        self._state, self._turns, self._ended = "".join(self._rows).index("S"), 0, False
        return self._grid(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._ended:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        truncated = self._turns >= self.max_turns
        number = read_answer(action)
        if number is None:
            self._ended = truncated
            return INVALID + self._grid(), -self.invalid_penalty, False, truncated, {"invalid": True, "success": False}
        moves = self._transitions[self._state][number]
        drawn = categorical_sample([move[0] for move in moves], self._random) if len(moves) > 1 else 0
        _, state, reward, terminated = moves[drawn]
        self._state, truncated = int(state), truncated and not terminated
        self._ended = bool(terminated) or truncated
        info = {"invalid": False, "success": bool(terminated) and reward > 0}
        return self._grid(), float(reward), bool(terminated), truncated, info

    def random_valid_action(self, rng: random.Random) -> str:
        """One of the actions that do not lead off the grid, each as likely, in its tags."""
        row, column = divmod(self._state, self.size)
        last = self.size - 1
        room = {"Left": column > 0, "Down": row < last, "Right": column < last, "Up": row > 0}
        return f"<answer>{rng.choice([action for action in ACTIONS if room[action]])}</answer>"

    def map_of(self, seed: int) -> tuple[str, ...]:
        """The rows of env seed `seed`'s map, S at the start."""
        if seed < 0:
            raise ValueError(f"seed={seed}: must be >= 0")
        if self.num_maps:
            maps = _fixed_maps(self.size, self.frozen, self.map_seed, self.random_start, self.num_maps)
            return maps[seed % self.num_maps]
        return _map(self.size, self.frozen, self.map_seed, self.random_start, seed)

    def _grid(self) -> str:
        row, column = divmod(self._state, self.size)
        lines = [line.replace("S", "F") for line in self._rows]
        lines[row] = f"{lines[row][:column]}P{lines[row][column + 1 :]}"
        return "".join(f"{line}\n" for line in lines)


def grid_rows(size: int) -> list[str]:
    """Every line (newline included) that a grid of this size can show; none for sizes whose rows are too many."""
    if size > LARGEST_ROW_WORD:
        return []
    plain = {"".join(cells) for cells in itertools.product("FH", repeat=size)}
    bare = plain | {f"{row[:-1]}G" for row in plain}
    walked = {f"{row[:column]}P{row[column + 1 :]}" for row in bare for column in range(size)}
    return [f"{row}\n" for row in sorted(bare | walked)]


@functools.lru_cache(maxsize=16)
def _fixed_maps(size: int, frozen: float, map_seed: int, random_start: bool, count: int) -> tuple[tuple[str, ...], ...]:
    """`count` maps, no two alike as far as that many are easily found."""
    draws = (_map(size, frozen, map_seed, random_start, own) for own in range(20 * count))
    distinct = list(dict.fromkeys(itertools.islice(draws, count)))
    while len(distinct) < count and (more := next(draws, None)) is not None:
        if more not in distinct:
            distinct.append(more)
    return tuple(itertools.islice(itertools.cycle(distinct), count))


@functools.lru_cache(maxsize=1024)
def _map(size: int, frozen: float, map_seed: int, random_start: bool, own: int) -> tuple[str, ...]:
    rows = tuple(str(row) for row in generate_random_map(size=size, p=frozen, seed=(map_seed << 64) + own))
    if not random_start:
        return rows
    cells = list("".join(rows).replace("S", "F"))
    cells[random.Random(f"{map_seed}/{own}").choice(_winnable(rows))] = "S"
    return tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))


def _winnable(rows: tuple[str, ...]) -> list[int]:
    """Cells, the goal apart, from which the goal can be reached, in order."""
    table = _transitions(rows, False)
    goal = len(rows) ** 2 - 1
    good = {goal}
    while more := {state for state in table.keys() - good if any(move[0][1] in good for move in table[state].values())}:
        good |= more
    return sorted(good - {goal})


@functools.lru_cache(maxsize=1024)
def _transitions(rows: tuple[str, ...], slippery: bool) -> dict[int, dict[int, list[tuple]]]:
    """gymnasium's table: state -> action -> [(probability, next state, reward, terminated)]."""
    return FrozenLakeEnv(desc=list(rows), is_slippery=slippery).P
