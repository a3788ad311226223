"""Engines over a tiny Hugging Face model, and what the model itself says: shared by the engine's tests, no tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path

import hf_models
import pytest
from torch import Tensor

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@functools.cache
def model(seed: int = 0):
    return hf_models.randomise(hf_models.dense(seed), seed)


@functools.cache
def oracle(ids: tuple[int, ...], count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    return hf_models.greedy(model(seed), list(ids), count)


@functools.cache
def log_softmax(ids: tuple[int, ...], seed: int = 0) -> Tensor:
    return hf_models.logits(model(seed), list(ids)).log_softmax(-1)


def make(folder: Path, **settings) -> Engine:
    fixed = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "kv_fill": math.nan}
    return Engine(EngineConfig(model=folder, **(fixed | settings)))


def run(engine: Engine, *, check: bool = True) -> dict[str, list[Completion]]:
    done: dict[str, list[Completion]] = {}
    while engine.has_unfinished():
        for completion in engine.step():
            done.setdefault(completion.request_id, []).append(completion)
        if check:
            engine.check_integrity()
    assert_free(engine)
    return done


def one(engine: Engine, ids: Iterable[int], params: SamplingParams = GREEDY, **fields) -> Completion:
    rid = engine.add_request(list(ids), params, **fields)
    return run(engine)[rid][0]


def assert_free(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert stats.waiting == stats.running == stats.used_blocks == stats.leased_blocks == 0


def assert_greedy(completion: Completion, count: int, seed: int = 0) -> None:
    ids, logprobs = oracle(tuple(completion.prompt_token_ids), count, seed)
    assert completion.token_ids == ids
    assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert (completion.finish_reason, completion.stop_reason, completion.error) == ("length", None, None)


def named(seed: int) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model(seed).named_parameters()]
