"""Saving the policy so that a reader never finds half of it.

Owns the order of the steps on disk: everything is written and flushed into a folder beside the target, the marker STABLE
last, and only then renamed. It does not know what a model folder holds.
Invariant: at every moment a whole folder exists, the new one or the one it replaces (which is removed last).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

MARKER = "STABLE"
"""An empty file: the folder it is in was written to the end."""


def is_stable(path: Path) -> bool:
    """Whether `path` is a folder that was written to the end."""
    return (path / MARKER).is_file()


def save_policy(write: Callable[[Path], None], path: Path) -> None:
    """Has `write` fill a folder that becomes `path`, replacing what is there; an OSError leaves the old one in place."""
    aside, old = path.with_name(f".{path.name}.new"), _old(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in (aside, old):
        if left_over.exists() and (left_over == aside or path.exists()):
            shutil.rmtree(left_over)
    aside.mkdir()
    write(aside)
    (aside / MARKER).touch()
    _flush(aside)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    _sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def put_back(path: Path) -> None:
    """Undoes a replacement that ended between its renames: what was being replaced has its name again."""
    if not path.exists() and is_stable(_old(path)):
        _old(path).rename(path)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _flush(folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
