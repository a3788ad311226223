"""Weights that arrive in place: what is served afterwards, and that a failure serves nothing until a whole version is in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, make, model, named, one, oracle, run
from torch import Tensor

from pearl.engine.engine import Engine
from pearl.protocol import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT = hf_models.prompt(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def poisoned(seed: int, at: int) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one by one, number `at` with one value that is infinite."""
    for number, (name, tensor) in enumerate(named(seed)):
        tensor = tensor.clone()
        if number == at % len(named(seed)):
            tensor.view(-1)[-1] = math.inf
        yield name, tensor


def breaking_off(seed: int, after: int) -> Iterator[tuple[str, Tensor]]:
    yield from named(seed)[:after]
    raise ConnectionError("the sender has gone")


@pytest.mark.parametrize("way", ["staged", "streaming"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_both_ways_in_all_modes(folder: Path, way: str, mode: str) -> None:
    engine = make(folder)
    places = [parameter.data_ptr() for parameter in engine._decoder.parameters()]
    rid = engine.add_request(PROMPT, LONG)
    for _ in range(4):
        engine.step()
    waiting = engine.add_request(hf_models.prompt(9), GREEDY)
    engine.update_weights(iter(named(1)), version=3, mode=mode, way=way)
    assert engine.weight_version == engine.stats().weight_version == 3
    done = run(engine)
    completion, old = done[rid][0], oracle(tuple(PROMPT), 4)[0]
    assert completion.token_ids[:4] == old
    assert_greedy(done[waiting][0], 8, seed=1)
    if mode == "abort":
        assert (completion.finish_reason, completion.weight_versions) == ("abort", [0] * 4)
    else:
        assert completion.weight_versions == [0] * 4 + [3] * 8
        recomputed = oracle((*PROMPT, *old), 8, 1)[0]
        assert (completion.token_ids[4:] == recomputed) is (mode == "recompute")
    assert_greedy(one(engine, [*PROMPT, *old]), 8, seed=1)
    assert places == [parameter.data_ptr() for parameter in engine._decoder.parameters()]


def test_kept_requests_go_on_alike_either_way(folder: Path) -> None:
    answers = []
    for way in ("staged", "streaming"):
        engine = make(folder)
        rid = engine.add_request(PROMPT, LONG)
        for _ in range(4):
            engine.step()
        engine.update_weights(named(1), version=1, way=way)
        answers.append(run(engine)[rid][0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-6)


def test_streaming_makes_no_second_copy(folder: Path) -> None:
    engine = make(folder)
    engine.update_weights(named(1), version=1, way="streaming")
    assert not engine._store._staged and not engine._store._spare
    assert_greedy(one(engine, PROMPT), 8, seed=1)


@pytest.mark.parametrize("again", ["staged", "streaming"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("fault", ["poisoned", "breaks off", "not whole"])
def test_after_a_failure_nothing_is_served_until_a_whole_version_is_in(folder: Path, fault: str, mode: str, again: str) -> None:
    engine = make(folder)
    rid = engine.add_request(PROMPT, LONG)
    for _ in range(4):
        engine.step()
    waiting = engine.add_request(hf_models.prompt(9), GREEDY)
    source, error = {
        "poisoned": (poisoned(1, -1), ValueError),
        "breaks off": (breaking_off(1, 9), ConnectionError),
        "not whole": (iter(named(1)[:-1]), ValueError),
    }[fault]
    with pytest.raises(error):
        engine.update_weights(source, version=1, mode="keep", way="streaming")
    stats = engine.stats()
    assert engine.weight_version == stats.weight_version == -1
    assert stats.running == stats.cached_blocks == stats.used_blocks == 0 and stats.num_preemptions == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no weights"):
            engine.step()
    engine.check_integrity()
    engine.update_weights(named(2), version=1, mode=mode, way=again)
    done = run(engine)
    assert_greedy(done[waiting][0], 8, seed=2)
    completion, old = done[rid][0], oracle(tuple(PROMPT), 4)[0]
    if mode == "abort":
        assert (completion.finish_reason, completion.token_ids) == ("abort", old)
    else:
        assert completion.token_ids == old + oracle((*PROMPT, *old), 8, 2)[0]
        assert completion.weight_versions == [0] * 4 + [1] * 8


@pytest.mark.parametrize(
    "change",
    [
        lambda pairs: pairs[:-1],
        lambda pairs: [*pairs, ("extra", torch.zeros(2))],
        lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1][None])],
        lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1].long())],
        lambda pairs: [*pairs, pairs[0]],
    ],
    ids=["missing", "unknown", "mis-shaped", "whole numbers", "doubled"],
)
def test_a_list_that_does_not_fit_is_refused_before_the_first_byte(folder: Path, change) -> None:
    engine = make(folder)
    rid = engine.add_request(PROMPT, LONG)
    for _ in range(4):
        engine.step()
    before = engine.stats()
    with pytest.raises(ValueError):
        engine.update_weights(change(named(1)), version=1, mode="recompute", way="streaming")
    assert engine.stats() == before
    assert_greedy(run(engine)[rid][0], 12)


def test_only_a_rising_version_comes_in(folder: Path) -> None:
    engine = make(folder)
    engine.update_weights(named(1), version=2, way="streaming")
    for version in (2, 1, True):
        with pytest.raises(ValueError, match="version="):
            engine.update_weights(named(0), version=version, way="streaming")
    assert_greedy(one(engine, PROMPT), 8, seed=1)


def test_what_is_being_staged_is_not_overtaken(folder: Path) -> None:
    engine = make(folder)
    engine.stage_weights(named(1)[:4], 1)
    with pytest.raises(ValueError, match="version 1 is being staged; commit or discard"):
        engine.update_weights(named(2), version=2, way="streaming")
    engine.stage_weights(named(1)[4:], 1)
    engine.commit_weights(1)
    assert_greedy(one(engine, PROMPT), 8, seed=1)


def test_a_source_cannot_step_the_engine_it_streams_into(folder: Path) -> None:
    """Half of the old and half of the new weights are never run, not even from inside the source of the tensors."""
    engine = make(folder)
    engine.add_request(PROMPT, GREEDY)

    def source(engine: Engine) -> Iterator[tuple[str, Tensor]]:
        yield from named(1)[:9]
        engine.step()
        yield from named(1)[9:]

    with pytest.raises(RuntimeError, match="no weights"):
        engine.update_weights(source(engine), version=1, way="streaming")
