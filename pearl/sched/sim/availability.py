"""When external machines come and go: traces that were recorded, windows of them, and traces drawn with the same statistics.

Owns a trace as changes of a set of nodes, its statistics, and how it becomes pairs of events on workers' GPUs. It knows neither
the simulator nor what a worker does. Invariants: a node is added before it is removed and once; the same seed gives the same
trace; the project ships no recorded trace, it reads them by path.

The file form is that of the Bamboo project's public traces (Thorpe et al., NSDI 2023): `milliseconds,add|remove,node`.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pearl.sched.sim.plans import Availability

GRID_S = 60.0
"""Recorded traces, and drawn ones, change on whole minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """`node` comes (`add`) or goes, `at_s` seconds after the trace begins."""

    at_s: float
    add: bool
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrace:
    """Changes in the order of time over `length_s` seconds; what is there at the beginning is added at 0."""

    changes: tuple[NodeChange, ...]
    length_s: float

    def counts(self) -> list[tuple[float, int]]:
        """(from when, how many nodes), one row per moment at which something changes, from 0 on."""
        rows, count = [(0.0, 0)], 0
        for change in self.changes:
            count += 1 if change.add else -1
            if rows[-1][0] == change.at_s:
                rows[-1] = (change.at_s, count)
            else:
                rows.append((change.at_s, count))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """`change_share`: of grid intervals in which the count changes; lives in seconds, of nodes seen to come and to go."""

    mean: float
    low: int
    high: int
    change_share: float
    life_mean_s: float
    life_median_s: float


P3_LIKE = TraceStatistics(mean=24.0, low=10, high=32, change_share=0.24, life_mean_s=88 * 60.0, life_median_s=59 * 60.0)
G4DN_LIKE = TraceStatistics(mean=12.6, low=0, high=24, change_share=0.15, life_mean_s=99 * 60.0, life_median_s=61 * 60.0)
"""What the two recorded traces are like (11.4 and 10.8 hours of spot instances)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Two hours of a recorded trace as a cluster's external GPUs: `file`, minutes, and what its most nodes stand for.

    `origin` is the file's name in TRACES.
    """

    name: str
    file: str
    origin: str
    first_minute: int
    last_minute: int
    most_nodes: int
    like: TraceStatistics


TRACES = "github.com/SymbioticLab/Oobleck, tools/simulator/traces"
"""Where the recorded traces are to be had: Bamboo's, as the Oobleck project (Jang et al., SOSP 2023) passes them on."""

_P3: dict[str, Any] = {"file": "spot_trace_p3.csv", "origin": "p3-trace.csv", "most_nodes": 32, "like": P3_LIKE}
_G4DN: dict[str, Any] = {"file": "spot_trace_g4dn.csv", "origin": "g4dn-trace.csv", "most_nodes": 24, "like": G4DN_LIKE}
SEGMENTS = (
    Segment(name="S1", first_minute=225, last_minute=345, **_P3),
    Segment(name="S2", first_minute=280, last_minute=400, **_G4DN),
    Segment(name="S3", first_minute=425, last_minute=545, **_G4DN),
)
"""Windows whose means are those that arXiv 2609.35158 prints for its three segments (13.6, 9.0, 11.8 rollout GPUs, 4 of them
reserved); it does not print where its own lie."""

EXTERNAL_GPUS = 12


def read_trace(path: Path) -> NodeTrace:
    """ValueError names the file, the line and what is wrong: no number, not add or remove, time going back, a node twice."""
    changes: list[NodeChange] = []
    present: set[str] = set()
    with path.open(newline="") as file:
        for line, row in enumerate(csv.reader(file), 1):
            if not row:
                continue
            where = f"{path}:{line}: {','.join(row)!r}"
            if len(row) != 3 or not row[0].strip().isdecimal() or row[1] not in ("add", "remove"):
                raise ValueError(f"{where}: must be milliseconds, add or remove, node")
            change = NodeChange(at_s=int(row[0]) / 1000, add=row[1] == "add", node=row[2])
            if changes and change.at_s < changes[-1].at_s:
                raise ValueError(f"{where}: earlier than the line before, {changes[-1].at_s * 1000:.0f}")
            if (change.node in present) == change.add:
                raise ValueError(f"{where}: {change.node} is {'already' if change.add else 'not'} there")
            (present.add if change.add else present.remove)(change.node)
            changes.append(change)
    if not changes:
        raise ValueError(f"{path}: no changes in it")
    return NodeTrace(changes=tuple(changes), length_s=changes[-1].at_s)


def window(trace: NodeTrace, first_s: float, last_s: float) -> NodeTrace:
    """What happens from `first_s` to `last_s`, counted from `first_s`; nodes that are there then are added at 0."""
    if not 0 <= first_s < last_s <= trace.length_s + GRID_S:
        raise ValueError(f"first_s={first_s}, last_s={last_s}: must be a part of the trace's {trace.length_s} s")
    present: dict[str, None] = {}
    inside = []
    for change in trace.changes:
        if change.at_s > first_s:
            if change.at_s < last_s:
                inside.append(NodeChange(at_s=change.at_s - first_s, add=change.add, node=change.node))
        elif change.add:
            present[change.node] = None
        else:
            del present[change.node]
    there = [NodeChange(at_s=0.0, add=True, node=node) for node in present]
    return NodeTrace(changes=(*there, *inside), length_s=last_s - first_s)


