"""docs/settings.md is what the code says now, and explains every key."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pearl.config import Config
from pearl.overrides import keys_of, override
from pearl.settings_page import main, page

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
ROWS = dict(re.findall(r"^\| `([a-z0-9_.]+)` \| .+ \| `(.*)` \|$", page(), flags=re.MULTILINE))
"""Key -> default as it is written."""


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "run: python -m pearl.settings_page > docs/settings.md"


def test_the_command_prints_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["settings_page"])
    main()
    assert capsys.readouterr().out == page()


def test_every_key_has_a_row_in_the_order_of_the_configuration() -> None:
    keys = list(keys_of(Config()))
    inside = [key for key in keys if "." in key]
    assert list(ROWS) == [key for key in keys if "." not in key] + inside


def is_explained(key: str) -> bool:
    """Its name stands in backticks, by itself or before `=`, in the docstring of the class that holds it."""
    section, _, name = key.rpartition(".")
    holder = getattr(Config(), section) if section else Config()
    return re.search(rf"`{name}[`=]", type(holder).__doc__) is not None


def test_every_key_is_explained_by_the_class_that_holds_it() -> None:
    assert [key for key in keys_of(Config()) if not is_explained(key)] == []


def test_defaults_are_written_as_set_takes_them() -> None:
    """All but `engine.model`, which a job sets itself, and empty text, which cannot be given."""
    written = {key: default for key, default in ROWS.items() if key != "engine.model" and default != '""'}
    assert [key for key, default in written.items() if override(Config(), [f"{key}={default}"]) != Config()] == []
