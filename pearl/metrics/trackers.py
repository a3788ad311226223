"""Rows of a run for programs that show runs: event files for TensorBoard, and Weights & Biases.

Owns how a row becomes an event of theirs. It does not know what a row means beyond its `step`. Invariant: after a resume
there is one point per step, the one that counts: the event file is written anew from the rows that a resumed run kept.

An event file is a sequence of TFRecords (length, its checksum, data, its checksum; masked CRC-32C) of `Event` messages of
TensorFlow's event.proto, of which three fields are needed; so the package tensorboard is needed to look, not to write.
"""

from __future__ import annotations

import functools
import importlib
import math
import secrets
import struct
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pearl.config import Config
from pearl.metrics.jsonl import read_jsonl

FILE_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78


class Tracker(Protocol):
    """Who takes rows."""

    def write(self, row: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class EventFile:
    """TensorBoard's file in `folder`; files of an earlier part of the run are replaced, `rows` being what was in them."""

    def __init__(self, folder: Path, rows: Iterable[dict[str, Any]] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._file = (folder / f"events.out.tfevents.{int(time.time()):010d}.pearl").open("wb", buffering=0)
        self._file.write(_record(_double(1, time.time()) + _bytes(3, FILE_VERSION.encode())))
        for row in rows:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """The row's numbers at its step."""
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in numbers(row))
        self._file.write(_record(_double(1, time.time()) + _key(2, 0) + _varint(int(row["step"])) + _bytes(5, values)))

    def close(self) -> None:
        self._file.close()


class WandbRun:
    """A run of Weights & Biases, its name being that of the run's folder, its id in a file there: a resumed run goes on in it,
    wherever the folder is by then. ValueError without the package.

    Points go by the row's own step, not by a counter of the service's: a resumed run may make steps once more. A row that the
    service does not take is warned of, and goes no further: the run's own files have it.
    """

    def __init__(self, project: str, run: Path, config: dict[str, Any]) -> None:
        wandb, known = load_wandb(project), run / "wandb_id"
        if not known.exists():
            known.write_text(secrets.token_hex(8))
        settings = {"project": project, "id": known.read_text(), "name": run.resolve().name, "config": config}
        self._run = wandb.init(resume="allow", dir=str(run), **settings)
        self._run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._run.log({"step": row["step"], **dict(numbers(row))})
        except Exception as error:  # whatever its package raises when its own process or the service has gone
            warnings.warn(f"wandb: step {row['step']} was not taken: {error}", stacklevel=2)

    def close(self) -> None:
        self._run.finish()


def trackers_of(config: Config, run: Path) -> list[Tracker]:
    """Those that a run's settings ask for; the event file begins with the rows that the run already has."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        path = run / "metrics.jsonl"
        trackers.append(EventFile(run / "tensorboard", read_jsonl(path) if path.exists() else ()))
    if config.wandb:
        trackers.append(WandbRun(config.wandb, run, msgspec.to_builtins(config)))
    return trackers


def load_wandb(project: str) -> Any:
    """The package wandb; ValueError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError(f"wandb={project!r}: must be empty, the package wandb is not installed") from None


def numbers(row: dict[str, Any]) -> list[tuple[str, float]]:
    """What of a row can be drawn, `step` itself left out."""
    return [(name, float(value)) for name, value in row.items() if isinstance(value, int | float) and name != "step"]


def read_events(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, values) of each event of a file that EventFile wrote; ValueError for a checksum that is wrong."""
    data, place, events = path.read_bytes(), 0, []
    while place < len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        body = data[place + 12 : place + 12 + size]
        sums = struct.unpack_from("<I", data, place + 8) + struct.unpack_from("<I", data, place + 12 + size)
        if sums != (_masked(data[place : place + 8]), _masked(body)):
            raise ValueError(f"{path}: the checksum of the record at byte {place} is wrong")
        place += size + 16
        fields = _fields(body)
        if 5 in fields:
            values = [_fields(value) for number, value in _pairs(fields[5]) if number == 1]
            events.append((fields.get(2, 0), {value[1].decode(): value[2] for value in values}))
    return events


# ------------------------------------------------------------------------------------------------------------- bytes


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


@functools.cache
def _table() -> Sequence[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720 (Castagnoli)."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    """What is too large for fp32 is infinite: a row must not fail for what shows it."""
    try:
        return _key(field, 5) + struct.pack("<f", value)
    except OverflowError:
        return _key(field, 5) + struct.pack("<f", math.copysign(math.inf, value))


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _fields(data: bytes) -> dict[int, Any]:
    return dict(_pairs(data))


def _pairs(data: bytes) -> Iterable[tuple[int, Any]]:
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _read_varint(data, place)
            yield key >> 3, value
        elif kind == 2:
            size, place = _read_varint(data, place)
            yield key >> 3, data[place : place + size]
            place += size
        else:
            form, size = ("<d", 8) if kind == 1 else ("<f", 4)
            yield key >> 3, struct.unpack_from(form, data, place)[0]
            place += size


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[place] & 0x7F) << shift
        shift += 7
        place += 1
        if data[place - 1] < 0x80:
            return value, place
