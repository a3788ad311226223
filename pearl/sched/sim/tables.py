"""Simulated runs as tables: throughput by policy and segment, makespans predicted and simulated, what happened.

Owns what is compared and its wording; figures are `figures.py`. It runs nothing. Invariant: a mean over seeds never stands
without its spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pearl.sched.sim.results import SimResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulated run: which policy on which segment (or any other case), from which seed."""

    policy: str
    segment: str
    seed: int
    result: SimResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation (0 for a single value) over seeds."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        mean = _plain(self.mean, 4)
        return mean if self.count < 2 else f"{mean} ± {_plain(self.deviation, 2)}"


def _plain(value: float, digits: int) -> str:
    """Of so many digits, or all of those before the point: never as a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def spread_of(values: Iterable[float]) -> Spread:
    """ValueError without values."""
    found = list(values)
    if not found:
        raise ValueError("values=[]: nothing to average")
    return Spread(mean=statistics.fmean(found), deviation=statistics.stdev(found) if len(found) > 1 else 0.0, count=len(found))


def throughput(result: SimResult) -> float:
    """(rollout tokens + training tokens) per second over whole steps; 0 without one.

    Rollout tokens are all those of the trajectories that were trained, prompts and observations too, each once: what is
    computed again is no output.
    """
    if not result.steps:
        return 0.0
    return 2 * sum(step.trained_tokens for step in result.steps) / result.steps[-1].ended_s


def gain(ours: Iterable[Run], theirs: Iterable[Run]) -> Spread:
    """Throughput of `ours` over `theirs`, less 1: run by run. ValueError if their segments and seeds are not the same."""
    mine = {(run.segment, run.seed): throughput(run.result) for run in ours}
    other = {(run.segment, run.seed): throughput(run.result) for run in theirs}
    if mine.keys() != other.keys() or not mine:
        raise ValueError(f"runs of {sorted(mine)} and of {sorted(other)}: must be of the same segments and seeds")
    return spread_of(mine[key] / other[key] - 1 if other[key] > 0 else math.inf for key in mine)


def throughput_table(runs: Sequence[Run], base: str | None = None) -> list[list[str]]:
    """Rows of text, a heading first: tokens per second by policy and segment, and the gain over the policy `base`."""
    segments, policies = _names(runs)
    rows = [["policy", *(f"tokens/s ({_with(segment)})" for segment in segments)] + ([f"over {base}"] if base else [])]
    for policy in policies:
        mine = [run for run in runs if run.policy == policy]
        cells = []
        for segment in segments:
            here = [throughput(run.result) for run in mine if run.segment == segment]
            cells.append(str(spread_of(here)) if here else "-")
        if base:
            cells.append(_signed(gain(mine, [run for run in runs if run.policy == base])))
        rows.append([policy, *cells])
    return rows


def _with(segment: str) -> str:
    """The external GPUs of a segment, which may be a steady number of workers."""
    if segment.isdecimal():
        return f"{segment} external worker{'' if segment == '1' else 's'}"
    return "no external GPUs" if segment == "none" else segment


def _names(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(run.segment for run in runs)), list(dict.fromkeys(run.policy for run in runs))


def _signed(value: Spread) -> str:
    around = f" ± {100 * value.deviation:.1f}" if value.count > 1 else ""
    return f"{100 * value.mean:+.1f}{around} %"


def step_table(result: SimResult) -> list[list[str]]:
    """Rows of text, one per RL step."""
    rows = [["step", "shape", "rollout s", "predicted s", "train s", "step s", "tokens", "workers", "staleness"]]
    last = 0.0
    for step in result.steps:
        predicted = "-" if step.predicted_s is None else f"{step.predicted_s:.0f}"
        rows.append(
            [
                str(step.step),
                step.shape + ("" if step.steady else " *"),
                f"{step.makespan_s:.0f}",
                predicted,
                f"{step.trained_s - step.collected_s:.0f}",
                f"{step.ended_s - last:.0f}",
                str(step.trained_tokens),
                f"{step.workers:.1f}",
                f"{step.staleness_mean:.2f}",
            ]
        )
        last = step.ended_s
    return rows


def transition_table(result: SimResult) -> list[list[str]]:
    """Rows of text, one per kind of decision: how many, how many failed, seconds they took on average."""
    rows = [["decision", "count", "failed", "mean s"]]
    for kind in dict.fromkeys(row["kind"] for row in result.transitions):
        here = [row for row in result.transitions if row["kind"] == kind]
        took = [row["seconds"] for row in here if row["seconds"] is not None]
        failed = sum(not row["ok"] for row in here)
        rows.append([kind, str(len(here)), str(failed), f"{statistics.fmean(took):.1f}" if took else "-"])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Of |predicted / simulated - 1| over steps that began with a prediction and kept their shape."""

    median: float
    p95: float
    count: int


def prediction_pairs(results: Iterable[SimResult]) -> list[tuple[float, float]]:
    """(predicted, simulated) makespans of steps whose shape stayed what the prediction was for."""
    steps = [step for result in results for step in result.steps if step.steady and step.predicted_s is not None]
    return [(step.predicted_s, step.makespan_s) for step in steps if step.predicted_s is not None]


def prediction_error(pairs: Sequence[tuple[float, float]]) -> PredictionError:
    """Infinite without pairs."""
    errors = sorted(abs(predicted / simulated - 1) for predicted, simulated in pairs if simulated > 0)
    if not errors:
        return PredictionError(median=math.inf, p95=math.inf, count=0)
    last = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
    return PredictionError(median=statistics.median(errors), p95=last, count=len(errors))


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; the first is aligned left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        others = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *others]).rstrip())
    return "\n".join(lines)


def counts_line(counts: Mapping[str, int]) -> str:
    """What was counted, most first."""
    shown = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value}" for name, value in shown if value)
