"""Checkpoints of a run on disk: begun aside, renamed, marked STABLE last, the oldest removed after that.

    checkpoints/.step_000004.new/          being written: the trainer's files, then controller.msgpack
    checkpoints/step_000004/               the same after its rename; not used before it has the marker
    checkpoints/step_000004/STABLE         the marker: names and sizes of all files, and a checksum of controller.msgpack

Owns that order and who is removed when. It does not know what the trainer writes. Invariants: whenever the process is
killed or the machine stops, `latest` finds a checkpoint no older than the last `commit` that returned; what is removed is
first renamed out of sight, so a half-removed folder is never taken for a checkpoint; nothing whole is removed before a newer
one is whole. One process writes at a time (`run_state.RunLock`). Torch-free.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pearl.rl.controller_state import ControllerState, check_format, decode, encode

FOLDER = "checkpoints"
MARKER = "STABLE"
STATE_FILE = "controller.msgpack"
TRAINER_FOLDER = "trainer"
"""The part of a checkpoint that the training ranks write."""
TRAINER_FACTS = "trainer.json"
"""What says there what they wrote."""
_NAME = re.compile(r"step_(\d{6,})")
_HIDDEN = re.compile(r"\.step_\d{6,}\.(new|old|lost)")


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker says: `files` are sizes in bytes by path inside the checkpoint."""

    step: int
    state_crc32: int
    files: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest checkpoint that can be used (None: there is none), and the newer ones that cannot."""

    path: Path | None
    skipped: tuple[Skipped, ...]


class CheckpointFolder:
    """The checkpoints of one run, `keep` of which stay. Steps rise: `begin` refuses one that is not newer than `latest`."""

    def __init__(self, run_dir: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep_checkpoints={keep}: must be >= 1")
        self.path = Path(run_dir) / FOLDER
        self.keep = keep

    def find(self) -> Found:
        """Looks at all of them, newest first, until one is whole."""
        skipped: list[Skipped] = []
        for path in self._steps():
            try:
                _verified(path)
                return Found(path=path, skipped=tuple(skipped))
            except ValueError as error:
                skipped.append(Skipped(path=path, reason=str(error)))
        return Found(path=None, skipped=tuple(skipped))

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return self.find().path

    def begin(self, step: int) -> Path:
        """Makes the empty folder that the trainer's state of `step` goes into; left-overs of an earlier try are removed.

        ValueError if a whole checkpoint of this or a later step is there.
        """
        newest = self.latest()
        if step < 0 or (newest is not None and step <= _step_of(newest)):
            raise ValueError(f"step={step}: must be >= 0 and newer than {newest}")
        for folder in (self.path.parent, self.path):
            folder.mkdir(parents=True, exist_ok=True)
        _sync(self.path.parent)
        aside = self._hidden(step, "new")
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        return aside

    def commit(self, step: int, state: ControllerState) -> Path:
        """Makes what `begin(step)` gave, with `state`, the latest checkpoint; when this returns it stays so, power cut or not.

        Every process that writes into the folder has finished. ValueError for a state of another step, without `begin`,
        or if what was written cannot be read back; OSError from the disk. After an error no older checkpoint is missing.
        """
        aside, target = self._hidden(step, "new"), self.path / f"step_{step:06d}"
        if state.step != step:
            raise ValueError(f"step={step}: the state is of step {state.step}")
        if not aside.is_dir():
            raise ValueError(f"step={step}: was not begun ({aside} is not there)")
        data = encode(state)
        (aside / STATE_FILE).write_bytes(data)
        files = _flush(aside)
        if target.exists():
            _rename_away(target, self._hidden(step, "old"))
        aside.rename(target)
        _sync(self.path)
        _mark(target, _Marker(step=step, state_crc32=zlib.crc32(data), files=files))
        _verified(target)
        self._sweep(step)
        return target

    def committing(self, step: int, state: ControllerState) -> Future[Path]:
        """`commit` in a thread of its own: flushing, and removing what is as large as the model, may take long. The state must
        not change any more; nothing else may be asked of this folder before the end."""
        done: Future[Path] = Future()

        def carry_out() -> None:
            try:
                done.set_result(self.commit(step, state))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=carry_out, name="commit", daemon=True).start()
        return done

    def rewind(self, step: int) -> list[Path]:
        """Hides all that is newer than `step` until a commit removes it: a resumed run writes these steps anew."""
        newer = [path for path in self._steps() if _step_of(path) > step]
        for path in newer:
            _rename_away(path, self._hidden(_step_of(path), "lost"))
        if newer:
            _sync(self.path)
        return newer

    def _sweep(self, step: int) -> None:
        """Removes all but the newest `keep` whole ones up to `step`, which is whole itself."""
        kept = 0
        for path in self._steps():
            if kept < self.keep and _step_of(path) <= step and _is_whole(path):
                kept += 1
            else:
                _rename_away(path, self._hidden(_step_of(path), "old"))
        for path in [path for path in self.path.iterdir() if _HIDDEN.fullmatch(path.name)]:
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed now is tried again after the next commit
        _sync(self.path)

    def _steps(self) -> list[Path]:
        """All folders with a checkpoint's name, newest first."""
        if not self.path.is_dir():
            return []
        folders = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=_step_of, reverse=True)

    def _hidden(self, step: int, kind: str) -> Path:
        return self.path / f".step_{step:06d}.{kind}"


def load(path: Path) -> ControllerState:
    """The controller's part of a checkpoint; ValueError with the reason if the checkpoint is not whole."""
    return decode(_verified(path))


def _verified(path: Path) -> bytes:
    """Checks a checkpoint against its marker, and gives the controller's part. ValueError with the reason if it is not whole.

    Of the trainer's files only presence and size are compared: they are as large as the model, and their reader checks them.
    """
    try:
        if not (path / MARKER).exists():
            raise ValueError(f"no {MARKER}: its writing was cut short")
        marker = msgspec.json.decode((path / MARKER).read_bytes(), type=_Marker)
        for name, size in marker.files.items():
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes, {size} were written")
        data = (path / STATE_FILE).read_bytes()
    except OSError as error:
        name = Path(error.filename).name if error.filename else path.name
        raise ValueError(f"{name} cannot be read ({error.strerror})") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{MARKER} is damaged ({error})") from None
    if zlib.crc32(data) != marker.state_crc32:
        raise ValueError(f"{STATE_FILE} is damaged (checksum)")
    if marker.step != _step_of(path):
        raise ValueError(f"{MARKER} is of step {marker.step}")
    check_format(data)
    return data


def _is_whole(path: Path) -> bool:
    try:
        _verified(path)
    except ValueError:
        return False
    return True


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _mark(folder: Path, marker: _Marker) -> None:
    """Writes the marker in one instant, and to the disk."""
    aside = folder / f".{MARKER}.new"
    aside.write_bytes(msgspec.json.encode(marker))
    _sync(aside)
    aside.rename(folder / MARKER)
    _sync(folder)


def _flush(folder: Path) -> dict[str, int]:
    """Sends all files and folders below `folder` to the disk, each before the folder it is in; sizes by relative path."""
    sizes: dict[str, int] = {}
    for path in _inside_out(folder):
        _sync(path)
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return dict(sorted(sizes.items()))


def _inside_out(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder, topdown=False):
        yield from (Path(root) / name for name in names)
        yield Path(root)


def _rename_away(path: Path, hidden: Path) -> None:
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
