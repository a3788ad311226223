"""One connection between a source of KV and a receiver: words over TCP, bytes over a group of the two.

Owns what the two say, in which order, and the limit on every wait for bytes. It does not know pools, requests, or how bytes
travel: that is a `Carrier`'s (`gloo.py`, `nccl.py`). Invariants: no wait is longer than its timeout, and its error names what
was awaited; the loss of the other end, or its giving up, shows within `SLICE_S`. A link that failed is closed, never used
again.

    source: Welcome -> (both make the group) -> as often as one likes, and as many at a time:
    receiver: Ask -> source: Coming and the bytes of what it names, and so on, until it says that this was the last of it

Transfers take turns: none waits for another whose prompt is still being computed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from pearl.engine.comm.conversation import Conversation
from pearl.engine.migration.planner import CopyPart
from pearl.engine.migration.transport import Pool
from pearl.kv_transfer import KVTransfer

MOST_WORDS = 16 << 20
"""The longest message, in bytes: a plan names every block."""
SOURCE, RECEIVER = 0, 1
"""Their ranks in the group."""
SLICE_S = 0.05
_Said = TypeVar("_Said", bound=msgspec.Struct)


class LinkError(RuntimeError):
    """The other end is lost, silent, or has given up, or bytes are not what they should be."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The number of the group that the two make next, and what else the receiver's carrier needs for it."""

    generation: int
    greeting: bytes = b""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Wants the source's side of these parts of an offer, in answers of this `number`; `dropped`: does not want them any more,
    which is answered too."""

    number: int
    transfer_id: str
    lease_word: int
    parts: tuple[CopyPart, ...] = ()
    dropped: bool = False


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of these parts follow now, for the ask of this `number`. It is answered with `last`, if all of it has come and
    was under lease all the time, or with a `refusal`. Number 0 is no answer: it says that the source is there."""

    number: int = 0
    parts: tuple[CopyPart, ...] = ()
    last: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlet:
    """An offer at its source. `queue`: the GPU's stream on which its KV is written, else None."""

    transfer: KVTransfer
    pool: Pool
    queue: Any = None

    def holds(self) -> bool:
        """Whether what was read up to now was under lease."""
        return self.pool.leases.holds(self.transfer.blocks[-1], self.transfer.lease_word)


class Inlet(Protocol):
    """A transfer at its receiver. `queue`: the GPU's stream on which its blocks were used before, else None."""

    transfer: KVTransfer
    pool: Pool
    queue: Any

    def land(self, piece: CopyPart, data: Any) -> None:
        """Writes one piece, [layer, 2, block, kv_head, ...] in the pool's dtype, if it is still wanted."""

    def open(self) -> bool:
        """Whether it is still wanted; if so, its blocks may be written from now on without asking again, until `shut`."""

    def shut(self) -> None: ...


class Carrier(Protocol):
    """Brings the bytes of one link. Each end has one, for one thread."""

    def greeting(self) -> bytes:
        """On the source: what the receiver has to be told before."""

    def join(self, link: Link, rank: int, welcome: Welcome) -> None:
        """Makes the group, in bounded time. RuntimeError if that fails."""

    def send(self, link: Link, outlet: Outlet, parts: Sequence[CopyPart]) -> None:
        """On the source; returns when all of it has been read. RuntimeError if the link is lost."""

    def receive(self, link: Link, inlet: Inlet, parts: Sequence[CopyPart]) -> None:
        """On the receiver, also of what is not wanted any more. RuntimeError if the link is lost or bytes are wrong."""

    def close(self, *, settled: bool) -> None:
        """Leaves the group; at once. `settled`: nothing is under way."""


class Link:
    """One end. Not thread-safe, except for `interrupt`."""

    def __init__(self, connection: socket.socket, timeout_s: float, carrier: Carrier) -> None:
        self.timeout_s, self.carrier = timeout_s, carrier
        self.conversation = Conversation(connection, MOST_WORDS)

    def say(self, words: msgspec.Struct) -> None:
        self.conversation.say(words, self.timeout_s)

    def hear(self, kind: type[_Said]) -> _Said:
        """The next words, within the timeout."""
        return self.conversation.hear(kind, self.timeout_s)

    def hear_patiently(self, kind: type[_Said]) -> _Said:
        """The next words, whenever they come."""
        return self.conversation.hear(kind, self.timeout_s, patient=True)

    def heard(self, within_s: float = 0.0) -> bool:
        """Whether there is something to hear (or the other end is gone); waits for it so long at most."""
        return self.conversation.heard(within_s)

    def wait(self, through: Callable[[float], bool], what: str) -> None:
        """Until `through`, which is told how many seconds it may wait, says so. LinkError at once if the other has hung up."""
        deadline = time.monotonic() + self.timeout_s
        while not through(SLICE_S):
            if self.gone() and not through(0.0):
                raise LinkError(f"{what}: the other end has given up")
            if time.monotonic() > deadline:
                raise LinkError(f"{what}: not through within {self.timeout_s:g} s")

    def gone(self) -> bool:
        """Whether the other end has hung up; never waits."""
        return self.conversation.gone()

    def interrupt(self) -> None:
        """Has whoever waits at this end give up; from any thread."""
        self.conversation.interrupt()

    def close(self, *, settled: bool) -> None:
        """At once. `settled`: no bytes are under way."""
        self.conversation.close()
        self.carrier.close(settled=settled)
