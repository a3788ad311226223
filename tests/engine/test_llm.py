"""Offline generation: order of results, text, chat, scoring, and that a failed call leaves nothing behind."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.llm import LLM
from pearl.protocol import SamplingParams

VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: 256 bytes, the merges ab and abc, and two special tokens; smaller than the model's vocabulary."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"ab": 256, "abc": 257}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def hf():
    return hf_models.randomise(hf_models.dense(vocab_size=VOCAB, initializer_range=0.3))


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = hf_models.save(hf, tmp_path_factory.mktemp("text"))
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", block_size=4, num_blocks=120, kv_fill=math.nan)


GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_results_come_in_the_order_of_the_prompts(llm: LLM, hf) -> None:
    prompts = [hf_models.prompt(length, seed=length, vocab_size=VOCAB) for length in (9, 1, 30, 4)]
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (8, 1, 3, 5)]
    results = llm.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        ids, logprobs = hf_models.greedy(hf, prompt, one.max_tokens or 0)
        assert (result.prompt_token_ids, result.token_ids, result.params) == (prompt, ids, one)
        assert result.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert not llm.engine.has_unfinished()


def test_siblings_stand_side_by_side(llm: LLM) -> None:
    params = [SamplingParams(n=3, seed=1, max_tokens=6), SamplingParams(n=2, seed=1, max_tokens=6)]
    results = llm.generate([[1, 2, 3], [1, 2, 3]], params)
    assert [result.index for result in results] == [0, 1, 2, 0, 1]
    assert [result.token_ids for result in results[:2]] == [result.token_ids for result in results[3:]]


def test_text_goes_in_and_comes_out(llm: LLM) -> None:
    [result] = llm.generate("abcab é", GREEDY)
    assert result.prompt_token_ids == [257, 256, *llm.tokenizer.encode(" é")]
    assert result.text == llm.tokenizer.decode(result.token_ids)
    again = llm.generate(result.prompt_token_ids, GREEDY)
    assert (again[0].token_ids, again[0].text) == (result.token_ids, result.text)


def test_ids_are_not_tokenised_again(llm: LLM, hf) -> None:
    spelled = llm.tokenizer.encode("a") + llm.tokenizer.encode("b") + llm.tokenizer.encode("c")
    [result] = llm.generate(spelled, GREEDY)
    assert result.prompt_token_ids == spelled != [257]
    assert result.token_ids == hf_models.greedy(hf, spelled, 6)[0]


def test_streamed_pieces_make_the_text(folder: Path) -> None:
    engine = Engine(EngineConfig(model=folder, dtype="float32", num_blocks=60))
    for seed in range(4):
        engine.add_request("hello abc", SamplingParams(seed=seed, max_tokens=30))
    pieces: dict[str, str] = {}
    for update in engine.stream():
        pieces[update.request_id] = pieces.get(update.request_id, "") + update.text
        if update.completion:
            assert update.completion.text == pieces[update.request_id] == engine.tokenizer.decode(update.completion.token_ids)
    assert len(pieces) == 4 and any(pieces.values())


def test_text_comes_piece_by_piece_only_if_it_is_asked_for(folder: Path) -> None:
    engine = Engine(EngineConfig(model=folder, dtype="float32", num_blocks=60))
    texts = []
    for streaming in (False, True):
        engine.add_request("abc", SamplingParams(seed=1, max_tokens=20), request_id="same", streaming=streaming)
        pieces = [update.text for update in engine.stream()]
        assert (sum(map(bool, pieces)) > 3) is streaming
        texts.append("".join(pieces))
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_cuts_the_text_and_keeps_the_ids(folder: Path, streaming: bool) -> None:
    engine = Engine(EngineConfig(model=folder, dtype="float32", num_blocks=60))

    def complete(**fields):
        engine.add_request("abc", SamplingParams(seed=5, max_tokens=30, **fields), streaming=streaming)
        [completion] = [update.completion for update in engine.stream() if update.completion]
        return completion

    free = complete()
    stop = free.text[7]
    cut = complete(stop=[stop])
    assert (cut.finish_reason, cut.stop_reason, cut.text) == ("stop", stop, free.text[: free.text.index(stop)])
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    late = complete(stop=[stop], min_tokens=25)
    assert len(late.token_ids) >= 25


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    [free] = llm.generate("abc", SamplingParams(seed=5, max_tokens=12))
    [ended] = llm.generate("abc", SamplingParams(seed=5, max_tokens=12, stop_token_ids=[free.token_ids[4]]))
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (free.token_ids[:5], "stop", free.token_ids[4])
    assert ended.text == llm.tokenizer.decode(ended.token_ids[:-1])


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "ab <|im_end|> c"}]
    [result] = llm.chat(messages, GREEDY)
    start, end = tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert result.prompt_token_ids == llm.tokenizer.render_chat(messages)
    assert (result.prompt_token_ids.count(start), result.prompt_token_ids.count(end)) == (2, 1)
    both = llm.chat([messages, [{"role": "user", "content": "x"}]], GREEDY)
    assert len(both) == 2 and both[0].token_ids == result.token_ids


def test_scores_are_teacher_forced_log_probs(llm: LLM, hf) -> None:
    ids = hf_models.prompt(33, vocab_size=VOCAB)
    rows = hf_models.logits(hf, ids).log_softmax(-1)
    expected = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for _ in range(2):
        assert llm.score(ids) == pytest.approx(expected, abs=1e-4)
    assert llm.score(ids[:1]) == []
    [sampled] = llm.generate(ids[:5], SamplingParams(seed=1, max_tokens=9))
    assert llm.score(ids[:5] + sampled.token_ids)[4:] == pytest.approx(sampled.logprobs, abs=1e-4)


def test_one_bad_prompt_refuses_the_whole_call(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"999"):
        llm.generate([[1, 2], [1, 999], [3]], SamplingParams(n=2))
    with pytest.raises(ValueError, match=r"2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match=r"messages"):
        llm.chat([])
    assert not llm.engine.has_unfinished()
    llm.engine.check_integrity()
    assert llm.engine.stats().used_blocks == 0
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate([1, 2], GREEDY)[0].token_ids) == 6


def test_states_that_would_wait_for_ever_are_refused(llm: LLM) -> None:
    llm.engine.pause()
    with pytest.raises(RuntimeError, match=r"paused"):
        llm.generate([1, 2], GREEDY)
    llm.engine.resume()
    assert not llm.engine.has_unfinished()
    rid = llm.engine.add_request([1, 2], GREEDY)
    with pytest.raises(RuntimeError, match=r"by hand"):
        llm.generate([1, 2], GREEDY)
    assert llm.engine.abort(rid)


def test_settings(folder: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"blocksize.*block_size"):
        LLM(folder, blocksize=4)
    changed = LLM(llm.engine.config, block_size=8)
    assert (changed.engine.config.block_size, changed.engine.config.dtype) == (8, "float32")


def test_the_default_dtype_serves_with_fp32_log_probs(folder: Path) -> None:
    llm = LLM(folder, num_blocks=20)
    [result] = llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, logprobs=VOCAB))
    assert llm.engine.config.dtype == "bfloat16" and result.top_logprobs is not None
    for row in result.top_logprobs:
        assert math.fsum(math.exp(value) for value in row.values()) == pytest.approx(1.0, abs=1e-5)


def test_public_names_load_when_asked_for() -> None:
    code = (
        "import sys, pearl.engine; assert 'torch' not in sys.modules; "
        "from pearl.engine import SamplingParams, EngineConfig, Role; "
        "assert 'torch' not in sys.modules; from pearl.engine import LLM, Engine, Completion; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
    import pearl.engine

    with pytest.raises(AttributeError, match=r"nothing"):
        _ = pearl.engine.nothing
