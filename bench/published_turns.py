"""An environment for measuring: software engineering as published, with its turns, its answers' lengths and its own time.

Plays the simulator's `software` tasks (`pearl/sched/sim/workload.py` cites what they are drawn from) and asks nothing of a
policy. Siblings have the same first prompt; which of a group's courses an episode takes follows from its first reply, so that
it can be played again. It sleeps as long as such an environment works: give a job enough `env.workers`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

from bench.long_turns import WORD
from pearl.sched.sim.workload import SOFTWARE

SIBLINGS = 16


class PublishedTurns:
    """`slowdown` is that of the job's emulated devices; one word of an observation is one token of a fresh tokenizer."""

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown

    @property
    def words(self) -> Sequence[str]:
        return (WORD, "answer ")

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._courses, self._turn = SOFTWARE.group(seed, SIBLINGS, 0), 0
        time.sleep(self._slowdown * self._courses[0].reset_s)
        return WORD * self._courses[0].first_prompt, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._turn == 0:
            self._course = self._courses[zlib.crc32(action.encode(errors="surrogatepass")) % SIBLINGS]
        turns = self._course.turns
        time.sleep(self._slowdown * turns[self._turn].env_s)
        self._turn += 1
        over = self._turn == len(turns)
        return "" if over else WORD * turns[self._turn].appended, float(over), over, False, {}
