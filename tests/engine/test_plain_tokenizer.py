"""Plain text to ids and back, the same in every process, and what stands around a message of the environment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pearl.engine.plain_tokenizer import Joint, PlainTokenizer
from pearl.engine.tokenizer import Tokenizer

TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab <|im_end|>\n")), max_size=30)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[PlainTokenizer, PlainTokenizer]]:
    made = {name: PlainTokenizer(make(), name=name) for name, make in tiny.KINDS.items()}
    return {name: (one, PlainTokenizer.from_json(one.to_json())) for name, one in made.items()}


@pytest.mark.parametrize("name", tiny.KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_another_process_reads_and_writes_the_same(
    pairs: dict[str, tuple[PlainTokenizer, PlainTokenizer]], name: str, text: str
) -> None:
    one, other = pairs[name]
    ids = one.encode(text)
    assert other.encode(text) == ids
    assert other.plain_ids(text, first=False) == one.plain_ids(text, first=False)
    assert other.decode(ids) == one.decode(ids)
    assert (other.special_ids, other.byte_tokens, other.is_byte_level) == (one.special_ids, one.byte_tokens, one.is_byte_level)


@pytest.mark.parametrize("name", ["byte_level", "byte_level_in_sequence"])
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_is_what_the_library_makes_of_it(skip: bool, name: str) -> None:
    backend, rng = tiny.KINDS[name](), random.Random(3)
    tokenizer = PlainTokenizer(tiny.KINDS[name]())
    assert tokenizer.is_byte_level
    for _ in range(3000):
        ids = [rng.randrange(280) for _ in range(rng.randrange(9))]  # unknown ids, special ones and broken characters
        assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)
    with pytest.raises(ValueError, match="-1 is not a token id"):
        tokenizer.decode([1, -1], skip)


@pytest.mark.parametrize("template", tiny.TEMPLATES)
@pytest.mark.parametrize("content", ["go on", "  two  \n", "<|im_end|> said", "ünï \U0001f600", "a"])
def test_a_joint_elsewhere_gives_the_ids_of_the_template(tmp_path: Path, template: str, content: str) -> None:
    tokenizer = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, tiny.TEMPLATES[template]))
    joint = tokenizer.joint_of("user")
    assert joint is not None and Joint.takes(content)
    ids = joint.ids(PlainTokenizer.from_json(tokenizer.to_json()), content)
    for ended in (True, False):
        wanted = tokenizer.chat_continue({"role": "user", "content": content}, ended=ended)
        assert tokenizer.after_reply(ids, ended=ended) == wanted
    assert not any(map(Joint.takes, ("", " \n", None, 3)))


@pytest.mark.parametrize("chars", [None, "\n", " ", " \n"])
@pytest.mark.parametrize("method", ["lstrip", "strip", "rstrip"])
def test_a_joint_trims_what_the_template_trims(tmp_path: Path, method: str, chars: str | None) -> None:
    template = tiny.CHATML.replace("message['content']", f"message['content'].{method}({chars!r})")
    tokenizer = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    assert (tokenizer.joint_of("user") is None) == (chars is not None)  # such a template is asked about each content
    for content in ("\nab", " ab", "ab \n", "\n \tab \t"):
        ids = tokenizer.chat_continue({"role": "user", "content": content}, ended=True)
        trimmed = getattr(content, method)(chars)
        wanted = f"\n<|im_start|>user\n{trimmed}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


def test_no_merge_is_left_out_by_chance() -> None:
    backend = tiny.byte_level()
    wanted = PlainTokenizer(tiny.byte_level()).encode("abcabcDEF" * 4)
    backend.model.dropout = 0.5
    tokenizer = PlainTokenizer(backend)
    for one in (tokenizer, PlainTokenizer.from_json(tokenizer.to_json())):
        assert one.encode("abcabcDEF" * 4) == wanted


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="is no tokenizer"):
        PlainTokenizer.from_json("{}")


def in_vocabulary(special: str) -> PlainTokenizer:
    """A tokenizer whose model itself makes the special token of a word."""
    words = Backend(models.WordLevel({special: 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(special, special=True, normalized=False)])
    return PlainTokenizer(words)


def test_text_that_spells_a_special_token_very_often_is_text() -> None:
    tokenizer = in_vocabulary("<s>")
    for count in (1, 2, 5000):
        ids = tokenizer.encode("a <s> " * count)
        assert 0 not in ids and ids.count(1) == count


def test_a_special_token_of_one_character_cannot_be_text() -> None:
    tokenizer = in_vocabulary("S")
    assert tokenizer.encode("a a") == [1, 1]
    with pytest.raises(ValueError, match="makes a special token of it"):
        tokenizer.encode("a S a")
