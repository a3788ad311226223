"""Sampling and endings through the whole engine: filters, penalties, seeds, stop strings, and all of them together.

Scripted models make text tests exact: attention and MLP add nothing, so the next token is a function of the last one.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import hf_models
import pytest
import tiny_tokenizers
import torch
from engine_cases import assert_free, assert_greedy, log_softmax, make, model, one, run
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pearl.engine.engine import Engine
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams

VOCAB, EOS, END = 264, 261, 263
PROMPT = hf_models.prompt(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def scripted(path: Path, tokens: list[str | int], *, eos: int | None = None) -> Engine:
    """An engine whose greedy continuation of "Q" is `tokens` (texts of one token each, or ids), then the last one for ever."""
    tokenizer = tiny_tokenizers.byte_level()
    ids = [token if isinstance(token, int) else tokenizer.encode(token, add_special_tokens=False).ids[0] for token in tokens]
    chain = [tokenizer.encode("Q", add_special_tokens=False).ids[0], *ids]
    assert len(set(chain)) == len(chain), "a token has one successor"
    hf = hf_models.llama(vocab_size=VOCAB, hidden_size=VOCAB, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    with torch.no_grad():
        hf.model.layers[0].self_attn.o_proj.weight.zero_()
        hf.model.layers[0].mlp.down_proj.weight.zero_()
        hf.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        hf.lm_head.weight.zero_()
        for last, following in itertools.pairwise([*chain, chain[-1]]):
            hf.lm_head.weight[following, last] = 1.0
    hf_models.save(hf, path)
    tiny_tokenizers.save(tokenizer, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return make(path)


def streamed(engine: Engine, **fields) -> tuple[list[str], Completion]:
    params = {"temperature": 0.0, "max_tokens": 12} | fields
    engine.add_request("Q", SamplingParams(**params))
    updates = list(engine.stream())
    assert_free(engine)
    completion = updates[-1].completion
    assert completion is not None and "".join(update.text for update in updates) == completion.text
    assert len(completion.token_ids) == len(completion.logprobs or [])
    return [update.text for update in updates], completion


# ---------------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "temperature"),
    [
        (0, 0.9, 0.0, 1.0),
        (0, 0.5, 0.0, 1.0),
        (0, 1e-9, 0.0, 1.0),
        (1, 0.8, 0.0, 1.0),
        (3, 0.8, 0.0, 2.0),
        (None, 1.0, 1.0, 1.0),
        (-1, 1.0, 0.3, 1.0),
        (10**9, 1.0, 0.3, 0.7),
        (20, 0.95, 0.1, 1.3),
        (128, 1.0, 0.0, 5.0),
    ],
)
def test_kept_tokens_are_those_of_transformers(
    folder: Path, top_k: int | None, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_tokens=4, logprobs=128, n=3, seed=5
    )
    chain = LogitsProcessorList()
    if top_k is not None and 0 < top_k < 128:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    engine = make(folder)
    rid = engine.add_request(PROMPT, params)
    for completion in run(engine)[rid]:
        for position, best in enumerate(completion.top_logprobs or []):
            row_V = log_softmax(tuple(PROMPT + completion.token_ids[:position]))[-1]
            kept_V = chain(None, row_V[None] / temperature)[0].log_softmax(-1)
            expected = {token_id: value for token_id, value in enumerate(kept_V.tolist()) if value > float("-inf")}
            assert best == pytest.approx(expected, abs=3e-4)
            assert completion.token_ids[position] in expected


@pytest.mark.parametrize("first", [True, False])
def test_a_filter_of_one_row_does_not_cut_its_neighbour(folder: Path, first: bool) -> None:
    engine = make(folder, num_blocks=8000, max_num_seqs=5000, max_batch_tokens=5000)
    greedy = SamplingParams(top_k=1, max_tokens=1, n=50)
    free = SamplingParams(max_tokens=1, n=4000, seed=1)
    ids = {engine.add_request([7], params): params for params in ((greedy, free) if first else (free, greedy))}
    done = run(engine, check=False)
    probs = log_softmax((7,))[-1].exp().tolist()
    for rid, params in ids.items():
        counts = Counter(completion.token_ids[0] for completion in done[rid])
        if params is greedy:
            assert counts == {max(range(128), key=probs.__getitem__): 50}
            continue
        for token_id, prob in enumerate(probs):
            assert abs(counts[token_id] - 4000 * prob) <= 4.5 * (4000 * prob * (1 - prob)) ** 0.5 + 1


def test_an_empty_nucleus_is_refused_and_a_whole_one_keeps_all(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"top_p=0\.0"):
        SamplingParams(top_p=0.0)
    completion = one(make(folder), PROMPT, SamplingParams(top_p=1.0, max_tokens=1, logprobs=128))
    assert completion.top_logprobs is not None and len(completion.top_logprobs[0]) == 128


def test_the_kind_of_log_prob_does_not_move_the_tokens(folder: Path) -> None:
    one_of = {
        mode: one(make(folder), PROMPT, SamplingParams(temperature=0.5, top_k=3, seed=9, max_tokens=10, logprobs_mode=mode))
        for mode in ("raw", "processed")
    }
    assert one_of["raw"].token_ids == one_of["processed"].token_ids
    assert one_of["raw"].logprobs != one_of["processed"].logprobs


def test_penalties_see_the_prompt_or_the_output(folder: Path) -> None:
    """Presence and frequency count sampled tokens alone, repetition the prompt as well."""
    prompt = [5, 5, 5]
    raw_V = hf_models.logits(model(), prompt)[-1]

    def first(**fields) -> dict[int, float]:
        completion = one(make(folder), prompt, SamplingParams(seed=1, max_tokens=3, logprobs=128, **fields))
        assert completion.top_logprobs is not None
        return completion.top_logprobs[0]

    assert first(presence_penalty=1.0, frequency_penalty=1.0) == pytest.approx(
        dict(enumerate(raw_V.log_softmax(-1).tolist())), abs=1e-4
    )
    pushed_V = raw_V.clone()
    pushed_V[5] = raw_V[5] / 2.0 if raw_V[5] > 0 else raw_V[5] * 2.0
    assert first(repetition_penalty=2.0) == pytest.approx(dict(enumerate(pushed_V.log_softmax(-1).tolist())), abs=1e-4)
    assert (pushed_V.log_softmax(-1) - raw_V.log_softmax(-1)).abs().max() > 1e-2


def test_presence_and_frequency_by_hand(folder: Path) -> None:
    completion = one(
        make(folder), [5, 5], SamplingParams(top_k=4, seed=1, max_tokens=12, presence_penalty=0.4, frequency_penalty=-0.7)
    )
    assert max(Counter(completion.token_ids).values()) >= 2
    for position, token_id in enumerate(completion.token_ids):
        row_V = hf_models.logits(model(), [5, 5, *completion.token_ids[:position]])[-1]
        for seen, times in Counter(completion.token_ids[:position]).items():
            row_V[seen] -= 0.4 - 0.7 * times
        kept_V = TopKLogitsWarper(4)(None, row_V[None])[0].log_softmax(-1)
        assert (completion.logprobs or [])[position] == pytest.approx(float(kept_V[token_id]), abs=2e-4)


def test_everything_together_depends_on_nothing_around_it(folder: Path) -> None:
    """Siblings with seeds, penalties, filters and stop ids: the same alone, crowded, in chunks and after giving way."""
    params = SamplingParams(
        n=3, seed=11, temperature=1.4, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.2,
        frequency_penalty=0.1, stop_token_ids=[3, 60], min_tokens=4, max_tokens=20,
    )  # fmt: skip

    def answers(engine: Engine, *, disturb: bool = False) -> list[tuple]:
        rid = engine.add_request(PROMPT, params)
        done: list[Completion] = []
        for step in itertools.count():
            if not engine.has_unfinished():
                return sorted((c.index, c.token_ids, c.finish_reason, c.stop_reason) for c in done)
            if disturb and step % 5 == 2:
                engine.preempt(rid)
            done += [completion for completion in engine.step() if completion.request_id == rid]
            engine.check_integrity()

    expected = answers(make(folder))
    assert len({tuple(ids) for _, ids, _, _ in expected}) == 3
    assert answers(make(folder, max_batch_tokens=3, enable_prefix_cache=False)) == expected
    assert answers(make(folder, num_blocks=9)) == expected
    assert answers(make(folder), disturb=True) == expected
    crowded = make(folder)
    for index in range(5):
        crowded.add_request(hf_models.prompt(4 + index, seed=index), SamplingParams(max_tokens=9, temperature=index / 2, n=2))
    assert answers(crowded) == expected


# ---------------------------------------------------------------------------------------------------- endings


def test_no_beginning_of_a_stop_string_is_streamed(tmp_path: Path) -> None:
    pieces, completion = streamed(scripted(tmp_path, ["DEF", "G", "H", "I", "J", "K"]), stop=["DEFGHIJ"])
    assert "".join(pieces) == "" and completion.text == ""
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("stop", "DEFGHIJ", 5)


def test_a_stop_string_may_end_inside_a_token(tmp_path: Path) -> None:
    pieces, completion = streamed(scripted(tmp_path, ["ab", "c", "a"]), stop=["bc"])
    assert "".join(pieces) == completion.text == "a"
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("stop", "bc", 2)


def test_a_stop_string_waits_for_min_tokens(tmp_path: Path) -> None:
    engine = scripted(tmp_path, ["a", "\n", "b", "c", "d", "e", "f"])
    _, completion = streamed(engine, stop=["\n"], min_tokens=5, max_tokens=7)
    assert (len(completion.token_ids), completion.text, completion.finish_reason) == (7, "a\nbcdef", "length")
    _, early = streamed(engine, stop=["\n"])
    assert (len(early.token_ids), early.text) == (2, "a")
    _, late = streamed(engine, stop=["\n", "e"], min_tokens=5)
    assert (len(late.token_ids), late.text, late.stop_reason) == (6, "a\nbcd", "e")


def test_the_reason_of_the_end_is_told(tmp_path: Path) -> None:
    engine = scripted(tmp_path, ["a", "b", "c", EOS, "d"], eos=EOS)
    whole = [64, 65, 66, EOS]

    def end(**fields) -> tuple:
        completion = streamed(engine, **fields)[1]
        return completion.finish_reason, completion.stop_reason, completion.token_ids, completion.text

    assert end() == ("stop", None, whole, "abc")
    assert end(stop_token_ids=[66]) == ("stop", 66, whole[:3], "ab")
    assert end(stop_token_ids=[EOS]) == ("stop", None, whole, "abc")
    assert end(stop_token_ids=[EOS], ignore_eos=True) == ("stop", EOS, whole, "abc")
    assert end(stop=["bc"]) == ("stop", "bc", whole[:3], "a")
    assert end(max_tokens=2) == ("length", None, whole[:2], "ab")
    assert end(max_tokens=4) == ("stop", None, whole, "abc")
    assert end(max_tokens=6, ignore_eos=True)[::3] == ("length", "abcdd")


def test_a_stop_string_that_is_a_special_token_fires(tmp_path: Path) -> None:
    _, completion = streamed(scripted(tmp_path, ["ab", END, "c"]), stop=["<|im_end|>"])
    assert (completion.text, completion.stop_reason, len(completion.token_ids)) == ("ab", "<|im_end|>", 2)


def test_siblings_with_stop_strings_and_seeds_end_one_by_one(tmp_path: Path) -> None:
    hf = hf_models.randomise(hf_models.dense(vocab_size=VOCAB, initializer_range=0.3))
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), hf_models.save(hf, tmp_path))
    engine = make(tmp_path)
    fields = {"n": 4, "seed": 3, "max_tokens": 40, "temperature": 1.2, "repetition_penalty": 1.1}
    rid = engine.add_request("hello abc", SamplingParams(**fields))
    free = {c.index: c for c in run(engine)[rid]}
    stop = next(char for char in free[0].text if char.isascii() and char not in free[1].text)
    rid = engine.add_request("hello abc", SamplingParams(**fields, stop=[stop]))
    for completion in run(engine)[rid]:
        whole = free[completion.index]
        assert completion.text == whole.text.partition(stop)[0]
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert (completion.stop_reason == stop) is (stop in whole.text)


# ---------------------------------------------------------------------------------------------------- leaving a stream


def test_a_stream_left_early_loses_nothing(folder: Path) -> None:
    engine = make(folder)
    ids = [engine.add_request([1, 2, index], SamplingParams(temperature=0.0, max_tokens=3)) for index in range(3)]
    tokens: dict[str, list[int]] = {rid: [] for rid in ids}
    ended: dict[str, Completion] = {}
    while engine.has_unfinished():
        for update in engine.stream():  # left after every single update
            tokens[update.request_id].extend(update.token_ids)
            if update.completion:
                ended[update.request_id] = update.completion
            break
    for rid in ids:
        assert_greedy(ended[rid], 3)
        assert tokens[rid] == ended[rid].token_ids
    assert_free(engine)


def test_aborting_inside_a_stream(folder: Path) -> None:
    engine = make(folder)
    ids = [engine.add_request([1, 2, index], SamplingParams(temperature=0.0, max_tokens=6, n=1 + index)) for index in range(3)]
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], Completion] = {}
    for count, update in enumerate(engine.stream()):
        key = (update.request_id, update.index)
        assert key not in ended
        tokens.setdefault(key, []).extend(update.token_ids)
        if update.completion:
            ended[key] = update.completion
        if count == 3:  # siblings of the last request have updates of this very step still to come
            assert engine.abort(ids[2]) and engine.abort(ids[0])
    assert len(ended) == 6 and all(tokens[key] == completion.token_ids for key, completion in ended.items())
    assert {ended[ids[2], index].finish_reason for index in range(3)} == {ended[ids[0], 0].finish_reason} == {"abort"}
    assert_greedy(ended[ids[1], 0], 6)
    assert_free(engine)
