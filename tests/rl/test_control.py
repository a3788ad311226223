"""The control thread: awake whatever the main thread does, and every way in which a rank learns that it must end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pearl.channel import Server, wait
from pearl.config import Timeouts
from pearl.protocol import (
    Done,
    Interrupted,
    Kill,
    Notice,
    Ping,
    Pong,
    Publish,
    Ready,
    Serve,
    Status,
    StepReport,
    Stop,
    ToController,
)
from pearl.rl import control as control_module
from pearl.rl.control import ControlThread

LONG_S = 8.0


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimpleNamespace]]:
    """start(controller=Popen | None, show=..., **timeouts) -> the thread, its controller's socket, and what was recorded."""
    exits: list[int] = []
    monkeypatch.setattr(control_module.os, "_exit", exits.append)
    context = zmq.Context()
    server = Server(context, "tcp://127.0.0.1:0", ToController)
    threads = []

    def build(controller: Any = None, show: Callable[[Any], None] | None = None, **timeouts: float) -> SimpleNamespace:
        shown: list[Any] = []
        limits = Timeouts(**{"silence_s": 30.0, "stop_s": 0.5} | timeouts)
        thread = ControlThread(server.address, 0, limits, show or shown.append, controller)
        thread.start()
        threads.append(thread)
        thread.send(Ready(rank=0, max_model_len=1))
        stage = SimpleNamespace(thread=thread, server=server, shown=shown, exits=exits, got=[])
        until(lambda: receive(stage))
        return stage

    yield build
    for thread in threads:
        thread.close()
    server.close()
    context.term()


def receive(stage: SimpleNamespace) -> list[Any]:
    """All events so far."""
    stage.got += [message for _, message in stage.server.receive()]
    return stage.got


