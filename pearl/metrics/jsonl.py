"""Rows of a run, one JSON object per line, on disk as soon as they are written (a crash loses none).

Owns the files' form, where runs are found, and what a resumed run does to its rows: those of steps that it will write again
are moved aside, so that steps never go back in a file. It does not know what a row means beyond its `step`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import msgspec


class JsonlWriter:
    """Appends objects to a file; each `write` is complete lines, flushed to the operating system, or an OSError and none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def write(self, *rows: Any) -> None:
        left = memoryview(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        before = os.fstat(self._file.fileno()).st_size if rows else 0
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(before)  # what is written later must not begin in the middle of a line
            raise

    def sync(self) -> None:
        """Waits until what was written survives a power cut too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[dict]:
    """All complete rows of a file; a last line cut by a crash is left out."""
    lines = Path(path).read_bytes().split(b"\n")
    return [msgspec.json.decode(line) for line in lines[:-1] if line]


def rewind_rows(path: str | Path, last_step: int) -> int:
    """Moves the rows with a `step` after `last_step` to NAME.lost-<n>.jsonl beside the file; returns how many there were.

    Rows without a `step` stay. A line that is no row, such as a last one cut by a crash, is moved too and not counted. The
    file is replaced in one instant after the moved lines are on disk: a crash loses no row, at worst the next call moves
    the same ones once more. No writer may have the file open. A file that is not there has no rows.
    """
    path = Path(path)
    if not path.exists() or all(_fate(line, last_step) == "kept" for line in _lines(path)):
        return 0
    lost, kept, moved = path.with_name(f".{path.name}.lost"), path.with_name(f".{path.name}.kept"), 0
    with lost.open("wb") as lost_file, kept.open("wb") as kept_file:
        for line in _lines(path):
            fate = _fate(line, last_step)
            moved += fate == "lost"
            if fate == "kept":
                kept_file.write(line)
            else:
                lost_file.write(line.removesuffix(b"\n") + b"\n")
        _sync(lost_file)
        _sync(kept_file)
    lost.rename(_next_lost(path))
    kept.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return moved


def runs_near(path: Path) -> str:
    """The end of an error message: ' (runs in FOLDER: ...)', the newest few runs in `path`, or beside it if it is no folder."""
    folder = path if path.is_dir() else path.parent
    with contextlib.suppress(OSError):
        found = [settings for settings in folder.glob("*/config.json") if not any(settings.parent.glob("*.safetensors"))]
        if runs := sorted(found, key=lambda settings: settings.stat().st_mtime, reverse=True):
            return f" (runs in {folder}: {', '.join(settings.parent.name for settings in runs[:5])})"
    return ""


class _Row(msgspec.Struct):
    """The one field of a row that matters here; others are skipped without being built."""

    step: Any = None


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _fate(line: bytes, last_step: int) -> Literal["kept", "lost", "broken"]:
    """What becomes of a line when the run goes back to `last_step`; broken: not a whole row."""
    try:
        step = msgspec.json.decode(line, type=_Row).step
    except msgspec.MsgspecError:
        return "broken"
    if not line.endswith(b"\n"):
        return "broken"
    return "lost" if isinstance(step, int | float) and step > last_step else "kept"


def _next_lost(path: Path) -> Path:
    pattern = re.compile(re.escape(path.stem) + r"\.lost-(\d+)" + re.escape(path.suffix))
    taken = [int(match[1]) for name in os.listdir(path.parent) if (match := pattern.fullmatch(name))]
    return path.with_name(f"{path.stem}.lost-{max(taken, default=0) + 1}{path.suffix}")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
