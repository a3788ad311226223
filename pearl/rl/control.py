"""The control thread of a rank: its connection to the controller, which stays awake while the main thread is busy.

Owns the rank's socket, heartbeats, and the watch over parent and controller. It does not interpret commands: they go into
`inbox` in the order of arrival. Invariant: once the rank is to end, the process is gone at most `timeouts.stop_s` seconds
later, whatever the main thread is doing. Torch-free.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from pearl.channel import ChannelError, Client
from pearl.config import Timeouts
from pearl.protocol import Event, Interrupted, Kill, Notice, Ping, Pong, Status, StepReport, Stop, ToRank
from pearl.rl import process

ENDED_GRACE_S = 1.0
"""A controller that ended may have sent its last command just before; it gets this long to arrive."""

INTERRUPT_GRACE_S = 2.0
"""How long an interrupted rank waits for the controller, which may know a better reason (a rank that died first)."""

LONGEST_GAP_S = 1.0
"""A pause of the watcher itself (Ctrl-Z, a suspended laptop) counts at most this much towards any deadline."""


class ControlThread(threading.Thread):
    """Connects as `rank{n}`; `inbox` holds what the main loop has to do, `show` gets what is for people as it arrives.

    Ends the rank (a `Stop` in the inbox, then a hard exit) when the controller says so because of a failure, when the parent
    process changes, when the controller was silent for `timeouts.silence_s`, or when it has ended; `controller` is its
    process on the rank that started it, None elsewhere.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        timeouts: Timeouts,
        show: Callable[[Any], None],
        controller: subprocess.Popen | None,
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.rank = rank
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._address = address
        self._timeouts = timeouts
        self._show = show
        self._controller = controller
        self._parent = os.getppid()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._closing = threading.Event()
        self._deadlines: dict[str, float] = {}
        self._exit_code = 1
        self._last_word: Stop | None = None

    # ------------------------------------------------------------------------------------------------ main thread

    def send(self, event: Event) -> None:
        """Queues an event for the controller; callable from the main thread only (one encoder)."""
        self._outbox.append(self._encoder.encode(event))
        self._wake()

    def take(self, timeout_s: float) -> list:
        """What has arrived for the main loop; waits up to `timeout_s` for the first of it."""
        messages = []
        try:
            messages.append(self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait())
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def interrupt(self, signum: int) -> None:
        """In a handler of SIGINT or SIGTERM: the controller is told and will say stop; if not, the rank ends by itself."""
        if "stop" not in self._deadlines:
            name = signal.Signals(signum).name
            self._exit_code = 128 + signum
            self._outbox.append(msgspec.msgpack.encode(Interrupted(rank=self.rank, signal=name)))
            self._last_word = Stop(number=-1, reason=f"interrupted by {name}", exit_code=self._exit_code)
            self._deadlines |= {"stop": INTERRUPT_GRACE_S, "exit": self._timeouts.stop_s}
            self._wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued and ends the thread."""
        self._closing.set()
        self._wake()
        self.join(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_writer, b"x")

    # ------------------------------------------------------------------------------------------------ this thread

    def run(self) -> None:
        context = zmq.Context()
        client = Client(context, self._address, f"rank{self.rank}", ToRank)
        last, silence = time.monotonic(), 0.0
        while not self._closing.is_set():
            self._wait(client)
            now = time.monotonic()
            gap, last = min(now - last, LONGEST_GAP_S), now
            silence = 0.0 if self._receive(client) else silence + gap
            self._watch(silence)
            self._flush(client)
            self._pass_time(gap)
        self._flush(client)
        client.close()
        context.term()

    def _wait(self, client: Client) -> None:
        poller = zmq.Poller()
        poller.register(client.socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.poll(200)
        with contextlib.suppress(BlockingIOError):  # nobody woke us; the poll ended by itself
            os.read(self._wake_reader, 65536)

    def _receive(self, client: Client) -> bool:
        messages = client.receive()
        for message in messages:
            match message:
                case Ping():
                    client.send(Pong(rank=self.rank, sequence=message.sequence))
                case StepReport() | Status() | Notice():
                    self._show(message)
                case Kill():
                    process.kill(message.pid)
                case Stop():
                    self._stopped(message)
                case _:
                    self.inbox.put(message)
        return bool(messages)

    def _stopped(self, stop: Stop) -> None:
        """The controller's last word. After a failure the main thread may sit in a collective that never ends."""
        self._last_word = None
        self._deadlines = {"stop": math.inf}
        if stop.exit_code:
            self._exit_code = stop.exit_code
            self._deadlines["exit"] = self._timeouts.stop_s
            self._show(stop)
        self.inbox.put(stop)

    def _watch(self, silence: float) -> None:
        """Whether there is still somebody to work for; no longer asked once the rank is to end."""
        if "stop" in self._deadlines:
            return
        if os.getppid() != self._parent:
            self._end("the launcher is gone")
        if silence > self._timeouts.silence_s:
            if self._controller is not None:
                self._controller.kill()
            self._end(f"the controller was silent for timeouts.silence_s={self._timeouts.silence_s:g} s")
        if self._controller is not None and self._controller.poll() is not None:
            self._end(f"the controller ended with exit code {self._controller.returncode}", grace_s=ENDED_GRACE_S)

    def _end(self, reason: str, grace_s: float = 0.0) -> None:
        """Starts the rank's end: a stop for the main loop after `grace_s`, later the hard exit."""
        self._last_word = Stop(number=-1, reason=reason, exit_code=1)
        self._deadlines = {"stop": grace_s, "exit": grace_s + self._timeouts.stop_s}

    def _pass_time(self, gap: float) -> None:
        self._deadlines = {name: left - gap for name, left in self._deadlines.items()}
        if self._last_word is not None and self._deadlines["stop"] <= 0:
            self._show(self._last_word)
            self.inbox.put(self._last_word)
            self._last_word = None
        if self._deadlines.get("exit", 1.0) <= 0:
            os._exit(self._exit_code)

    def _flush(self, client: Client) -> None:
        try:
            while self._outbox:
                client.send_encoded(self._outbox[0])
                self._outbox.popleft()
        except ChannelError as error:
            if "stop" not in self._deadlines:
                self._end(str(error))
