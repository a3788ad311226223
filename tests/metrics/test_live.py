"""The display: what a terminal and a log get, when, and that a stream that is gone harms nobody."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.console import Console

from pearl.clock import VirtualClock
from pearl.metrics.live import CURVES, LiveView, ViewState, is_interactive, render
from pearl.protocol import Status, WorkerStatus

CLEAR_LINE = "\x1b[2K"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def row(step: int, **changes: object) -> dict:
    values = {"step": step, "max_steps": 40, "reward_mean": step / 40, "success_rate": step / 40, "tokens_per_s": 9700.0}
    times = {"time_s": 2.0, "rollout_s": 1.0, "train_s": 0.8, "publish_s": 0.0, "other_s": 0.2, "elapsed_s": 2.0 * step}
    return values | times | {"staleness_mean": 0.5, "staleness_max": 1} | changes


def state_of(waited_s: float = 5.0, waiting_for: str = "a batch of 16 groups (3 ready)", ranks: int = 2) -> Status:
    train = WorkerStatus(role="train", busy_share=0.41, running=0, waiting=0, weight_version=12)
    serve = WorkerStatus(role="mixed", busy_share=0.83, running=14, waiting=3, weight_version=11)
    workers = {f"rank{rank}": serve if rank else train for rank in range(ranks)}
    return Status(waiting_for=waiting_for, waited_s=waited_s, queues={"in_flight": 96, "ready": 3}, workers=workers)


def view_state(rows: list[dict], status: Status | None, *, width: int = 80, height: int = 24, **options: bool) -> ViewState:
    curves = {name: [row.get(name) for row in rows] for name in CURVES}
    return ViewState(row=rows[-1] if rows else {}, curves=curves, status=status, width=width, height=height, **options)


def shown(state: ViewState) -> str:
    console = Console(file=io.StringIO(), width=state.width, record=True, force_terminal=True)
    console.print(render(state))
    return console.export_text()


# ------------------------------------------------------------------------------------------------------------- looks


def test_the_display_shows_progress_curves_workers_and_the_wait() -> None:
    rows = [row(step, eval_success_rate=0.9 if step == 10 else None) for step in range(1, 21)]
    text = shown(view_state(rows, state_of()))
    assert "step 20/40" in text and "40 s so far, about 40 s left" in text
    assert re.search(r"reward +\+0\.500 ▁▁.*██\n", text), "the curve of reward fills its own range"
    assert re.search(r"success +0\.50 ▁▁.*▄▅\s*\n", text), "success is drawn on a scale from 0 to 1"
    assert re.search(r"eval +0\.90 █\s*\n", text), "the last evaluation stays until the next"
    assert re.search(r"tokens/s +9\.7k", text)
    assert "2.00 s a step  rollout 50%  train 40%  other 10%" in text and "stale    0.5 (most 1)" in text
    assert re.search(r"rank0 +train +41% .* 0 +0 +v12\n", text) and re.search(r"rank1 +mixed +83% .* 14 +3 +v11\n", text)
    assert "waiting 5 s for a batch of 16 groups (3 ready)" in text and "in flight 96, ready 3" in text


@pytest.mark.parametrize("width", [40, 59, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    rows = [row(step) for step in range(1, 1001)]
    text = shown(view_state(rows, state_of(), width=width))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert re.search(r"rank1 +mixed +83% .*14 +3 +v11", text)


def test_many_workers_are_shown_by_role_so_that_the_display_fits() -> None:
    text = shown(view_state([row(1)], state_of(ranks=100), height=24))
    assert len(text.splitlines()) <= 24
    assert re.search(r"99 ranks +mixed +83%", text)


def test_before_the_first_step_there_is_a_display_too() -> None:
    assert "before the first step" in shown(view_state([], state_of(waiting_for="all ranks to be ready")))
    assert "waiting 5 s for all ranks to be ready" in shown(view_state([], state_of(waiting_for="all ranks to be ready")))


def test_an_ascii_terminal_gets_ascii_curves() -> None:
    text = shown(view_state([row(step) for step in range(1, 9)], None, ascii_only=True))
    assert "_.-=+*%#" in text and "█" not in text


# ------------------------------------------------------------------------------------------------------------- a terminal


def test_it_is_redrawn_at_most_four_times_a_second() -> None:
    stream, clock = io.StringIO(), VirtualClock()
    view = LiveView(stream, interactive=True, clock=clock)
    for step in range(1, 41):
        view.step(row(step))
        clock.advance(0.05)
    frames = re.findall(r"step \d+/40", stream.getvalue())
    assert 7 <= len(frames) <= 8, "two seconds"
    view.close("done")
    assert "step 40/40" in stream.getvalue(), "the last frame is the last state"
    assert stream.getvalue().endswith("done\n")


def test_a_notice_stands_above_the_display_and_stays() -> None:
    stream = io.StringIO()
    view = LiveView(stream, interactive=True, clock=VirtualClock())
    view.step(row(1))
    before = stream.getvalue()
    view.notice("warm-up 10/40 [bold]as it is[/bold]")
    added = stream.getvalue().removeprefix(before)
    assert added.index(CLEAR_LINE) < added.index("warm-up 10/40 [bold]as it is[/bold]") < added.index("step 1/40")
    view.close("")


def test_the_end_shows_no_wait() -> None:
    stream = io.StringIO()
    view = LiveView(stream, interactive=True, clock=VirtualClock())
    view.step(row(1))
    view.status(state_of())
    before = stream.getvalue()
    view.close("done after 3 s")
    assert "waiting" not in stream.getvalue().removeprefix(before)
    view.notice("later")
    assert stream.getvalue().endswith("done after 3 s\nlater\n"), "what comes after is a plain line"


def test_the_cursor_is_never_left_hidden() -> None:
    stream = io.StringIO()
    LiveView(stream, interactive=True, clock=VirtualClock()).step(row(1))
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "even if the process is killed now"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def output() -> str:
        stream = io.StringIO()
        view = LiveView(stream, interactive=True, clock=VirtualClock())
        view.step(row(3))
        view.close("")
        return stream.getvalue()

    assert COLOUR.search(output())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOUR.search(output())


def test_a_resumed_run_shows_its_earlier_steps() -> None:
    stream = io.StringIO()
    view = LiveView(stream, interactive=True, clock=VirtualClock(), history=[row(step) for step in range(1, 8)])
    assert stream.getvalue() == ""
    view.step(row(8))
    assert "▁▂▃▄▅▆▇█" in stream.getvalue()
    view.close("")


# ------------------------------------------------------------------------------------------------------------- a log


def test_a_log_gets_plain_lines() -> None:
    stream = io.StringIO()
    view = LiveView(stream, interactive=False, clock=VirtualClock())
    view.notice("ready after 2.0 s")
    view.step(row(1))
    view.status(state_of(1.0))
    view.close("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ready after 2.0 s" and lines[1].startswith("step    1/40  reward +0.025") and lines[2:] == ["done"]
    assert "\x1b" not in stream.getvalue()


def beats(waits: list[float], clock: VirtualClock, view: LiveView, stream: io.StringIO) -> list[int]:
    """Sends one state a second with these waits; the seconds (from 0) at which a line came."""
    seconds = []
    for second, waited_s in enumerate(waits):
        before = len(stream.getvalue())
        view.status(state_of(waited_s))
        if len(stream.getvalue()) > before:
            seconds.append(second)
        clock.advance(1.0)
    return seconds


@pytest.fixture
def log() -> tuple[VirtualClock, LiveView, io.StringIO]:
    stream, clock = io.StringIO(), VirtualClock()
    return clock, LiveView(stream, interactive=False, clock=clock), stream


def test_a_wait_is_told_after_each_30_s(log: tuple[VirtualClock, LiveView, io.StringIO]) -> None:
    clock, view, stream = log
    assert beats([float(second) for second in range(100)], clock, view, stream) == [30, 60, 90]
    first = stream.getvalue().splitlines()[0]
    assert first.startswith("still waiting after 30 s for a batch of 16 groups (3 ready) | in flight 96, ready 3 | rank0 train")


def test_a_notice_does_not_put_off_the_heartbeat_of_a_wait(log: tuple[VirtualClock, LiveView, io.StringIO]) -> None:
    clock, view, stream = log
    beats([float(second) for second in range(20)], clock, view, stream)
    view.notice("something else")
    assert beats([float(second) for second in range(20, 40)], clock, view, stream) == [10]


def test_short_waits_are_not_told_while_steps_go_on(log: tuple[VirtualClock, LiveView, io.StringIO]) -> None:
    clock, view, stream = log
    for step in range(1, 6):
        assert beats([float(second) for second in range(20)], clock, view, stream) == []
        view.step(row(step))


def test_silence_is_broken_although_the_wait_is_renewed(log: tuple[VirtualClock, LiveView, io.StringIO]) -> None:
    """A batch that grows renews its wait all the time; a reader of the log still sees life every 30 s."""
    clock, view, stream = log
    assert beats([float(second % 7) for second in range(70)], clock, view, stream) == [30, 60]


# ------------------------------------------------------------------------------------------------------------- streams


@pytest.fixture
def broken() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield stream
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@pytest.mark.parametrize("interactive", [False, True])
def test_a_reader_that_left_harms_nobody(broken: TextIO, interactive: bool) -> None:
    view = LiveView(broken, interactive=interactive, clock=VirtualClock())
    for call in (lambda: view.notice("x"), lambda: view.step(row(1)), lambda: view.status(state_of(31.0))):
        call()
    view.close("done")


@pytest.mark.parametrize("interactive", [False, True])
def test_a_closed_stream_harms_nobody(interactive: bool) -> None:
    stream = io.StringIO()
    view = LiveView(stream, interactive=interactive, clock=VirtualClock())
    view.step(row(1))
    stream.close()
    view.notice("x")
    view.close("done")


@pytest.mark.parametrize("interactive", [False, True])
def test_a_lost_standard_output_leaves_the_exit_code_alone(interactive: bool) -> None:
    script = (
        "import sys; from pearl.metrics.live import LiveView\n"
        f"view = LiveView(sys.stdout, interactive={interactive}); view.step(dict(step=1, max_steps=2)); view.close('done')\n"
        "print('more'); sys.exit(7)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("interactive", [False, True])
def test_a_plain_encoding_is_enough(interactive: bool) -> None:
    raw = io.BytesIO()
    view = LiveView(io.TextIOWrapper(raw, encoding="ascii"), interactive=interactive, clock=VirtualClock())
    view.step(row(1))
    view.notice("höher → weiter")
    view.close("done")
    assert b"h?her ? weiter" in raw.getvalue()


def test_only_a_terminal_that_can_move_its_cursor_is_interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        assert is_interactive(stream)
        for term in ("dumb", "unknown"):
            monkeypatch.setenv("TERM", term)
            assert not is_interactive(stream)
    os.close(master)
    assert not is_interactive(io.StringIO())
