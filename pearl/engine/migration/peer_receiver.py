"""The receiver's side of KV that is sent: asks a source for the blocks of its offers, in a thread of its own, and writes them.

Owns the tickets and the check that each byte comes once. It does not
know requests, nor how bytes travel. Invariants: the caller never waits; after `done` has said True or raised, and after
`cancel` has said True, nothing is written; nothing is written but what was asked for.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from pearl.engine.migration.blocks import scatter_blocks
from pearl.engine.migration.peer_link import RECEIVER, Ask, Carrier, Coming, Link, LinkError, Welcome
from pearl.engine.migration.pieces import view
from pearl.engine.migration.planner import CopyPart, CopyPlan
from pearl.engine.migration.transport import Pool, TransferError
from pearl.kv_transfer import KVTransfer

POLL_S = 0.001


class PeerTicket:
    """A transfer under way. What comes of it is said by `land` and `end`, from the receiver's thread."""

    def __init__(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool, queue: Any = None) -> None:
        self.plan, self.transfer, self.pool, self.queue = plan, transfer, pool, queue
        self._lock = threading.Lock()
        self._through = self._writing = False
        self._error: TransferError | None = None

    def done(self) -> bool:
        if self._error is not None and not self._writing:
            raise self._error
        return self._through

    def cancel(self) -> bool:
        self.end("it was cancelled")
        return not self._writing

    @property
    def over(self) -> bool:
        """Whether what is under way is not wanted any more."""
        return self._error is not None

    def land(self, piece: CopyPart, data: Tensor) -> None:
        """Writes one piece, as it lies in a buffer, into the pool, if it is still wanted."""
        blocks = view(self.pool.tensor, piece.layers, piece.destination_heads)
        shape = (*blocks.shape[:2], len(piece.destination_blocks), *blocks.shape[3:])
        data = data.view(blocks.dtype).view(shape).to(blocks.device)
        with self._lock:
            if not self.over:
                scatter_blocks(blocks, piece.destination_blocks, data)

    def open(self) -> bool:
        """Whether it is still wanted; if so, its blocks may be written from now on without asking again, until `shut`."""
        with self._lock:
            self._writing = not self.over
            return self._writing

    def shut(self) -> None:
        self._writing = False

    def end(self, reason: str | None) -> None:
        """It is through, or why not; the first word counts."""
        with self._lock:
            if self._error is None and not self._through:
                self._error = None if reason is None else TransferError(self.transfer.transfer_id, reason)
                self._through = reason is None


