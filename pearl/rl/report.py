"""A run as one page: `python -m pearl.rl.report RUN` writes RUN/report.html, which needs no network and no other file.

Owns what is shown and in which order: the outcome, curves, where time went, who did what when (from trace.json where there
is one), what the cluster became (from transitions.jsonl), staleness, and sample trajectories with their tokens coloured by
log-prob. It reads what a run has written, also while it goes on. Invariant: every text of a run is escaped: no word of a
model becomes part of the page. Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from pearl import config as configuration
from pearl.config import Config
from pearl.engine.tokenizer import Tokenizer
from pearl.metrics import svg
from pearl.metrics.console import TIME_PARTS, count, duration, is_number, number, percent
from pearl.metrics.jsonl import read_jsonl, runs_near
from pearl.metrics.trace import read_trace
from pearl.rl import report_transitions
from pearl.rl.report_style import STYLE

MOST_SPANS = 3000
"""The timeline shows the last so many spans: a page must open in a second."""
LATE = 200
"""So many of the last episodes are the late ones."""
MOST_TOKENS = 600
"""So many tokens of a sample trajectory are shown."""
COLOURS = {"TrainStep": 1, "engine steps": 0, "Publish": 2, "Checkpoint": 3, "Export": 4, "SetReference": 5}
LOWEST_LOGPROB = -4.0
"""From here on a sampled token is at its darkest."""

Row = dict[str, Any]


def page(run: Path) -> str:
    """The whole page. ValueError if `run` holds no run that has made a step."""
    rows = _rows(run)
    config = _config(run)
    steps = [int(row["step"]) for row in rows]
    parts = [
        f"<h1>{escape(run.resolve().name)}</h1>",
        _outcome(rows, config),
        "<h2>Learning</h2>",
        _figures(_learning(rows, steps)),
        "<h2>Time</h2>",
        _figures(_time(rows, steps)),
        _timeline(run),
        report_transitions.section(_changes(run), rows),
        "<h2>Staleness and agreement</h2>",
        _figures(_agreement(rows, steps)),
        "<h2>Sample trajectories</h2>",
        _trajectories(run, config, _episodes(run / "trajectories.jsonl")),
        "<h2>Settings that differ from the defaults</h2>",
        _settings(config),
    ]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{meta}<title>{escape(run.resolve().name)}</title>"
    return f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _rows(run: Path) -> list[Row]:
    if not run.is_dir():
        raise ValueError(f"{run}: no such directory{runs_near(run)}")
    path = run / "metrics.jsonl"
    rows = {row["step"]: row for row in read_jsonl(path) if "step" in row} if path.is_file() else {}
    if not rows:
        missing = "metrics.jsonl is empty" if path.is_file() else f"metrics.jsonl is not there{runs_near(run)}"
        raise ValueError(f"{run}: no run that has made a step: {missing}")
    return [rows[step] for step in sorted(rows)]


def _episodes(path: Path) -> Iterator[Row]:
    """One at a time: all those of a long run are more than memory has room for. A line that is no row is left out."""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield msgspec.json.decode(line, type=dict)


def _changes(run: Path) -> list[Row]:
    """The finished changes of the cluster; none where nothing was written."""
    path = run / "transitions.jsonl"
    return read_jsonl(path) if path.is_file() else []


def _config(run: Path) -> Config | None:
    """None where it cannot be read: the page does without."""
    try:
        return configuration.from_json((run / "config.json").read_bytes())
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------ numbers


def _outcome(rows: list[Row], config: Config | None) -> str:
    last, late = rows[-1], rows[-10:]
    evaluations = [row["eval_success_rate"] for row in rows if is_number(row.get("eval_success_rate"))]
    facts = {
        "steps": f"{last['step']} of {last.get('max_steps', '?')}",
        "time": duration(last.get("elapsed_s", float("nan"))),
        "success, last 10 steps": number(_mean(late, "success_rate"), ".3f"),
        "held-out success, best": number(max(evaluations, default=None), ".3f"),
        "reward, last 10 steps": number(_mean(late, "reward_mean"), "+.3f"),
        "tokens/s": count(_mean(rows, "tokens_per_s")),
        "training ranks idle": percent(_idle(rows, "train_busy")),
        "serving ranks idle": percent(_idle(rows, "serve_busy")),
        "trajectories": f"{last.get('trained', '?')} trained, {last.get('dropped', '?')} dropped",
    }
    if config is not None:
        facts = {"recipe": config.recipe or "-", "environment": config.env.name, "algorithm": config.algorithm.name} | facts
    boxes = [f"<div><b>{escape(str(value))}</b><span>{escape(name)}</span></div>" for name, value in facts.items()]
    return f'<div class="facts">{"".join(boxes)}</div>'


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if is_number(row.get(key))]
    return sum(values) / len(values) if values else None


def _idle(rows: Sequence[Row], key: str) -> float | None:
    """The share of all time; None if it was not measured."""
    timed = [row for row in rows if is_number(row.get(key)) and is_number(row.get("time_s"))]
    total = sum(row["time_s"] for row in timed)
    return 1 - sum(row[key] * row["time_s"] for row in timed) / total if total else None


def _column(rows: list[Row], key: str) -> list[float | None]:
    return [row.get(key) for row in rows]


def _curves(rows: list[Row], **names: str) -> dict[str, list[float | None]]:
    """Columns by the name that they are shown with, in place of underscores blanks; those without a number are left out."""
    columns = {shown.replace("_", " "): _column(rows, key) for shown, key in names.items()}
    return {name: column for name, column in columns.items() if any(is_number(value) for value in column)}


def _learning(rows: list[Row], steps: list[int]) -> Iterator[tuple[str, Sequence[str], str]]:
    success = _curves(rows, success="success_rate", held_out="eval_success_rate")
    yield "success", list(success), svg.line_chart(steps, success, low=0, high=1)
    for title, names in (
        ("reward", {"mean": "reward_mean"}),
        ("turns per trajectory", {"turns": "turns_mean"}),
        ("entropy and KL, nat", {"entropy": "entropy", "KL": "kl"}),
        ("gradient norm", {"norm": "grad_norm"}),
        ("shares", {"unreadable_turns": "invalid_rate", "groups_of_equal_reward": "zero_variance_groups"}),
    ):
        columns = _curves(rows, **names)
        yield title, list(columns), svg.line_chart(steps, columns)


def _time(rows: list[Row], steps: list[int]) -> Iterator[tuple[str, Sequence[str], str]]:
    split = {part: _column(rows, f"{part}_s") for part in TIME_PARTS}
    yield "seconds of a step", list(split), svg.bar_chart(steps, split)
    columns = _curves(rows, tokens_per_s="tokens_per_s")
    yield "tokens per second", list(columns), svg.line_chart(steps, columns, low=0)
    idle = {
        name: [1 - value if is_number(value) else None for value in _column(rows, key)]
        for name, key in (("training ranks", "train_busy"), ("serving ranks", "serve_busy"))
    }
    yield "idle share", list(idle), svg.line_chart(steps, idle, low=0, high=1)


def _agreement(rows: list[Row], steps: list[int]) -> Iterator[tuple[str, Sequence[str], str]]:
    for title, names in (
        ("staleness, versions", {"mean": "staleness_mean", "most": "staleness_max"}),
        ("engine against trainer, nat", {"same_version": "logprob_gap", "older_versions": "policy_shift"}),
        ("clipped and capped shares", {"clipped": "clip_fraction", "importance_capped": "importance_capped"}),
    ):
        columns = _curves(rows, **names)
        yield title, list(columns), svg.line_chart(steps, columns, low=0)


def _figures(charts: Iterator[tuple[str, Sequence[str], str]]) -> str:
    figures = []
    for title, names, chart in charts:
        if chart:
            keys = [f'<i style="background: var(--c{place})"></i>{escape(name)}' for place, name in enumerate(names)]
            figures.append(f"<figure><figcaption>{escape(title)} <small>{' '.join(keys)}</small></figcaption>{chart}</figure>")
    return f'<div class="figures">{"".join(figures)}</div>'


def _timeline(run: Path) -> str:
    """The spans of the trace, a lane per rank and kind of work."""
    path = run / "trace.json"
    if not path.is_file():
        return "<p>No timeline: set trace=true for one.</p>"
    spans = [event for event in read_trace(path) if event.get("ph") == "X"][-MOST_SPANS:]
    tracks: dict[str, list[tuple[str, float, float]]] = {}
    for event in spans:
        start = event["ts"] / 1e6
        tracks.setdefault(str(event["cat"]), []).append((str(event["name"]), start, start + event["dur"] / 1e6))
    names = dict.fromkeys(str(event["name"]) for event in spans)
    keys = " ".join(f'<i style="background: var(--c{COLOURS.get(name, 7)})"></i>{escape(name)}' for name in names)
    chart = svg.lanes({name: tracks[name] for name in sorted(tracks)}, COLOURS)
    caption = f"<figcaption>who did what when <small>{keys}</small></figcaption>"
    return f'<figure class="wide">{caption}{chart}</figure>' if chart else ""


# ------------------------------------------------------------------------------------------------------- trajectories


def chosen(episodes: Iterable[Row]) -> list[tuple[str, Row]]:
    """A few episodes that say much: the first, one that failed, the last losses and successes, the longest of the last."""
    first: list[Row] = []
    failed: list[Row] = []
    late: deque[Row] = deque(maxlen=LATE)
    for episode in episodes:
        if episode.get("outcome") == "done" and episode.get("token_ids"):
            first = first or [episode]
            late.append(episode)
        elif episode.get("outcome") == "failed":
            failed = [episode]
    wins, losses = [[episode for episode in late if bool(episode.get("success")) is kind] for kind in (True, False)]
    picks = [("the first", first), ("a late success", wins[-1:]), ("a late miss", losses[-1:]), ("failed", failed)]
    if late:
        picks.append(("the longest of the late ones", [max(late, key=lambda episode: len(episode["token_ids"]))]))
    seen: dict[str, tuple[str, Row]] = {}
    for title, found in picks:
        for episode in found:
            seen.setdefault(str(episode.get("trajectory_id")), (title, episode))
    return list(seen.values())


def _trajectories(run: Path, config: Config | None, episodes: Iterable[Row]) -> str:
    tokenizer = _tokenizer(run, config)
    parts = [_trajectory(title, episode, tokenizer) for title, episode in chosen(episodes)]
    legend = (
        '<p class="legend"><span class="given">given</span> <span class="sampled" style="--p: 0%">sampled, likely</span> '
        '<span class="sampled" style="--p: 100%">sampled, unlikely</span> (the log-prob is shown under the pointer)</p>'
    )
    return legend + "".join(parts) if parts else "<p>None yet.</p>"


def _tokenizer(run: Path, config: Config | None) -> Tokenizer | None:
    folders = [run / "policy", run / "initial_policy", *([Path(config.model.path)] if config and config.model.path else [])]
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_folder(folder)
    return None


def _trajectory(title: str, episode: Row, tokenizer: Tokenizer | None) -> str:
    reward, success = number(episode.get("reward"), "+.2f"), "success" if episode.get("success") else "no success"
    where = f"step {episode.get('step')}, seed {episode.get('env_seed')}"
    facts = f"{where}, {len(episode.get('turns', []))} turns, {reward}, {success}"
    error = f'<p class="error">{escape(str(episode["error"]))}</p>' if episode.get("error") else ""
    head = f"<summary><b>{escape(title)}</b> {escape(str(episode.get('trajectory_id')))}: {escape(facts)}</summary>"
    return f"<details open>{head}{error}<pre>{_tokens(episode, tokenizer)}</pre></details>"


def _tokens(episode: Row, tokenizer: Tokenizer | None) -> str:
    """Each token in a colour of its own; without a tokenizer, or log-probs, what was said in plain words."""
    ids, mask = episode.get("token_ids", []), episode.get("loss_mask", [])
    if tokenizer is None:
        said = [f"{turn.get('text', '')}\n{turn.get('observation', '')}" for turn in episode.get("turns", [])]
        return escape("\n".join([str(episode.get("prompt", "")), *said]))
    logprobs = iter(episode.get("logprobs", []))
    parts = []
    for token, sampled in list(zip(ids, mask, strict=False))[:MOST_TOKENS]:
        text = escape(tokenizer.decode([token], skip_special_tokens=False))
        if not sampled:
            parts.append(f'<span class="given">{text}</span>')
            continue
        logprob = next(logprobs, None)
        share = min(1.0, logprob / LOWEST_LOGPROB) if is_number(logprob) else 0.0
        parts.append(f'<span class="sampled" style="--p: {share:.0%}" title="{number(logprob, ".3f")}">{text}</span>')
    more = f"\n... {len(ids) - MOST_TOKENS} more tokens" if len(ids) > MOST_TOKENS else ""
    return "".join(parts) + more


# ------------------------------------------------------------------------------------------------------------ settings


def _settings(config: Config | None) -> str:
    if config is None:
        return "<p>config.json cannot be read.</p>"
    lines = [f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in _differing(config, Config(), "")]
    return f"<table>{''.join(lines)}</table>"


def _differing(section: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(section):
        value, usual = getattr(section, item.name), getattr(default, item.name)
        if dataclasses.is_dataclass(value):
            yield from _differing(value, usual, f"{prefix}{item.name}.")
        elif value != usual and item.name != configuration.CHOSEN:
            yield f"{prefix}{item.name}", value


def main(argv: list[str] | None = None) -> int:
    """The command; the exit code (2: there is nothing to report)."""
    parser = argparse.ArgumentParser(
        prog="python -m pearl.rl.report", allow_abbrev=False, description="Write a run's report.html."
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, help="default: RUN/report.html")
    given = parser.parse_args(argv)
    output = given.output or given.run / "report.html"
    try:
        text = page(given.run)
        aside = output.with_name(f".{output.name}.new")
        aside.write_text(text, encoding="utf-8", errors="replace")
        aside.replace(output)
    except (ValueError, OSError) as error:
        print(f"pearl.rl.report: error: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
