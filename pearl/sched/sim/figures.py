"""Simulated runs as pictures: throughput by policy and segment, workers by role over time, makespans predicted and simulated.

Owns the drawing; the numbers are `tables.py`. matplotlib is imported when a picture is drawn, never before. Invariant: the file
at `path` is a whole picture or what was there before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.sched.sim.results import SimResult
from pearl.sched.sim.tables import Run, prediction_error, spread_of, throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROLE_COLOURS = {"mixed": "#7a8fa6", "prefill": "#c8501e", "decode": "#1f5fa8", "changing": "#d8d8d8"}
POLICY_COLOURS = ("#b8b8b8", "#8a8a8a", "#6aa56a", "#d98b4a", "#1f5fa8", "#1b7f4b", "#a585bd", "#c8501e")
INK = "#222222"


def draw_throughput(runs: Sequence[Run], path: str | Path) -> None:
    """Bars: tokens per second by segment and policy, with their spread over seeds. ValueError without runs."""
    if not runs:
        raise ValueError("runs=[]: nothing to draw")
    segments = list(dict.fromkeys(run.segment for run in runs))
    policies = list(dict.fromkeys(run.policy for run in runs))
    figure, panel = _figure(max(6.0, 0.35 * len(segments) * len(policies) + 2), 4.2)
    width = 0.84 / len(policies)
    for index, policy in enumerate(policies):
        spreads = []
        for segment in segments:
            here = [throughput(run.result) for run in runs if run.policy == policy and run.segment == segment]
            spreads.append(spread_of(here or [0.0]))
        places = [number - 0.42 + width * (index + 0.5) for number in range(len(segments))]
        means, around = [one.mean for one in spreads], [one.deviation for one in spreads]
        colour = POLICY_COLOURS[index % len(POLICY_COLOURS)]
        panel.bar(places, means, width * 0.92, yerr=around, color=colour, label=policy, error_kw={"lw": 0.8})
    panel.set_xticks(range(len(segments)), segments)
    panel.set_ylabel("tokens / s, rollout and training")
    panel.legend(fontsize=8, frameon=False, ncols=min(4, len(policies)), loc="upper left", bbox_to_anchor=(0, 1.2))
    _save(figure, path)


def draw_timeline(result: SimResult, path: str | Path, title: str = "") -> None:
    """Workers by role over time, borrowed ones and trajectories under way as lines, ends of steps as marks."""
    if not result.intervals:
        raise ValueError("result.intervals=(): nothing to draw")
    figure, panel = _figure(9.0, 4.0)
    minutes = [interval.at_s / 60 for interval in result.intervals]
    layers = [[interval.roles.get(role, 0.0) for interval in result.intervals] for role in ROLE_COLOURS]
    panel.stackplot(minutes, *layers, labels=list(ROLE_COLOURS), colors=list(ROLE_COLOURS.values()), step="post", lw=0)
    for name, style in (("borrowed", ":"), ("external", "--")):
        counts = [one.roles.get(name, 0.0) for one in result.intervals]
        panel.step(minutes, counts, style, where="post", color=INK, lw=1, label=name)
    for step in result.steps:
        panel.axvline(step.collected_s / 60, color="#00000055", lw=0.8)
    beside = panel.twinx()
    beside.plot(minutes, [one.in_flight for one in result.intervals], color="#1b7f4b", lw=0.9)
    beside.set_ylabel("trajectories under way", color="#1b7f4b")
    beside.set_ylim(bottom=0)
    panel.set_xlabel("minutes; lines: a batch is complete")
    panel.set_ylabel("workers")
    panel.legend(fontsize=8, frameon=False, ncols=6, loc="upper left", bbox_to_anchor=(0, 1.13))
    panel.set_title(title, loc="right", fontsize=9, color=INK)
    _save(figure, path)


def draw_predictions(pairs: Sequence[tuple[float, float]], path: str | Path) -> None:
    """(predicted, simulated) makespans, and the band of 10 % around equality."""
    if not pairs:
        raise ValueError("pairs=[]: nothing to draw")
    figure, panel = _figure(5.0, 4.6)
    low, high = min(min(pair) for pair in pairs) * 0.9, max(max(pair) for pair in pairs) * 1.1
    panel.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color="#e6eef6", lw=0)
    panel.plot([low, high], [low, high], color="#8a8a8a", lw=0.8)
    panel.plot([pair[0] for pair in pairs], [pair[1] for pair in pairs], "o", ms=3.5, color="#1f5fa8", alpha=0.7)
    found = prediction_error(pairs)
    panel.set_title(f"{found.count} steps: error median {found.median:.1%}, p95 {found.p95:.1%}", fontsize=9, color=INK)
    panel.set_xlabel("predicted makespan, s")
    panel.set_ylabel("simulated makespan, s")
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel


def _save(figure: Figure, path: str | Path) -> None:
    aside = Path(path).with_name(f".{Path(path).name}.part")
    figure.savefig(aside, format="png")
    os.replace(aside, path)
