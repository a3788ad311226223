"""What passes between a main loop and the thread beside it that has its connection: messages in, events out, and a bell.

Owns both queues and the pipe by which the thread is woken. It knows no socket and interprets nothing. Invariants: both
directions keep their order; an event leaves the queue only once it was sent; no call waits longer than it was told to.
Torch-free.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from typing import Any

import msgspec

from pearl.channel import Client
from pearl.protocol import Event

PIPE_BYTES = 65536


class Mailbox:
    """`send` and `take` are the main loop's (and any other's), `put`, `flush` and `hush` the thread's, which polls `bell`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self.bell, self._rope = os.pipe()
        """A descriptor that can be read once somebody has rung."""
        self._closed = False
        for end in (self.bell, self._rope):
            os.set_blocking(end, False)

    def send(self, event: Event) -> None:
        """Queues an event for the other side; from any thread."""
        with self._lock:
            self._outbox.append(self._encoder.encode(event))
            first = len(self._outbox) == 1
        if first:  # else the thread is at it, or has been rung for
            self.ring()

    def take(self, timeout_s: float) -> list[Any]:
        """What has arrived for the main loop; waits up to `timeout_s` for the first of it."""
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def ring(self) -> None:
        """Wakes the thread; from any thread, and from a signal's handler."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
                os.write(self._rope, b"x")

    def put(self, message: Any) -> None:
        """For the main loop."""
        self._inbox.put(message)

    def hush(self) -> None:
        """Takes the ringing back: before `flush`, so that what comes later rings again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, PIPE_BYTES)

    def flush(self, client: Client) -> None:
        """Sends all events. ChannelError if one cannot be; it and those behind it stay."""
        while self._outbox:
            client.send_encoded(self._outbox[0])
            with self._lock:
                self._outbox.popleft()

    def close(self) -> None:
        """Gives the pipe back, once the thread has ended."""
        if not self._closed:
            self._closed = True
            for end in (self.bell, self._rope):
                os.close(end)
