"""An environment for measuring: episodes of long turns whose lengths are drawn from the seed, and that ask nothing of a policy.

One word of an observation is one token of a fresh tokenizer. It takes no time of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

WORD = "item "


class LongTurns:
    """`turns` turns on average, `appended` words per observation (each half to one and a half times), `first` in the first."""

    def __init__(self, turns: int = 10, appended: int = 600, first: int = 1200) -> None:
        self.turns, self.appended, self.first = turns, appended, first

    @property
    def words(self) -> Sequence[str]:
        return (WORD, "answer ")

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._random = random.Random(seed)
        self._left = self._random.randint(max(1, self.turns // 2), self.turns + self.turns // 2)
        return WORD * self.first, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        over = self._left <= 0
        observation = "" if over else WORD * round(self.appended * self._random.uniform(0.5, 1.5))
        return observation, self._random.random() if over else 0.0, over, False, {}
