"""Where the time of our engine's steps goes: deciding, laying out, the parts of the forward pass, drawing, tidying up.

For `python -m bench.engine --profile`. Parts are counted in processor time of the thread that steps, one inside the other as
they are called; those of the forward pass and of the head by the kernels, where they do. A case is one request, or 32, that
decode after prompts of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.peers.workload import prompts
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.protocol import SamplingParams

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
STEPS = 100
BATCHES = (1, 32)


class Stopwatch:
    """Seconds that go into calls of some methods, step by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From now on the time in `owner.method` counts as `part`."""
        call: Callable = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                self.spent[part] = self.spent.get(part, 0.0) + time.thread_time() - began

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


def profile(options: argparse.Namespace) -> None:
    """Prints a table of milliseconds per step, medians of a hundred steps."""
    torch.set_num_threads(options.threads)
    config = EngineConfig(
        model=options.model, dtype=DTYPES[options.dtype], kernels=options.kernels, max_model_len=2048, device="cpu"
    )
    engine = Engine(config)
    watch = Stopwatch()
    core, runner = engine._core, engine._runner
    for owner, method, part in (
        (core, "schedule", "schedule"),
        (runner, "prepare", "batch"),
        (runner, "forward", "forward"),
        (runner, "queue_draw", "head and sample"),
        (core, "finish", "finish"),
    ):
        watch.watch(owner, method, part)
    print(f"{engine.kernels_why}, {options.threads} threads, of which one steps: its ms per step, medians of {STEPS}")
    for batch in BATCHES:
        _print(batch, _steps(engine, batch, watch))


def _steps(engine: Engine, batch: int, watch: Stopwatch) -> list[dict[str, float]]:
    """Milliseconds per part of decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 10, ignore_eos=True)
    rids = [engine.add_request(ids, params) for ids in prompts(batch, 64, batch, engine.model_config.vocab_size)]
    served = engine._runner._served
    parts: Callable[[], dict[str, int]] = getattr(served, "take_profile", dict)
    for _ in range(3):
        engine.step()
    rows = []
    for _ in range(STEPS):
        watch.take(), parts()
        began = time.thread_time()
        engine.step()
        whole = time.thread_time() - began
        row = {part: seconds * 1e3 for part, seconds in watch.take().items()}
        row |= {f"  {part}": nanoseconds / 1e6 for part, nanoseconds in parts().items()}
        rows.append(row | {"whole step": whole * 1e3})
    for rid in rids:
        engine.discard(rid)
    return rows


def _print(batch: int, rows: list[dict[str, float]]) -> None:
    medians = {part: statistics.median(row.get(part, 0.0) for row in rows) for part in rows[0]}
    whole = medians["whole step"]
    model = medians["forward"] + medians["head and sample"]
    print(f"\nbatch {batch}")
    for part, ms in medians.items():
        print(f"{part:>18} {ms:8.3f} {100 * ms / whole:5.1f} %")
    print(f"{'beside the model':>18} {whole - model:8.3f} {100 * (whole - model) / whole:5.1f} %")
