"""What rank 0 shows while a job runs: a display that renews itself on a terminal, plain lines anywhere else.

Owns when something is shown and the stream it goes to; what it looks like is `render`, a pure function of `ViewState`. It
does not know processes or sockets: reports come in by calls. Invariant: no call raises because of the stream. Once the
reader is gone (a closed terminal, `| head`) everything is dropped, and the job goes on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pearl.clock import Clock, WallClock
from pearl.metrics import console as text
from pearl.protocol import Status

REFRESH_S = 0.25
HEARTBEAT_S = 30.0

CURVES = ("reward_mean", "success_rate", "eval_success_rate", "tokens_per_s", "time_s")
"""Columns of metrics.jsonl that the display keeps of every step."""

WIDEST_CURVE = 100
RATE_OVER_STEPS = 10
"""The time left is estimated from this many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """All that the display shows. `curves` has one value per step for each of CURVES; `width`, `height` in characters."""

    row: Mapping[str, Any]
    curves: Mapping[str, Sequence[float | None]]
    status: Status | None
    width: int
    height: int
    ascii_only: bool = False

    @property
    def narrow(self) -> bool:
        return self.width < 60


def is_interactive(stream: TextIO) -> bool:
    """Whether a display that renews itself makes sense: a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


class LiveView:
    """Shows notices, steps and states on `stream`. Calls may come from any thread, one at a time.

    `history` are rows of an earlier part of the run (a resumed one): they belong to the curves and are not printed.
    """

    def __init__(
        self, stream: TextIO, *, interactive: bool, clock: Clock | None = None, history: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that a plain terminal does not know must not end the job
        self._stream = stream
        self._clock = clock or WallClock()
        self._console = _Console(file=stream, force_terminal=interactive, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._interactive = interactive
        self._lock = threading.RLock()
        self._gone = False
        self._row: Mapping[str, Any] = {}
        self._curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
        self._status: Status | None = None
        self._drawn = float("-inf")
        self._last_line = self._clock.now()
        self._next_beat_s = HEARTBEAT_S
        self._waited_s = 0.0
        for row in history:
            self._keep(row)

    def notice(self, line: str) -> None:
        """One line that stays: printed, on a terminal above the display."""
        with self._lock:
            self._line(line)

    def step(self, row: Mapping[str, Any]) -> None:
        """A finished step (a row of metrics.jsonl)."""
        with self._lock:
            self._keep(row)
            if self._interactive:
                self._draw()
            else:
                self._line(text.step_line(row))

    def status(self, status: Status) -> None:
        """What is waited for, and how busy everybody is, as of now."""
        with self._lock:
            self._status = status
            if self._interactive:
                self._draw()
            elif self._beat_due(status):
                self._next_beat_s = status.waited_s + HEARTBEAT_S
                self._line(text.heartbeat_line(status))

    def close(self, final_text: str) -> None:
        """Leaves the curves on the screen and prints `final_text` below. What comes later is printed as plain lines."""
        with self._lock:
            self._status = None  # nobody is busy or waiting any more
            if self._live is not None:
                self._draw(now=True)
                self._guarded(self._live.stop)
                self._live = None
            self._interactive = False
            if final_text:
                self._line(final_text)

    # ------------------------------------------------------------------------------------------------- inside

    def _keep(self, row: Mapping[str, Any]) -> None:
        self._row = row
        for name, curve in self._curves.items():
            value = row.get(name)
            curve.append(value if text.is_number(value) else None)

    def _beat_due(self, status: Status) -> bool:
        """After each 30 s of one wait; and after 30 s without any line, for waits that are renewed while work comes in."""
        if status.waited_s < self._waited_s:
            self._next_beat_s = HEARTBEAT_S
        self._waited_s = status.waited_s
        return status.waited_s >= self._next_beat_s or self._clock.now() - self._last_line >= HEARTBEAT_S

    def _line(self, line: str) -> None:
        self._last_line = self._clock.now()
        if self._live is not None:
            self._guarded(lambda: self._console.print(Text(line), soft_wrap=True))
        else:
            self._guarded(lambda: self._write(line))

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _draw(self, *, now: bool = False) -> None:
        """Redraws, unless it did so a moment ago; the states that come every second catch up."""
        if not now and self._clock.now() - self._drawn < REFRESH_S:
            return
        self._drawn = self._clock.now()
        self._guarded(self._refresh)

    def _refresh(self) -> None:
        size = self._console.size
        state = ViewState(
            row=self._row,
            curves=self._curves,
            status=self._status,
            width=size.width,
            height=size.height,
            ascii_only=not self._console.encoding.startswith("utf"),
        )
        if self._live is None:
            self._live = self._started()
        self._live.update(render(state), refresh=True)

    def _started(self) -> Live:
        """The cursor stays visible: a process that is killed could not bring it back."""
        ours = self._stream is sys.stdout
        live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=ours,  # a stray print of this process goes above the display, not through it
            redirect_stderr=ours and sys.stderr.isatty(),
        )
        live.start()
        self._console.show_cursor(True)
        return live

    def _guarded(self, show: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            show()
        except OSError:  # a broken pipe, a vanished terminal, a full disk
            self._give_up()
        except ValueError:
            if not self._stream.closed:
                raise
            self._give_up()

    def _give_up(self) -> None:
        """Drops all that comes. A lost standard output leads nowhere from now on, so the flush at exit cannot fail."""
        self._gone = self._console.quiet = True
        live, self._live = self._live, None
        with contextlib.suppress(OSError, ValueError):
            if live is not None:
                live.stop()
            if self._stream.fileno() == 1:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, 1)
                os.close(nothing)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here; the error goes on to LiveView instead."""
        self.quiet = True
        raise BrokenPipeError


