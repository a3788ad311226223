"""The engine with Hugging Face as the oracle: ids equal, log-probs within 1e-4, whatever the engine's sizes are."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import hf_models
import pytest
import torch
from engine_cases import GREEDY, assert_free, assert_greedy, make, model, one, oracle, run

from pearl.engine.request import Completion
from pearl.protocol import Role, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def prompts_with_shared_starts(rng: random.Random, count: int) -> list[list[int]]:
    start = hf_models.prompt(16)
    return [
        start[: rng.randrange(17)] + [rng.randrange(128) for _ in range(rng.randrange(1, 12))] for _ in range(count)
    ]


# ---------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("seed", range(8))
def test_any_sizes_give_the_oracle_tokens(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    engine = make(
        folder,
        block_size=block_size,
        num_blocks=rng.choice([-(-40 // block_size), -(-70 // block_size), 200]),
        max_batch_tokens=rng.choice([1, 3, 8, 64]),
        max_num_seqs=rng.choice([1, 2, 5, 16]),
        enable_prefix_cache=rng.random() < 0.7,
        role=rng.choice([Role.MIXED, Role.DECODE]),
        decode_prefill_tokens=rng.choice([2, 16]),
    )
    prompts = prompts_with_shared_starts(rng, 7)
    ids, done = [], {}
    for prompt in prompts:
        ids.append(engine.add_request(prompt, GREEDY))
        for completion in itertools.chain.from_iterable(engine.step() for _ in range(rng.randrange(3))):
            done[completion.request_id] = completion
    done |= {rid: completions[0] for rid, completions in run(engine).items()}
    for rid, prompt in zip(ids, prompts, strict=True):
        assert done[rid].prompt_token_ids == prompt
        assert_greedy(done[rid], 8)


@pytest.mark.parametrize("cache", [True, False])
def test_every_length_around_block_edges(folder: Path, cache: bool) -> None:
    engine = make(folder, enable_prefix_cache=cache)
    whole = hf_models.prompt(13)
    for length in range(1, 14):
        ids, logprobs = oracle(tuple(whole[:length]), 9)
        for count in range(1, 10):
            rid = engine.add_request(whole[:length], SamplingParams(temperature=0.0, max_tokens=count))
            while engine.has_unfinished():
                for completion in engine.step():
                    assert completion.request_id == rid and completion.token_ids == ids[:count]
                    assert completion.logprobs == pytest.approx(logprobs[:count], abs=1e-4)
                    cached = completion.num_cached_tokens
                    assert cached == ((length - 1) // 4 * 4 if cache and length > 4 and count > 1 else cached)
    assert_free(engine)
    assert cached == (12 if cache else 0)


def test_preemption_gives_the_same_tokens_each_once(folder: Path) -> None:
    engine = make(folder, num_blocks=8, enable_prefix_cache=False)
    prompts = [hf_models.prompt(8, seed=seed) for seed in range(3)]
    ids = [engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=16)) for prompt in prompts]
    updates: dict[str, list[int]] = {rid: [] for rid in ids}
    done: dict[str, Completion] = {}
    for update in engine.stream():
        updates[update.request_id].extend(update.token_ids)
        if update.completion:
            done[update.request_id] = update.completion
    assert sum(completion.num_preemptions for completion in done.values()) >= 2
    for rid in ids:
        assert_greedy(done[rid], 16)
        assert updates[rid] == done[rid].token_ids


def test_a_prompt_does_not_depend_on_its_company(folder: Path) -> None:
    prompts = [hf_models.prompt(length, seed=length) for length in (1, 4, 5, 8, 13)]
    alone = [one(make(folder), prompt) for prompt in prompts]
    for order in (range(5), reversed(range(5))):
        engine = make(folder)
        ids = {index: engine.add_request(prompts[index], GREEDY) for index in order}
        done = run(engine)
        for index, rid in ids.items():
            assert done[rid][0].token_ids == alone[index].token_ids
            assert done[rid][0].logprobs == pytest.approx(alone[index].logprobs, abs=1e-4)


def test_spellings_of_greedy_agree(folder: Path) -> None:
    for params in (
        SamplingParams(temperature=0.0, max_tokens=16),
        SamplingParams(temperature=0.7, top_k=1, max_tokens=16),
        SamplingParams(temperature=5.0, top_k=1, max_tokens=16),
    ):
        assert one(make(folder), hf_models.prompt(6), params).token_ids == oracle(tuple(hf_models.prompt(6)), 16)[0]


def test_llama_and_tied_weights(tmp_path: Path) -> None:
    for name, built in (
        ("llama", hf_models.llama(attention_bias=True, mlp_bias=True)),
        ("tied", hf_models.dense(tie_word_embeddings=True)),
    ):
        hf = hf_models.randomise(built)
        completion = one(make(hf_models.save(hf, tmp_path / name)), hf_models.prompt(9))
        ids, logprobs = hf_models.greedy(hf, hf_models.prompt(9), 8)
        assert completion.token_ids == ids
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_repetition_penalty_equals_generate_whatever_the_order(folder: Path) -> None:
    prompt = hf_models.prompt(6)
    generated = model().generate(
        torch.tensor([prompt]), do_sample=False, repetition_penalty=2.0, max_new_tokens=5, pad_token_id=0
    )[0, 6:].tolist()
    assert generated != oracle(tuple(prompt), 5)[0]
    penalised = SamplingParams(temperature=0.0, repetition_penalty=2.0, max_tokens=5)
    plain = SamplingParams(temperature=0.0, max_tokens=5)
    for order in ((penalised, plain), (plain, penalised)):
        engine = make(folder)
        ids = {engine.add_request(prompt, params): params for params in order}
        for rid, completions in run(engine).items():
            assert completions[0].token_ids == (generated if ids[rid] is penalised else oracle(tuple(prompt), 5)[0])


# ---------------------------------------------------------------------------------------------------- cache, abort, pause


def test_a_salt_keeps_prefixes_apart(folder: Path) -> None:
    engine = make(folder)
    prompt = hf_models.prompt(9)
    hits = []
    for salt in ("a", "b", "a", "b"):
        completion = one(engine, prompt, cache_salt=salt)
        assert_greedy(completion, 8)
        hits.append(completion.num_cached_tokens)
    assert hits == [0, 0, 8, 8]
    assert engine.reset_prefix_cache() > 0 and engine.stats().cached_blocks == 0
    assert one(engine, prompt, cache_salt="a").num_cached_tokens == 0


def test_abort_delivers_what_there_is(folder: Path) -> None:
    engine = make(folder)
    first, second = (engine.add_request(hf_models.prompt(6), SamplingParams(temperature=0.0, max_tokens=12)) for _ in range(2))
    for _ in range(3):
        engine.step()
    assert engine.abort(first) and not engine.abort("unknown")
    assert engine.has_unfinished()
    done = run(engine)
    assert (done[first][0].finish_reason, len(done[first][0].token_ids), len(done[first][0].logprobs or [])) == ("abort", 3, 3)
    assert_greedy(done[second][0], 12)


def test_discard_delivers_nothing(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request([1, 2], SamplingParams(n=2))
    engine.step()
    assert engine.discard(rid) and not engine.has_unfinished()
    assert_free(engine)


def test_pause_stops_steps_and_resume_goes_on(folder: Path) -> None:
    engine = make(folder)
    rid = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    engine.pause()
    assert [engine.step_updates() for _ in range(3)] == [[], [], []] and engine.has_unfinished()
    assert list(engine.stream()) == []
    engine.resume()
    assert_greedy(run(engine)[rid][0], 8)


def test_nothing_of_a_discarded_request_comes_after_it(folder: Path) -> None:
    engine = make(folder)
    gone = [engine.add_request(hf_models.prompt(5), GREEDY) for _ in range(2)]
    kept = engine.add_request(hf_models.prompt(6), GREEDY)
    engine.step()
    assert engine.abort(gone[0]) and not engine.discard(gone[0])  # it has ended, but was not delivered yet
    assert engine.discard(gone[1])
    assert list(run(engine)) == [kept]
