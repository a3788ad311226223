"""A run as one picture: what was learnt above, what it cost below.

    python -m pearl.metrics.plot RUN            writes RUN/reward.png

Reads rows of metrics.jsonl and writes a PNG; matplotlib is imported when a picture is drawn, never before. Invariant: the
file at `path` is a whole picture or what was there before.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.metrics.console import TIME_PARTS, count, duration, is_number
from pearl.metrics.jsonl import read_jsonl, runs_near

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREEN, ORANGE, INK, FAINT = "#1f5fa8", "#1b7f4b", "#c8501e", "#222222", "#8a8a8a"
PART_COLOURS = {"rollout": "#4a7fb5", "train": "#d98b4a", "publish": "#6aa56a", "eval": "#a585bd", "other": "#c9c9c9"}

SMOOTH_SHARE = 25
"""Smoothed curves are means over a window of about this fraction of the run."""


def plot_run(rows: list[dict[str, Any]], path: str | Path, *, title: str = "") -> None:
    """Draws reward, success, tokens/s and the split of time over the steps of `rows` into a PNG at `path`.

    Quantities that no row has are left out. If a step comes twice (a run that was resumed), its last row counts. Raises
    ValueError without rows.
    """
    if not rows:
        raise ValueError("rows=[]: a picture needs at least one row of metrics.jsonl")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = last_of_each_step(rows)
    figure = Figure(figsize=(11, 6.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    _reward(axes[0][0], rows)
    _success(axes[0][1], rows)
    _rate(axes[1][0], rows)
    _time(axes[1][1], rows)
    for panel in axes.flat:
        _dress(panel, rows)
    for panel in axes[1]:
        panel.set_xlabel("step", color=INK)
    figure.suptitle(f"{title}   {_summary(rows)}".strip(), x=0.01, ha="left", fontsize=11, color=INK)
    aside = Path(path).with_name(f".{Path(path).name}.part")
    figure.savefig(aside, format="png")
    os.replace(aside, path)


def last_of_each_step(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order of their steps; of several rows of a step the one that was written last."""
    return sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])


def smoothed(values: Sequence[float], *, keep_ends: bool) -> list[float]:
    """Centred means. At the ends over what there is; with `keep_ends` over ever fewer values, so that the curve begins and
    ends where the run did (and one outlier there shows in full)."""
    half, last = _window(len(values)) // 2, len(values) - 1
    reach = [min(half, index, last - index) if keep_ends else half for index in range(len(values))]
    windows = [values[max(0, index - half) : index + half + 1] for index, half in enumerate(reach)]
    return [sum(window) / len(window) for window in windows]


