"""The fresh model folder: any text survives its tokenizer, transformers loads it, frames are short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from pearl.config import ModelOptions
from pearl.engine.models.config import from_folder
from pearl.engine.tokenizer import Tokenizer
from pearl.rl.fresh_model import SPECIALS, is_token_text, write_model_folder

WORDS = ["PFFF\n", "FFHF\n", "Left", "Left turn", "<answer>", "</answer>", "né", "日本 x", "x"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("fresh") / "model", ModelOptions(max_position=96), WORDS)


@pytest.fixture(scope="session")
def tok(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_every_byte_and_word_is_one_token(tok: Tokenizer) -> None:
    assert [tok.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tok.encode("x") == [ord("x")]
    assert tok.encode("PFFF\nFFHF\n") == [256, 257]
    assert len(tok.encode("<answer>Left</answer>")) == 3
    assert len(tok.encode("日本 x")) == 1


def test_the_longest_word_wins(tok: Tokenizer) -> None:
    assert len(tok.encode("Left turn")) == 1
    assert len(tok.encode("Left tur")) == 1 + len(" tur")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
mixed = st.lists(st.one_of(texts, st.sampled_from([*WORDS, *SPECIALS, "Lef", "Ġ", "\u0120nĊ", "\ufffd"])), max_size=5).map(
    "".join
)


@given(text=mixed)
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(tok: Tokenizer, text: str) -> None:
    ids = tok.encode(text)
    assert tok.decode(ids) == text and not tok.special_ids & set(ids)


def test_a_word_that_would_not_come_back_stays_in_bytes(tok: Tokenizer) -> None:
    assert not is_token_text("né") and tok.encode("né") == list("né".encode())


def test_a_message_costs_two_tokens_more_than_its_content(tok: Tokenizer) -> None:
    grid, action = {"role": "user", "content": "PFFF\nFFHF\n"}, {"role": "assistant", "content": "<answer>Left</answer>"}
    assert len(tok.chat_start([grid])) == 2 + 2 + 1
    assert len(tok.render_chat([grid, action, grid], add_generation_prompt=False)) == (2 + 2) + (2 + 3) + (2 + 2)
    assert len(tok.chat_continue(grid, ended=True)) == 2 + 2 + 1
    assert tok.decode(tok.chat_start([grid]), skip_special_tokens=False) == (
        "<|im_start|>user\nPFFF\nFFHF\n<|im_end|><|im_start|>assistant\n"
    )


def test_turns_add_up(tok: Tokenizer) -> None:
    say = [{"role": "system", "content": "Go."}, {"role": "user", "content": "PFFF\n"}]
    reply, following = "<answer>Left</answer>", {"role": "user", "content": "<|im_end|>FFHF\n"}
    whole = tok.render_chat([*say, {"role": "assistant", "content": reply}, following])
    assert tok.chat_start(say) + tok.encode(reply) + tok.chat_continue(following, ended=False) == whole


def test_transformers_loads_the_folder(folder: Path, tok: Tokenizer) -> None:
    oracle = AutoTokenizer.from_pretrained(str(folder))
    assert len(oracle) == tok.vocab_size and oracle.eos_token == "<|im_end|>" and oracle.model_max_length == 96
    messages = [{"role": "user", "content": "PFFF\nwhere to?"}, {"role": "assistant", "content": "Left"}]
    assert oracle.apply_chat_template(messages, return_dict=False) == tok.render_chat(messages, add_generation_prompt=False)
    text = "né Left turn 日本 x 🙂"
    assert oracle.encode(text, add_special_tokens=False) == tok.encode(text) and oracle.decode(tok.encode(text)) == text
    config = AutoConfig.from_pretrained(str(folder))
    assert config.model_type == "qwen3" and config.eos_token_id == tok.eos_token_id == tok.end_of_turn_id
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 10000.0
    assert set(config.layer_types) == {"full_attention"}


def test_the_engine_reads_the_config(folder: Path, tok: Tokenizer) -> None:
    config = from_folder(folder)
    options = ModelOptions(max_position=96)
    assert config.vocab_size % 8 == 0 and 0 <= config.vocab_size - tok.vocab_size < 8
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 192, options.num_layers)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 96)
    assert config.qk_norm and config.tie_embeddings and config.dtype == "float32"
    assert config.eos_token_ids == (tok.eos_token_id,)


def test_the_same_input_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    again = write_model_folder(tmp_path, ModelOptions(max_position=96), [*WORDS, "Left"])
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert json.loads((again / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["a", ""], ModelOptions(), "empty word"),
        ("text", ModelOptions(), "list of words"),
        (["x<|im_end|>"], ModelOptions(), "special token '<|im_end|>'"),
        ([], ModelOptions(num_heads=4, num_kv_heads=3), "num_kv_heads=3"),
        ([], ModelOptions(head_dim=15), "head_dim=15"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, words: list[str], options: ModelOptions, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        write_model_folder(tmp_path / "new", options, words)
    assert message in str(error.value) and not (tmp_path / "new").exists()


def test_a_role_without_header_is_refused(tok: Tokenizer) -> None:
    with pytest.raises(ValueError, match="must be system, user or assistant"):
        tok.render_chat([{"role": "tool", "content": "x"}])


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from pearl.config import ModelOptions; from pearl.rl.fresh_model import write_model_folder\n"
        f"write_model_folder({str(tmp_path / 'm')!r}, ModelOptions(), ['Left']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
