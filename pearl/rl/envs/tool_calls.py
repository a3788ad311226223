"""Calls of tools in a model's reply, in the form that Qwen's and Hermes' chat templates write them.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    </tool_call>

Owns the description of tools in a system prompt, the reading of a call and the form of what a tool said. It does not know
what the tools do. Invariants: a reply is read only if it holds exactly one call, of a known tool, with exactly its
arguments and of their types; what is wrong is said in a sentence that the model can go by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TYPES: dict[str, type] = {"string": str, "integer": int}
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


class ToolCallError(ValueError):
    """The reply holds no call that can be carried out; the message is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`arguments` are names and JSON types ("string" or "integer"), all required but those in `optional`."""

    name: str
    description: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the function, as chat templates take it."""
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        required = [name for name in self.arguments if name not in self.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool and its arguments, checked."""

    name: str
    arguments: dict[str, Any]


def described(tools: Sequence[Tool]) -> str:
    """The part of a system prompt that says which tools there are and how they are called."""
    schemas = "\n".join(json.dumps(tool.schema()) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
        f"signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\nFor each function call, return a json "
        "object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def written(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def response(text: str) -> str:
    """What a tool said, as the templates show it to the model."""
    return f"<tool_response>\n{text}\n</tool_response>"


def has_call(text: str) -> bool:
    """Whether a reply tries to call a tool."""
    return "<tool_call>" in text


def read_call(text: str, tools: Sequence[Tool]) -> Call:
    """The only call of a reply. ToolCallError says what is wrong."""
    bodies = _CALL.findall(text)
    if len(bodies) != 1 or text.count("<tool_call>") != 1:
        raise ToolCallError(f"a reply must hold exactly one <tool_call>...</tool_call>, this one holds {len(bodies)}")
    try:
        body = json.loads(bodies[0])
    except (json.JSONDecodeError, RecursionError) as error:
        raise ToolCallError(f"the call is not JSON: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("arguments", {}), dict):
        raise ToolCallError('the call must look like {"name": ..., "arguments": {...}}')
    tool = next((tool for tool in tools if tool.name == body.get("name")), None)
    if tool is None:
        raise ToolCallError(f"no tool {body.get('name')!r}; there are: {', '.join(tool.name for tool in tools)}")
    return Call(name=tool.name, arguments=_checked(tool, body.get("arguments", {})))


def _checked(tool: Tool, given: dict[str, Any]) -> dict[str, Any]:
    takes = ", ".join(tool.arguments) or "nothing"
    for name in given:
        if name not in tool.arguments:
            raise ToolCallError(f"{tool.name} takes {takes}, not {name!r}")
    for name, kind in tool.arguments.items():
        if name not in given and name not in tool.optional:
            raise ToolCallError(f"{tool.name} needs {name} (it takes {takes})")
        value = given.get(name)
        if name in given and (not isinstance(value, _TYPES[kind]) or isinstance(value, bool)):
            raise ToolCallError(f"{tool.name}: {name} must be of type {kind}")
    return given
