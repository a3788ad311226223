"""The prefix cache and the pool through the whole engine: stale, colliding, shared, evicted, leaking blocks; weight updates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_models
import numpy as np
import pytest
import torch
from engine_cases import GREEDY, assert_free, assert_greedy, log_softmax, make, model, named, one, oracle, run
from torch import Tensor

from pearl.engine import prefix_cache
from pearl.engine.engine import Engine
from pearl.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **fields)


# ---------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("size", [0.05, 0.01])
def test_a_small_change_of_weights_leaves_no_old_prefix(tmp_path: Path, size: float) -> None:
    hf = hf_models.randomise(hf_models.dense())
    engine = make(hf_models.save(hf, tmp_path))
    prompt = hf_models.prompt(13)
    before = one(engine, prompt)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    engine.update_weights([(name, parameter.detach()) for name, parameter in hf.named_parameters()], version=1)
    after = one(engine, prompt)
    ids, logprobs = hf_models.greedy(hf, prompt, 8)
    assert (after.num_cached_tokens, after.token_ids) == (0, ids)
    assert after.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-2)


def test_equal_hashes_share_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "block_hash", lambda parent, ids: 7)
    monkeypatch.setattr(prefix_cache, "root_hash", lambda root: 7)
    engine = make(folder)
    hits = []
    for start in (1, 11, 1, 11):
        completion = one(engine, range(start, start + 8), greedy(8))
        assert_greedy(completion, 8)
        hits.append(completion.num_cached_tokens)
    assert hits == [0, 0, 4, 4]


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_wholly_cached_prompt_computes_its_last_token(folder: Path, length: int) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(length)
    for expected in (0, length - 4, length - 4):
        completion = one(engine, prompt, greedy(6))
        assert_greedy(completion, 6)
        assert completion.num_cached_tokens == expected
    ids = [engine.add_request(prompt, greedy(6)) for _ in range(2)]
    done = run(engine)
    for rid in ids:
        assert_greedy(done[rid][0], 6)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_blocks_held_are_those_of_the_computed_tokens(folder: Path, length: int) -> None:
    engine = make(folder, enable_prefix_cache=False)
    engine.add_request(hf_models.prompt(length), greedy(9))
    for computed in range(length, length + 8):
        engine.step()
        assert engine.stats().used_blocks == -(-computed // 4)
    run(engine)


def test_a_block_used_again_is_found_no_more(folder: Path) -> None:
    engine = make(folder, num_blocks=4)
    first, second = hf_models.prompt(8), hf_models.prompt(12, seed=1)
    for prompt, hit in ((first, 0), (second, 0), (first, 0), (first, 4)):
        completion = one(engine, prompt, greedy(4))
        assert_greedy(completion, 4)
        assert completion.num_cached_tokens == hit


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_equal_prompts_in_one_batch(folder: Path, budget: int, late: int) -> None:
    engine = make(folder, max_batch_tokens=budget)
    prompt = hf_models.prompt(9)
    ids = [engine.add_request(prompt, greedy(6))]
    for _ in range(late):
        engine.step()
    ids += [engine.add_request(prompt, greedy(6)) for _ in range(2)]
    done = run(engine)
    for rid in ids:
        assert_greedy(done[rid][0], 6)


def test_salts_are_never_mixed_up(folder: Path) -> None:
    engine = make(folder)
    salts = (None, "", "None", "0", "a", "b", "0:salt:a", ":salt:")
    for expected in (0, 8):
        for salt in salts:
            completion = one(engine, hf_models.prompt(9), cache_salt=salt)
            assert completion.num_cached_tokens == expected, salt
            assert_greedy(completion, 8)


def test_a_reset_holds_for_requests_that_are_running(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(13)
    running = engine.add_request(prompt, greedy(30))
    engine.step()
    engine.reset_prefix_cache()
    other = engine.add_request(prompt, greedy(4))
    done = run(engine)
    assert (done[other][0].num_cached_tokens, len(done[running][0].token_ids)) == (0, 30)
    assert_greedy(done[other][0], 4)
    assert_greedy(done[running][0], 30)


def test_cache_on_and_off_give_the_same_tokens(folder: Path) -> None:
    rng = random.Random(3)
    start = hf_models.prompt(20)
    prompts = [start[: rng.randrange(21)] + [rng.randrange(128) for _ in range(rng.randrange(1, 6))] for _ in range(25)]
    params = SamplingParams(seed=5, max_tokens=7)
    answers = []
    for cache in (True, False):
        engine = make(folder, enable_prefix_cache=cache, num_blocks=30)
        answers.append([one(engine, prompt, params) for prompt in prompts])
    assert [c.token_ids for c in answers[0]] == [c.token_ids for c in answers[1]]
    assert sum(c.num_cached_tokens for c in answers[0]) > 100 and not any(c.num_cached_tokens for c in answers[1])


@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompt_log_probs_of_a_cached_prompt_are_whole(folder: Path, length: int) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(length)
    rows = log_softmax(tuple(prompt))
    expected = [float(rows[position, token_id]) for position, token_id in enumerate(prompt[1:])]
    for _ in range(2):
        completion = one(engine, prompt, greedy(2, prompt_logprobs=True, logprobs=1))
        assert completion.prompt_logprobs is not None and completion.prompt_logprobs[0] is None
        assert completion.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert one(engine, prompt).num_cached_tokens == (length - 1) // 4 * 4


# ---------------------------------------------------------------------------------------------------- what is given back


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_leaves_no_block_behind(folder: Path, steps: int) -> None:
    engine = make(folder, num_blocks=12)
    prefix = hf_models.prompt(8)
    for turn in range(50):
        one(engine, prefix, greedy(1))
        rid = engine.add_request([*prefix, 1, 2, 3, 4, turn], greedy(9))
        for _ in range(steps):
            engine.step()
        assert engine.abort(rid)
        assert [completion.finish_reason for completion in engine.step()] == ["abort"]
        engine.check_integrity()
        assert_free(engine)
    assert_greedy(one(engine, hf_models.prompt(41, seed=2), greedy(6)), 6)


def test_an_abort_in_the_queue_leaves_no_block_behind(folder: Path) -> None:
    engine = make(folder, num_blocks=12, max_num_seqs=1)
    prefix = hf_models.prompt(8)
    one(engine, prefix, greedy(1))
    running = engine.add_request([*prefix, 9], greedy(8))
    engine.step()
    for turn in range(20):
        engine.abort(engine.add_request([*prefix, 1, 2, 3, 4, turn], greedy(5)))
        engine.check_integrity()
    assert_greedy(run(engine)[running][0], 8)


def test_blocks_come_back_after_every_request(folder: Path) -> None:
    engine = make(folder, num_blocks=8)
    for turn in range(200):
        completion = one(engine, hf_models.prompt(9, seed=turn % 20), greedy(3))
        assert completion.num_preemptions == 0
        if turn < 20:
            assert_greedy(completion, 3)
        else:
            assert completion.token_ids == oracle(tuple(completion.prompt_token_ids), 3)[0]


def test_two_thousand_short_requests_leak_nothing(folder: Path) -> None:
    engine = make(folder, num_blocks=60)
    rng = random.Random(0)
    for _ in range(40):
        for index in range(50):
            params = SamplingParams(max_tokens=1 + index % 3, seed=index, stop_token_ids=[rng.randrange(128)])
            engine.add_request([rng.randrange(128) for _ in range(rng.randrange(1, 10))], params)
        finished = 0
        while engine.has_unfinished():
            finished += len(engine.step())
        assert finished == 50
        assert_free(engine)
    engine.check_integrity()
    assert engine.reset_prefix_cache() > 0 and engine.stats().free_blocks == 60


# ---------------------------------------------------------------------------------------------------- updates that go wrong


def poisoned(value: float) -> list[tuple[str, Tensor]]:
    tensors = [(name, tensor.clone()) for name, tensor in named(1)]
    tensors[-1][1].view(-1)[-1] = value
    return tensors


def broken() -> Iterator[tuple[str, Tensor]]:
    yield from named(1)[:5]
    raise OSError("the source went away")


BAD_UPDATES: dict[str, tuple[Callable, str]] = {
    "nan": (lambda: poisoned(math.nan), "not finite"),
    "infinite": (lambda: poisoned(-math.inf), "not finite"),
    "too large for the dtype": (lambda: [(name, tensor.double() * 1e300) for name, tensor in named(1)], "not finite"),
    "integers": (lambda: [(name, tensor.int()) for name, tensor in named(1)], r"dtype torch\.int32"),
    "missing": (lambda: named(1)[:-1], "1 of .* missing"),
    "nothing": (list, "missing"),
    "extra": (lambda: [*named(1), ("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32))], "no such tensor"),
    "twice": (lambda: [*named(1), named(1)[0]], "twice"),
    "swapped": (lambda: [(name, named(1)[-1 - place][1]) for place, (name, _) in enumerate(named(1))], "shape"),
    "arrays": (lambda: [(name, np.zeros(tensor.shape, np.float32)) for name, tensor in named(1)], "ndarray"),
    "names that are none": (lambda: [(5, named(1)[0][1])], "5, Parameter|5, Tensor"),
    "no data": (lambda: [(name, tensor.to("meta")) for name, tensor in named(1)], "dense"),
    "sparse": (lambda: [(name, tensor.to_sparse()) for name, tensor in named(1)], "dense"),
}


@pytest.mark.parametrize("kind", list(BAD_UPDATES))
def test_a_bad_update_in_the_middle_of_requests_costs_nobody_anything(folder: Path, kind: str) -> None:
    tensors, words = BAD_UPDATES[kind]
    engine = make(folder)
    one(engine, hf_models.prompt(9))
    rid = engine.add_request(hf_models.prompt(9), greedy(8))
    for mode in ("keep", "recompute", "abort"):
        engine.step()
        with pytest.raises(ValueError, match=words):
            engine.update_weights(tensors(), version=1, mode=mode)
    assert engine.weight_version == 0
    completion = run(engine)[rid][0]
    assert_greedy(completion, 8)
    assert (completion.num_cached_tokens, completion.weight_versions) == (8, [0] * 8)
    engine.update_weights(named(1), version=1)
    assert_greedy(one(engine, hf_models.prompt(9)), 8, seed=1)


def test_a_source_that_breaks_off_is_as_if_it_never_came(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), greedy(8))
    engine.step()
    with pytest.raises(OSError, match="went away"):
        engine.update_weights(broken(), version=1)
    engine.update_weights(named(0), version=2)
    assert run(engine)[rid][0].token_ids == oracle(tuple(hf_models.prompt(6)), 8)[0]


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, np.int64(1)])
def test_a_version_is_a_rising_integer(folder: Path, version: object) -> None:
    engine = make(folder)
    with pytest.raises(ValueError, match="version="):
        engine.update_weights(named(1), version=version)  # type: ignore[arg-type]
    assert engine.weight_version == 0
    assert_greedy(one(engine, [1, 2, 3]), 8)


def test_a_step_that_raises_has_not_happened(folder: Path) -> None:
    """Out of memory or an interrupt in the model: blocks come back, and every request goes on with the same tokens."""
    engine = make(folder, max_batch_tokens=6)
    prompts = [hf_models.prompt(length, seed=length) for length in (5, 9, 13)]
    ids = [engine.add_request(prompt, greedy(8, prompt_logprobs=True)) for prompt in prompts]
    gone = engine.add_request([1, 2, 3], greedy(8))
    whole, done, raised = engine._runner.launch, {}, 0

    def failing(*_, **__) -> None:
        raise KeyboardInterrupt

    for step in range(1000):
        if not engine.has_unfinished():
            break
        if step == 4:
            assert engine.abort(gone)
        if step % 3 == 1:
            engine._runner.launch = failing
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            engine._runner.launch = whole
            raised += 1
        else:
            done |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    assert raised > 5 and done[gone].finish_reason == "abort"
    for rid, prompt in zip(ids, prompts, strict=True):
        assert_greedy(done[rid], 8)
        assert len(done[rid].prompt_logprobs or []) == len(prompt)
    assert_free(engine)


def test_own_tensors_can_be_the_source(folder: Path) -> None:
    engine: Engine = make(folder)
    other: Engine = make(folder)
    other.update_weights(named(1), version=1)
    engine.update_weights(iter(named(1)), version=1)
    assert one(engine, [4, 5], GREEDY).token_ids == one(other, [4, 5], GREEDY).token_ids
