"""ChatTemplate: conversations to text by the model's own template, with whatever users wrote kept apart from special tokens.

Owns which of several templates is used, tools as schemas, and the errors of templates. It knows no ids. Invariant: a special
token in the text was written by the template. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pearl.engine.special_text import ContentMarker

Message = dict[str, Any]


class ChatTemplate:
    """The template or templates of a fast tokenizer of transformers; `specials` are the texts of its special tokens."""

    def __init__(self, fast: Any, name: str, specials: list[str]) -> None:
        self._fast = fast
        self._name = name
        self._marker = ContentMarker(specials)

    @property
    def exists(self) -> bool:
        return self._fast.chat_template is not None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None,
        template: str | None,
        arguments: Mapping[str, Any] | None,
    ) -> tuple[str, dict[int, str]]:
        """(text, {code of a stand-in: the character it stands for}); see `Tokenizer.render_chat`."""
        self.check(messages)
        name = self._chosen(template, bool(tools))
        given = [list(messages), None if tools is None else _schemas(tools), dict(arguments or {})]
        (marked, specs, marked_arguments), standins = self.mark(given)
        return self.write(marked, add_generation_prompt, specs, name, marked_arguments), standins

    def mark(self, value: Any) -> tuple[Any, dict[int, str]]:
        """(nested lists and dicts in which no string holds a special token, the stand-ins)."""
        return self._marker.mark(value, str(self._fast.chat_template))

    def _chosen(self, template: str | None, tools: bool) -> str | None:
        """The name of the template to use, None if there is only one, which has none. ValueError if it is not there."""
        named = self._fast.chat_template
        if not isinstance(named, dict):
            if template is not None:
                raise ValueError(f"template={template!r}: {self._name} has a single template without a name")
            return None
        name = template or ("tool_use" if tools and "tool_use" in named else "default")
        if name not in named:
            raise ValueError(f"template={template!r}: {self._name} has {', '.join(sorted(named))}, no {name!r}")
        return name

    def write(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """What the template makes of messages as they are. ValueError in its own words if it refuses."""
        options = {**(arguments or {}), "tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            return self._fast.apply_chat_template(list(messages), tools=tools, chat_template=template, **options)
        except Exception as error:  # a template is a program: it raises what its author or its input leads it to
            reason = str(error) or type(error).__name__
            raise ValueError(f"messages: the chat template of {self._name} refuses them: {reason}") from error

    def check(self, messages: Sequence[Message]) -> None:
        """ValueError if there is no template, or if these are no messages."""
        if not self.exists:
            raise ValueError(f"messages: {self._name} has no chat template; give a prompt as text or token ids")
        if not messages:
            raise ValueError("messages=[]: must hold at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages: {message!r} must be a dict with a role")


def _schemas(tools: Sequence[Any]) -> list[Any]:
    """Tools as JSON schemas; functions are described by their annotations and docstring. ValueError for anything else."""
    from transformers.utils import get_json_schema

    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ValueError(f"tools={tools!r}: must be a list of JSON schemas or functions")
    try:
        return [get_json_schema(tool) if callable(tool) else dict(tool) for tool in tools]
    except Exception as error:  # a docstring that does not describe every argument, or no tool at all
        raise ValueError(f"tools: each must be a JSON schema or a function with annotations and docstring: {error}") from error