def until(holds: Callable[[], Any], timeout_s: float = LONG_S) -> float:
    """Waits until `holds()`; the seconds that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s, "it did not come about"
        time.sleep(0.01)
    return time.monotonic() - began


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def next_stop(stage: SimpleNamespace, timeout_s: float = LONG_S) -> Stop:
    messages: list[Any] = []
    until(lambda: messages.extend(stage.thread.take(0.05)) or messages, timeout_s)
    [stop] = messages
    assert isinstance(stop, Stop)
    return stop


def test_pings_are_answered_while_the_main_thread_takes_nothing(start: Callable[..., SimpleNamespace]) -> None:
    stage = start()
    for sequence in range(3):
        stage.server.send("rank0", Ping(sequence=sequence))
    until(lambda: sum(isinstance(event, Pong) for event in receive(stage)) == 3)
    assert [event.sequence for event in stage.got if isinstance(event, Pong)] == [0, 1, 2]
    assert stage.thread.take(0.0) == []


def test_commands_wait_in_order_and_what_is_for_people_is_shown_at_once(start: Callable[..., SimpleNamespace]) -> None:
    stage = start()
    shown = (Notice(text="hello"), StepReport(metrics={"step": 1}), Status(waiting_for="", waited_s=0.0, queues={}, workers={}))
    for message in (Serve(number=0), shown[0], Publish(number=1, version=1), *shown[1:]):
        stage.server.send("rank0", message)
    until(lambda: len(stage.shown) == 3)
    assert [type(message) for message in stage.shown] == [Notice, StepReport, Status]
    assert [message.number for message in stage.thread.take(1.0)] == [0, 1]


def test_events_arrive_in_order_and_close_sends_the_last(start: Callable[..., SimpleNamespace]) -> None:
    stage = start()
    for number in range(200):
        stage.thread.send(Done(rank=0, number=number, seconds=0.0))
    stage.thread.close()
    assert not stage.thread.is_alive()
    until(lambda: len(receive(stage)) == 201)
    assert [event.number for event in stage.got[1:]] == list(range(200))


def test_a_good_end_is_left_to_the_main_thread(start: Callable[..., SimpleNamespace]) -> None:
    stage = start(stop_s=0.2)
    stage.server.send("rank0", Stop(number=9, reason="all done", exit_code=0))
    assert next_stop(stage).reason == "all done"
    time.sleep(0.7)
    assert (stage.exits, stage.shown) == ([], [])


def test_a_main_thread_that_does_not_leave_after_a_failure_is_left_behind(start: Callable[..., SimpleNamespace]) -> None:
    stage = start(stop_s=0.4)
    stage.server.send("rank0", Stop(number=9, reason="rank 3 failed", exit_code=1))
    took = until(lambda: stage.exits)
    assert 0.3 < took < 3
    assert stage.exits[0] == 1
    assert [message.reason for message in stage.shown] == ["rank 3 failed"]


def test_a_silent_controller_is_killed_and_the_rank_ends(start: Callable[..., SimpleNamespace]) -> None:
    child = sleeper()
    try:
        stage = start(controller=child, silence_s=0.5)
        stop = next_stop(stage)
        assert "silent for timeouts.silence_s=0.5 s" in stop.reason
        assert stop.exit_code == 1
        assert child.wait(5) == -signal.SIGKILL
        until(lambda: stage.exits)
    finally:
        child.kill()


def test_pings_keep_the_silence_away(start: Callable[..., SimpleNamespace]) -> None:
    stage = start(silence_s=0.8)
    for sequence in range(8):
        stage.server.send("rank0", Ping(sequence=sequence))
        wait([stage.server], 0.2)
        time.sleep(0.15)
    assert stage.thread.take(0.0) == []


def test_a_controller_that_ended_is_named_unless_its_last_word_comes_yet(start: Callable[..., SimpleNamespace]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"])
    child.wait()
    stage = start(controller=child)
    assert next_stop(stage).reason == "the controller ended with exit code 5"
    other = start(controller=child)
    other.server.send("rank0", Stop(number=3, reason="its own reason", exit_code=4))
    stops = []
    until(lambda: stops.extend(message for message in other.thread.take(0.05) if isinstance(message, Stop)) or stops)
    assert [stop.reason for stop in stops] == ["its own reason"]


def test_a_rank_whose_launcher_is_gone_ends(start: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = start(stop_s=0.3)
    monkeypatch.setattr(control_module.os, "getppid", lambda: 1)
    assert next_stop(stage).reason == "the launcher is gone"
    until(lambda: stage.exits)


def test_a_signal_is_passed_on_and_the_controllers_verdict_is_taken(start: Callable[..., SimpleNamespace]) -> None:
    stage = start()
    stage.thread.interrupt(signal.SIGINT)
    stage.thread.interrupt(signal.SIGINT)
    until(lambda: any(isinstance(event, Interrupted) for event in receive(stage)))
    stage.server.send("rank0", Stop(number=3, reason="rank 1 died; then interrupted by SIGINT", exit_code=130))
    assert next_stop(stage).reason == "rank 1 died; then interrupted by SIGINT"
    assert [event.signal for event in stage.got if isinstance(event, Interrupted)] == ["SIGINT"]


def test_a_signal_ends_the_rank_without_a_controller_too(start: Callable[..., SimpleNamespace]) -> None:
    stage = start()
    stage.thread.interrupt(signal.SIGTERM)
    stop = next_stop(stage)
    assert (stop.reason, stop.exit_code) == ("interrupted by SIGTERM", 143)
    until(lambda: stage.exits)
    assert stage.exits[0] == 143


def test_a_process_that_hangs_on_this_machine_is_killed_on_request(start: Callable[..., SimpleNamespace]) -> None:
    child = sleeper()
    try:
        stage = start()
        stage.server.send("rank0", Kill(pid=child.pid))
        assert child.wait(5) == -signal.SIGKILL
        stage.server.send("rank0", Kill(pid=child.pid))
        stage.server.send("rank0", Ping(sequence=7))
        until(lambda: any(isinstance(event, Pong) for event in receive(stage)))
    finally:
        child.kill()


def test_an_error_in_the_thread_itself_ends_the_rank_at_once(start: Callable[..., SimpleNamespace]) -> None:
    def broken(_: Any) -> None:
        raise KeyError("an unexpected state")

    stage = start(show=broken, stop_s=0.5)
    stage.server.send("rank0", Notice(text="hello"))
    stop = next_stop(stage, 5.0)
    assert "an unexpected state" in stop.reason
    assert stop.exit_code == 1


def test_nothing_of_the_thread_outlives_it() -> None:
    """Descriptors of the pipe that wakes it included: a process that makes many of them does not run out."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        thread = ControlThread("tcp://127.0.0.1:1", 0, Timeouts(), lambda _: None, None)
        thread.start()
        thread.close()
    assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) - before < 12
