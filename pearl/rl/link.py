"""The connection of an external worker to a job: it asks to join, answers heartbeats, and says when the job is not heard of.

Owns the worker's socket and the watch over the job's silence. It does not interpret orders: they go into the main loop's
mailbox in the order of arrival. Invariants: a link is for one membership, under a name that nobody can guess; once it is lost
it stays so, and the main loop is told by a `Stop`; no wait is without a limit; a main loop that comes by no more ends the
process. Torch-free.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from pearl.channel import ChannelError, Client
from pearl.protocol import Event, Join, Joined, Notice, Ping, Pong, Refused, Status, StepReport, Stop, ToRank
from pearl.rl.door import client_options
from pearl.rl.heartbeat import LONGEST_GAP_S
from pearl.rl.mailbox import Mailbox

POLL_MS = 200
ASK_EVERY_S = 2.0
"""How often it is asked to be let in: what was asked before the job was there may be lost."""
ARM_EVERY_S = 1.0
EXIT_LOST = 75
"""Of the `Stop` with which a link says that the job is not heard of any more (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a job takes workers in: "HOST:PORT/TOKEN"."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """ValueError says what it should look like."""
        found = re.fullmatch(r"(?:tcp://)?([^\s/:]+):(\d{1,5})/(\w{1,200})", text.strip())
        if found is None or not 0 < int(found[2]) < 65536:
            raise ValueError(f"ADDRESS {text!r}: must be HOST:PORT/TOKEN, as the job prints it")
        return cls(host=found[1], port=int(found[2]), token=found[3])

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.token}"

    def own_host(self) -> str:
        """The address of this machine by which the job's machine reaches it, as the way there shows."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: it only chooses the way
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])


class Link(threading.Thread):
    """`answer` says how asking went, once it went; `take` and `send` are what a `RankLoop` needs.

    From `watch` on the process ends with exit code 1 once nobody has called `take` for `stuck_s` in which it ran itself
    (the job has given it up by then), or once not even this thread has run for so long: a library holds the interpreter, or the
    process was stopped. Who is told to end, or has lost the job, is watched too.
    """

    def __init__(self, address: Address, silence_s: float, gpus: list[str]) -> None:
        super().__init__(name="link", daemon=True)
        self.answered = threading.Event()
        self.answer: Joined | Refused | None = None
        self.lost = ""
        """Why the job is not heard of any more."""
        self.reached = False
        """A job that knows the token is there, whether it has answered or not: its ranks may still be starting."""
        self._address, self.silence_s = address, silence_s
        self.doubt_s = math.inf
        """After a silence of this the job is asked whether it still knows this worker, which it may have lost meanwhile."""
        self._join = Join(pid=os.getpid(), host=socket.gethostname(), gpus=gpus)
        self._mail = Mailbox()
        self._closing = threading.Event()
        self.stuck_s = math.inf
        self._watched = False
        self._away_s = 0.0
        """For how long `take` has not been called."""
        self._armed = -math.inf

    # ------------------------------------------------------------------------------------------------ other threads

    def send(self, event: Event) -> None:
        """Queues an event for the job; from any thread."""
        self._mail.send(event)

    def take(self, timeout_s: float) -> list:
        """What has arrived for the main loop; waits up to `timeout_s` for the first of it."""
        self._away_s = 0.0
        return self._mail.take(timeout_s)

    def watch(self) -> None:
        """From now on the main loop has to come by at least every `stuck_s`."""
        self._away_s, self._watched = 0.0, True
        self._arm()

    def _arm(self) -> None:
        """A thread that needs no interpreter ends the process if this is not called again in time."""
        self._armed = time.monotonic()
        if self.stuck_s < math.inf:
            faulthandler.dump_traceback_later(self.stuck_s, exit=True)

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
        except Exception as error:  # a fault of ours: the worker must not wait for ever
            traceback.print_exc()
            self._lose(f"{type(error).__name__}: {error}")
        last = time.monotonic()
        while not self._closing.wait(POLL_MS / 1000):
            now = time.monotonic()
            self._pass_time(now, min(now - last, LONGEST_GAP_S))
            last = now
        if self._watched:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        context = zmq.Context()
        where = f"tcp://{self._address.host}:{self._address.port}"
        client = Client(context, where, secrets.token_hex(16), ToRank, options=client_options(self._address.token))
        door = client.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        poller = zmq.Poller()
        for end in (client.socket, self._mail.bell, door):
            poller.register(end, zmq.POLLIN)
        last, silence, asked = time.monotonic(), 0.0, -ASK_EVERY_S
        while not self._closing.is_set() and not self.lost:
            now = time.monotonic()
            if now - asked >= ASK_EVERY_S and (self.answer is None or silence > self.doubt_s):
                asked = now
                client.send(Pong(rank=self.answer.rank, sequence=-1) if isinstance(self.answer, Joined) else self._join)
            ready = dict(poller.poll(POLL_MS))
            if self._mail.bell in ready:
                self._mail.hush()
            if door in ready:
                self._knocked(door)
            now = time.monotonic()
            gap, last = min(now - last, LONGEST_GAP_S), now
            silence = 0.0 if client.socket in ready and self._receive(client) else silence + gap
            if silence > self.silence_s:
                self._lose(f"the job was silent for {self.silence_s:g} s")
            self._flush(client)
            self._pass_time(now, gap)
        self._flush(client)
        client.socket.disable_monitor()
        door.close(0)
        client.socket.close(linger=0 if self.lost else 1000)
        context.term()

    def _knocked(self, monitor: zmq.Socket) -> None:
        """The door is open, or stays shut: then nobody there will ever answer."""
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.reached = True
        elif self.answer is None:
            self.answer = Refused(reason="the token is not that of this job")
            self.answered.set()

    def _pass_time(self, now: float, gap: float) -> None:
        """Looks after the main loop, which may hang in a step, or while it should end."""
        if not self._watched:
            return
        self._away_s += gap
        if now - self._armed >= ARM_EVERY_S:
            self._arm()
        if self._away_s > self.stuck_s:
            sys.stderr.write(f"pearl join: its main loop has done nothing for elastic.stuck_s={self.stuck_s:g} s\n")
            faulthandler.dump_traceback()
            os._exit(1)

    def _receive(self, client: Client) -> bool:
        messages = client.receive()
        for message in messages:
            match message:
                case Ping():
                    if isinstance(self.answer, Joined):
                        client.send(Pong(rank=self.answer.rank, sequence=message.sequence))
                case Joined() | Refused() if self.answer is None:
                    self.answer = message
                    self.answered.set()
                case Joined():  # asked twice
                    continue
                case Refused():
                    self._lose(f"the job does not know this worker any more: {message.reason}")
                case StepReport() | Status() | Notice():
                    continue
                case _:
                    if isinstance(message, Stop):
                        self.watch()
                    self._mail.put(message)
        return bool(messages)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self.watch()
        self.answered.set()
        self._mail.put(Stop(number=-1, reason=self.lost, exit_code=EXIT_LOST))

    def _flush(self, client: Client) -> None:
        try:
            self._mail.flush(client)
        except ChannelError as error:
            self._lose(str(error))
