"""Tokenizers of every kind: what is decoded piece by piece is what is decoded at once, and users' text stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from pearl.engine.text_stream import TextStream
from pearl.engine.tokenizer import Tokenizer

every_kind = pytest.mark.parametrize("kind", tiny.KINDS)
FALLBACK = ("sentencepiece_like", "llama2_like")


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("kinds")
    return {name: Tokenizer.from_folder(tiny.save(build(), root / name, tiny.CHATML)) for name, build in tiny.KINDS.items()}


@pytest.fixture(scope="session")
def oracles(kinds: dict[str, Tokenizer]) -> dict[str, PreTrainedTokenizerFast]:
    return {name: PreTrainedTokenizerFast.from_pretrained(tok._name) for name, tok in kinds.items()}


def streamed(tok: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = TextStream(tok, **options)
    pieces = [*(stream.push(token_id) for token_id in ids), stream.close()]
    assert "".join(pieces) == stream.text
    return pieces


# -------------------------------------------------------------------------------------------------------- piece by piece


def test_ids_that_nobody_knows_do_not_end_a_character(kinds: dict[str, Tokenizer]) -> None:
    """A padded vocabulary's: the decoder skips them, also within the bytes of one character."""
    tok = kinds["sentencepiece_like"]
    first, second, third = (tok.byte_tokens[byte] for byte in "\u1000".encode())
    ids = [first, second, tok.vocab_size + 3, third]
    assert "".join(streamed(tok, ids)) == tok.decode(ids) == "\u1000"


@every_kind
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_ids_join_to_the_whole(kinds: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tok = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 4), max_size=40))
    whole = tok.decode(ids)
    assert "".join(streamed(tok, ids)) == whole
    assert "".join(streamed(tok, ids, streaming=False)) == whole
    assert "".join(streamed(tok, ids, stop=["\x00never\x00"])) == whole


@every_kind
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_whole_is_what_transformers_decodes(
    kinds: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast], kind: str, data: st.DataObject
) -> None:
    """But for byte fall-back tokens that spell no character: there transformers gives up the characters beside them too."""
    tok = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=30))
    want = oracles[kind].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tok.decode(ids) == want or (kind in FALLBACK and "\ufffd" in want)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_sequence", *FALLBACK])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back_and_no_character_is_broken(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    if kind in FALLBACK:
        text = text.replace("▁", "_")  # stands for the space there
    if kind == "sentencepiece_like":
        text = text.lstrip(" ")  # it puts no space before a text that has one, and takes one away
    pieces = streamed(kinds[kind], kinds[kind].encode(text))
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


@pytest.mark.parametrize("kind", FALLBACK)
def test_bytes_that_spell_no_character_cost_only_themselves(
    kinds: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast], kind: str
) -> None:
    tok = kinds[kind]
    byte = tok.byte_tokens
    ids = [*(byte[one] for one in "é".encode()), byte[0xFF], *(byte[one] for one in "🙂".encode())]
    assert oracles[kind].decode(ids) == "\ufffd" * 7
    assert tok.decode(ids) == "é\ufffd🙂"
    assert streamed(tok, ids) == ["", "é", "\ufffd", "", "", "", "🙂", ""]
    assert streamed(tok, ids[:4]) == ["", "é", "\ufffd", "", "\ufffd"]


@pytest.mark.parametrize("kind", FALLBACK)
def test_characters_in_bytes_are_shown_at_once_however_long_the_run(kinds: dict[str, Tokenizer], kind: str) -> None:
    tok = kinds[kind]
    ids = [tok.byte_tokens[byte] for byte in ("🙂" * 50).encode()]
    assert streamed(tok, ids) == ["", "", "", "🙂"] * 50 + [""]
    line = tok.byte_tokens[ord("\n")]
    stream = TextStream(tok, stop=["\n"])
    stream.push(tok.encode("a")[0])
    stream.push(line)
    assert stream.stopped_by == "\n"


def test_unknown_ids_are_no_context(kinds: dict[str, Tokenizer]) -> None:
    """Many ids beyond the tokenizer in a row: the word after them keeps its space."""
    tok = kinds["sentencepiece_like"]
    word = tok.encode(" ab")[-1:]
    ids = tok.encode("a") + [tok.vocab_size + 3] * 20 + word
    assert "".join(streamed(tok, ids)) == tok.decode(ids)


