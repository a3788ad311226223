"""The control thread of a rank: its connection to the controller, which stays awake while the main thread is busy.

Owns the rank's socket, heartbeats, and the watch over parent and controller. It does not interpret commands: they go into
`inbox` in the order of arrival. Invariant: once the rank is to end (`end`), the process is gone at most `stop_s` seconds
later, whatever the main thread is doing. Torch-free.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from pearl.channel import ChannelError, Client
from pearl.config import Timeouts
from pearl.protocol import Event, Interrupted, Notice, Ping, Pong, StepReport, Stop, ToRank

ENDED_GRACE_S = 1.0
"""A controller that ended may have sent its last command just before; it gets this long to arrive."""

LONGEST_GAP_S = 1.0
"""A pause of the watcher itself (Ctrl-Z, a suspended laptop) counts at most this much towards any deadline."""


class ControlThread(threading.Thread):
    """Connects as `rank{n}`; `inbox` holds what the main loop has to do, `show` gets reports as they arrive.

    Ends the rank (a `Stop` in the inbox, then a hard exit) when the parent process changes, when the controller was silent
    for `timeouts.silence_s`, or when `controller_ended()` (asked on the rank that started it) gives a reason.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        timeouts: Timeouts,
        show: Callable[[StepReport | Notice], None],
        controller_ended: Callable[[], str | None],
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.rank = rank
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._address = address
        self._timeouts = timeouts
        self._show = show
        self._controller_ended = controller_ended
        self._ended_for = 0.0
        self._parent = os.getppid()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._closing = threading.Event()
        self._end_in: float | None = None
        self._exit_code = 1

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

    def end(self, reason: str, exit_code: int) -> None:
        """Asks the main loop to stop and starts the clock of the hard exit. Safe in a signal handler."""
        if self._end_in is None:
            self._exit_code = exit_code
            self._end_in = self._timeouts.stop_s
            self.inbox.put(Stop(number=-1, reason=reason, exit_code=exit_code))

    def interrupt(self, signum: int) -> None:
        """SIGINT or SIGTERM: tells the controller, then ends the rank with 128 + signum."""
        name = signal.Signals(signum).name
        self._outbox.append(msgspec.msgpack.encode(Interrupted(rank=self.rank, signal=name)))
        self.end(f"interrupted by {name}", 128 + signum)

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued and ends the thread."""
        self._closing.set()
        self._wake()
        self.join(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_writer, b"x")

    def run(self) -> None:
        context = zmq.Context()
        client = Client(context, self._address, f"rank{self.rank}", ToRank)
        last, silence = time.monotonic(), 0.0
        while not self._closing.is_set():
            self._wait(client)
            now = time.monotonic()
            gap, last = min(now - last, LONGEST_GAP_S), now
            heard = self._receive(client)
            silence = 0.0 if heard else silence + gap
            self._watch(silence, gap)
            self._flush(client)
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
            if isinstance(message, Ping):
                client.send(Pong(rank=self.rank, sequence=message.sequence))
            elif isinstance(message, StepReport | Notice):
                self._show(message)
            else:
                self.inbox.put(message)
        return bool(messages)

    def _watch(self, silence: float, gap: float) -> None:
        if os.getppid() != self._parent:
            self.end("the launcher is gone", 1)
        if silence > self._timeouts.silence_s:
            self.end(f"the controller was silent for timeouts.silence_s={self._timeouts.silence_s:g} s", 1)
        ended = self._controller_ended()
        self._ended_for += gap if ended else 0.0
        if ended and self._ended_for > ENDED_GRACE_S:
            self.end(ended, 1)
        if self._end_in is not None:
            self._end_in -= gap
            if self._end_in <= 0:
                os._exit(self._exit_code)

    def _flush(self, client: Client) -> None:
        try:
            while self._outbox:
                client.send_encoded(self._outbox[0])
                self._outbox.popleft()
        except ChannelError as error:
            self.end(str(error), 1)


