"""Who takes part in a job: ranks of WORLD, and external workers that come and go. Torch-free.

Owns the numbers, under which peer each is reached, and for external workers their own socket and heartbeat. It decides
nothing. Invariants: a number is given once in the life of a job; a message counts only from the peer whose number it carries,
everything else (strangers, those that are gone, what cannot be read) is dropped and counted, and never an error; one turn
takes in no more than `PER_TURN` messages, whatever waits.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

import zmq

from pearl.channel import ChannelError, Server
from pearl.config import ElasticOptions
from pearl.protocol import Event, Failed, Join, Ping, Pong, Ready, Refused, Report, ToController, Tokens
from pearl.rl.door import Doorkeeper, largest_message, server_options
from pearl.rl.heartbeat import Heartbeat

PREFIX = "rank"
PREPARING = 6.0
"""Who builds its engine, and so has no requests that could wait for it, may be silent this many times as long."""
PER_TURN = 1000
"""Messages that are taken in at once; WORLD's own are not to wait for more."""


def name_of(number: int) -> str:
    """The name of a member; the ranks of WORLD connect under theirs."""
    return f"{PREFIX}{number}"


def number_of(name: str) -> int:
    """The other way round."""
    return int(name.removeprefix(PREFIX))


@dataclass(slots=True, kw_only=True)
class Member:
    """One of the external ones. `peer`: the name under which it connected; `told`: its messages with tokens that came."""

    number: int
    peer: str
    gpus: list[str]
    ready: Ready | None = None
    told: int = 0

    @property
    def name(self) -> str:
        return name_of(self.number)


