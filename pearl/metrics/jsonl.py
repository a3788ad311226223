"""Rows of a run, one JSON object per line, on disk as soon as they are written (a crash loses none)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class JsonlWriter:
    """Appends objects to a file; each `write` is one complete line, flushed to the operating system."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def write(self, *rows: Any) -> None:
        if rows:
            self._file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[dict]:
    """All complete rows of a file; a last line cut by a crash is left out."""
    lines = Path(path).read_bytes().split(b"\n")
    return [msgspec.json.decode(line) for line in lines[:-1] if line]
