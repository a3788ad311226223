"""The four workloads of `bench.engine`, and the loop of a side that serves them: the same token ids and counts for everybody.

Standard library alone, since every side runs in an environment of its own. A side is a process: it loads its model, says one
line of JSON about itself on stdout, and then answers each line {"workload": ..., "seed": ...} on stdin with one line of what
it took. Decoding is greedy, ends are ignored, every answer's length is checked. A new seed in every round makes new prompts,
so that a prefix cache helps only between the turns of a conversation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Generate = Callable[[list[list[int]], int, "Sequence[int] | None"], list[list[int]]]
"""(prompts, tokens to make, conversation of each or None) -> as many new ids for each."""

FIRST_ID, LAST_IDS = 100, 100
"""Ids at both ends of the vocabulary that no prompt has: the special ones."""
CHECK_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 19842, 281, 582, 6330, 30, 2, 198, 1, 520, 9531, 198]
"""A question in SmolLM2's chat template: what sides answer shows that they serve the same model."""
CHECK_TOKENS = 7
"""The end comes after so many, and some that ignore it cannot give it."""


@dataclass(frozen=True)
class Workload:
    """`sequences` of `turns` turns, each of which adds `prompt` new tokens to the whole history and makes `output`."""

    what: str
    sequences: int
    prompt: int
    output: int
    turns: int = 1

    @property
    def output_tokens(self) -> int:
        return self.sequences * self.turns * self.output


WORKLOADS = {
    "W1": Workload("decoding a batch", 32, 64, 128),
    "W2": Workload("long prompts", 16, 1024, 8),
    "W3": Workload("conversations", 16, 128, 32, turns=4),
    "W4": Workload("one request", 1, 64, 64),
}


def seed_of(name: str, seed: int, repetition: int) -> int:
    """The seed of one repetition of a workload."""
    return seed * 1000 + repetition * 100 + int(name[1:]) * 17


def prompts(count: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_ID, vocab_size - LAST_IDS) for _ in range(length)] for _ in range(count)]


def arguments() -> argparse.ArgumentParser:
    """What every side is told."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=1)
    return parser


def serve(about: dict, vocab_size: int, generate: Generate, pids: Sequence[int] = ()) -> None:
    """Answers until stdin ends. `pids` are processes that work for this side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    generate(prompts(2, 32, 12345, vocab_size), 4, None)
    check = generate([CHECK_PROMPT], CHECK_TOKENS, None)[0] if vocab_size > max(CHECK_PROMPT) else []
    print(json.dumps(about | {"check": check}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        workload = WORKLOADS[asked["workload"]]
        history = [[] for _ in range(workload.sequences)]
        news = [prompts(workload.sequences, workload.prompt, seed, vocab_size) for seed in _seeds(workload, asked["seed"])]
        busy, own, began = _machine_s(), _own_s(pids), time.perf_counter()
        _converse(workload, generate, history, news)
        wall, cpu = time.perf_counter() - began, _own_s(pids) - own
        others = max(0.0, (_machine_s() - busy - cpu) / wall)
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, "other_cores": others}), file=answers, flush=True)


def _seeds(workload: Workload, seed: int) -> list[int]:
    return [seed] if workload.turns == 1 else [seed + 7 * turn + 1 for turn in range(workload.turns)]


def _converse(workload: Workload, generate: Generate, history: list[list[int]], news: list[list[list[int]]]) -> None:
    conversations = range(workload.sequences) if workload.turns > 1 else None
    for turn in news:
        for ids, new in zip(history, turn, strict=True):
            ids.extend(new)
        answers = generate([list(ids) for ids in history], workload.output, conversations)
        lengths = [len(answer) for answer in answers]
        if lengths != [workload.output] * workload.sequences:
            raise RuntimeError(f"answers of {lengths} tokens, {workload.output} were asked for")
        for ids, answer in zip(history, answers, strict=True):
            ids.extend(answer)


def _own_s(pids: Sequence[int]) -> float:
    """Processor seconds of all threads of this process and of `pids`."""
    total = time.process_time()
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _machine_s() -> float:
    """Processor seconds that the whole machine has spent on something."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
