"""GGUF files written here with llama.cpp's own library, read back as Hugging Face folders; transformers is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import tiny_gguf
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pearl.engine.llm import LLM
from pearl.engine.tokenizer import Tokenizer
from pearl.engine.weights.gguf_folder import GgufFile, rotary_rows, to_bfloat16, write_folder
from pearl.protocol import SamplingParams

pytest.importorskip("gguf", reason="needs the package gguf (extra models)")


SHAPE: dict[str, Any] = {"vocab_size": 264, "num_attention_heads": 2, "num_key_value_heads": 1}


@torch.no_grad()
def rounded(hf: PreTrainedModel) -> PreTrainedModel:
    """With weights that are exact in bfloat16, so that writing them changes nothing."""
    for parameter in hf.parameters():
        parameter.copy_(parameter.bfloat16().float())
    return hf


def folder_of(path: Path, folder: Path, progress: Callable[[int, int], None] = lambda count, total: None) -> Path:
    folder.mkdir()
    write_folder(GgufFile(path), folder, progress)
    return folder


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return rounded(hf_models.randomise(hf_models.llama(**SHAPE)))


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    return folder_of(tiny_gguf.write(root / "model.gguf", model), root / "folder")


def test_transformers_and_the_engine_load_the_same_model(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    ids = hf_models.prompt(40, vocab_size=264)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(hf_models.logits(loaded, ids), hf_models.logits(model, ids), atol=1e-5, rtol=0)
    [completion] = LLM(folder, dtype="float32", num_blocks=16).generate([ids], SamplingParams(temperature=0, max_tokens=12))
    assert completion.token_ids == hf_models.greedy(model, ids, 12)[0]
    as_stored = tiny_gguf.write(tmp_path / "plain.gguf", model, permuted=False)  # self-check: the order of rows matters
    wrong = AutoModelForCausalLM.from_pretrained(folder_of(as_stored, tmp_path / "plain"), dtype=torch.float32).eval()
    assert (hf_models.logits(wrong, ids) - hf_models.logits(model, ids)).abs().max() > 0.1


def test_a_tied_model_has_no_head(tmp_path: Path) -> None:
    hf = rounded(hf_models.llama(**SHAPE, tie_word_embeddings=True))
    folder = folder_of(tiny_gguf.write(tmp_path / "model.gguf", hf), tmp_path / "folder")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert loaded.config.tie_word_embeddings
    torch.testing.assert_close(hf_models.logits(loaded, [1, 2, 3]), hf_models.logits(hf, [1, 2, 3]), atol=1e-5, rtol=0)


def test_quantised_weights_are_near_and_come_in_pieces(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model, quantised=True)
    seen: list[tuple[int, int]] = []
    whole = folder_of(path, tmp_path / "whole", lambda count, total: seen.append((count, total)))
    monkeypatch.setattr("pearl.engine.weights.gguf_folder.CHUNK", 7)
    pieces = folder_of(path, tmp_path / "pieces")
    assert (whole / "model.safetensors").read_bytes() == (pieces / "model.safetensors").read_bytes()
    assert seen == [(count, 21) for count in range(1, 22)]
    loaded = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    for name, value in model.state_dict().items():
        worst = (loaded.state_dict()[name] - value).abs().max() / value.abs().max()
        assert worst < 0.01, name  # 8 bits a weight


def test_digits_are_tokens_of_their_own_and_text_comes_back(folder: Path) -> None:
    tok, auto = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    oracle = tiny_gguf.tokenizer()
    self_check = tiny_gguf.tokenizer()
    self_check.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert self_check.encode("x12").ids != oracle.encode("x12").ids
    for text in ("x12 abc 2024 DEF", "it's 3.14", "Привет 你好 🙂", " \n\t ab"):
        ids = tok.encode(text)
        assert ids == oracle.encode(text).ids == auto.encode(text) and tok.decode(ids) == text
    assert (tok.bos_token_id, tok.eos_token_id, tok.special_ids) == (260, 261, {260, 261, 262, 263})
    messages = [{"role": "user", "content": "ab12"}]
    assert tok.render_chat(messages) == auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_without_a_chat_template_there_is_none(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model, change={"tokenizer.chat_template": None})
    assert not Tokenizer.from_folder(folder_of(path, tmp_path / "folder")).has_chat_template


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model='llama'"),
    ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre='qwen2'"),
    ({"tokenizer.ggml.pre": None}, "no 'tokenizer.ggml.pre'"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
    ({"llama.feed_forward_length": None}, "no 'llama.feed_forward_length'"),
    ({"tokenizer.ggml.token_type": [1] * 263 + [6]}, "token_type: kinds"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_is_not_understood_is_refused(model: PreTrainedModel, tmp_path: Path, change: dict, words: str) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model, change=change)
    with pytest.raises(ValueError, match=words):
        folder_of(path, tmp_path / "folder")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_exps.weight"])
def test_a_tensor_without_a_place_is_named(model: PreTrainedModel, tmp_path: Path, name: str) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model, more={name: np.ones(32, np.float32)})
    with pytest.raises(ValueError, match=name):
        folder_of(path, tmp_path / "folder")


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    hf = hf_models.llama(**SHAPE)
    with torch.no_grad():
        hf.model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        folder_of(tiny_gguf.write(tmp_path / "model.gguf", hf), tmp_path / "folder")


@pytest.mark.parametrize("keep", [0, 3, 100, 20000])
def test_a_damaged_file_is_named(model: PreTrainedModel, tmp_path: Path, keep: int) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.gguf"):
        GgufFile(path)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    given_values = np.array(values, np.float32)
    want = torch.from_numpy(given_values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert to_bfloat16(given_values).tolist() == want.tolist()


def test_rotary_rows_undo_the_permutation() -> None:
    rows = np.arange(24)
    assert (tiny_gguf.permuted_rows(rows[:, None], 3)[rotary_rows(24, 3)][:, 0] == rows).all()


def test_the_chat_template_of_the_fixture_is_what_comes_back(folder: Path) -> None:
    tok = Tokenizer.from_folder(folder)
    ids = tok.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert tok.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nx<|im_end|>\n"
