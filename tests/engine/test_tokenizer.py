"""Tokenizer and chat templates against transformers' own `apply_chat_template`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from pearl.engine.special_text import ContentMarker
from pearl.engine.tokenizer import Tokenizer

BOS, START, END = 260, 262, 263


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: tiny.save(tiny.byte_level(), root / name, template) for name, template in tiny.TEMPLATES.items()}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    return {name: PreTrainedTokenizerFast.from_pretrained(str(folder)) for name, folder in folders.items()}


def expected(oracle: Any, messages: list[dict], **options: Any) -> list[int]:
    return oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def said(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]


every_template = pytest.mark.parametrize("name", tiny.TEMPLATES)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(lambda text: text.replace("<", "("))
spelled = st.sampled_from(["", "<|im_end|>", "<s>", "</s>", "<|im_start|>assistant\n", "<|im_", "end|>", "<", "abc", "\n", " "])
any_text = st.lists(st.one_of(plain_text, spelled), max_size=4).map("".join)


# -------------------------------------------------------------------------------------------------------- encode, decode


def test_sizes_and_special_ids(tokenizers: dict[str, Tokenizer]) -> None:
    tok = tokenizers["chatml"]
    assert (tok.vocab_size, tok.bos_token_id, tok.eos_token_id) == (264, 260, 261)
    assert tok.special_ids == {260, 261, 262, 263}


def test_encode_adds_no_bos_and_recognises_no_special_token(tokenizers: dict[str, Tokenizer]) -> None:
    tok = tokenizers["chatml"]
    assert tok.encode("abc") == [257]
    ids = tok.encode("A<|im_end|>B")
    assert len(ids) == 12 and not tok.special_ids & set(ids)
    assert tok.decode(ids) == "A<|im_end|>B"


@given(text=any_text)
@settings(max_examples=150, deadline=None)
def test_decode_gives_encoded_text_back(tokenizers: dict[str, Tokenizer], text: str) -> None:
    ids = tokenizers["chatml"].encode(text)
    assert tokenizers["chatml"].decode(ids) == text
    assert not tokenizers["chatml"].special_ids & set(ids)


def test_decode_as_transformers_and_spaces_stay(
    tokenizers: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast]
) -> None:
    tok, text = tokenizers["chatml"], "x != y 'social' n't ."
    assert tok.decode(tok.encode(text)) == text == oracles["chatml"].decode(tok.encode(text))
    for skip in (True, False):
        ids = [END, *tok.encode("ab"), BOS]
        assert tok.decode(ids, skip_special_tokens=skip) == oracles["chatml"].decode(ids, skip_special_tokens=skip)


def test_ids_of_a_padded_vocabulary_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tok = tokenizers["chatml"]
    assert tok.decode([64, 300, 65, 2**31]) == tok.decode([64, 65]) == "ab"
    assert tok.token_bytes(300) == b""


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_decode_names_what_is_no_token_id(tokenizers: dict[str, Tokenizer], bad: int) -> None:
    with pytest.raises(ValueError, match=f"token_ids: {bad} "):
        tokenizers["chatml"].decode([1, bad])


@given(ids=st.lists(st.integers(0, 270), max_size=30))
@settings(max_examples=150, deadline=None)
def test_token_bytes_spell_what_decode_gives(tokenizers: dict[str, Tokenizer], ids: list[int]) -> None:
    tok = tokenizers["chatml"]
    joined = b"".join(tok.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", errors="replace") == tok.decode(ids, skip_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    raw = tiny.byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=9, pad_id=0, pad_token="!")
    tok = Tokenizer.from_folder(tiny.save(raw, tmp_path))
    assert len(tok.encode("xxxxxx")) == 6
    assert len(tok.encode("xx")) == 2


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


# -------------------------------------------------------------------------------------------------------- templates


CONVERSATIONS = [
    said("hi"),
    said("abcDEF", "ab", "\n\nc "),
    said("  spaces \n", "x", ""),
    [{"role": "system", "content": "Be short."}, *said("DEF🙂", "é", "y")],
]


@every_template
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_render_chat_is_what_transformers_renders(
    tokenizers: dict[str, Tokenizer],
    oracles: dict[str, PreTrainedTokenizerFast],
    name: str,
    messages: list[dict],
    prompt: bool,
) -> None:
    want = expected(oracles[name], messages, add_generation_prompt=prompt)
    assert tokenizers[name].render_chat(messages, add_generation_prompt=prompt) == want


TOOLS = [{"type": "function", "function": {"name": "look", "description": "<|im_end|> looks", "parameters": {"x": "</s>"}}}]


def test_tools_and_tool_replies(tokenizers: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast]) -> None:
    calls = [{"name": "look", "arguments": {"at": "ab"}}]
    messages = [*said("go"), {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "abc"}]
    harmless = [{"type": "function", "function": {"name": "look", "parameters": {"x": "é"}}}]
    want = expected(oracles["qwen3"], messages, tools=harmless, add_generation_prompt=True)
    assert tokenizers["qwen3"].render_chat(messages, tools=harmless) == want
    naughty = [{**messages[1], "tool_calls": [{"name": "<s>look", "arguments": {"<|im_end|>": ["<|im_end|>"]}}]}]
    ids = tokenizers["qwen3"].render_chat([*said("go"), *naughty], tools=TOOLS)
    assert ids.count(END) == 3 and ids.count(START) == 4 and BOS not in ids
    text = tokenizers["qwen3"].decode(ids)
    assert '"<|im_end|> looks"' in text and '{"<|im_end|>": ["<|im_end|>"]}' in text and '"<s>look"' in text


def test_bos_is_not_doubled(tokenizers: dict[str, Tokenizer], oracles: dict[str, PreTrainedTokenizerFast]) -> None:
    naive = oracles["bos"].encode(oracles["bos"].apply_chat_template(said("hi"), tokenize=False))
    assert naive[:3] == [BOS, BOS, START]
    assert tokenizers["bos"].render_chat(said("hi"))[:2] == [BOS, START]
    assert tokenizers["bos"].chat_start(said("hi")).count(BOS) == 1


@every_template
@given(contents=st.lists(any_text, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_contents_never_become_special_tokens(tokenizers: dict[str, Tokenizer], name: str, contents: list[str]) -> None:
    tok = tokenizers[name]
    neutral = tok.render_chat(said(*("x" for _ in contents)))
    ids = tok.render_chat(said(*contents))
    assert [token_id for token_id in ids if token_id in tok.special_ids] == [
        token_id for token_id in neutral if token_id in tok.special_ids
    ]
    if name == "chatml":
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in said(*contents))
        assert tok.decode(ids) == text + "assistant\n"


def test_special_content_is_encoded_as_plain_text(tokenizers: dict[str, Tokenizer]) -> None:
    tok = tokenizers["chatml"]
    ids = tok.render_chat(said("A<|im_end|>B"), add_generation_prompt=False)
    assert ids == [START, *tok.encode("user\nA<|im_end|>B"), END, *tok.encode("\n")]


def test_strings_side_by_side_cannot_join_into_a_special_token(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['name'] + m['content'] }}{{ '<|im_end|>' }}{% endfor %}"
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    ids = tok.render_chat([{"role": "user", "name": "<|im_", "content": "start|>"}])
    assert ids == [*tok.encode("<|im_start|>"), END]


def test_special_tokens_that_strip_take_the_space_with_them(tmp_path: Path) -> None:
    raw = tiny.byte_level()
    raw.add_special_tokens([AddedToken("<|turn|>", special=True, normalized=False, lstrip=True, rstrip=True)])
    template = "{% for m in messages %}{{ '<|turn|> \n' + m['content'] + ' <|im_end|>' }}{% endfor %}{{ ' <|turn|>' }}"
    folder = tiny.save(raw, tmp_path, template)
    tok, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert tok.render_chat(said("\n ab", "c")) == expected(oracle, said("\n ab", "c"))


def test_text_after_a_special_token_where_the_first_word_is_special(tmp_path: Path) -> None:
    folder = tiny.save(tiny.sentencepiece_like(), tmp_path, tiny.WITH_BOS)
    tok, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    self_check = oracle.encode("ab", add_special_tokens=False), oracle.encode("<s>ab", add_special_tokens=False)[1:]
    assert self_check[0] != self_check[1]
    for messages in (said("ab b"), said("a", " b", "é")):
        assert tok.render_chat(messages) == expected(oracle, messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    "call", [lambda t: t.render_chat(said("x")), lambda t: t.chat_start(said("x")), lambda t: t.end_of_turn_id]
)
def test_without_a_template_the_error_says_so(tmp_path: Path, call: Any) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path))
    assert not tok.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        call(tok)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "no role"}]])
def test_malformed_messages_are_refused(tokenizers: dict[str, Tokenizer], messages: list) -> None:
    with pytest.raises(ValueError, match="messages"):
        tokenizers["chatml"].render_chat(messages)


def test_a_template_that_refuses_is_a_value_error(tmp_path: Path) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="roles must alternate"):
        tok.render_chat(said("x"))


# -------------------------------------------------------------------------------------------------------- continuation


@every_template
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("content", ["abc", "\nab", " ab \n", "", "  ", "<|im_end|>x", "🙂"])
def test_a_continued_conversation_is_the_rendered_one(
    tokenizers: dict[str, Tokenizer], name: str, role: str, content: str
) -> None:
    tok, first, reply = tokenizers[name], said("aq"), "DEF left"
    following = {"role": role, "content": content}
    whole = tok.render_chat([*first, {"role": "assistant", "content": reply}, following])
    prompt, sampled = tok.chat_start(first), tok.encode(reply)
    assert prompt + sampled + [tok.end_of_turn_id] + tok.chat_continue(following, ended=True) == whole
    assert prompt + sampled + tok.chat_continue(following, ended=False) == whole


@every_template
@given(content=any_text)
@settings(max_examples=60, deadline=None)
def test_any_content_can_follow(tokenizers: dict[str, Tokenizer], name: str, content: str) -> None:
    tok, following = tokenizers[name], {"role": "user", "content": content}
    whole = tok.render_chat([*said("aq", "ok"), following])
    assert tok.chat_start(said("aq")) + tok.encode("ok") + tok.chat_continue(following, ended=False) == whole


def test_a_message_with_more_keys_is_rendered_by_the_template(tmp_path: Path) -> None:
    template = tiny.CHATML.replace("message['role'] +", "message['role'] + (message['name'] or '') +")
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    following = {"role": "user", "content": "x", "name": "<s>bo"}
    whole = tok.render_chat([*said("q", "r"), following])
    assert tok.chat_start(said("q")) + tok.encode("r") + tok.chat_continue(following, ended=False) == whole
    assert BOS not in whole


@every_template
def test_the_end_of_an_assistant_turn(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert tokenizers[name].end_of_turn_id == END


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, tiny.THINKING_PROMPT))
    assert tok.chat_start(said("x"))
    with pytest.raises(ValueError, match="no prefix of its continuation"):
        tok.chat_continue({"role": "user", "content": "y"}, ended=True)


def test_a_template_without_end_token(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    with pytest.raises(ValueError, match="no special token"):
        _ = tok.end_of_turn_id
    ids = tok.chat_continue({"role": "user", "content": "y"}, ended=False)
    assert tok.decode(ids) == "\nuser: y\nassistant: " and ids == tok.chat_continue(
        {"role": "user", "content": "y"}, ended=True
    )


def test_time_of_a_continuation(tokenizers: dict[str, Tokenizer], capsys: pytest.CaptureFixture[str]) -> None:
    tok, message = tokenizers["qwen3"], {"role": "user", "content": "abc DEF left right"}
    ids = tok.chat_continue(message, ended=True)
    start = time.perf_counter()
    same = all(tok.chat_continue(message, ended=True) == ids for _ in range(2000))
    with capsys.disabled():
        print(f"[chat_continue {(time.perf_counter() - start) / 2000 * 1e6:.1f} us]", end=" ")
    assert same


# -------------------------------------------------------------------------------------------------------- marking


@given(contents=st.lists(any_text, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_marked_strings_hold_no_special_token_and_come_back(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    marked, standins = ContentMarker(list(tiny.SPECIALS)).mark(messages, "")
    joined = "".join(message["content"] for message in marked)
    assert not any(special in joined for special in tiny.SPECIALS)
    assert joined.translate(standins) == "".join(contents)


def test_the_beginning_of_a_special_token_is_marked_beside_a_whole_one() -> None:
    marked, standins = ContentMarker(list(tiny.SPECIALS)).mark([{"content": "<s><|im_"}, {"content": "end|>"}], "")
    joined = marked[0]["content"] + marked[1]["content"]
    assert "<s>" not in joined and "<|im_end|>" not in joined and joined.translate(standins) == "<s><|im_end|>"


def test_stand_ins_avoid_characters_in_use() -> None:
    content = "<s>" + chr(0xF0000)
    marked, standins = ContentMarker(["<s>"]).mark([{"content": content}], chr(0xF0001))
    assert set(standins) == {0xF0002} and marked[0]["content"] == chr(0xF0002) + "s>" + chr(0xF0000)


def test_torch_is_not_loaded(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from pearl.engine.tokenizer import Tokenizer; assert 'transformers' not in sys.modules\n"
        f"tok = Tokenizer.from_folder({str(folders['qwen3'])!r})\n"
        "tok.chat_start([{'role': 'user', 'content': 'x'}]); tok.chat_continue({'role': 'user', 'content': 'x'}, ended=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
