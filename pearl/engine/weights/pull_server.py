"""Gives weight versions to whoever asks, in threads of its own: neither a trainer nor an engine waits for a receiver.

Owns who is served at a time, and the limits that a receiver has to keep. It does not know what the receiver does with the
weights. Invariants: a receiver that is lost, stops, is slow or lies costs one slot, for a bounded time, and is named in
`dropped`; every other one goes on; every wait has a limit.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from dataclasses import dataclass, field

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.comm.conversation import Conversation, ConversationError, pair_over
from pearl.engine.comm.groups import LOCAL
from pearl.engine.comm.pairs import Pair
from pearl.engine.weights.conversation import Answer, Ask, Report
from pearl.engine.weights.holding import GivingSender, Held, Holding, HoldingBusy

TIMEOUT_S = 10.0
SLOWEST_BYTES_PER_S = 1e6
POLL_S = 0.0005
DROPPED_KEPT = 100
"""How many receivers that failed are remembered by name."""
WAITING = 16
"""How many connections may be open beside those that are served: for a refusal, which is quick."""


@dataclass(slots=True, kw_only=True)
class PullStats:
    """What a server has done. `seconds` and `cpu_s` are of its own threads, while they served."""

    served: int = 0
    refused: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    dropped: dict[str, str] = field(default_factory=dict)
    """The receivers that failed, and how each did last."""
    drops: int = 0
    problem: str = ""
    """Why the weights here could not be sent, the last time that it was so."""


class PullServer:
    """Serves `holding` at `port` of `host` from its making to `close`."""

    def __init__(
        self,
        holding: Holding,
        *,
        host: str = LOCAL,
        slots: int = 2,
        timeout_s: float = TIMEOUT_S,
        slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S,
    ) -> None:
        """`host`: the address of this machine that receivers reach. `slots`: how many are served at the same time.

        `timeout_s` bounds the wait for any one message; a receiver has that and `slowest_bytes_per_s` for the whole.
        """
        if slots < 1 or timeout_s <= 0 or slowest_bytes_per_s <= 0:
            raise ValueError(f"slots={slots}, timeout_s={timeout_s}, slowest_bytes_per_s={slowest_bytes_per_s}: must be > 0")
        self.stats = PullStats()
        self._holding, self._timeout_s, self._slowest = holding, timeout_s, slowest_bytes_per_s
        self._generations = itertools.count(1)
        self._slots = threading.BoundedSemaphore(slots)
        self._open = threading.BoundedSemaphore(slots + WAITING)
        self._lock = threading.Lock()
        self._closing = False
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server((host, 0))
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="pull server")
        self._accepting.start()

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Ends all transfers; returns once their threads have ended, or after `timeout_s`."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = [self._accepting, *self._threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(POLL_S)  # out of file descriptors, or a connection that ended before it was taken
                continue
            if not self._open.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._converse, args=(connection,), daemon=True, name="pull receiver")
            try:
                with self._lock:
                    thread.start()
                    self._threads.add(thread)
            except RuntimeError:  # no thread is to be had now: this receiver asks again, or another holder
                self._open.release()
                connection.close()

    def _converse(self, connection: socket.socket) -> None:
        """One receiver, from its first word to its last."""
        conversation = Conversation(connection)
        name = conversation.peer
        try:
            ask = conversation.hear(Ask, self._timeout_s)
            name = ask.name
            self._answer(conversation, ask)
        except (ConversationError, CollectiveError, OSError) as error:
            self._drop(name, str(error))
        finally:
            conversation.close()
            self._open.release()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _answer(self, conversation: Conversation, ask: Ask) -> None:
        if not self._slots.acquire(blocking=False):
            self._refuse(conversation, "all slots are taken", later=True)
            return
        start, cpu = time.monotonic(), time.thread_time()
        try:
            self._serve(conversation, ask)
        finally:
            self._slots.release()
            with self._lock:
                self.stats.seconds += time.monotonic() - start
                self.stats.cpu_s += time.thread_time() - cpu

    def _serve(self, conversation: Conversation, ask: Ask) -> None:
        if (problem := self._difference(ask)) is not None:
            self._refuse(conversation, problem)
            self._drop(ask.name, problem)
            return
        newest = self._holding.newest
        wanted = newest if ask.version is None else ask.version
        if wanted <= ask.present or newest < wanted:
            self._refuse(conversation, f"version {newest} is the newest here", later=True)
            return
        try:
            held = self._holding.hold(wanted)
        except ValueError as error:
            self._refuse(conversation, str(error), later=ask.version is None or isinstance(error, HoldingBusy))
            return
        with contextlib.closing(held):
            self._give(conversation, ask, held)

    def _difference(self, ask: Ask) -> str | None:
        plan = self._holding.plan
        dtype = str(plan.dtype).removeprefix("torch.")
        if ask.dtype != dtype:
            return f"{ask.name} takes {ask.dtype}, {dtype} is sent here"
        if ask.plan != plan.fingerprint:
            return f"the tensors of {ask.name} differ from those here in name, shape, order or bucket size"
        return None

    def _give(self, conversation: Conversation, ask: Ask, held: Held) -> None:
        generation = next(self._generations)
        pair: Pair | None = None
        settled = False
        try:
            conversation.say(Answer(version=held.version, generation=generation), self._timeout_s)
            pair = pair_over(conversation, 0, generation, self._timeout_s)
            assert pair.comm is not None
            sender = held.sender(pair.comm, self._timeout_s)
            report = self._send(conversation, sender)
            settled = report is not None
            if report is not None:
                self._conclude(report, sender, generation)
        finally:
            if pair is not None:
                pair.close(settled=settled)

    def _send(self, conversation: Conversation, sender: GivingSender) -> Report | None:
        """What the receiver says once all is sent; None if the weights here could not be sent, which it has been told."""
        limit_s = self._timeout_s + sender.nbytes / self._slowest
        deadline = time.monotonic() + limit_s
        report: Report | None = None
        try:
            while not sender.poll():
                if self._closing:
                    raise CollectiveError(f"version {sender.version}: this server is closing")
                if report is None and conversation.heard():  # it may have the last bucket before that is known here
                    report = conversation.hear(Report, self._timeout_s)
                if report is not None and report.problem:
                    raise CollectiveError(f"version {sender.version}: gave up: {report.problem}")
                if time.monotonic() > deadline:
                    raise CollectiveError(f"version {sender.version}: not taken within {limit_s:g} s")
                time.sleep(POLL_S)
        except (CollectiveError, ConversationError):
            raise
        except Exception as error:  # whatever the weights here raise, the receiver has been told
            with self._lock:
                self.stats.refused += 1
                self.stats.problem = str(error)
            return None
        return report or conversation.hear(Report, self._timeout_s)

    def _conclude(self, report: Report, sender: GivingSender, generation: int) -> None:
        """Books what the receiver says it has."""
        said, sent = (report.generation, report.version, report.digest), (generation, sender.version, sender.digest)
        if report.problem:
            raise CollectiveError(f"version {sender.version}: gave up: {report.problem}")
        if said != sent:
            raise CollectiveError(f"reports [generation, version, checksum] {said}, {sent} were sent")
        with self._lock:
            self.stats.served += 1
            self.stats.nbytes += sender.nbytes

    def _refuse(self, conversation: Conversation, words: str, *, later: bool = False) -> None:
        with self._lock:
            self.stats.refused += 1
        conversation.say(Answer(refusal=words, later=later), self._timeout_s)

    def _drop(self, name: str, words: str) -> None:
        with self._lock:
            self.stats.dropped.pop(name, None)
            self.stats.dropped[name] = words
            if len(self.stats.dropped) > DROPPED_KEPT:
                del self.stats.dropped[next(iter(self.stats.dropped))]
            self.stats.drops += 1
