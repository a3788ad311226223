"""Where text meets ids: a vocabulary wider than the tokenizer, ids out of range, prompts encoded twice."""

from __future__ import annotations

import hf_models
import pytest
import tiny_tokenizers as tiny
import torch
from engine_cases import run
from transformers import PreTrainedModel

from pearl.engine.llm import LLM
from pearl.protocol import SamplingParams

VOCAB, BEYOND = 320, 300
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its head has rows that the tokenizer (264 tokens) does not know; one of them wins after the prompt 64 65 66."""
    hf = hf_models.randomise(hf_models.dense(vocab_size=VOCAB))
    with torch.no_grad():
        hidden = hf.model(torch.tensor([[64, 65, 66]])).last_hidden_state[0, -1]
        hf.lm_head.weight[BEYOND] = 20 * hidden / hidden.norm()
    return hf


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = hf_models.save(model, tmp_path_factory.mktemp("wide") / "model")
    return LLM(tiny.save(tiny.byte_level(), folder, tiny.CHATML), dtype="float32", num_blocks=64)


def test_an_id_beyond_the_tokenizer_is_sampled_has_no_text_and_is_taken_back(llm: LLM, model: PreTrainedModel) -> None:
    [completion] = llm.generate([[64, 65, 66]], GREEDY)
    want, logprobs = hf_models.greedy(model, [64, 65, 66], 6)
    assert completion.token_ids == want and want[0] == BEYOND
    assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)  # over the whole head, the unknown rows too
    assert completion.text == llm.tokenizer.decode(completion.token_ids) == llm.tokenizer.decode(want[1:])
    longer = completion.prompt_token_ids + completion.token_ids
    [following] = llm.generate([longer], GREEDY)
    assert following.token_ids == hf_models.greedy(model, longer, 6)[0]
    [streamed] = [one for one in _stream(llm, [64, 65, 66]) if one is not None]
    assert streamed.text == completion.text


def _stream(llm: LLM, ids: list[int]) -> list:
    llm.engine.add_request(ids, GREEDY)
    return [update.completion for update in llm.engine.stream()]


def test_an_id_out_of_range_harms_nobody(llm: LLM) -> None:
    [alone] = llm.generate([[5, 6, 7]], GREEDY)
    rid = llm.engine.add_request([5, 6, 7], GREEDY)
    llm.engine.step()
    for bad in ([5, 5000], [5, VOCAB], [-1], [2**40]):
        with pytest.raises(ValueError, match=str(bad[-1])):
            llm.engine.add_request(bad, GREEDY)
    assert run(llm.engine)[rid][0].token_ids == alone.token_ids
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == alone.token_ids


def test_ids_are_never_decoded_and_encoded_again(llm: LLM, model: PreTrainedModel) -> None:
    assert llm.tokenizer.encode(llm.tokenizer.decode([64, 65, 66])) == [257]  # self-check
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=True)
    [completion] = llm.generate([[64, 65, 66]], params)
    assert completion.prompt_token_ids == [64, 65, 66]
    rows = hf_models.logits(model, [64, 65, 66]).log_softmax(-1)
    assert (completion.prompt_logprobs or [])[1:] == pytest.approx([float(rows[0, 65]), float(rows[1, 66])], abs=1e-4)


def test_what_a_chat_samples_goes_into_the_next_turn_as_it_was_sampled(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    [completion] = llm.chat([{"role": "user", "content": "ab <|im_end|>"}], params)
    tok = llm.tokenizer
    assert completion.prompt_token_ids.count(263) == 1
    history = completion.prompt_token_ids + completion.token_ids
    turn = history + tok.chat_continue({"role": "user", "content": "c"}, ended=False)
    [following] = llm.generate([turn], SamplingParams(max_tokens=2))
    assert following.prompt_token_ids[: len(history)] == history
