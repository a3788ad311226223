"""Simulated runs as one HTML page that needs nothing but itself: tables as text, pictures inside.

Owns the page. What it shows is made by `tables.py` and `figures.py`. Invariant: names of runs cannot become markup.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from pearl.sched.sim.figures import draw_predictions, draw_throughput, draw_timeline
from pearl.sched.sim.tables import (
    Run,
    counts_line,
    prediction_error,
    prediction_pairs,
    step_table,
    throughput_table,
    transition_table,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; } h2 { margin-top: 2.5rem; font-size: 1.1rem; } p { color: #555; }
"""


def write_page(runs: Sequence[Run], path: str | Path, *, title: str, base: str | None = None, note: str = "") -> None:
    """Throughput of all, then each run of the first seed by itself. ValueError without runs."""
    if not runs:
        raise ValueError("runs=[]: nothing to show")
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(note)}</p>"]
    parts += [_table(throughput_table(runs, base)), _picture(lambda file: draw_throughput(runs, file))]
    pairs = prediction_pairs(run.result for run in runs)
    if pairs:
        found = prediction_error(pairs)
        words = f"{found.count} steps in which the shape stayed: median error {found.median:.1%}, p95 {found.p95:.1%}."
        parts += ["<h2>Makespans predicted and simulated</h2>", f"<p>{words}</p>"]
        parts.append(_picture(lambda file: draw_predictions(pairs, file)))
    first = runs[0].seed
    for run in runs:
        if run.seed == first:
            parts += _one(run)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    aside = Path(path).with_name(f".{Path(path).name}.part")
    aside.write_text(page + "".join(parts) + "</html>\n", encoding="utf-8")
    os.replace(aside, path)


def _one(run: Run) -> list[str]:
    parts = [f"<h2>{escape(run.policy)}, {escape(run.segment)}, seed {run.seed}</h2>"]
    if run.result.intervals:
        parts.append(_picture(lambda file: draw_timeline(run.result, file)))
    parts += [_table(step_table(run.result)), _table(transition_table(run.result))]
    return [*parts, f"<p>{escape(counts_line(run.result.counts))}</p>"]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _picture(draw: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        draw(file)
        data = base64.b64encode(file.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="">'
