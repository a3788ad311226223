"""Sampling through the whole engine: seeds, siblings and log-probs."""

from __future__ import annotations

import itertools
from pathlib import Path

import hf_models
import pytest
from engine_cases import assert_free, assert_greedy, log_softmax, make, model, one, run

from pearl.engine.engine import Engine
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def sampled(engine: Engine, params: SamplingParams, *, preempt_at: int | None = None) -> list[int]:
    rid = engine.add_request(hf_models.prompt(17), params)
    tokens: list[int] = []
    while engine.has_unfinished():
        if len(tokens) == preempt_at:
            engine.preempt(rid)
            preempt_at = None
        tokens.extend(itertools.chain.from_iterable(u.token_ids for u in engine.step_updates() if u.request_id == rid))
    return tokens


def test_a_seed_fixes_the_tokens_in_any_batch_chunk_and_after_preemption(folder: Path) -> None:
    params = SamplingParams(seed=7, max_tokens=12)
    expected = sampled(make(folder), params)
    assert len(set(expected)) > 3 and expected != sampled(make(folder), SamplingParams(seed=8, max_tokens=12))
    for chunk in (1, 4, 64):
        assert sampled(make(folder, max_batch_tokens=chunk), params) == expected
    for at in (1, 5):
        assert sampled(make(folder), params, preempt_at=at) == expected
    engine = make(folder, max_batch_tokens=32)
    for index in range(4):
        engine.add_request(hf_models.prompt(5, seed=index), SamplingParams(max_tokens=20, temperature=0.5 + index, top_k=index))
    assert sampled(engine, params) == expected


def test_without_a_seed_engine_seed_and_request_id_fix_the_tokens(folder: Path) -> None:
    params = SamplingParams(max_tokens=12)
    assert sampled(make(folder), params) == sampled(make(folder), params)
    assert sampled(make(folder), params) != sampled(make(folder, seed=1), params)
    engine = make(folder)
    assert sampled(engine, params) != sampled(engine, params)


def test_log_probs_are_those_of_the_oracle(folder: Path) -> None:
    prompt = hf_models.prompt(6)
    for mode in ("raw", "processed"):
        params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=6, logprobs=5, logprobs_mode=mode)
        completion = one(make(folder), prompt, params)
        assert completion.logprobs is not None and completion.top_logprobs is not None
        for position, token_id in enumerate(completion.token_ids):
            row_V = log_softmax(tuple(prompt + completion.token_ids[:position]))[-1]
            if mode == "processed":
                best = (row_V * 2).topk(3)
                expected = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
            else:
                best = row_V.topk(5)
                expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            assert completion.top_logprobs[position] == pytest.approx(expected, abs=2e-4)
            assert completion.logprobs[position] == pytest.approx(expected[token_id], abs=2e-4)


def test_log_probs_can_be_left_out(folder: Path) -> None:
    none, zero = (one(make(folder), [1, 2], SamplingParams(logprobs=k, max_tokens=5)) for k in (None, 0))
    assert none.logprobs is None and none.top_logprobs is None
    assert zero.logprobs is not None and len(zero.logprobs) == 5 == len(zero.weight_versions)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12])
@pytest.mark.parametrize("chunk", [4, 64])
def test_prompt_log_probs_survive_cache_chunks_and_preemption(folder: Path, length: int, chunk: int) -> None:
    engine = make(folder, max_batch_tokens=chunk)
    prompt = hf_models.prompt(length)
    rows = log_softmax(tuple(prompt))
    expected = [float(rows[position, token_id]) for position, token_id in enumerate(prompt[1:])]
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=True)
    for preempt in (False, False, True):
        rid = engine.add_request(prompt, params)
        steps = 0
        while engine.has_unfinished():
            if preempt and steps in (1, 2):
                engine.preempt(rid)
            for completion in engine.step():
                assert completion.prompt_logprobs is not None and completion.prompt_logprobs[0] is None
                assert completion.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)
                assert_greedy(completion, 3)
            steps += 1
    plain = one(engine, prompt)
    assert plain.num_cached_tokens == (length - 1) // 4 * 4
    assert_greedy(plain, 8)


def test_sampled_log_probs_equal_their_own_rescoring(folder: Path) -> None:
    engine = make(folder)
    first = one(engine, hf_models.prompt(5), SamplingParams(seed=3, max_tokens=16))
    whole = first.prompt_token_ids + first.token_ids
    again = one(engine, whole, SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert again.prompt_logprobs is not None and first.logprobs is not None
    assert again.prompt_logprobs[5:] == pytest.approx(first.logprobs, abs=1e-4)


# ---------------------------------------------------------------------------------------------------- siblings


def test_siblings_differ_and_come_back_the_same(folder: Path) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=12)
    runs = []
    for _ in range(2):
        engine = make(folder)
        rid = engine.add_request(hf_models.prompt(9), params)
        updates: dict[int, list[int]] = {index: [] for index in range(4)}
        done: dict[int, Completion] = {}
        for update in engine.stream():
            assert update.request_id == rid
            updates[update.index].extend(update.token_ids)
            if update.completion:
                done[update.index] = update.completion
        assert {index: (c.index, c.request_id, c.token_ids) for index, c in done.items()} == {
            index: (index, rid, updates[index]) for index in range(4)
        }
        runs.append([updates[index] for index in range(4)])
    assert runs[0] == runs[1] and len(set(map(tuple, runs[0]))) >= 3
    assert runs[0][0] == one(make(folder), hf_models.prompt(9), SamplingParams(seed=1, max_tokens=12)).token_ids


def test_a_sibling_that_stops_leaves_the_others_running(folder: Path) -> None:
    whole, stopped = make(folder), make(folder)
    prompt, params = hf_models.prompt(9), SamplingParams(n=4, seed=1, max_tokens=12)
    rid = whole.add_request(prompt, params)
    free = {c.index: c.token_ids for c in run(whole)[rid]}
    others = set(itertools.chain.from_iterable(free[index] for index in (1, 2, 3)))
    place, own = next((place, token_id) for place, token_id in enumerate(free[0]) if token_id not in others)
    rid = stopped.add_request(prompt, SamplingParams(n=4, seed=1, max_tokens=12, stop_token_ids=[own]))
    ended = {c.index: c for c in run(stopped)[rid]}
    assert (ended[0].token_ids, ended[0].stop_reason) == (free[0][: place + 1], own) and place < 11
    assert all(ended[index].token_ids == free[index] for index in (1, 2, 3))


def test_aborting_siblings_ends_them_all(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(5), SamplingParams(n=3, max_tokens=50), request_id="family")
    for _ in range(4):
        engine.step()
    with pytest.raises(ValueError, match=r"family.*in use"):
        engine.add_request([1], request_id="family")
    assert engine.abort(rid) and not engine.abort(rid)
    ended = engine.step()
    assert [(c.request_id, c.index, c.finish_reason, len(c.token_ids)) for c in ended] == [
        ("family", index, "abort", 4) for index in range(3)
    ]
    assert_free(engine)
    assert_greedy(one(engine, [5, 6], request_id="family"), 8)
