"""The control thread of a rank: its connection to the controller, which stays awake while the main thread is busy.

Owns the rank's socket, heartbeats, and the watch over parent and controller. It does not interpret commands: they go into
the main loop's mailbox in the order of arrival. Invariant: once the rank is to end, the process is gone at most
`timeouts.stop_s` seconds later, whatever the main thread is doing. Torch-free.
"""

from __future__ import annotations

import collections
import math
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from pearl.channel import ChannelError, Client
from pearl.config import Timeouts
from pearl.protocol import Event, Failed, Interrupted, Kill, Notice, Ping, Pong, Status, StepReport, Stop, ToRank
from pearl.rl import process
from pearl.rl.heartbeat import LONGEST_GAP_S
from pearl.rl.mailbox import Mailbox

POLL_MS = 200
WATCH_EVERY_S = 0.05

ENDED_GRACE_S = 1.0
"""A controller that ended may have sent its last command just before; it gets this long to arrive."""

ANSWER_GRACE_S = 2.0
"""How long a rank that is to end waits for the controller's word, which may know a better reason (a rank that died first)."""

LAUNCHER_GONE = "the launcher is gone"


class ControlThread(threading.Thread):
    """Connects as `rank{n}`; `take` gives what the main loop has to do, `show` gets what is for people as it arrives.

    Ends the rank (a `Stop` for the main loop, then a hard exit) when the controller says so because of a failure, when the
    parent process changes, when the controller was silent for `timeouts.silence_s`, or when it has ended; `controller` is its
    process on the rank that started it, None elsewhere. `leave` is the hard exit, if not `os._exit`.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        timeouts: Timeouts,
        show: Callable[[Any], None],
        controller: subprocess.Popen | None,
        leave: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.rank = rank
        self._address = address
        self._timeouts = timeouts
        self._show = show
        self._controller = controller
        self._leave = leave
        self._parent = os.getppid()
        self._mail = Mailbox()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._closing = threading.Event()
        self._deadlines: dict[str, float] = {}
        self._exit_code = 1
        self._last_word: Stop | None = None

    # ------------------------------------------------------------------------------------------------ main thread

    def send(self, event: Event) -> None:
        """Queues an event for the controller; from any thread."""
        self._mail.send(event)

    def take(self, timeout_s: float) -> list:
        """What has arrived for the main loop; waits up to `timeout_s` for the first of it."""
        return self._mail.take(timeout_s)

    def interrupt(self, signum: int) -> None:
        """After a signal, from any thread: the controller is told and will say stop; if not, the rank ends by itself."""
        self._calls.append(partial(self._interrupted, signum))
        self._mail.ring()

    def fail(self, reason: str) -> None:
        """From any thread: the rank is to end, and so is the job."""
        self._calls.append(partial(self._lose, reason))
        self._mail.ring()

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is queued and ends the thread."""
        self._closing.set()
        self._mail.ring()
        self.join(timeout_s)
        if not self.is_alive():
            self._mail.close()

    # ------------------------------------------------------------------------------------------------ this thread

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # a fault of ours; nobody else would end the rank in time
            traceback.print_exc()
            self._mail.put(Stop(number=-1, reason=f"control thread: {type(error).__name__}: {error}", exit_code=1))
            if not self._closing.wait(self._timeouts.stop_s):
                os._exit(1)

    def _run(self) -> None:
        context = zmq.Context()
        client = Client(context, self._address, f"rank{self.rank}", ToRank)
        poller = zmq.Poller()
        poller.register(client.socket, zmq.POLLIN)
        poller.register(self._mail.bell, zmq.POLLIN)
        last, silence, watched = time.monotonic(), 0.0, -math.inf
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._mail.bell in ready:
                self._mail.hush()
            now = time.monotonic()
            gap, last = min(now - last, LONGEST_GAP_S), now
            silence = 0.0 if client.socket in ready and self._receive(client) else silence + gap
            while self._calls:
                self._calls.popleft()()
            if now - watched > WATCH_EVERY_S:  # asks the system; most turns of this loop only pass a message on
                watched = now
                self._watch(silence)
            self._flush(client)
            self._pass_time(gap)
        self._flush(client)
        client.close()
        context.term()

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
                    self._mail.put(message)
        return bool(messages)

    def _stopped(self, stop: Stop) -> None:
        """The controller's last word. After a failure the main thread may sit in a collective that never ends."""
        self._last_word = None
        self._deadlines = {"stop": math.inf}
        if stop.exit_code:
            self._exit_code = stop.exit_code
            self._deadlines["exit"] = self._timeouts.stop_s
            self._show(stop)
        self._mail.put(stop)

    def _watch(self, silence: float) -> None:
        """Whether there is still somebody to work for; no longer asked once the rank is to end."""
        if "stop" in self._deadlines:
            return
        if process.is_orphan(self._parent):
            self._lose(LAUNCHER_GONE)
            return
        if silence > self._timeouts.silence_s + (0.0 if self._controller is not None else self._patience_s()):
            if self._controller is not None:
                self._controller.kill()
            self._end(f"the controller was silent for timeouts.silence_s={self._timeouts.silence_s:g} s")
        elif self._controller is not None and self._controller.poll() is not None:
            self._end(f"the controller ended with exit code {self._controller.returncode}", grace_s=ENDED_GRACE_S)

    def _patience_s(self) -> float:
        """The rank that started the controller kills it and says so first; its end is the others' end."""
        return self._timeouts.heartbeat_s + ANSWER_GRACE_S

    def _interrupted(self, signum: int) -> None:
        if "stop" in self._deadlines:
            return
        if process.is_orphan(self._parent):  # the kernel's signal says that the launcher died
            self._lose(LAUNCHER_GONE)
            return
        name = signal.Signals(signum).name
        self._mail.send(Interrupted(rank=self.rank, signal=name))
        self._end(f"interrupted by {name}", exit_code=128 + signum, grace_s=ANSWER_GRACE_S)

    def _lose(self, reason: str) -> None:
        """The rank cannot go on, and the controller hears of it."""
        if "stop" not in self._deadlines:
            self._mail.send(Failed(rank=self.rank, error=reason, traceback=""))
            self._end(reason, grace_s=ANSWER_GRACE_S)

    def _end(self, reason: str, *, exit_code: int = 1, grace_s: float = 0.0) -> None:
        """Starts the rank's end: a stop for the main loop after `grace_s`, later the hard exit."""
        self._exit_code = exit_code
        self._last_word = Stop(number=-1, reason=reason, exit_code=exit_code)
        self._deadlines = {"stop": grace_s, "exit": grace_s + self._timeouts.stop_s}

    def _pass_time(self, gap: float) -> None:
        self._deadlines = {name: left - gap for name, left in self._deadlines.items()}
        if self._last_word is not None and self._deadlines["stop"] <= 0:
            self._show(self._last_word)
            self._mail.put(self._last_word)
            self._last_word = None
        if self._deadlines.get("exit", 1.0) <= 0:
            (self._leave or os._exit)(self._exit_code)

    def _flush(self, client: Client) -> None:
        try:
            self._mail.flush(client)
        except ChannelError as error:
            if "stop" not in self._deadlines:
                self._end(str(error))
