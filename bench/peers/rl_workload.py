"""One RL step as every side of `bench/rl.py` makes it: prompts, sizes, rewards, and the talk with the bench.

Knows no library but the standard one: it is imported in other projects' environments.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GROUPS, SIBLINGS, PROMPT, ANSWER = 2, 8, 64, 64
"""Groups of answers to one prompt each, and tokens of prompts and answers."""
LR, CLIP_LOW, CLIP_HIGH = 1e-5, 0.2, 0.28


def prompts(seed: int, vocab_size: int) -> list[list[int]]:
    """A prompt for each group, the same for a seed everywhere; no id below 100, where special tokens are."""
    rng = random.Random(seed)
    return [[rng.randrange(100, vocab_size) for _ in range(PROMPT)] for _ in range(GROUPS)]


def reward(answer: list[int]) -> float:
    """Something that differs between answers: the share of even ids."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


def options() -> argparse.Namespace:
    """What the bench tells a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


class Parts:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def answer_requests(about: str, step: Callable[[int, Parts], None]) -> None:
    """Says what this side is, and then makes a step for every line {"seed": ...} and says what it took."""
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        parts, wall, cpu = Parts(), time.perf_counter(), time.process_time()
        step(json.loads(line)["seed"], parts)
        row = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "parts": parts.seconds}
        print(json.dumps(row), flush=True)
