"""Tokenizer: text to ids and back, and conversations to ids by the model's own chat template.

Owns what is a special token and who may write one: the chat template alone. Text of users and environments is always plain
text, also where it spells a special token. It does not know requests or streams (`text_stream.py`). Invariants: `encode`
returns no special id; ids already in use are never tokenised again, a conversation only grows by `chat_continue`. Torch-free:
the tokenizer class of transformers is imported by the functions that need it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.engine.chat_template import ChatTemplate, Message
from pearl.engine.plain_tokenizer import Joint, PlainTokenizer

ASK, REPLY, NEXT = "Q1ask7", "Q2reply7", "Q3next7"
"""Dummy contents with which a template is asked what it puts around a message."""

STARTS_KEPT = 256
"""First prompts of conversations that are remembered."""
SPACES = (" ", "\n", "\t", "\u3000")
"""White space of several kinds: a template that trims some of it trims all, or is asked about each content."""


class Tokenizer(PlainTokenizer):
    """A fast tokenizer of transformers with the rules above. `from_folder` is the usual way to get one."""

    def __init__(self, fast: Any, *, name: str = "tokenizer") -> None:
        self._fast = fast
        super().__init__(fast.backend_tokenizer, name=name)
        self._template = ChatTemplate(fast, name, list(self._special_by_text))
        self.vocab_size: int = len(fast)
        """Number of tokens known; a model's vocabulary may be padded beyond it."""
        self.bos_token_id: int | None = fast.bos_token_id
        self.eos_token_id: int | None = fast.eos_token_id
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
        content = message.get("content")
        joint = self.joint_of(message.get("role"))
        if joint is not None and len(message) == 2 and Joint.takes(content):
            ids = joint.ids(self, content)
        else:
            ids = self._template_ids(*self._rest_after_reply(message), first=False)
        return self.after_reply(ids, ended=ended)

    def joint_of(self, role: Any) -> Joint | None:
        """What stands around messages of a role, None if the template is not as simple as that. ValueError as above."""
        return self._joints[role] if role in self._joints else self._derive_joint(role)

    def after_reply(self, ids: list[int], *, ended: bool) -> list[int]:
        """The ids of what follows an ended reply (`Joint.ids`) as they follow this one."""
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
        texts = [self._rest_after_reply({"role": role, "content": pad + NEXT + pad})[0] for pad in ("", *SPACES)]
        (head, _, tail), *padded = (text.partition(NEXT) for text in texts)
        rows = [(pad, before, after) for pad, (before, _, after) in zip(SPACES, padded, strict=True)]
        known = all(before in (head, head + pad) and after in (tail, pad + tail) for pad, before, after in rows)
        strips = {(before == head, after == tail) for _, before, after in rows}
        joint = None
        if known and len(strips) == 1 and texts[0].count(NEXT) == 1 and not self._strips:
            last = max((match.end() for match in self._special_pattern.finditer(head)), default=0)
            match = self._special_pattern.search(tail)
            first = match.start() if match else len(tail)
            joint = Joint(
                before=self._template_ids(head[:last], {}, first=False),
                head=head[last:],
                tail=tail[:first],
                after=self._template_ids(tail[first:], {}, first=False),
                strip=strips.pop(),
            )
        self._joints[role] = joint
        return joint

    # ------------------------------------------------------------------------------------------------ encoding

    def _template_ids(self, text: str, standins: dict[int, str], first: bool = True) -> list[int]:
        """Ids of a template's output: its own special tokens, and plain text (with the stand-ins undone) between them."""
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            ids += self.plain_ids(text[position : match.start()].translate(standins), first=first and not ids)
            ids.append(self._special_id(match))
            position = match.end()
        return ids + self.plain_ids(text[position:].translate(standins), first=first and not ids)

    def _special_id(self, match: re.Match[str]) -> int:
        text = match.group()
        return self._special_by_text[text if text in self._special_by_text else text.strip()]