def test_bytes_behind_another_decoder_wait_for_the_character(tmp_path: Path) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.bytes_then_replaced(), tmp_path))
    assert not tok.is_byte_level and not tok.byte_tokens
    assert streamed(tok, tok.encode("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


@every_kind
def test_the_cost_of_a_token_does_not_grow(kinds: dict[str, Tokenizer], kind: str) -> None:
    tok = kinds[kind]
    ids = (tok.encode("ab é a") or [0]) * 300
    decoded: list[int] = []

    class Counting:
        special_ids, is_byte_level, byte_tokens = tok.special_ids, tok.is_byte_level, tok.byte_tokens
        token_bytes, knows = staticmethod(tok.token_bytes), staticmethod(tok.knows)

        @staticmethod
        def decode(token_ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return tok.decode(token_ids, skip_special_tokens)

    stream = TextStream(Counting())  # type: ignore[arg-type]
    for token_id in ids:
        stream.push(token_id)
    stream.close()
    assert stream.text == tok.decode(ids)
    assert len(decoded) <= 2 * len(ids) and max(decoded, default=0) <= 16


# -------------------------------------------------------------------------------------------------------- special tokens

spelled = st.sampled_from([*tiny.SPECIALS, "<think>", "</s", ">", "a", " ", "<s", "b."])


@every_kind
@given(parts=st.lists(spelled, max_size=6))
@settings(max_examples=60, deadline=None)
def test_text_never_becomes_a_special_token(kinds: dict[str, Tokenizer], kind: str, parts: list[str]) -> None:
    tok = kinds[kind]
    text = "".join(parts)
    ids = tok.encode(text)
    assert tok.special_ids.isdisjoint(ids)
    if kind.startswith("byte_level") or kind == "llama2_like":
        assert tok.decode(ids) == text


def test_a_vocabulary_that_holds_special_tokens_as_words(kinds: dict[str, Tokenizer]) -> None:
    tok = kinds["unigram"]
    self_check = tok._backend.encode("a</s>b", add_special_tokens=False).ids
    assert not tok.special_ids.isdisjoint(self_check)
    assert tok.decode(tok.encode("a</s>b</s>")) == "a</s>b</s>"
    assert tok.decode(tok.encode("</s>")) == "</s>"


def test_an_end_token_that_the_file_does_not_call_special(tmp_path: Path) -> None:
    raw = tiny.byte_level()
    raw.add_tokens([AddedToken("<|eot|>", special=False, normalized=False)])
    tok = Tokenizer.from_folder(tiny.save(raw, tmp_path, eos_token="<|eot|>"))
    assert tok.eos_token_id == 264 and 264 in tok.special_ids
    assert 264 not in tok.encode("a<|eot|>b") and tok.decode([64, 264]) == "a"


def test_a_special_token_of_a_single_word_is_found_as_the_tokenizer_finds_it(tmp_path: Path) -> None:
    raw = tiny.byte_level()
    raw.add_special_tokens([AddedToken("<mask>", special=True, normalized=False, single_word=True)])
    folder = tiny.save(raw, tmp_path, "{% for m in messages %}{{ 'x<mask>y <mask> z' + m['content'] }}{% endfor %}")
    tok, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "q"}]
    want = oracle.apply_chat_template(messages, return_dict=False)
    assert want.count(264) == 1 and tok.render_chat(messages) == want


@pytest.mark.parametrize("count", [1, 500])
def test_many_special_tokens(tmp_path: Path, count: int) -> None:
    raw = tiny.byte_level()
    raw.add_special_tokens([AddedToken(f"<|{number}|>", special=True, normalized=False) for number in range(count)])
    folder = tiny.save(raw, tmp_path, tiny.CHATML.replace("'<|im_end|>\n'", "'<|0|><|im_end|>\n'"))
    tok, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "DEF"}]
    assert tok.render_chat(messages) == oracle.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
    text = "".join(f"<|{number}|>" for number in range(count))
    ids = tok.encode(text)
    assert tok.special_ids.isdisjoint(ids) and tok.decode(ids) == text
    rendered = tok.render_chat([{"role": "user", "content": text}])
    assert [one for one in rendered if one in tok.special_ids] == [262, 264, 263, 262]


# -------------------------------------------------------------------------------------------------------- templates


@every_kind
@pytest.mark.parametrize("contents", [["ab", "a"], ["a b", ""], ["<s>", "</s>b"]])
def test_chats_are_rendered_as_transformers_does(
    kinds: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast], kind: str, contents: list[str]
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    ids = kinds[kind].render_chat(messages)
    if "<" not in contents[0]:
        assert ids == oracles[kind].apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
    ours = [one for one in ids if one in kinds[kind].special_ids]
    plain = kinds[kind].render_chat([{"role": "user", "content": "b"} for _ in contents])
    assert ours == [one for one in plain if one in kinds[kind].special_ids]
