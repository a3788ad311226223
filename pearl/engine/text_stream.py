"""TextStream: the text of one request while its tokens arrive, and the stop strings that may end it.

Owns incremental detokenisation and stop matching. It does not know requests, EOS rules or who reads the text (the caller says
which tokens are hidden), and uses a tokenizer only through `DecodingTokenizer`. Invariants: the pieces it gives out, joined,
are the decoded visible tokens up to the first stop string; no piece ends inside a character; a token costs the same whatever
the length of the text; where a stop string matches does not depend on how the text was cut into tokens. Torch-free.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class DecodingTokenizer(Protocol):
    """What a TextStream needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def is_byte_level(self) -> bool: ...
    @property
    def byte_tokens(self) -> Sequence[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def knows(self, token_id: int) -> bool: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class ByteDecoder:
    """Tokens that are byte strings to text: holds back at most the 3 bytes of an unfinished UTF-8 character.

    The bytes themselves tell an unfinished character from a real U+FFFD, so the latter never waits. A maximal invalid
    sequence becomes one U+FFFD (Unicode 16, chapter 3.9), in Python's decoder as in the tokenizer's.
    """

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteRuns:
    """Mends the byte fall-back tokens ("<0x0A>") of a stream of ids, so that they always spell whole characters.

    A decoder replaces a whole run of such tokens by U+FFFD once one of them is invalid, also characters that have been shown
    by then. Here a maximal invalid sequence alone becomes U+FFFD, as with tokens that are byte strings. Valid runs, and
    tokenizers without such tokens, pass unchanged.
    """

    __slots__ = ("_bytes_of", "_decoder", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        self._bytes_of, self._tokens = tokenizer.token_bytes, tokenizer.byte_tokens
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> list[int]:
        if not self._tokens:
            return [token_id]
        byte = self._bytes_of(token_id)
        if byte:
            return self._spelled(self._decoder.decode(byte))
        return [*self.finish(), token_id] if self._tokenizer.knows(token_id) else []  # decoders skip what nobody knows

    def finish(self) -> list[int]:
        """Ends a run: U+FFFD for a character that was not finished."""
        return self._spelled(self._decoder.decode(b"", final=True))

    def _spelled(self, text: str) -> list[int]:
        return [self._tokens[byte] for byte in text.encode()]


class WindowDecoder:
    """For tokenizers whose tokens are not byte strings (SentencePiece): decodes a short window twice per token.

    The tokens shown last stay in the window as context, since such decoders treat the first token of a text specially. A
    U+FFFD at the end is taken for an unfinished character unless byte fall-back tokens tell (`ByteRuns`), but for no longer
    than `LIMIT` tokens.
    """

    LIMIT = 8

    __slots__ = ("_context", "_decode", "_pending", "_runs", "_shown", "_tells")

    def __init__(self, tokenizer: DecodingTokenizer) -> None:
        self._decode = tokenizer.decode
        self._runs = ByteRuns(tokenizer)
        self._tells = bool(tokenizer.byte_tokens)
        self._context: list[int] = []
        self._shown = 0
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        new = self._runs.feed(token_id)
        if not new:
            return ""
        self._pending += new
        text = self._decode(self._context + self._pending)
        unfinished = (text.endswith("\ufffd") and not self._tells) or len(text) <= self._shown
        return "" if unfinished and len(self._pending) < self.LIMIT else self._advance(text)

    def finish(self) -> str:
        self._pending += self._runs.finish()
        return self._advance(self._decode(self._context + self._pending)) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[self._shown :]
        if new:  # tokens that show nothing are no context: what comes next would be taken for the first of the text
            self._context = self._pending
            self._shown = len(self._decode(self._context))
        self._pending = []
        return new


class StopMatcher:
    """Finds the stop string that is complete first; of those complete at the same character, the longest."""

    __slots__ = ("_last", "_longest", "_prefixes", "_stop")

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._prefixes = {text[:size] for text in stop for size in range(1, len(text))}
        self._last = {prefix[-1] for prefix in self._prefixes}
        self._longest = max((len(text) for text in stop), default=1) - 1

    def find(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends after `text[:old]`, or None."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def held(self, text: str) -> int:
        """The number of characters at the end of `text` that may be the beginning of a stop string."""
        if not text or text[-1] not in self._last:
            return 0
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._prefixes), 0)


class TextStream:
    """Incremental text of one request.

    Special tokens are matched against stop strings but not shown; hidden tokens (a stop or EOS token) are neither. The text is
    cut before the stop string. A match that is complete before `min_tokens` tokens were pushed (hidden ones count) is ignored
    for good. With `streaming=False` and no stop strings nothing is decoded before `close()`.

    `stopped_by` is the stop string that ended the text, None until then.
    """

    __slots__ = (
        "_closed",
        "_count",
        "_decoder",
        "_held",
        "_ids",
        "_matcher",
        "_min_tokens",
        "_pieces",
        "_shown",
        "_tokenizer",
        "stopped_by",
    )

    def __init__(
        self, tokenizer: DecodingTokenizer, *, stop: Sequence[str] = (), min_tokens: int = 0, streaming: bool = True
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={stop!r}: must be a list of non-empty strings")
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._decoder: ByteDecoder | WindowDecoder | None = None
        if stop or streaming:
            self._decoder = ByteDecoder(tokenizer) if tokenizer.is_byte_level else WindowDecoder(tokenizer)
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._count = 0
        self._held = ""
        self._shown = ""
        self._closed = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int, *, hidden: bool = False) -> str:
        """Takes one sampled token; returns the text that is now final and cannot be part of a stop string ("" if none)."""
        self._count += 1
        if hidden or self._closed or self.stopped_by is not None:
            return ""
        if self._decoder is None:
            self._ids.append(token_id)
            return ""
        special = token_id in self._tokenizer.special_ids
        if self._matcher is None:
            return "" if special else self._give(self._decoder.feed(token_id))
        if special:
            return self._match(self._matcher, self._tokenizer.decode((token_id,), skip_special_tokens=False), shown="0")
        return self._match(self._matcher, self._decoder.feed(token_id), shown="1")

    def close(self) -> str:
        """No more tokens: returns the text still held back ("" after a stop string, or when closed before)."""
        if self._closed or self.stopped_by is not None:
            return ""
        self._closed = True
        if self._decoder is None:
            return self._give(self._tokenizer.decode(self._ids))
        return self._give(self._release(len(self._held)) + self._decoder.finish())

    def _match(self, matcher: StopMatcher, new: str, shown: str) -> str:
        """Appends `new` to the text held back; gives out what cannot be part of a stop string."""
        if not new:
            return ""
        old = len(self._held)
        self._held += new
        self._shown += shown * len(new)
        found = matcher.find(self._held, old) if self._count >= self._min_tokens else None
        if found is not None:
            start, self.stopped_by = found
            return self._give(self._release(start))
        return self._give(self._release(len(self._held) - matcher.held(self._held)))

    def _release(self, size: int) -> str:
        """Takes `size` characters off the text held back and returns those of them that are shown.

        `_shown` runs parallel to `_held`: "1" for a character of the text, "0" for one of a special token.
        """
        text, marks = self._held[:size], self._shown[:size]
        self._held, self._shown = self._held[size:], self._shown[size:]
        return text if "0" not in marks else "".join(char for char, mark in zip(text, marks, strict=True) if mark == "1")

    def _give(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