class Externals:
    """The external workers of a job. Without `options.listen` there are none, and nothing is bound.

    `address` is the socket's, `invitation` what a worker is given, "HOST:PORT/TOKEN"; one of before (`known`) is kept, so that
    workers find a resumed job again; if its port is taken by now, `elsewhere` says so. `max_model_len` bounds what one message
    may hold. `dropped` counts messages by reason ("bad_token": attempts to get in). ValueError if nobody can join at `listen`.
    """

    def __init__(
        self, context: zmq.Context, options: ElasticOptions, first: int, now: float, known: str = "", max_model_len: int = 0
    ) -> None:
        where, _, token = known.strip().partition("/")
        self.token = token or secrets.token_hex(16)
        self._largest = largest_message(max_model_len)
        self.elsewhere = ""
        """Why workers of before will not find this job."""
        self._keeper = Doorkeeper(context, self.token) if options.listen else None
        self.server: Server | None = None
        self.server = self._listen(context, options.listen, where) if options.listen else None
        self.address = self.server.address if self.server else ""
        self.invitation = f"{_reachable(self.address)}/{self.token}" if self.server else ""
        self.members: dict[int, Member] = {}
        self.joins: list[tuple[str, Join]] = []
        """Workers that ask to take part, and have not been answered."""
        self.dropped: Counter[str] = Counter()
        self._next = first
        self._numbers: dict[str, int] = {}
        self._silence_s = options.silence_s
        self._heartbeat = Heartbeat(every_s=options.heartbeat_s, silence_s=options.silence_s, now=now)
        self._loops = Heartbeat(every_s=options.heartbeat_s, silence_s=options.stuck_s, now=now)
        """Of the main loops of those that serve; pings are answered by a thread of its own."""

    @property
    def ends(self) -> list[Server | zmq.Socket]:
        return [self.server, self._keeper.socket] if self.server and self._keeper else []

    def receive(self) -> list[Event]:
        """What has arrived of members; who asks to join is in `joins` afterwards."""
        if self.server is None or self._keeper is None:
            return []
        self._keeper.answer()
        events: list[Event] = []
        for peer, message in self.server.receive(PER_TURN):
            number = self._numbers.get(peer)
            if isinstance(message, Join):
                self._asked(peer, message)
            elif number is None or message.rank != number:
                self.dropped["stranger"] += 1
                self.tell(peer, Refused(reason="not a member of this job, or not any more"))
            else:
                self._heartbeat.heard(number)
                if isinstance(message, Report):  # of who serves one comes every second
                    self._loops.add(number)
                elif not isinstance(message, Pong):
                    self._loops.heard(number)
                events.append(message)
        self.dropped["unreadable"], self.server.rejected = self.dropped["unreadable"] + self.server.rejected, 0
        self.dropped["bad_token"] = self._keeper.refused
        return events + self._oversized(self.server)

    def _oversized(self, server: Server) -> list[Event]:
        """Who says more than there can be to say has failed."""
        sizes, server.oversized = server.oversized, []
        self.dropped["too_large"] += len(sizes)
        named = [(self._numbers.get(peer), size) for peer, size in sizes]
        why = "it sent a message of {} bytes: at most {} are possible"
        return [Failed(rank=one, error=why.format(size, self._largest)) for one, size in named if one is not None]

    def admit(self, peer: str, join: Join, now: float) -> Member:
        """Gives the worker a number, for good; from now on it is watched."""
        number, self._next = self._next, self._next + 1
        member = Member(number=number, peer=peer, gpus=list(join.gpus) or [name_of(number)])
        self.members[number], self._numbers[peer] = member, number
        self._heartbeat.advance(now)  # time before it came does not count against it
        self._heartbeat.add(number, PREPARING * self._silence_s)
        return member

    def prepared(self, number: int, ready: Ready) -> None:
        """It has its engine."""
        self.members[number].ready = ready
        self._heartbeat.add(number)

    def missed(self, event: Tokens) -> str:
        """Why tokens of a member have been lost on their way, "" if none were: a connection that breaks takes along what is on
        it, and comes back by itself. To be asked of each such message once."""
        member = self.members[event.rank]
        due, member.told = member.told, member.told + 1
        return "" if event.place in (-1, due) else f"message {due} with its tokens did not arrive, {event.place} did"

    def forget(self, number: int) -> None:
        """It is gone: nothing that it says counts any more."""
        member = self.members.pop(number, None)
        if member is not None:
            del self._numbers[member.peer]
            self._heartbeat.remove(number)
            self._loops.remove(number)

    def send(self, number: int, message: Any) -> bool:
        """False if it is gone, or cannot be reached; nothing waits."""
        member = self.members.get(number)
        return member is not None and self.tell(member.peer, message)

    def tell(self, peer: str, message: Any) -> bool:
        """To a worker that has no number, or not yet."""
        if self.server is None:
            return False
        try:
            self.server.send(peer, message)
        except ChannelError:
            self.dropped["unreachable"] += 1
            return False
        return True

    def watch(self, now: float) -> list[int]:
        """Those that have been silent too long; sends pings."""
        silent = self._heartbeat.advance(now)
        if self._heartbeat.ping_due():
            for number in self.members:
                self.send(number, Ping(sequence=self._heartbeat.sequence))
        return silent

    def stuck(self, now: float) -> list[int]:
        """Those that serve and answer pings, but whose main loop has said nothing for too long."""
        return self._loops.advance(now)

    def close(self) -> None:
        if self.server is not None:
            self.server.socket.close(linger=1000)
        if self._keeper is not None:
            self._keeper.close()

    def _asked(self, peer: str, join: Join) -> None:
        if peer in self._numbers or any(peer == other for other, _ in self.joins):
            self.dropped["doubled"] += 1
        else:
            self.joins.append((peer, join))

    def _listen(self, context: zmq.Context, listen: str, before: str) -> Server:
        """Where it was before, if that is free and nothing else was asked for."""
        host, _, port = listen.rpartition(":")
        old = before.rpartition(":")[2]
        options = server_options(self._largest)
        if port == "0" and old.isdecimal():
            with contextlib.suppress(zmq.ZMQError):
                return Server(context, f"tcp://{host}:{old}", ToController, options=options, largest=self._largest)
            self.elsewhere = f"port {old}, where workers of before look for this job, is taken: they will not find it"
        try:
            return Server(context, f"tcp://{listen}", ToController, options=options, largest=self._largest)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"elastic.listen={listen}: workers cannot join there: {error}") from error


def _reachable(address: str) -> str:
    """"HOST:PORT" for those who join; of a socket on all interfaces the host is this machine's name."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"{socket.gethostname() if host in ('0.0.0.0', '*') else host}:{port}"
