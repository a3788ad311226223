"""`--set a.b=c`: command-line text into a Config, by the types of its fields. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from typing import Any

from pearl.config import CHOSEN, Config
from pearl.protocol import Role


def override(config: Config, settings: list[str]) -> Config:
    """Applies `a.b=c` strings and returns a new Config; ValueError names an unknown key and its nearest ones.

    All at once: what only fits together may come in any order. Of a key that is set twice the last one counts.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            example = f"{setting}={_example(config, setting)}" if setting in keys_of(config) else "seed=1"
            raise ValueError(f"--set {setting!r}: must be KEY=VALUE, for example --set {example}")
        _note(changes, config, key.split("."), text, key)
    return _changed(config, changes)


def _example(config: Config, key: str) -> Any:
    """The present value of a key, as it would be written."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return json.dumps(value) if isinstance(value, dict | bool) else "none" if value is None else value


def _note(changes: dict[str, Any], section: Any, path: list[str], text: str, key: str) -> None:
    """Enters a setting: the value of a field, or the changes of a section within `section`."""
    fields = {item.name for item in dataclasses.fields(section)} - {CHOSEN}
    name, rest = path[0], path[1:]
    if name not in fields:
        raise ValueError(_unknown(key, list(keys_of(Config()))))
    present = getattr(section, name)
    if dataclasses.is_dataclass(present):
        if not rest:
            inside = ", ".join(f"{key}.{item.name}" for item in dataclasses.fields(present))
            raise ValueError(f"--set {key}: is a section; set one of {inside}")
        _note(changes.setdefault(name, {}), present, rest, text, key)
    elif not rest:
        changes[name] = parse_as(typing.get_type_hints(type(section))[name], text, key)
    elif isinstance(present, dict):
        changes[name] = {**changes.get(name, present), ".".join(rest): _json_or_text(text)}
    else:
        raise ValueError(_unknown(key, list(keys_of(Config()))))


def _changed(section: Any, changes: dict[str, Any]) -> Any:
    """The section with all its changes at once."""
    values = dict(changes)
    for name in changes:
        if dataclasses.is_dataclass(present := getattr(section, name)):
            values[name] = _changed(present, changes[name])
    return dataclasses.replace(section, **values)


def _unknown(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=3, cutoff=0.5)
    tail = [name for name in valid if name.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hint = f"did you mean {', '.join(dict.fromkeys(tail + near))}?" if near or tail else "see --print for all keys"
    return f"--set {key}: no such key; {hint}"


def keys_of(section: Any, prefix: str = "") -> typing.Iterator[str]:
    """All dotted keys below a section, in order."""
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{prefix}{item.name}.")
        elif item.name != CHOSEN:
            yield prefix + item.name


def parse_as(hint: Any, text: str, key: str) -> Any:
    """Reads command-line text as the field's type; ValueError names the type it should be."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    kinds = [option for option in options if option is not type(None)]
    kind = kinds[0]
    if not text:
        none = " or none" if type(None) in options else ""
        raise ValueError(f"--set {key}=: the value is missing, it must be {_name_of(kind)}{none}")
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if kind is Role:
            return Role(text)
        if typing.get_origin(kind) is dict:
            return {**json.loads(text)}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--set {key}={text!r}: must be {_name_of(kind)}") from None
    return text


def _name_of(kind: Any) -> str:
    """What a value of this type looks like, for people."""
    if kind is Role:
        return f"one of {', '.join(Role)}"
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if typing.get_origin(kind) is dict:
        return """a JSON object, for example '{"size": 4}'"""
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(kind, "a value")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
