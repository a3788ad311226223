"""What happened when, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show; and one number taken from it.

Owns the file and the names in it. It has no clock: times are the caller's, in seconds of one clock. Format: the JSON array
of Google's "Trace Event Format", in which the closing bracket may be missing. Invariant: the file can be loaded whenever the
process ends, since every event is one write of a complete line; a trace that cannot be written is given up, never the job.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

MAX_EVENTS = 1_000_000
"""About 100 MB, and about what the viewers take at ease."""


class TraceWriter:
    """Streams events to `path` (begun anew).

    A track is a row of the picture. "rank1/engine" is the row "engine" of the process "rank1"; a name without a slash is a
    process with one row. Spans of one track may nest; one that reaches out of the span written before it begins where that
    one ended, since viewers drop spans that partly overlap. After `max_events` spans and counters a note says so and the
    rest is dropped and counted; `stopped` then gives the reason, as it does for a failed disk.
    """

    def __init__(self, path: str | Path, *, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events={max_events}: must be >= 1")
        self.path = Path(path)
        self.dropped = 0
        self.stopped: str | None = None
        self._max_events = max_events
        self._events = 0
        self._ids: dict[str, tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._latest: dict[str, tuple[float, float]] = {}
        self._opening = b"[\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb", buffering=0)

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Something that took from `start_s` to `end_s`. ValueError if it ended before it began or a time is not finite."""
        if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
            raise ValueError(f"span {name!r} of {track!r}: start_s={start_s}, end_s={end_s}: must be finite, start_s <= end_s")
        pid, tid = self._track(track)
        before = self._latest.get(track, (end_s, end_s))
        if before[0] < start_s < before[1] < end_s:
            start_s = before[1]
        self._latest[track] = (start_s, end_s)
        start = _microseconds(start_s)
        duration = round(_microseconds(end_s) - start, 3)
        event = {"ph": "X", "name": name, "cat": track, "pid": pid, "tid": tid, "ts": start, "dur": duration}
        self._count(event | ({"args": args} if args else {}))

    def counter(self, name: str, time_s: float, **values: float) -> None:
        """The values of a stacked graph called `name` from `time_s` on; those that are not finite are left out."""
        if not math.isfinite(time_s):
            raise ValueError(f"counter {name!r}: time_s={time_s}: must be finite")
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        if finite:
            pid = self._process("counters")
            self._count({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _microseconds(time_s), "args": finite})

    def close(self) -> None:
        """Writes the end of the array; later events are dropped."""
        if self._file.closed:
            return
        if self.stopped is None:
            self._write(b"\n]\n" if self._opening == b",\n" else b"[]\n")
            self.stopped = self.stopped or "closed"
        with contextlib.suppress(OSError):
            self._file.close()

    # ------------------------------------------------------------------------------------------------- inside

    def _track(self, track: str) -> tuple[int, int]:
        if track not in self._ids:
            process, _, thread = track.partition("/")
            pid = self._process(process)
            tid = 1 + sum(known_pid == pid for known_pid, _ in self._ids.values())
            self._ids[track] = (pid, tid)
            self._name("thread", pid, tid, thread or process)
        return self._ids[track]

    def _process(self, name: str) -> int:
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            self._name("process", pid, 0, name)
        return self._processes[name]

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        """Metadata events: the viewers sort rows by name unless told the order of their appearance."""
        self._emit({"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}})
        index = {"sort_index": tid if what == "thread" else pid}
        self._emit({"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": index})

    def _count(self, event: dict[str, Any]) -> None:
        if self.stopped is None and self._events == self._max_events:
            text = f"the trace ends here: max_events={self._max_events}"
            self._emit({"ph": "i", "s": "g", "name": text, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]})
            self.close()
            self.stopped = text
        if self.stopped is not None:
            self.dropped += 1
            return
        self._events += 1
        self._emit(event)

    def _emit(self, event: dict[str, Any]) -> None:
        if self.stopped is None:
            opening, self._opening = self._opening, b",\n"
            self._write(opening + msgspec.json.encode(event))

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.stopped = f"{self.path} cannot be written: {error.strerror}"


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file by `TraceWriter`, whether or not it was closed; a last line cut short is left out."""
    lines = Path(path).read_bytes().removeprefix(b"[\n").split(b"\n")
    events = []
    for line in lines:
        try:
            events.append(msgspec.json.decode(line.removesuffix(b","), type=dict))
        except msgspec.DecodeError:
            break  # the closing bracket, or where the process died
    return events


def overlap_seconds(events: Iterable[dict[str, Any]], track_a: str, name_a: str, track_b: str, name_b: str) -> float:
    """Seconds in which a span `name_a` of `track_a` and a span `name_b` of `track_b` were both under way.

    Time in which several spans of one side run counts once. 0.0 if there is no such span.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    sides = [
        _united([(event["ts"], event["ts"] + event["dur"]) for event in spans if (event["cat"], event["name"]) == side])
        for side in ((track_a, name_a), (track_b, name_b))
    ]
    return _shared(*sides) / 1e6


def _united(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points of time as intervals in order that do not touch."""
    united: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def _shared(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    """The length of what two lists by `_united` have in common, in one pass over both."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def _microseconds(seconds: float) -> float:
    """The unit of the format, to the nanosecond."""
    return round(seconds * 1e6, 3)
