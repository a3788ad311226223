"""Incremental text: whole characters, genuine U+FFFD, stop strings, bounded work."""

from __future__ import annotations

import time

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.text_stream import TextStream, WindowDecoder
from pearl.engine.tokenizer import Tokenizer

END = 263
DEF = 259


@pytest.fixture(scope="session")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.save(tiny.sentencepiece_like(), tmp_path_factory.mktemp("words")))


def pushed(stream: TextStream, ids: list[int]) -> list[str]:
    """Pieces until the stream stops; `close` is the caller's."""
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stopped_by is not None:
            break
    return pieces


def one_by_one(tok: Tokenizer, *texts: str) -> list[int]:
    return [token_id for text in texts for token_id in tok.encode(text)]


# -------------------------------------------------------------------------------------------------------- characters


def test_characters_are_never_cut(tok: Tokenizer) -> None:
    ids = tok.encode("🙂🙂")
    assert len(ids) == 8
    stream = TextStream(tok)
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "🙂", "", "", "", "🙂"]
    assert stream.close() == "" and stream.text == "🙂🙂"


def test_a_genuine_replacement_character_flows(tok: Tokenizer) -> None:
    text = "a\ufffdb" * 100
    stream, waiting = TextStream(tok), 0
    for count, token_id in enumerate(tok.encode(text), start=1):
        stream.push(token_id)
        waiting = max(waiting, count - len(stream.text.encode()))
    assert waiting == 2 and stream.text == text


@given(ids=st.lists(st.integers(0, 270), max_size=40), stop=st.sampled_from([[], ["\x00never\x00"]]), lazy=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_decoded_ids(tok: Tokenizer, ids: list[int], stop: list[str], lazy: bool) -> None:
    stream = TextStream(tok, stop=stop, streaming=not lazy)
    pieces = [*pushed(stream, ids), stream.close()]
    assert "".join(pieces) == stream.text == tok.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_replacement_character_is_invented(tok: Tokenizer, text: str) -> None:
    stream = TextStream(tok)
    pieces = pushed(stream, tok.encode(text))
    assert "".join(pieces) == text and stream.close() == ""
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_an_unfinished_character_shows_at_the_end_only(tok: Tokenizer) -> None:
    ids = tok.encode("x🙂")[:-1]
    stream = TextStream(tok)
    assert pushed(stream, ids) == ["x", "", "", ""]
    assert stream.close() == "\ufffd" and stream.close() == "" and stream.text == tok.decode(ids)


@given(text=st.text(st.sampled_from("ab é🙂x\ufffd\n"), max_size=25))
@settings(max_examples=200, deadline=None)
def test_tokenizers_of_words_join_too(words: Tokenizer, text: str) -> None:
    assert not words.is_byte_level
    ids = words.encode(text)
    stream = TextStream(words)
    pieces = [*pushed(stream, ids), stream.close()]
    assert "".join(pieces) == stream.text == words.decode(ids)
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_the_window_of_a_word_decoder_is_bounded() -> None:
    sizes: list[int] = []

    class Spy:
        byte_tokens = ()

        def token_bytes(self, token_id: int) -> bytes:
            return b""

        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(token_ids))
            return "\ufffd" * len(token_ids)

    decoder = WindowDecoder(Spy())  # type: ignore[arg-type]
    text = "".join(decoder.feed(token_id) for token_id in range(100)) + decoder.finish()
    assert text == "\ufffd" * 100
    assert max(sizes) <= 2 * WindowDecoder.LIMIT and len(sizes) <= 2 * 100 + 2


# -------------------------------------------------------------------------------------------------------- stop strings


def test_no_beginning_of_a_stop_string_is_shown(tok: Tokenizer) -> None:
    ids = tok.encode("DEFGHIJ")
    assert ids[0] == DEF and len(ids) == 5
    stream = TextStream(tok, stop=["DEFGHIJ"])
    assert "".join(pushed(stream, ids)) == "" and stream.stopped_by == "DEFGHIJ" and stream.close() == ""


def test_a_stop_string_that_does_not_complete_is_shown(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["DEFGHIJ"])
    assert pushed(stream, tok.encode("DEFGHx")) == ["", "", "", "DEFGHx"]
    assert stream.stopped_by is None
    assert stream.push(DEF) == "" and stream.close() == "DEF" and stream.text == "DEFGHxDEF"


def test_a_stop_string_may_end_inside_a_token(tok: Tokenizer) -> None:
    ids = [256, *tok.encode("c"), *tok.encode("a")]
    stream = TextStream(tok, stop=["bc"])
    assert len(pushed(stream, ids)) == 2 and stream.text == "a" and stream.stopped_by == "bc"
    inside = TextStream(tok, stop=["E"])
    assert pushed(inside, [DEF]) == ["D"] and inside.stopped_by == "E"