class PeerReceiver:
    """Takes transfers from one source; a thread does while there are any."""

    def __init__(self, address: str, timeout_s: float, carrier: Callable[[], Carrier]) -> None:
        """`address`: "HOST:PORT"."""
        self._address, self._timeout_s, self._carrier = address, timeout_s, carrier
        self._link: Link | None = None
        self._new: deque[PeerTicket] = deque()
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._running, self._settled, self._closed = False, True, False
        self._heard = 0.0

    def take(self, ticket: PeerTicket) -> None:
        with self._lock:
            self._new.append(ticket)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True, name=f"kv from {self._address}").start()

    def gone(self) -> bool:
        """Whether it has nothing to do and the source has hung up (or never answered)."""
        with self._lock:
            if self._running or (self._link is not None and not self._link.gone()):
                return False
            self._drop()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for ticket in [*self._new, *(asked.ticket for asked in self._asked.values())]:
                ticket.end("this engine's transport was closed")
            if self._running and self._link is not None:
                self._link.interrupt()
            elif not self._running:
                self._drop()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._new and not self._asked:
                    self._running = False
                    if self._closed:
                        self._drop()
                    return
            try:
                self._turn(self._connected())
            except Exception as error:  # whatever it was: what was asked for ends, and what is asked next begins anew
                self._lose(str(error) or type(error).__name__)

    def _turn(self, link: Link) -> None:
        """Asks for what is new, and takes what comes next."""
        while self._new:
            ticket = self._new.popleft()
            if not ticket.over:
                self._ask(link, ticket)
        for asked in self._asked.values():
            if asked.ticket.over and not asked.dropped:
                asked.dropped = True
                link.say(msgspec.structs.replace(asked.ask, parts=(), dropped=True))
        if not self._asked:
            return
        if link.heard(POLL_S):
            self._take(link, link.hear(Coming))
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._timeout_s:
            raise LinkError(f"nothing was heard from {self._address} within {self._timeout_s:g} s")

    def _ask(self, link: Link, ticket: PeerTicket) -> None:
        if not self._asked:
            self._heard = time.monotonic()
        transfer, number = ticket.transfer, next(self._numbers)
        ask = Ask(number=number, transfer_id=transfer.transfer_id, lease_word=transfer.lease_word, parts=ticket.plan.parts)
        self._asked[number] = _Asked(ask, ticket)
        link.say(ask)

    def _take(self, link: Link, coming: Coming) -> None:
        if not coming.number:
            return
        asked = self._asked.get(coming.number)
        if asked is None:
            raise LinkError(f"{self._address} answers ask {coming.number}, which is none")
        if coming.last or coming.refusal:
            missing = "all of it was said to have come, which is not so" if asked.due else None
            asked.ticket.end(f"its source refuses: {coming.refusal}" if coming.refusal else missing)
            del self._asked[coming.number]
            return
        for part in coming.parts:
            asked.due.take(part)
        self._settled = False
        link.carrier.receive(link, asked.ticket, coming.parts)
        self._settled = True

    def _lose(self, reason: str) -> None:
        """What was asked for will not come; nor what was not, if there is no way to ask."""
        with self._lock:
            for ticket in [asked.ticket for asked in self._asked.values()] or self._new:
                ticket.end(reason)
            if not self._asked:
                self._new.clear()
            self._asked = {}
            self._drop()

    def _connected(self) -> Link:
        if self._link is not None and not self._asked and self._link.gone():
            self._drop()  # nothing is due: the source has hung up
        if self._link is None:
            host, _, port = self._address.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
            except OSError as error:
                what = f"{self._address} cannot be reached within {self._timeout_s:g} s"
                raise LinkError(f"{what}: {error}") from error
            link = self._link = Link(connection, self._timeout_s, self._carrier())
            link.carrier.join(link, RECEIVER, link.hear(Welcome))
        return self._link

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(settled=self._settled)
        self._settled = True


class _Asked:
    """A transfer that the source has been asked for."""

    def __init__(self, ask: Ask, ticket: PeerTicket) -> None:
        self.ask, self.ticket, self.due = ask, ticket, Due(ticket.plan)
        self.dropped = False


class Due:
    """What of a plan has not come yet: so each byte comes once, and nothing comes that was not asked for."""

    def __init__(self, plan: CopyPlan) -> None:
        self._layers: dict[tuple, int] = {}
        """(heads, source block, destination block) -> the layers that are due, as bits."""
        self._end = max((part.layers[1] for part in plan.parts), default=0)
        for part in plan.parts:
            for key in _keys(part):
                self._layers[key] = self._layers.get(key, 0) | _bits(part)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def take(self, part: CopyPart) -> None:
        """LinkError if it is not due, or not all of it."""
        if not 0 <= part.layers[0] < part.layers[1] <= self._end:
            raise LinkError(f"layers {part.layers} came without being due")
        bits, keys = _bits(part), [*_keys(part)]
        for key in keys:
            left = self._layers.get(key, 0)
            if left & bits != bits:
                raise LinkError(f"layers {part.layers} of block {key[2]} came without being due")
            if left == bits:
                del self._layers[key]
            else:
                self._layers[key] = left & ~bits


def _keys(part: CopyPart) -> zip:
    count = len(part.source_blocks)
    heads = [(part.source_heads, part.destination_heads)] * count
    return zip(heads, part.source_blocks, part.destination_blocks, strict=True)


def _bits(part: CopyPart) -> int:
    return (1 << part.layers[1]) - (1 << part.layers[0])
