"""Plain text to ids and back, by a tokenizer of the tokenizers library: all of tokenizing that needs no chat template.

Owns `encode` and `decode`, and `Joint`, what stands around a message that follows a reply. It knows no templates and no files.
Invariants: `encode` returns no special id, and the same ids for the same text; a `PlainTokenizer` made of `to_json` of another,
in any process, gives the same ids and the same text. Torch-free, and free of transformers: the library that it needs is small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import msgspec

from pearl.engine.special_text import special_pattern
from pearl.engine.text_stream import ByteRuns


class Joint(msgspec.Struct, frozen=True, kw_only=True):
    """What a template writes from the end of an assistant turn to the next generation prompt, around a message of one role.

    ids: `before` + encode(`head` + content + `tail`) + `after`. The plain text next to the content is encoded with it, since
    tokens may span both. `strip` says on which sides the template trims the content.
    """

    before: list[int]
    head: str
    tail: str
    after: list[int]
    strip: tuple[bool, bool]

    @staticmethod
    def takes(content: Any) -> TypeGuard[str]:
        """Whether this is content around which a template writes what it writes around any other."""
        return isinstance(content, str) and bool(content) and not content.isspace()

    def ids(self, tokenizer: PlainTokenizer, content: str) -> list[int]:
        """Those of a message with this content (see `takes`), which follows an ended reply."""
        content = content.lstrip() if self.strip[0] else content
        content = content.rstrip() if self.strip[1] else content
        return self.before + tokenizer.plain_ids(self.head + content + self.tail, first=False) + self.after


class _Table(dict[int, bytes]):
    """Finds out what it is first asked for."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._find(token_id)
        return found


class PlainTokenizer:
    """`backend`: a `tokenizers.Tokenizer`, which is the caller's no more."""

    def __init__(self, backend: Any, *, name: str = "tokenizer") -> None:
        self._name = name
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        if getattr(self._backend.model, "dropout", None):
            self._backend.model.dropout = None  # else merges are left out by chance, as for training
        decoders = _decoder_types(self._backend.decoder)
        added = self._backend.get_added_tokens_decoder()
        specials = {token_id: token for token_id, token in added.items() if token.special}
        self._special_by_text = {token.content: token_id for token_id, token in specials.items()}
        self._strips = any(token.lstrip or token.rstrip for token in specials.values())
        self._special_pattern = special_pattern(specials.values())
        self._first_differs = self._is_first_piece_different()
        self._backend.encode_special_tokens = True
        self.special_ids: frozenset[int] = frozenset(specials)
        """Ids that `decode` leaves out unless asked."""
        self.is_byte_level: bool = set(decoders) == {"ByteLevel"}
        """Every token is a string of bytes, `token_bytes`."""
        fallback = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        usable = "ByteFallback" in decoders and None not in fallback
        self.byte_tokens: tuple[int, ...] = tuple(fallback) if usable else ()
        """Ids of the byte fall-back tokens "<0x00>" to "<0xFF>", if the tokenizer has them."""
        self._fallback_byte = {token_id: bytes([byte]) for byte, token_id in enumerate(self.byte_tokens)}
        self._byte_of = byte_alphabet()
        self._bytes = _Table(self._bytes_of)
        self._shown = _Table(lambda token_id: b"" if token_id in self.special_ids else self._bytes[token_id])

    @classmethod
    def from_json(cls, text: str) -> PlainTokenizer:
        """The one whose `to_json` this is. ValueError if it is not one."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"text={text[:40]!r}: is no tokenizer: {error}") from error

    def to_json(self) -> str:
        """All that there is to know of it, for `from_json`. ValueError if a part of it is Python's and cannot be told."""
        try:
            return str(self._backend.to_str())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {self._name}: cannot be written down: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and special tokens spelled in it stay plain text. ValueError for a lone surrogate."""
        try:
            [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=False)  # finds no offsets: half the time
            ids = encoded.ids
        except TypeError:  # what has no UTF-8 form cannot reach the tokenizer
            raise ValueError(f"text={text[:40]!r}: must be a string without lone surrogates") from None
        return ids if self.special_ids.isdisjoint(ids) else self._apart(text)

    def _apart(self, text: str) -> list[int]:
        """Ids of text in which the model itself finds special tokens (its vocabulary holds them as words): cut inside each."""
        cuts = [match.end() - 1 for match in self._special_pattern.finditer(text) if match.end() - match.start() > 1]
        if not cuts:
            raise ValueError(f"text={text[:40]!r}: the tokenizer {self._name} makes a special token of it")
        first, *others = (text[start:end] for start, end in pairwise([0, *cuts, len(text)]))
        ids = self.encode(first)
        for piece in others:
            ids += self._continued_ids(piece)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know (a padded vocabulary) give "". No clean-up of spaces.

        A maximal invalid sequence of bytes becomes one U+FFFD, whatever stands beside it.
        """
        try:
            if self.is_byte_level:  # what the library does too, in a tenth of the time
                spelled = self._shown if skip_special_tokens else self._bytes
                return b"".join(map(spelled.__getitem__, token_ids)).decode("utf-8", "replace")
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            worst = next(token_id for token_id in token_ids if not 0 <= token_id < 2**32)
            raise ValueError(f"token_ids: {worst} is not a token id, must be in [0, 2**32)") from None
        if self.byte_tokens and "\ufffd" in text:
            mended = self._mended(token_ids, skip_special_tokens)
            text = self._backend.decode(mended, skip_special_tokens=skip_special_tokens)
        return text

    def _mended(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        runs, mended = ByteRuns(self), []
        for token_id in token_ids:
            if not (skip_special_tokens and token_id in self.special_ids):
                mended += runs.feed(token_id)
        return mended + runs.finish()

    def knows(self, token_id: int) -> bool:
        """Whether the tokenizer has such a token."""
        return token_id in self.special_ids or self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an unknown id.

        Known for every token of a byte-level tokenizer, of others only for byte fall-back tokens ("<0x0A>"); else empty.
        """
        return self._bytes[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        fallback = self._fallback_byte.get(token_id, b"")
        return self._spelled(self._backend.id_to_token(token_id) or "") if self.is_byte_level else fallback

    def _spelled(self, token: str) -> bytes:
        # A token with any character outside the byte alphabet is an added one that stands for itself.
        known = all(char in self._byte_of for char in token)
        return bytes(self._byte_of[char] for char in token) if known else token.encode()

    def plain_ids(self, text: str, *, first: bool) -> list[int]:
        """Ids of a piece of plain text; `first`: nothing precedes it."""
        if not text:
            return []
        return self.encode(text) if first or not self._first_differs else self._continued_ids(text)

    def _continued_ids(self, text: str) -> list[int]:
        """SentencePiece tokenizers put a space before the first word of a text: encodes behind a line break, then drops it."""
        anchor = self.encode("\n")
        ids = self.encode("\n" + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    def _is_first_piece_different(self) -> bool:
        """Whether plain text is encoded otherwise at the very beginning than after a special token."""
        special = next(iter(self._special_by_text), None)
        if special is None:
            return False
        self._backend.encode_special_tokens = False
        after, alone = (self._backend.encode(text, add_special_tokens=False).ids for text in (special + "a", "a"))
        return after[1:] != alone


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves, the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _decoder_types(decoder: Any) -> list[str]:
    """What a decoder of the tokenizers library is made of: ["ByteLevel"], ["Replace", "ByteFallback", ...], []."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return [part["type"] for part in state.get("decoders", [state] if state else [])]
