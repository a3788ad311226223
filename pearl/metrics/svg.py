"""Charts as SVG text, for a page that needs nothing but itself.

Owns the drawing: line charts over steps, stacked bars, and lanes of spans. Colours are CSS variables of the page (--c0, --c1,
... --ink, --faint, --grid), so that light and dark are the page's choice. It does not know what the numbers mean. Invariant:
what is no finite number leaves a gap; the text is well-formed XML whatever the names are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from pearl.metrics.console import count, is_number

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 24
MOST_POINTS = 400
"""A line has at most so many points: longer ones show the means of equal shares of the steps."""

Series = Mapping[str, Sequence[float | None]]


def line_chart(steps: Sequence[int], series: Series, *, low: float | None = None, high: float | None = None) -> str:
    """One line per name. The scale holds all values, and `low` and `high` where given. "" without a number."""
    numbers = [value for values in series.values() for value in values if is_number(value)]
    if not numbers or not steps:
        return ""
    bottom = min(numbers) if low is None else min(low, *numbers)
    top = max(numbers) if high is None else max(high, *numbers)
    if top <= bottom:
        pad = abs(bottom) * 0.1 or 1.0
        bottom, top = bottom - pad, top + pad
    lines = []
    for index, (name, values) in enumerate(series.items()):
        for points in _pieces(steps, values):
            path = " ".join(f"{_x(step, steps):.1f},{_y(value, bottom, top):.1f}" for step, value in points)
            shape = f'<polyline points="{path}"/>' if len(points) > 1 else _dot(*points[0], steps, bottom, top)
            lines.append(f'<g class="line" style="--c: var(--c{index})"><title>{escape(name)}</title>{shape}</g>')
    return _svg(HEIGHT, _grid(bottom, top) + _step_labels(steps) + "".join(lines))


def bar_chart(steps: Sequence[int], series: Series) -> str:
    """Bars of the names' values on top of each other, from zero. "" without a number above 0."""
    names = list(series)
    columns = [[max(0.0, value) if is_number(value) else 0.0 for value in row] for row in zip(*series.values(), strict=True)]
    starts, columns = _shares([float(step) for step in steps], columns)
    top = max((sum(column) for column in columns), default=0.0)
    if top <= 0:
        return ""
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    bars = []
    for place, column in enumerate(columns):
        level = 0.0
        for index, value in enumerate(column):
            if value > 0:
                y, height = _y(level + value, 0.0, top), (HEIGHT - TOP - BOTTOM) * value / top
                title = f"<title>step {starts[place]:.0f}: {escape(names[index])} {value:.3g}</title>"
                box = f'x="{LEFT + place * width:.1f}" y="{y:.1f}" width="{max(0.5, width - 0.6):.1f}" height="{height:.1f}"'
                bars.append(f'<rect {box} style="fill: var(--c{index})">{title}</rect>')
                level += value
    return _svg(HEIGHT, _grid(0.0, top) + _step_labels(steps) + "".join(bars))


def lanes(tracks: Mapping[str, Sequence[tuple[str, float, float]]], colours: Mapping[str, int]) -> str:
    """One lane per track with its (name, start, end) spans in seconds, from the earliest start on. "" without a span."""
    spans = [span for track in tracks.values() for span in track]
    if not spans:
        return ""
    start, end = min(span[1] for span in spans), max(span[2] for span in spans)
    width, left, row = 940, 110, 22
    scale = (width - left - RIGHT) / max(end - start, 1e-9)
    parts = []
    for place, (name, track) in enumerate(tracks.items()):
        y = TOP + place * row
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width - left - RIGHT}" height="{row - 5}" class="lane"/>')
        for label, began, ended in track:
            box = f'x="{left + (began - start) * scale:.2f}" y="{y}" width="{max(0.3, (ended - began) * scale):.2f}"'
            title = f"<title>{escape(label)}: {ended - began:.3f} s, {began - start:.2f} s after the start</title>"
            parts.append(f'<rect {box} height="{row - 5}" style="fill: var(--c{colours.get(label, 7)})">{title}</rect>')
    height = TOP + len(tracks) * row + BOTTOM
    for share in range(6):
        x, at = left + share / 5 * (width - left - RIGHT), "end" if share == 5 else "middle"
        parts.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="{at}">{share / 5 * (end - start):.3g} s</text>')
    return _svg(height, "".join(parts), width)


def _svg(height: int, inside: str, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{inside}</svg>'


def _x(step: float, steps: Sequence[int]) -> float:
    span = max(1, steps[-1] - steps[0])
    return LEFT + (step - steps[0]) / span * (WIDTH - LEFT - RIGHT)


def _y(value: float, bottom: float, top: float) -> float:
    return HEIGHT - BOTTOM - (value - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)


def _dot(step: float, value: float, steps: Sequence[int], bottom: float, top: float) -> str:
    return f'<circle cx="{_x(step, steps):.1f}" cy="{_y(value, bottom, top):.1f}" r="3"/>'


def _grid(bottom: float, top: float) -> str:
    parts = []
    for share in range(5):
        value = bottom + share / 4 * (top - bottom)
        y = _y(value, bottom, top)
        text = count(value) if abs(value) >= 1000 else f"{value:.3g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _step_labels(steps: Sequence[int]) -> str:
    places = {steps[0]: "start", steps[-1]: "end"} if len(steps) > 1 else {steps[0]: "start"}
    y = HEIGHT - 6
    return "".join(
        f'<text x="{_x(step, steps):.1f}" y="{y}" text-anchor="{at}">{step}</text>' for step, at in places.items()
    )


def _pieces(steps: Sequence[int], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """The runs of points between gaps. Where only some steps have a value at all (evaluations), these are joined."""
    known = [(float(step), value) for step, value in zip(steps, values, strict=True) if is_number(value)]
    if len(known) <= len(steps) / 2:
        if known:
            yield known
        return
    places, columns = _shares([float(step) for step in steps], [[value if is_number(value) else math.nan] for value in values])
    piece: list[tuple[float, float]] = []
    for step, [value] in zip(places, columns, strict=True):
        if math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _shares(places: list[float], columns: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """At most MOST_POINTS columns, each the mean of its share."""
    cells = min(MOST_POINTS, len(columns))
    if cells == len(columns):
        return places, columns
    cuts = [cell * len(columns) // cells for cell in range(cells + 1)]
    ranges = list(itertools.pairwise(cuts))
    means = [[sum(part) / (last - first) for part in zip(*columns[first:last], strict=True)] for first, last in ranges]
    return [places[first] for first, _ in ranges], means