# ------------------------------------------------------------------------------------------------------------- looks


def render(state: ViewState) -> RenderableType:
    """The display. Pure: nothing but `state` decides what it looks like."""
    parts = (_progress(state), _curves(state), _details(state), _workers(state), _waiting(state))
    return Group(*[part for part in parts if part is not None])


def _progress(state: ViewState) -> RenderableType:
    if not state.row:
        return Text("before the first step", style="bold")
    step, last = state.row.get("step", 0), state.row.get("max_steps", 0)
    elapsed = text.duration(state.row.get("elapsed_s", 0.0))
    left = _time_left(state)
    times = Text(elapsed if state.narrow else f"{elapsed} so far{f', about {text.duration(left)} left' if left else ''}", "dim")
    grid = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    bar_width = max(4, min(40, state.width - len(f"step {step}/{last} ") - len(times) - 1))
    grid.add_row(Text(f"step {step}/{last}", "bold"), ProgressBar(total=last or 1, completed=step, width=bar_width), times)
    return grid


def _time_left(state: ViewState) -> float | None:
    recent = [value for value in state.curves["time_s"][-RATE_OVER_STEPS:] if value is not None]
    steps = state.row.get("max_steps", 0) - state.row.get("step", 0)
    return steps * sum(recent) / len(recent) if recent and steps > 0 else None


def _curves(state: ViewState) -> RenderableType | None:
    if not state.row:
        return None
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="crop")
    width = max(4, min(WIDEST_CURVE, state.width - 18))
    evaluations = [value for value in state.curves["eval_success_rate"] if value is not None]
    share = {"low": 0.0, "high": 1.0}
    rows: list[tuple[str, str, Sequence[float | None], str, dict[str, float]]] = [
        ("reward", text.number(state.row.get("reward_mean"), "+.3f"), state.curves["reward_mean"], "cyan", {}),
        ("success", text.number(state.row.get("success_rate"), ".2f"), state.curves["success_rate"], "green", share),
        ("eval", text.number(evaluations[-1], ".2f") if evaluations else "", evaluations, "green", share),
        ("tokens/s", text.count(state.row.get("tokens_per_s")), state.curves["tokens_per_s"], "blue", {"low": 0.0}),
    ]
    for label, value, curve, style, scale in rows:
        if curve:
            grid.add_row(label, value, Text(text.sparkline(curve, width, ascii_only=state.ascii_only, **scale), style))
    return grid


def _details(state: ViewState) -> RenderableType | None:
    if not state.row:
        return None
    total = state.row.get("time_s")
    parts = [f"{text.number(total, '.2f')} s{'' if state.narrow else ' a step'}"]
    for part in text.TIME_PARTS:
        seconds = state.row.get(f"{part}_s")
        if text.is_number(total) and text.is_number(seconds) and seconds >= 0.005 * total > 0:
            parts.append(f"{part} {text.percent(seconds / total)}")
    stale = f"{text.number(state.row.get('staleness_mean'), '.1f')} (most {text.number(state.row.get('staleness_max'), 'd')})"
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=8)
    grid.add_column()
    grid.add_row("time", ("  " if not state.narrow else " ").join(parts))
    grid.add_row("stale", stale)
    return grid


def _workers(state: ViewState) -> RenderableType | None:
    if state.status is None or not state.status.workers:
        return None
    grid = Table.grid(padding=(0, 2 if not state.narrow else 1, 0, 0))
    bar = [] if state.narrow else [""]
    for name, justify in (("worker", "left"), ("role", "left"), ("busy", "right"), *((name, "left") for name in bar)):
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    heads = ("worker", "role", "busy", *bar, "run", "wait", "ver" if state.narrow else "weights")
    grid.add_row(*[Text(head, "dim") for head in heads])
    for line in text.worker_lines(state.status.workers, max(2, state.height - 12)):
        share = line.busy_share if text.is_number(line.busy_share) else 0.0
        bars = [ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), width=10) for _ in bar]
        counts = (str(line.running), str(line.waiting), line.versions)
        grid.add_row(Text(line.name), Text(line.role), text.percent(line.busy_share), *bars, *counts)
    return Group("", grid)


def _waiting(state: ViewState) -> RenderableType | None:
    if state.status is None:
        return None
    lines = Text()
    if state.status.waiting_for:
        long = state.status.waited_s >= HEARTBEAT_S
        waited = f"waiting {text.duration(state.status.waited_s)} for {state.status.waiting_for}"
        lines.append(waited, "bold yellow" if long else "")
    if state.status.queues:
        lines.append(("\n" if lines else "") + text.queues_text(state.status.queues), "dim")
    return Group("", lines) if lines else None
