"""Claim: deciding and tidying up a step (schedule, the batch's tensors, finish) costs less than 60 us per running request.

The real core and batch of an engine run with answers made up beforehand, so no model takes part: 256 requests with long
prompts decode, and a second case adds text (incremental detokenization of every token). `value` is the median of all steps in
microseconds of one thread's processor time per running request, the worse case of the two. The last table is a step by its
parts; `--profile` adds the functions that the time goes to.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pearl.config import ModelOptions
from pearl.engine.batch import build_batch
from pearl.engine.core import CoreSettings, EngineCore
from pearl.engine.ending import TextStream as Text
from pearl.engine.request import Request, SampledToken, SchedulerOutput, StepResult
from pearl.engine.text_stream import TextStream
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import Role, SamplingParams
from pearl.rl.fresh_model import write_model_folder

TARGET_US = 60.0
PARTS = ("schedule", "batch", "finish")
BLOCK_SIZE = 16
PROMPT = 400
WORDS = ("up", "down", "left", "right")


class Bench:
    """`running` requests of one core, all decoding."""

    def __init__(self, running: int, new_text: Callable[[Request], Text] | None, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self.core = EngineCore(
            CoreSettings(
                block_size=BLOCK_SIZE,
                num_blocks=running * 64,
                max_model_len=64 * BLOCK_SIZE,
                max_num_seqs=running,
                max_batch_tokens=8192,
                decode_prefill_tokens=256,
                enable_prefix_cache=True,
                vocab_size=vocab_size,
                role=Role.MIXED,
            ),
            new_text,
        )
        for number in range(running):
            self.core.add_request(self._request(number))
        while self.core.stats().waiting:
            self.step()

    def step(self) -> dict[str, float]:
        """Processor seconds of each part of a step."""
        clock = time.thread_time
        began = clock()
        output = self.core.schedule(0.0)
        scheduled = clock()
        build_batch(output, self.core.requests, BLOCK_SIZE)
        built = clock()
        result = self._answers(output)
        answered = clock()
        self.core.finish(output, result, 0.0)
        return dict(zip(PARTS, (scheduled - began, built - scheduled, clock() - answered), strict=True))

    def _request(self, number: int) -> Request:
        prompt = [self._random.randrange(self._vocab_size) for _ in range(PROMPT)]
        return Request(
            request_id=str(number),
            params=SamplingParams(max_tokens=500),
            token_ids=prompt,
            num_prompt_tokens=PROMPT,
            max_tokens=500,
            seed=number,
        )

    def _answers(self, output: SchedulerOutput) -> StepResult:
        token = SampledToken(token_id=self._random.randrange(self._vocab_size), logprob=-1.0)
        sampled = {entry.request_id: token for entry in output.requests if entry.samples}
        return StepResult(sampled=sampled, weight_version=0)


def measure(running: int, steps: int, tokenizer: Tokenizer | None, profile: bool) -> dict[str, float]:
    """Median microseconds per running request, of each part and in all."""
    new_text = None if tokenizer is None else lambda request: TextStream(tokenizer, stop=request.params.stop)
    bench = Bench(running, new_text, vocab_size=64)
    rows = [bench.step() for _ in range(steps)]
    assert bench.core.stats().running == running
    if profile:
        _profile(bench)
    medians = {part: statistics.median(row[part] for row in rows) / running * 1e6 for part in PARTS}
    return medians | {"all": statistics.median(sum(row.values()) for row in rows) / running * 1e6}


def _profile(bench: Bench) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        bench.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="python -m bench.scheduler", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    arguments.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments.add_argument("--running", type=int, default=256)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--profile", action="store_true", help="show the functions that the time goes to")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder) / "model", ModelOptions(), WORDS)
        tokenizer = Tokenizer.from_folder(Path(folder) / "model")
        cases = {"ids": None, "ids and text": tokenizer}
        rows = {name: measure(options.running, options.steps, text, options.profile) for name, text in cases.items()}
    print(f"{options.running} running requests, us of one thread per request and step")
    print(f"{'':>14} {' '.join(f'{part:>10}' for part in (*PARTS, 'all'))}")
    for name, row in rows.items():
        print(f"{name:>14} {' '.join(f'{row[part]:>10.2f}' for part in (*PARTS, 'all'))}")
    value = max(row["all"] for row in rows.values())
    if options.json:
        result = {"bench": "scheduler", "claim": "us per running request and step", "value": round(value, 2)}
        print(json.dumps(result | {"target": TARGET_US, "ok": value < TARGET_US, "cases": rows}))
    else:
        print(f"{value:.1f} us per running request; target below {TARGET_US:.0f}")


if __name__ == "__main__":
    main()