def _reward(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_title("reward, mean of the batch")
    _curve(panel, rows, "reward_mean", BLUE)


def _success(panel: Axes, rows: list[dict[str, Any]]) -> None:
    steps, scores = _column(rows, "eval_success_rate")
    panel.set_title("success rate of the batch" + (", and in greedy evaluation (dots)" if steps else ""))
    _curve(panel, rows, "success_rate", GREEN)
    if steps:
        panel.plot(steps, scores, "o-", color=ORANGE, markersize=5, linewidth=1, markeredgecolor="white", clip_on=False)
    panel.set_ylim(-0.03, 1.03)


def _rate(panel: Axes, rows: list[dict[str, Any]]) -> None:
    panel.set_title("tokens per second, generated and trained")
    _curve(panel, rows, "tokens_per_s", BLUE)
    panel.set_ylim(0, 1.1 * max(_column(rows, "tokens_per_s")[1], default=1.0))
    panel.yaxis.set_major_formatter(lambda value, _: count(value).replace(".0", ""))


def _time(panel: Axes, rows: list[dict[str, Any]]) -> None:
    """Stacked seconds of a step, smoothed alike, so the parts add up to the step as long as none is below zero."""
    parts = [part for part in TIME_PARTS if any(is_number(row.get(f"{part}_s")) for row in rows)]
    series = {part: smoothed([max(0.0, _value(row, f"{part}_s")) for row in rows], keep_ends=False) for part in parts}
    total = sum(sum(values) for values in series.values())
    panel.set_title("seconds of a step" + (", smoothed" if _window(len(rows)) > 1 else ""))
    if not total:
        return
    parts = [part for part in parts if sum(series[part]) >= 0.005 * total]
    labels = [f"{part} {sum(series[part]) / total:.0%}" for part in parts]
    colours = [PART_COLOURS[part] for part in parts]
    steps, stacked = [row["step"] for row in rows], [series[part] for part in parts]
    if len(steps) == 1:  # an area needs two points
        steps, stacked = [steps[0] - 0.4, steps[0] + 0.4], [values * 2 for values in stacked]
    panel.stackplot(steps, stacked, colors=colours, labels=labels, edgecolor="white", linewidth=0.4)
    highest = max(sum(values) for values in zip(*stacked, strict=True))
    panel.set_ylim(0, highest * 1.25)
    panel.legend(loc="upper right", ncols=len(parts), frameon=False, fontsize=9, handlelength=1, columnspacing=1.2)


def _curve(panel: Axes, rows: list[dict[str, Any]], name: str, colour: str) -> None:
    """Every step faint, the smoothed curve strong; one of few points is only itself, with marks."""
    steps, values = _column(rows, name)
    if not steps:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", color=FAINT)
        panel.tick_params(axis="y", left=False, labelleft=False)
        return
    if _window(len(steps)) == 1:
        panel.plot(steps, values, "o-", color=colour, linewidth=1.6, markersize=3)
        return
    panel.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    panel.plot(steps, smoothed(values, keep_ends=True), color=colour, linewidth=2)


def _dress(panel: Axes, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    first, last = rows[0]["step"], rows[-1]["step"]
    margin = 0.5 if last - first < 20 else 0
    panel.set_xlim(first - margin, last + margin)
    panel.title.set(ha="left", x=0, fontsize=10, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(color=FAINT, labelcolor=INK, labelsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FAINT)


def _summary(rows: list[dict[str, Any]]) -> str:
    recent = [row["success_rate"] for row in rows[-10:] if is_number(row.get("success_rate"))]
    parts = [f"{len(rows)} steps" if len(rows) > 1 else "1 step"]
    if is_number(rows[-1].get("elapsed_s")):
        parts.append(duration(rows[-1]["elapsed_s"]))
    if recent:
        parts.append(f"success {sum(recent) / len(recent):.2f} (mean of the last {len(recent)})")
    return ", ".join(parts)


def _column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have a number under `name`."""
    present = [row for row in rows if is_number(row.get(name))]
    return [row["step"] for row in present], [row[name] for row in present]


def _value(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if is_number(value) else 0.0


def _window(points: int) -> int:
    """Odd, so that a window has a middle; 1 (as it is) for a short run."""
    return 2 * math.ceil(points / SMOOTH_SHARE / 2) + 1 if points >= 20 else 1


def main(argv: list[str] | None = None) -> int:
    program = "python -m pearl.metrics.plot"
    options = argparse.ArgumentParser(prog=program, allow_abbrev=False, description="A run as one picture.")
    options.add_argument("run", type=Path, help="a run directory")
    run = options.parse_args(argv).run
    try:
        if not (run / "metrics.jsonl").is_file():
            what = "no run that has made a step: metrics.jsonl is not there" if run.is_dir() else "no such directory"
            raise ValueError(f"{run}: {what}{runs_near(run)}")
        plot_run(read_jsonl(run / "metrics.jsonl"), run / "reward.png", title=run.resolve().name)
    except (OSError, ValueError) as error:
        print(f"pearl.metrics.plot: error: {error}", file=sys.stderr)
        return 2
    print(run / "reward.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
