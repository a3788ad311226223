"""The page docs/settings.md: what each setting of a job means, which values it takes, and what it is unless set.

Owns the layout. It knows no setting: sections, keys and defaults are those of Config, explanations the docstrings of its
classes, types their annotations. Invariant: every key that `--set` takes is in one row, so that a page that is compared with
this module's output cannot go stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from pearl.config import CHOSEN, Config
from pearl.protocol import Role

INTRODUCTION = """\
# Settings

Every setting of a job. `pearl run RECIPE --set KEY=VALUE` changes one, several `--set` several. Defaults are those of a job
without a recipe; a recipe changes some (recipes.md), and `pearl run RECIPE --print` shows the result.

Above each table, names without a dot are keys of its section. What ends in `_s` is in seconds. None is written `none`.

Made by `python -m pearl.settings_page > docs/settings.md` from the docstrings of the classes that hold the settings: a change
belongs there."""

KINDS: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "text",
    type(None): "`none`",
    Any: "any",
}
"""What a field of a plain type takes."""


def page() -> str:
    """The whole page as Markdown."""
    job = Config()
    inside = [item.name for item in dataclasses.fields(job) if dataclasses.is_dataclass(getattr(job, item.name))]
    parts = [_linked(INTRODUCTION), _part("The job", job, "")]
    return "\n\n".join([*parts, *(_part(f"`{name}`", getattr(job, name), f"{name}.") for name in inside)]) + "\n"


def _part(title: str, section: Any, prefix: str) -> str:
    """One section: its heading, what its class says, and a table of its keys."""
    table = ["| key | values | default |", "|---|---|---|", *_rows(section, prefix)]
    return "\n\n".join([f"## {title}", _linked(inspect.getdoc(type(section)) or ""), "\n".join(table)])


def _rows(section: Any, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.name != CHOSEN and not dataclasses.is_dataclass(value):
            yield f"| `{prefix}{item.name}` | {_values(hints[item.name])} | `{_written(value)}` |"


def _values(hint: Any) -> str:
    """What a field of this type takes."""
    if hint in KINDS:
        return KINDS[hint]
    if hint is Role or typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{one}`" for one in (Role if hint is Role else typing.get_args(hint)))
    if typing.get_origin(hint) is dict:
        return "JSON object"
    return " or ".join(map(_values, typing.get_args(hint)))


def _written(value: Any) -> str:
    """A value as `--set` takes it; text that is empty as two quotes."""
    if value is None:
        return "none"
    return json.dumps(value) if value == "" or not isinstance(value, str) else str(value)


def _linked(text: str) -> str:
    """Pages that are named become links, from where this page is."""
    return re.sub(r"(?<![\w/])(?:docs/)?(?!settings)(\w+\.md)\b", r"[\1](\1)", text)


def main() -> None:
    """Prints the page."""
    described = "Print what each setting of a job means, as Markdown."
    argparse.ArgumentParser(prog="python -m pearl.settings_page", description=described).parse_args()
    print(page(), end="")


if __name__ == "__main__":
    main()