def statistics(trace: NodeTrace) -> TraceStatistics:
    """Of the counts over time and of the lives that begin and end inside; lives are nan if there are none."""
    rows = trace.counts()
    ends = [at for at, _ in rows[1:]] + [trace.length_s]
    spans = [end - at for (at, _), end in zip(rows, ends, strict=True)]
    mean = sum(count * span for (_, count), span in zip(rows, spans, strict=True)) / trace.length_s
    counts = [count for (_, count), span in zip(rows, spans, strict=True) if span > 0]
    minutes = {int(at // GRID_S) for (_, before), (at, after) in pairwise(rows) if before != after}
    began: dict[str, float] = {}
    lives = []
    for change in trace.changes:
        if change.add:
            began[change.node] = change.at_s
        else:
            lives.append(change.at_s - began.pop(change.node))
    return TraceStatistics(
        mean=mean,
        low=min(counts),
        high=max(counts),
        change_share=len(minutes) / (trace.length_s / GRID_S),
        life_mean_s=float(np.mean(lives)) if lives else math.nan,
        life_median_s=float(np.median(lives)) if lives else math.nan,
    )


def draw_trace(like: TraceStatistics, length_s: float, rng: np.random.Generator) -> NodeTrace:
    """A trace that has these statistics in the long run.

    In `change_share` of the minutes the count changes, up or down with chances that lead it back to `mean` and never out of
    its range. Who goes is drawn among those present, so lives are exponential (recorded: mean over median 1.5 and 1.6, here
    1.44); their mean follows from how many go at a time (Little's law), which is drawn from a geometric distribution.
    """
    if not like.low <= like.mean <= like.high or like.low == like.high or not 0 < like.change_share <= 1:
        raise ValueError(f"statistics={like}: must have low <= mean <= high, low < high and a change_share in (0, 1]")
    per_change = max(1.0, 2 * like.mean * GRID_S / (like.life_mean_s * like.change_share))
    present: list[str] = []
    changes: list[NodeChange] = []
    born = 0

    def add(count: int, at_s: float) -> None:
        nonlocal born
        for _ in range(count):
            present.append(f"node{born}")
            changes.append(NodeChange(at_s=at_s, add=True, node=f"node{born}"))
            born += 1

    add(round(like.mean), 0.0)
    for minute in range(1, math.ceil(length_s / GRID_S)):
        if rng.random() >= like.change_share:
            continue
        up = rng.random() < _chance_of_more(len(present), like)
        room = like.high - len(present) if up else len(present) - like.low
        count = min(int(rng.geometric(1 / per_change)), room)
        if up:
            add(count, minute * GRID_S)
            continue
        for _ in range(count):
            node = present.pop(int(rng.integers(len(present))))
            changes.append(NodeChange(at_s=minute * GRID_S, add=False, node=node))
    return NodeTrace(changes=tuple(changes), length_s=length_s)


def _chance_of_more(count: int, like: TraceStatistics) -> float:
    """A half at the mean, 1 at the lower end, 0 at the upper one."""
    side = like.mean - like.low if count < like.mean else like.high - like.mean
    return min(1.0, max(0.0, 0.5 + 0.5 * (like.mean - count) / side)) if side else 0.5


def external_gpus(
    trace: NodeTrace, *, most_nodes: int, gpus: int, tp: int, rng: np.random.Generator, notice_s: float = 0.0
) -> Availability:
    """The trace as workers of `tp` GPUs: `most_nodes` nodes stand for `gpus`, and what is no whole worker is left out.

    Which worker goes when one has to is drawn: a scaled trace does not say which of its nodes a worker was.
    """
    if most_nodes < 1 or tp < 1 or gpus < tp:
        raise ValueError(f"most_nodes={most_nodes}, gpus={gpus}, tp={tp}: must be >= 1, >= tp and >= 1")
    present: list[tuple[str, ...]] = []
    events: list[tuple[float, int, tuple[str, ...]]] = []
    born = 0
    for at_s, count in trace.counts():
        wanted = min(count, most_nodes) * gpus // most_nodes // tp
        while len(present) < wanted:
            present.append(tuple(f"x{born}.{part}" for part in range(tp)))
            events.append((at_s, 1, present[-1]))
            born += 1
        while len(present) > wanted:
            events.append((at_s, -1, present.pop(int(rng.integers(len(present))))))
    return Availability(events=tuple(events), notice_s=notice_s)


def steady(workers: int, tp: int) -> Availability:
    """So many external workers from the beginning to the end."""
    groups = (tuple(f"x{number}.{part}" for part in range(tp)) for number in range(workers))
    return Availability(events=tuple((0.0, 1, group) for group in groups))


def segment_gpus(segment: Segment, folder: Path | None, *, tp: int, seed: int) -> tuple[Availability, str]:
    """(external GPUs of the segment, where they come from): its file in `folder`, else drawn with its statistics.

    ValueError for a file that is not there says where it is to be had.
    """
    rng = np.random.default_rng([seed, SEGMENTS.index(segment)])
    length_s = 60.0 * (segment.last_minute - segment.first_minute)
    if folder is not None:
        if not (folder / segment.file).is_file():
            where = f"it is {segment.origin} of {TRACES} (PEARL ships no recorded trace)"
            raise ValueError(f"{folder / segment.file}: is not there; {where}; without a folder traces are drawn")
        trace = window(read_trace(folder / segment.file), 60.0 * segment.first_minute, 60.0 * segment.last_minute)
        source = f"{segment.file}, minutes {segment.first_minute} to {segment.last_minute}"
    else:
        trace, source = draw_trace(segment.like, length_s, rng), f"drawn, seed {seed}"
    return external_gpus(trace, most_nodes=segment.most_nodes, gpus=EXTERNAL_GPUS, tp=tp, rng=rng), source
