"""Weight versions: what running requests do, what is refused, what is forgotten."""

from __future__ import annotations

import math
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_greedy, make, model, named, one, oracle, run

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def test_new_weights_are_used_and_old_prefixes_are_not(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(13)
    assert_greedy(one(engine, prompt), 8)
    assert engine.weight_version == 0
    engine.update_weights(named(1), version=1)
    completion = one(engine, prompt)
    assert (completion.num_cached_tokens, completion.weight_versions) == (0, [1] * 8)
    assert_greedy(completion, 8, seed=1)
    assert completion.token_ids != oracle(tuple(prompt), 8)[0]
    assert one(engine, prompt).num_cached_tokens == 12
    assert engine.stats().weight_version == engine.weight_version == 1


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_running_requests_at_an_update(folder: Path, mode: str) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(6)
    rid = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.update_weights(named(1), version=1, mode=mode)
    completion = run(engine)[rid][0]
    old = oracle(tuple(prompt), 4)[0]
    assert completion.token_ids[:4] == old
    if mode == "abort":
        assert (completion.finish_reason, completion.weight_versions) == ("abort", [0] * 4)
        return
    assert completion.weight_versions == [0] * 4 + [1] * 8
    recomputed = oracle(tuple(prompt + old), 8, 1)[0]
    assert (completion.token_ids[4:] == recomputed) is (mode == "recompute")
    following = one(engine, prompt + old)
    assert_greedy(following, 8, seed=1)


def test_an_engine_without_weights_serves_nothing(folder: Path) -> None:
    engine = Engine(EngineConfig(model=folder, dtype="float32", num_blocks=50), load_weights=False)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    assert engine.stats().weight_version == engine.weight_version == -1
    with pytest.raises(RuntimeError, match=r"no weights"):
        engine.step()
    with pytest.raises(ValueError):
        engine.update_weights(named(1)[:-1], version=0)
    with pytest.raises(RuntimeError, match=r"no weights"):
        engine.step()
    engine.update_weights(named(1), version=0)
    assert_greedy(run(engine)[rid][0], 8, seed=1)


def test_a_refused_update_changes_nothing(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(6)
    poisoned = [(name, tensor.clone()) for name, tensor in named(1)]
    poisoned[3][1].view(-1)[0] = math.nan
    for tensors, version in ((poisoned, 1), (named(1)[1:], 1), ([*named(1), ("extra", torch.zeros(2))], 1), (named(1), 0)):
        with pytest.raises(ValueError):
            engine.update_weights(tensors, version=version)
        assert engine.weight_version == 0
        assert_greedy(one(engine, prompt), 8)
    engine.update_weights(iter(named(1)), version=5)
    assert_greedy(one(engine, prompt), 8, seed=1)


def test_random_weights_are_the_seed_s(folder: Path) -> None:
    config = from_folder(folder)
    settings = {"model": config, "dtype": "float32", "num_blocks": 50, "load_format": "dummy"}
    engines = [Engine(EngineConfig(**settings, seed=seed)) for seed in (3, 3, 4)]
    answers = [one(engine, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12)).logprobs for engine in engines]
    assert answers[0] == answers[1] != answers[2]
    assert engines[0].weight_version == 0


def _pieces(seed: int, rows: int) -> list[tuple]:
    """The model's tensors cut into ranges of rows, as a transfer brings them."""
    return [(name, tensor[at : at + rows], at) for name, tensor in named(seed) for at in range(0, len(tensor), rows)]


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_requests_go_on_while_a_version_is_staged(folder: Path, mode: str) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(6)
    rid = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    pieces = _pieces(1, 50)
    share = -(-len(pieces) // 5)
    for number in range(5):
        engine.stage_weights(pieces[number * share : (number + 1) * share], 3)
        engine.step()
        assert (engine.weight_version, engine.stats().weight_version) == (0, 0)
    engine.commit_weights(3, mode)
    assert engine.weight_version == engine.stats().weight_version == 3
    completion = run(engine)[rid][0]
    assert completion.token_ids[:5] == oracle(tuple(prompt), 5)[0]
    assert completion.weight_versions == [0] * 5 + ([] if mode == "abort" else [3] * 7)
    assert_greedy(one(engine, prompt), 8, seed=1)
    engine.update_weights(named(0), version=4)
    assert_greedy(one(engine, prompt), 8)


def test_a_failed_stage_leaves_the_old_version_whole(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(6)
    good = named(1)
    poisoned = good[6][1].clone()
    poisoned.view(-1)[-1] = math.inf
    name, tensor = good[6]
    bad = {
        "1 of .* values are not finite": (name, poisoned),
        r"shape \(1, .*\), must be": (name, tensor[None]),
        "the model has no such tensor": ("extra", tensor),
        "arrived twice": good[0],
        r"rows from 3 arrived, those from 0 are due": (name, tensor[3:], 3),
        r"must be 1 to .* rows of": (name, torch.cat([tensor, tensor]), 0),
    }
    for words, pair in bad.items():
        engine.stage_weights(good[:5], 1)
        with pytest.raises(ValueError, match=words):
            engine.stage_weights([pair], 1)
        with pytest.raises(ValueError, match="version=1: None is staged"):
            engine.commit_weights(1)
        assert engine.weight_version == 0
        assert_greedy(one(engine, prompt), 8)
    engine.stage_weights(good, 1)
    engine.commit_weights(1)
    assert_greedy(one(engine, prompt), 8, seed=1)


def test_a_version_that_is_not_whole_or_not_staged_is_not_committed(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(6)
    pieces = _pieces(1, 50)
    engine.stage_weights(pieces[:-1], 2)
    with pytest.raises(ValueError, match=r"version 2: 1 of \d+ tensors are missing"):
        engine.commit_weights(2)
    with pytest.raises(ValueError, match="version=3: 2 is staged"):
        engine.commit_weights(3)
    with pytest.raises(ValueError, match="mode='drop': must be one of keep, recompute, abort"):
        engine.commit_weights(2, "drop")
    with pytest.raises(ValueError, match="version 2 is being staged"):
        engine.update_weights(named(1), version=3)
    with pytest.raises(ValueError, match="version 2 is being staged"):
        engine.stage_weights(named(1), 3)
    assert_greedy(one(engine, prompt), 8)
    engine.stage_weights(pieces[-1:], 2)
    engine.commit_weights(2)
    assert_greedy(one(engine, prompt), 8, seed=1)
    engine.stage_weights(pieces[:4], 3)
    engine.discard_weights()
    engine.update_weights(named(0), version=3)
    assert_greedy(one(engine, prompt), 8)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_given_memory_can_be_the_staged_copy(folder: Path, kernels: str) -> None:
    engine = make(folder, kernels=kernels)
    prompt = hf_models.prompt(6)
    pieces = [(name, rows.clone(), at) for name, rows, at in _pieces(1, 50)]
    addresses = [parameter.data_ptr() for parameter in engine._decoder.parameters()]
    for piece in reversed(pieces):  # parts of a fused parameter in any order, but the rows of a tensor in theirs
        name, _, at = piece
        due = [entry for entry in pieces if entry[0] == name] if at == 0 else []
        engine.stage_weights(due, 1, adopt=True)
    assert not engine._store._staged
    assert_greedy(one(engine, prompt), 8)
    with pytest.raises(ValueError, match="adopt=False: version 1 is being staged with adopt=True"):
        engine.stage_weights(named(1), 1)
    engine.commit_weights(1)
    for _, rows, _ in pieces:
        rows.zero_()
    assert_greedy(one(engine, prompt), 8, seed=1)
    assert addresses == [parameter.data_ptr() for parameter in engine._decoder.parameters()]


def test_only_what_is_as_the_live_weights_can_be_adopted(folder: Path) -> None:
    engine = make(folder)
    name, tensor = named(1)[0]
    with pytest.raises(ValueError, match=r"adopt=True takes torch.float32 on cpu, not torch.float64 on cpu"):
        engine.stage_weights([(name, tensor.double())], 1, adopt=True)
    with pytest.raises(ValueError, match=rf"{name}: must be a dense tensor with data"):
        engine.stage_weights([(name, tensor.to("meta"))], 1, adopt=True)
    assert_greedy(one(engine, hf_models.prompt(6)), 8)


def test_the_copy_s_memory_is_kept_from_the_second_version_on(folder: Path) -> None:
    config = EngineConfig(model=folder, dtype="float32", num_blocks=50, kernels="reference")
    engine = Engine(config, load_weights=False)
    engine.update_weights(named(1), version=0)
    assert not engine._store._spare
    engine.update_weights(named(0), version=1)
    kept = {name: tensor.data_ptr() for name, tensor in engine._store._spare.items()}
    assert len(kept) == len(list(engine._decoder.parameters()))
    engine.update_weights(named(1), version=2)
    assert kept == {name: tensor.data_ptr() for name, tensor in engine._store._spare.items()}
    assert_greedy(one(engine, hf_models.prompt(6)), 8, seed=1)
