"""The repositories of the coding environment: one text file each, beside this module in `tasks/`.

    What is wrong, as an issue would say it.
    -- path/of/a/file.py --
    its text
    -- tests/test_it.py --
    ...
    -- hidden/test_more.py --
    tests that nobody sees before the end

Owns that form (the one of Go's txtar archives) and the names. Invariants: a task holds tests of both kinds; paths stay inside
the repository.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).with_name("tasks")
TESTS, HIDDEN = "tests/", "hidden/"
_HEADER = re.compile(r"^-- (\S.*?) --\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """`files` is what the agent sees, tests included; `hidden` has the other tests, by the paths they will have."""

    name: str
    issue: str
    files: Mapping[str, str]
    hidden: Mapping[str, str]

    @property
    def tests(self) -> dict[str, str]:
        """All test files as they are at the end, whatever the agent made of them."""
        return {path: text for path, text in self.files.items() if path.startswith(TESTS)} | dict(self.hidden)


@functools.cache
def names() -> tuple[str, ...]:
    """The tasks that ship with the project."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.txt")))


@functools.cache
def load(name: str) -> CodingTask:
    """A task by its name; ValueError lists the valid ones."""
    if name not in names():
        raise ValueError(f"coding task {name!r}: must be one of {', '.join(names())}")
    return parse(name, (FOLDER / f"{name}.txt").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> CodingTask:
    """Reads the form above; ValueError for what is not of it."""
    issue, *parts = _HEADER.split(text)
    files = dict(zip(parts[::2], parts[1::2], strict=True))
    outside = [path for path in files if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts]
    if outside:
        raise ValueError(f"coding task {name}: path {outside[0]!r} leads out of the repository")
    hidden = {TESTS + path.removeprefix(HIDDEN): body for path, body in files.items() if path.startswith(HIDDEN)}
    seen = {path: body for path, body in files.items() if not path.startswith(HIDDEN)}
    task = CodingTask(name=name, issue=issue.strip(), files=seen, hidden=hidden)
    if not issue.strip() or not hidden or len(task.tests) == len(hidden):
        raise ValueError(f"coding task {name}: needs an issue, files below {TESTS} and files below {HIDDEN}")
    return task