def test_a_stop_string_equal_to_a_special_token_fires(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["<|im_end|>"])
    assert len(pushed(stream, [256, END, *tok.encode("c")])) == 2
    assert stream.text == "ab" and stream.stopped_by == "<|im_end|>"


def test_special_tokens_held_back_are_not_shown(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["b<|im_end|>Z"])
    ids = [256, END, *tok.encode("c")]
    assert pushed(stream, ids) == ["a", "", "bc"] and stream.text == "abc" == tok.decode(ids)
    spanning = TextStream(tok, stop=["b<|im_end|>c"])
    pushed(spanning, ids)
    assert spanning.text == "a" and spanning.stopped_by == "b<|im_end|>c"


def test_hidden_tokens_are_neither_shown_nor_matched(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["<|im_end|>"])
    assert stream.push(256) == "ab" and stream.push(END, hidden=True) == ""
    assert stream.stopped_by is None and stream.close() == "" and stream.text == "ab"
    held = TextStream(tok, stop=["abcd"])
    assert held.push(257) == "" and held.push(64, hidden=True) == "" and held.close() == "abc"


def test_a_match_before_min_tokens_is_ignored(tok: Tokenizer) -> None:
    ids = one_by_one(tok, "a", "\n", "b", "c", "\n", "e", "\n")
    early = TextStream(tok, stop=["\n"])
    assert len(pushed(early, ids)) == 2
    stream = TextStream(tok, stop=["\n"], min_tokens=5)
    assert len(pushed(stream, ids)) == 5 and stream.text == "a\nbc" and stream.stopped_by == "\n"
    later = TextStream(tok, stop=["\n"], min_tokens=6)
    assert len(pushed(later, ids)) == 7 and later.text == "a\nbc\ne"


def test_the_stop_string_complete_first_wins(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["abcd", "bc", "c"])
    pushed(stream, tok.encode("xabcd"))
    assert stream.stopped_by == "bc" and stream.text == "xa"
    within_one_token = TextStream(tok, stop=["abc", "b"])
    assert within_one_token.push(257) == "a" and within_one_token.stopped_by == "b"


@given(
    text=st.text("ab<", max_size=14),
    stop=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.booleans(), min_size=14, max_size=14),
)
@settings(max_examples=300, deadline=None)
def test_where_it_stops_does_not_depend_on_the_tokens(tok: Tokenizer, text: str, stop: list[str], cuts: list[bool]) -> None:
    want, by = text, None
    for end in range(1, len(text) + 1):
        matches = [one for one in stop if text[:end].endswith(one)]
        if matches:
            by = max(matches, key=len)
            want = text[: end - len(by)]
            break
    ids: list[int] = []
    place = 0
    while place < len(text):
        pair = text[place : place + 2] == "ab" and cuts[place]
        ids += [256] if pair else tok.encode(text[place])
        place += 2 if pair else 1
    stream = TextStream(tok, stop=stop)
    shown = ""
    for token_id in ids:
        shown += stream.push(token_id)
        assert want.startswith(shown)
    shown += stream.close()
    assert (shown, stream.text, stream.stopped_by) == (want, want, by)


def test_nothing_comes_after_a_stop_or_a_close(tok: Tokenizer) -> None:
    stream = TextStream(tok, stop=["b"])
    pushed(stream, [256])
    assert stream.push(DEF) == "" and stream.text == "a"
    closed = TextStream(tok)
    closed.close()
    assert closed.push(DEF) == "" and closed.text == ""


def test_without_a_reader_text_comes_at_the_end(tok: Tokenizer) -> None:
    stream = TextStream(tok, streaming=False)
    assert pushed(stream, [256, END, DEF]) == ["", "", ""] and stream.text == ""
    assert stream.close() == "abDEF" == stream.text
    watched = TextStream(tok, stop=["b"], streaming=False)
    assert pushed(watched, [256, DEF]) == ["a"]


@pytest.mark.parametrize("stop", [[""], "text", [1]])
def test_stop_must_be_non_empty_strings(tok: Tokenizer, stop: list) -> None:
    with pytest.raises(ValueError, match="stop="):
        TextStream(tok, stop=stop)


def test_time_per_token(tok: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    ids, times = tok.encode("abc DEF " * 300), {}
    for name, options in {"plain": {}, "stop": {"stop": ["DEFG", "zz"]}, "lazy": {"streaming": False}}.items():
        stream = TextStream(tok, **options)  # type: ignore[arg-type]
        start = time.perf_counter()
        for token_id in ids:
            stream.push(token_id)
        times[name] = (time.perf_counter() - start) / len(ids) * 1e6
        stream.close()
        assert stream.text == tok.decode(ids)
    with capsys.disabled():
        print("[us per token " + ", ".join(f"{name} {value:.2f}" for name, value in times.items()) + "]", end=" ")
