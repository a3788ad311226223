"""Admission, starvation, giving way, identity and precision through the whole engine, and what callers must not do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import tiny_tokenizers
import torch
from engine_cases import GREEDY, assert_free, assert_greedy, make, model, one, oracle, run

from pearl.engine.llm import LLM
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = hf_models.randomise(hf_models.dense(vocab_size=320, initializer_range=0.3))
    path = hf_models.save(hf, tmp_path_factory.mktemp("text"))
    return tiny_tokenizers.save(tiny_tokenizers.byte_level(), path, tiny_tokenizers.CHATML)


@pytest.fixture
def llm(text_folder: Path) -> LLM:
    return LLM(text_folder, dtype="float32", block_size=4, num_blocks=60)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count)


# ---------------------------------------------------------------------------------------------------- room


def test_a_prompt_longer_than_the_budget_runs_in_chunks(folder: Path) -> None:
    engine = make(folder, max_batch_tokens=8)
    rid = engine.add_request(hf_models.prompt(9), greedy(1))
    assert engine.step() == []
    assert_greedy(run(engine)[rid][0], 1)
    assert engine.stats().num_steps == 2


def test_admission_counts_blocks_and_not_tokens(folder: Path) -> None:
    """Four prompts of 9 tokens fit 40 slots by their count, but need 12 blocks of the 10."""
    engine = make(folder, num_blocks=10)
    ids = [engine.add_request(hf_models.prompt(9, seed=seed), greedy(3)) for seed in range(4)]
    most = 0
    done: dict[str, Completion] = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
        most = max(most, engine.stats().running)
        engine.check_integrity()
    assert most == 3
    for rid in ids:
        assert_greedy(done[rid], 3)
        assert done[rid].num_preemptions == 0


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 1), (1, 2), (3, 1), (7, 2), (256, 1), (5, 3)])
def test_the_oddest_pools_serve_what_fits(folder: Path, block_size: int, num_blocks: int) -> None:
    slots = block_size * num_blocks
    engine = make(folder, block_size=block_size, num_blocks=num_blocks, max_num_seqs=2, max_batch_tokens=2)
    fitting = min(slots, 3)
    ids = [engine.add_request(hf_models.prompt(fitting, seed=seed), greedy(5)) for seed in range(4)]
    done = run(engine)
    for rid in ids:
        completion = done[rid][0]
        expected = oracle(tuple(completion.prompt_token_ids), 5)[0]
        room = slots - fitting + 1  # the newest token's own KV need not be kept
        assert completion.token_ids == expected[: min(5, room)]
        assert completion.finish_reason == ("length" if room >= 5 else "error")
    if slots < 200:
        with pytest.raises(ValueError, match=str(slots)):
            engine.add_request(hf_models.prompt(slots + 1))


def test_a_pool_that_cannot_be_had_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"num_blocks={2**44}"):
        make(folder, num_blocks=2**44)


def test_arrivals_do_not_stop_a_decode(folder: Path) -> None:
    engine = make(folder, max_batch_tokens=16, num_blocks=400)
    first = engine.add_request(hf_models.prompt(6), greedy(20))
    engine.step()
    done: dict[str, Completion] = {}
    last = steps = 0
    while first not in done:
        engine.add_request(hf_models.prompt(16, seed=steps + 1), greedy(2))
        steps += 1
        got = [update for update in engine.step_updates() if update.request_id == first]
        if got:
            assert steps - last <= 3
            last = steps
        done |= {update.request_id: update.completion for update in got if update.completion}
        assert steps < 60
    assert_greedy(done[first], 20)
    for completions in run(engine, check=False).values():
        assert len(completions[0].token_ids) == 2


@pytest.mark.parametrize("cache", [True, False])
def test_giving_way_frees_whole_blocks(folder: Path, cache: bool) -> None:
    engine = make(folder, enable_prefix_cache=cache, num_blocks=40)
    ids = {length: engine.add_request(hf_models.prompt(length, seed=length), greedy(10)) for length in (5, 6, 7, 8, 9)}
    engine.step()
    for length, rid in ids.items():
        before = engine.stats()
        engine.preempt(rid)
        after = engine.stats()
        gained = after.free_blocks + after.cached_blocks - before.free_blocks - before.cached_blocks
        assert gained == -(-length // 4)
        engine.check_integrity()
    done = run(engine)
    for rid in ids.values():
        assert_greedy(done[rid][0], 10)
        assert done[rid][0].num_preemptions == 1


def test_staggered_arrivals_change_nothing(folder: Path) -> None:
    prompts = [hf_models.prompt(length, seed=length) for length in (1, 4, 5, 8, 13)]
    engine = make(folder, enable_prefix_cache=False)
    ids, done = [], {}
    for prompt in prompts:
        ids.append(engine.add_request(prompt, greedy(12)))
        for _ in range(2):
            done |= {completion.request_id: completion for completion in engine.step()}
    done |= {rid: completions[0] for rid, completions in run(engine).items()}
    for rid in ids:
        assert_greedy(done[rid], 12)


# ---------------------------------------------------------------------------------------------------- identity


def test_an_id_can_be_used_again_once_its_request_has_ended(folder: Path) -> None:
    engine = make(folder, max_num_seqs=1)
    engine.add_request(hf_models.prompt(5), greedy(8), request_id="a")
    engine.add_request(hf_models.prompt(6), greedy(8), request_id="b")
    engine.step()
    assert engine.abort("b")
    engine.add_request(hf_models.prompt(7), greedy(8), request_id="b")
    done = run(engine)
    assert_greedy(done["a"][0], 8)
    assert [c.finish_reason for c in done["b"]] == ["abort", "length"]
    assert_greedy(done["b"][1], 8)
    assert not engine._core.requests and not engine._core._texts


def test_one_id_twice_at_the_same_time_is_refused(folder: Path) -> None:
    engine = make(folder)
    engine.add_request(hf_models.prompt(5), greedy(8), request_id="x")
    engine.step()
    for n in (1, 3):
        with pytest.raises(ValueError, match=r"'x'.*in use"):
            engine.add_request([1, 2], SamplingParams(n=n), request_id="x")
    assert_greedy(run(engine)["x"][0], 8)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "names",
    [
        {"cache_salt": "\ud800"},
        {"cache_salt": 5},
        {"cache_salt": ["a"]},
        {"session_id": b"s"},
        {"request_id": "\udfff"},
        {"request_id": 7},
        {"request_id": ["x"]},
        {"request_id": "family\x001"},
    ],
)
def test_bad_names_are_refused_at_once_and_poison_nothing(folder: Path, names: dict[str, Any], n: int) -> None:
    """A name is hashed when its request is scheduled; a bad one found only there would stop every step from then on."""
    engine = make(folder)
    good = engine.add_request(hf_models.prompt(9), GREEDY)
    before = engine.stats()
    with pytest.raises(ValueError, match=next(iter(names))):
        engine.add_request(hf_models.prompt(9), SamplingParams(n=n), **names)
    assert engine.stats() == before and len(engine._core.requests) == 1
    assert_greedy(run(engine)[good][0], 8)


# ---------------------------------------------------------------------------------------------------- prompts of odd types


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts=None"),
        (5, "prompts=5"),
        (b"ab", "prompts=b'ab'"),
        ({"prompt": "a"}, "prompts="),
        ({1, 2}, "prompts="),
        ([None], "None.*integer"),
        ([[]], "at least 1"),
        ("", "at least 1"),
        (["a", ""], "at least 1"),
        ([b"ab"], "b'ab'"),
        ([{"a": 1}], "'a': 1"),
        (np.array([1, 2]), "integer"),
        ([np.int64(1), 2], "integer"),
        (torch.tensor([1, 2]), "at least 1|integer"),
        ([True, False], "True.*integer"),
        ([1, 2.0], r"2\.0.*integer"),
        ([1, "a"], "'a'.*integer"),
        ([["a"]], "'a'.*integer"),
        ("a\ud800b", "lone surrogates"),
        ([1, 2**70], str(2**70)),
        ([[1], [-1]], "-1"),
    ],
)
def test_prompts_that_are_none_are_refused(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, greedy(2))
    assert not llm.engine.has_unfinished()
    assert len(llm.generate("still here", greedy(2))[0].token_ids) == 2


def test_every_sequence_of_ids_or_texts_is_taken(llm: LLM) -> None:
    expected = llm.generate([[1, 2, 3]], greedy(4))[0].token_ids
    for prompts in ([1, 2, 3], (1, 2, 3), range(1, 4), iter([1, 2, 3]), ([1, 2, 3],), [range(1, 4)], ((1, 2, 3) for _ in (0,))):
        assert [c.token_ids for c in llm.generate(prompts, greedy(4))] == [expected]
    texts = [c.text for c in llm.generate(["ab", "c"], greedy(4))]
    assert [c.text for c in llm.generate(iter(("ab", "c")), (greedy(4) for _ in range(2)))] == texts


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages=None"),
        ("hi", "messages='hi'"),
        ({"role": "user", "content": "x"}, "messages="),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogates"),
        ([{"role": "user"}], "refuses"),
        ([{"role": 1, "content": "x"}], "role"),
    ],
)
def test_conversations_that_are_none_are_refused(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, greedy(2))
    assert len(llm.chat([{"role": "user", "content": "x"}], greedy(2))) == 1


def test_an_interrupted_call_leaves_the_engine_usable(llm: LLM) -> None:
    expected = [c.token_ids for c in llm.generate(["ab", "c"], greedy(6))]
    whole, calls = llm.engine._runner.launch, 0

    def interrupted(*args: Any, **fields: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return whole(*args, **fields)

    llm.engine._runner.launch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["ab", "c"], SamplingParams(temperature=0.0, max_tokens=6, n=2))
    assert not llm.engine.has_unfinished()
    assert_free(llm.engine)
    assert [c.token_ids for c in llm.generate(["ab", "c"], greedy(6))] == expected


# ---------------------------------------------------------------------------------------------------- precision


def test_log_probs_of_a_16_bit_model_come_from_an_fp32_head(tmp_path: Path) -> None:
    engine = make(hf_models.save(model(), tmp_path), dtype="bfloat16", kv_fill=None)
    rows: list[torch.Tensor] = []
    whole = engine._runner.queue_draw

    def watched(batch: Any, hidden_TD: torch.Tensor) -> Any:
        drawn_alone = len(hidden_TD) == len(batch.sample_rows)  # the last layer went on with no other rows
        rows.append((hidden_TD if drawn_alone else hidden_TD[batch.sample_rows]).clone())
        return whole(batch, hidden_TD)

    engine._runner.queue_draw = watched  # type: ignore[method-assign]
    completion = one(engine, hf_models.prompt(9), SamplingParams(seed=1, max_tokens=8, logprobs=128))
    head = model().lm_head.weight.detach().to(torch.bfloat16)
    for hidden_1D, best in zip(rows, completion.top_logprobs or [], strict=True):
        assert hidden_1D.dtype == torch.bfloat16
        expected = (hidden_1D.float() @ head.float().T).log_softmax(-1)[0]
        assert best == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-4)
        rounded = (hidden_1D @ head.T).float().log_softmax(-1)[0]
        assert float((rounded - expected).abs().max()) > 1e-3
    assert math.isfinite(sum(completion.logprobs or []))
