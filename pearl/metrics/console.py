"""What a person reads while a job runs, as plain text: a line per step, a line per long wait, numbers, small curves.

Formatting only: strings in, strings out; printing and deciding when is `live.py`'s. Invariant: a value that is missing or
not finite is shown as "-" and never raises, since what is shown must not end what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pearl.protocol import Status, WorkerStatus

TIME_PARTS = ("rollout", "train", "publish", "eval", "other")
"""The parts of a step's `time_s`; each has a key `{part}_s` in the row."""

LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*%#"

LONG_WAIT_S = 10.0
"""A wait is called one from here on; shorter ones, which follow each other in a step, have no length worth saying."""

HEARTBEAT_WORKERS = 8
"""With more workers than this a heartbeat shows them by role: it is one line."""


def step_line(row: Mapping[str, Any]) -> str:
    """One line for a row of metrics.jsonl (keys as in docs/metrics.md)."""
    parts = [part for part in TIME_PARTS if part != "eval" or row.get("eval_s")]
    split = " ".join(f"{part} {number(row.get(f'{part}_s'), '.2f')}" for part in parts)
    evaluation = f"  eval {number(row['eval_success_rate'], '.2f')}" if is_number(row.get("eval_success_rate")) else ""
    stale = f"  stale {number(row['staleness_mean'], '.1f')}" if row.get("staleness_max") else ""
    gap = f"  gap {number(row['logprob_gap'], '.0e')}" if is_number(row.get("logprob_gap")) else ""
    return (
        f"step {row.get('step', '-'):>4}/{row.get('max_steps', '-')}  reward {number(row.get('reward_mean'), '+.3f')}"
        f"  success {number(row.get('success_rate'), '.2f')}{evaluation}  {count(row.get('tokens_per_s'))} tok/s"
        f"  {number(row.get('time_s'), '.2f')} s ({split}){stale}{gap}"
    )


def heartbeat_line(status: Status) -> str:
    """What is waited for and for how long, the queues, and every worker (by role where they are many), in one line."""
    long = f"still waiting after {duration(status.waited_s)}" if status.waited_s >= LONG_WAIT_S else "waiting"
    parts = [f"{long} for {status.waiting_for}" if status.waiting_for else "running"]
    if status.queues:
        parts.append(queues_text(status.queues))
    parts += [
        f"{line.name} {line.role} busy {percent(line.busy_share)} running {line.running} waiting {line.waiting} {line.versions}"
        for line in worker_lines(status.workers, HEARTBEAT_WORKERS)
    ]
    return " | ".join(parts)


def queues_text(queues: Mapping[str, int]) -> str:
    """{'in_flight': 96} -> 'in flight 96'."""
    return ", ".join(f"{name.replace('_', ' ')} {depth}" for name, depth in queues.items())


# ------------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLine:
    """One worker, or all workers of one role: `busy_share` is their mean, the counts their sums, `versions` e.g. 'v11-12'."""

    name: str
    role: str
    busy_share: float
    running: int
    waiting: int
    versions: str


def worker_lines(workers: Mapping[str, WorkerStatus], most: int) -> list[WorkerLine]:
    """One line per worker, in the order of their names' numbers; if that is more than `most`, one per role."""
    named = {name: [workers[name]] for name in sorted(workers, key=lambda name: (len(name), name))}
    if len(named) <= most:
        return [_worker_line(name, members) for name, members in named.items()]
    roles: dict[str, list[WorkerStatus]] = {}
    for [worker] in named.values():
        roles.setdefault(worker.role, []).append(worker)
    return [_worker_line(f"{len(members)} rank{'s' if len(members) > 1 else ''}", members) for members in roles.values()]


def _worker_line(name: str, members: list[WorkerStatus]) -> WorkerLine:
    versions = [member.weight_version for member in members if member.weight_version >= 0]
    low, high = min(versions, default=None), max(versions, default=None)
    shares = [member.busy_share for member in members if math.isfinite(member.busy_share)]
    return WorkerLine(
        name=name,
        role=str(members[0].role),
        busy_share=sum(shares) / len(shares) if shares else math.nan,
        running=sum(member.running for member in members),
        waiting=sum(member.waiting for member in members),
        versions="v-" if low is None else f"v{low}" if low == high else f"v{low}-{high}",
    )


# ------------------------------------------------------------------------------------------------------------- numbers


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite int or float."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: object, form: str) -> str:
    """The value in a format such as '.2f'; '-' if there is none."""
    return format(value, form) if is_number(value) else "-"


def count(value: object) -> str:
    """1234 -> '1.2k'."""
    if not is_number(value):
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def percent(share: object) -> str:
    """0.826 -> '83%'."""
    return number(share, ".0%")


def duration(seconds: float) -> str:
    """75.3 -> '1 min 15 s'; from an hour on without the seconds."""
    if not is_number(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def sparkline(
    values: Sequence[float | None],
    width: int,
    *,
    low: float | None = None,
    high: float | None = None,
    ascii_only: bool = False,
) -> str:
    """All values as at most `width` characters, each the mean of its share of them; a blank where there is no number.

    The scale goes from `low` to `high`, by default of the values shown; values that are all equal sit at half height.
    """
    means = _buckets(values, width)
    shown = [mean for mean in means if mean is not None]
    if not shown:
        return ""
    bottom, top = min(shown) if low is None else low, max(shown) if high is None else high
    levels = ASCII_LEVELS if ascii_only else LEVELS
    return "".join(" " if mean is None else levels[_level(mean, bottom, top, len(levels))] for mean in means)


def _buckets(values: Sequence[float | None], width: int) -> list[float | None]:
    cells = min(width, len(values))
    means: list[float | None] = []
    for cell in range(cells):
        share = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        numbers = [value for value in share if value is not None and math.isfinite(value)]
        means.append(sum(numbers) / len(numbers) if numbers else None)
    return means


def _level(value: float, low: float, high: float, levels: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return min(levels - 1, max(0, int(share * levels)))
