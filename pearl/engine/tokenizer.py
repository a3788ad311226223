"""Tokenizer: text to ids and back, and conversations to ids by the model's own chat template.

Owns what is a special token and who may write one: the chat template alone. Text of users and environments is always plain
text, also where it spells a special token. It does not know requests or streams (`text_stream.py`). Invariants: `encode`
returns no special id; ids already in use are never tokenised again, a conversation only grows by `chat_continue`. Torch-free:
the tokenizer class of transformers is imported by the functions that need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.engine.chat_template import ChatTemplate, Message
from pearl.engine.special_text import special_pattern
from pearl.engine.text_stream import ByteRuns

ASK, REPLY, NEXT = "Q1ask7", "Q2reply7", "Q3next7"
"""Dummy contents with which a template is asked what it puts around a message."""

STARTS_KEPT = 256
"""First prompts of conversations that are remembered."""
PADDING = " \n "


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a template writes from the end of an assistant turn to the next generation prompt, around a message of one role.

    ids: `before` + encode(`head` + content + `tail`) + `after`. The plain text next to the content is encoded with it, since
    tokens may span both. `strip` says on which sides the template trims the content.
    """

    before: list[int]
    head: str
    tail: str
    after: list[int]
    strip: tuple[bool, bool]


class Tokenizer:
    """A fast tokenizer of transformers with the rules above. `from_folder` is the usual way to get one."""

    def __init__(self, fast: Any, *, name: str = "tokenizer") -> None:
        self._fast = fast
        self._name = name
        self._backend = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        decoders = _decoder_types(self._backend.decoder)
        added = self._backend.get_added_tokens_decoder()
        specials = {token_id: token for token_id, token in added.items() if token.special}
        self._special_by_text = {token.content: token_id for token_id, token in specials.items()}
        self._strips = any(token.lstrip or token.rstrip for token in specials.values())
        self._special_pattern = special_pattern(specials.values())
        self._template = ChatTemplate(fast, name, list(self._special_by_text))
        self._first_differs = self._is_first_piece_different()
        self._backend.encode_special_tokens = True
        self.special_ids: frozenset[int] = frozenset(specials)
        """Ids that `decode` leaves out unless asked."""
        self.vocab_size: int = len(fast)
        """Number of tokens known; a model's vocabulary may be padded beyond it."""
        self.bos_token_id: int | None = fast.bos_token_id
        self.eos_token_id: int | None = fast.eos_token_id
        self.is_byte_level: bool = set(decoders) == {"ByteLevel"}
        """Every token is a string of bytes, `token_bytes`."""
        fallback = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        usable = "ByteFallback" in decoders and None not in fallback
        self.byte_tokens: tuple[int, ...] = tuple(fallback) if usable else ()
        """Ids of the byte fall-back tokens "<0x00>" to "<0xFF>", if the tokenizer has them."""
        self._fallback_byte = {token_id: bytes([byte]) for byte, token_id in enumerate(self.byte_tokens)}
        self._byte_of = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._joints: dict[Any, Joint | None] = {}
        self._end_of_turn: int | None = None
        self._turn: tuple[str, str, list[int]] | None = None
        self._starts: dict[str, list[int]] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Loads `tokenizer.json` and its settings; never from the network. ValueError if there is none, or none that works."""
        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(f"model={str(folder)!r}: no tokenizer.json in this folder")
        from transformers import PreTrainedTokenizerFast

        try:
            fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises whatever a damaged file leads it to, plain Exception among it
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"model={str(folder)!r}: its tokenizer cannot be loaded ({reason})") from error
        return cls(fast, name=str(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and special tokens spelled in it stay plain text. ValueError for a lone surrogate."""
        try:
            [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=False)  # finds no offsets: half the time
            ids = encoded.ids
        except TypeError:  # what has no UTF-8 form cannot reach the tokenizer
            raise ValueError(f"text={text[:40]!r}: must be a string without lone surrogates") from None
        return ids if self.special_ids.isdisjoint(ids) else self._apart(text)

    def _apart(self, text: str) -> list[int]:
        """Ids of text in which the model itself finds a special token (its vocabulary holds it as a word): cut inside it."""
        match = self._special_pattern.search(text)
        if match is None:
            raise ValueError(f"text={text[:40]!r}: the tokenizer {self._name} makes a special token of it")
        cut = match.end() - 1
        return self.encode(text[:cut]) + self._continued_ids(text[cut:])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know (a padded vocabulary) give "". No clean-up of spaces.

        A maximal invalid sequence of bytes becomes one U+FFFD, whatever stands beside it.
        """
        try:
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
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            fallback = self._fallback_byte.get(token_id, b"")
            found = self._bytes[token_id] = self._spelled(token) if self.is_byte_level else fallback
        return found

    def _spelled(self, token: str) -> bytes:
        # A token with any character outside the byte alphabet is an added one that stands for itself.
        known = all(char in self._byte_of for char in token)
        return bytes(self._byte_of[char] for char in token) if known else token.encode()

    # ------------------------------------------------------------------------------------------------ conversations

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation ({"role", "content", ...} messages) in the model's template, BOS only where it writes one.

        As transformers' `apply_chat_template`, except that special tokens inside messages, tools and arguments become plain
        text. `tools` are JSON schemas or documented functions. Of several templates the one named `template` is used, by
        default "tool_use" with tools and "default" without. `template_args` are further variables of the template
        (`enable_thinking`). ValueError: no messages, no such template, or the template refuses, in its own words.
        """
        text, standins = self._template.render(messages, add_generation_prompt, tools, template, template_args)
        return self._template_ids(text, standins)

    def chat_start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a first prompt: the messages and the generation prompt. The last ones are kept: siblings begin alike."""
        key = repr(messages)
        if key not in self._starts:
            if len(self._starts) >= STARTS_KEPT:
                self._starts.pop(next(iter(self._starts)))
            self._starts[key] = self.render_chat(messages)
        return list(self._starts[key])

    @property
    def end_of_turn_id(self) -> int:
        """The special token that ends an assistant turn. ValueError if the template uses none."""
        if self._end_of_turn is None:
            match = self._special_pattern.search(self._assistant_turn()[1])
            if match is None:
                raise ValueError(f"chat template of {self._name}: ends an assistant turn with no special token")
            self._end_of_turn = self._special_id(match)
        return self._end_of_turn

    def chat_continue(self, message: Message, *, ended: bool) -> list[int]:
        """What follows the sampled ids of an assistant turn: the rest of that turn, `message`, the generation prompt.

        `ended`: the sampled ids end with `end_of_turn_id`; else it is put first. ValueError if the template does not keep
        what was said before as a prefix of the longer conversation.
        """
        role, content = message.get("role"), message.get("content")
        joint = self._joints[role] if role in self._joints else self._derive_joint(role)
        if joint is not None and len(message) == 2 and isinstance(content, str) and content and not content.isspace():
            content = content.lstrip() if joint.strip[0] else content
            content = content.rstrip() if joint.strip[1] else content
            ids = joint.before + self._plain_ids(joint.head + content + joint.tail, first=False) + joint.after
        else:
            ids = self._template_ids(*self._rest_after_reply(message), first=False)
        return ids if ended else self._assistant_turn()[2] + ids

    # ------------------------------------------------------------------------------------------------ templates

    def _assistant_turn(self) -> tuple[str, str, list[int]]:
        """(text of a first prompt, what the template writes after the reply to end the turn, ids of the latter)."""
        if self._turn is None:
            asked, replied = {"role": "user", "content": ASK}, {"role": "assistant", "content": REPLY}
            self._template.check([asked, replied])
            closed = self._template.write([asked, replied], False).rpartition(REPLY)[2]
            match = self._special_pattern.search(closed)
            ending = closed[: match.end()] if match else ""
            self._turn = self._template.write([asked], True), ending, self._template_ids(ending, {}, first=False)
        return self._turn

    def _rest_after_reply(self, message: Message) -> tuple[str, dict[int, str]]:
        """The template's text after the ended reply in [ask, reply, message, generation prompt], stand-ins still in it."""
        self._template.check([message])
        prompt, ending, _ = self._assistant_turn()
        marked, standins = self._template.mark([message])
        asked, replied = {"role": "user", "content": ASK}, {"role": "assistant", "content": REPLY}
        text = self._template.write([asked, replied, *marked], True)
        gap, found, rest = text[len(prompt) :].partition(REPLY)
        if not (text.startswith(prompt) and found and not gap.strip() and rest.startswith(ending)):
            raise ValueError(
                f"chat template of {self._name}: a conversation is no prefix of its continuation ({prompt + REPLY + ending!r} "
                f"became {text!r}), so turns cannot be added to sampled ids"
            )
        return rest[len(ending) :], standins

    def _derive_joint(self, role: Any) -> Joint | None:
        """The Joint of a role, None where the template treats contents in a way that it cannot express."""
        texts = [self._rest_after_reply({"role": role, "content": pad + NEXT + pad})[0] for pad in ("", PADDING)]
        (head, _, tail), (padded_head, _, padded_tail) = (text.partition(NEXT) for text in texts)
        known_head, known_tail = padded_head in (head, head + PADDING), padded_tail in (tail, PADDING + tail)
        joint = None
        if known_head and known_tail and texts[0].count(NEXT) == 1 and not self._strips:
            last = max((match.end() for match in self._special_pattern.finditer(head)), default=0)
            match = self._special_pattern.search(tail)
            first = match.start() if match else len(tail)
            joint = Joint(
                before=self._template_ids(head[:last], {}, first=False),
                head=head[last:],
                tail=tail[:first],
                after=self._template_ids(tail[first:], {}, first=False),
                strip=(padded_head == head, padded_tail == tail),
            )
        self._joints[role] = joint
        return joint

    # ------------------------------------------------------------------------------------------------ encoding

    def _template_ids(self, text: str, standins: dict[int, str], first: bool = True) -> list[int]:
        """Ids of a template's output: its own special tokens, and plain text (with the stand-ins undone) between them."""
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            ids += self._plain_ids(text[position : match.start()].translate(standins), first=first and not ids)
            ids.append(self._special_id(match))
            position = match.end()
        return ids + self._plain_ids(text[position:].translate(standins), first=first and not ids)

    def _special_id(self, match: re.Match[str]) -> int:
        text = match.group()
        return self._special_by_text[text if text in self._special_by_text else text.strip()]

    def _plain_ids(self, text: str, *, first: bool) -> list[int]:
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
