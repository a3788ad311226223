"""The pages agree with what they speak of: links, settings, benches."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from pathlib import Path

import pytest

from pearl.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"`([^`\n]+)`|^    (.*)$", flags=re.MULTILINE)
"""Words in backticks, and indented lines."""


def section_of(kind: object) -> type | None:
    """The dataclass that a field's type is, or may be."""
    return next((one for one in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(one)), None)  # type: ignore[return-value]


FIELDS = typing.get_type_hints(Config)
SECTIONS = {name: section for name, kind in FIELDS.items() if (section := section_of(kind)) is not None}


def is_setting(key: str) -> bool:
    name, _, rest = key.partition(".")
    if name not in SECTIONS:
        return name in FIELDS and not rest
    return rest.startswith("options.") or rest in typing.get_type_hints(SECTIONS[name])


PLACEHOLDERS = {"a.b", "model.safetensors"}


def words_of(page: Path) -> list[str]:
    return [quoted or indented for quoted, indented in CODE.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)", text)
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    named = set(re.findall(r"(?<![\w/])(?:docs/)?([a-z_]+\.md)\b", text)) - {"README.md"}
    assert [name for name in named if not (ROOT / "docs" / name).exists()] == []
    for link, place in links:
        headings = re.findall(r"^#+ (.*)$", (page.parent / link).read_text(), flags=re.MULTILINE) if place else []
        assert not place or place[1:] in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    words = words_of(page)
    sections = "|".join(SECTIONS)
    named = {key for word in words for key in re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_]+)(?![\w(./])", word)}
    named |= {key for word in words for key in re.findall(r"--set ([a-z_.]+)=", word)}
    assert sorted(key for key in named - PLACEHOLDERS if not is_setting(key)) == []


def test_every_bench_is_listed_and_its_help_begins_with_a_sentence() -> None:
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    benches = [path for path in sorted((ROOT / "bench").glob("*.py")) if "argparse.ArgumentParser(" in path.read_text()]
    assert [path.stem for path in benches if f"`{path.stem}`" not in listed] == []
    first = {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines() for path in benches}
    assert [name for name, lines in first.items() if not lines[0].endswith(".") or lines[1:2] != [""]] == []
