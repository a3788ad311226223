"""The source's side of KV that is sent: gives the blocks of its offers to whoever asks, in threads of its own.

Owns who is connected, what of an offer may be had, and when it is sent: as soon as it is written. It does not know requests,
nor how bytes travel. Invariants: only blocks of an open offer are read, and only what its progress says is there; what was
read counts only if the lease was whole afterwards; a receiver that is lost, stops or lies costs its own connection; the engine
never waits for any of them.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable

from pearl.engine.migration.peer_link import SOURCE, Ask, Carrier, Coming, Link, Outlet, Welcome
from pearl.engine.migration.pieces import Unfolding, part_bytes, pieces
from pearl.engine.migration.planner import CopyPart, CopyPlan

ACCEPT_PAUSE_S = 0.05
POLL_S = 0.001
DUE_S = 1.0
"""How long an offer is waited for that is unknown: of several ranks one may be a moment behind the first."""
REMEMBERED = 512
"""Offers that ended are refused at once, so many of them."""
SAY_S = 0.25
"""How often a receiver hears that nothing is ready yet."""
BATCH_BYTES = 64 << 20
"""What is sent of one transfer before others have their turn."""


class PeerSource:
    """Has `host` and `port` from its making to `close`, and answers there from its first offer on: who comes before (of several
    ranks one may be late) waits."""

    def __init__(self, host: str, timeout_s: float, carrier: Callable[[], Carrier]) -> None:
        self.problems: list[str] = []
        """How the last connections that failed did."""
        self._timeout_s, self._carrier = timeout_s, carrier
        self._offers: dict[str, Outlet] = {}
        self._ended: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        self._generations = itertools.count(1)
        self._links: set[Link] = set()
        self._serving = self.closing = False
        self._listener = socket.create_server((host, 0))
        self.host, self.port = host, int(self._listener.getsockname()[1])

    def offer(self, outlet: Outlet) -> None:
        self._offers[outlet.transfer.transfer_id] = outlet
        if not self._serving:
            self._serving = True
            threading.Thread(target=self._accept, daemon=True, name="kv source").start()

    def withdraw(self, transfer_id: str) -> None:
        self._ended.append(transfer_id)
        self._offers.pop(transfer_id, None)

    def close(self) -> None:
        """Ends all connections; no offer can be had any more."""
        self.closing = True
        self._offers.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in [*self._links]:
            link.interrupt()

    def _accept(self) -> None:
        while not self.closing:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # out of descriptors, or a receiver that has gone again: others may come
                self._note(error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            link = Link(connection, self._timeout_s, self._carrier())
            self._links.add(link)
            try:
                threading.Thread(target=self._converse, args=(link,), daemon=True, name="kv receiver").start()
            except RuntimeError as error:  # no thread is to be had now
                self._note(error)
                self._links.discard(link)
                link.close(settled=False)

    def _note(self, error: Exception) -> None:
        self.problems = [*self.problems[-9:], str(error)]

    def _converse(self, link: Link) -> None:
        """One receiver, as long as it stays."""
        sending = _Sending(link, self)
        try:
            welcome = Welcome(generation=next(self._generations), greeting=link.carrier.greeting())
            link.say(welcome)
            link.carrier.join(link, SOURCE, welcome)
            while not self.closing:
                sending.turn()
        except (RuntimeError, ValueError, OSError) as error:
            self._note(error)
        finally:
            self._links.discard(link)
            link.close(settled=sending.settled)

    def find(self, transfer_id: str) -> Outlet | None:
        return self._offers.get(transfer_id)

    def has_ended(self, transfer_id: str) -> bool:
        """Whether it is known that there was such an offer, and that it is over."""
        return self.closing or transfer_id in self._ended


class _Sending:
    """What one receiver has asked for and not got yet."""

    def __init__(self, link: Link, source: PeerSource) -> None:
        self.settled = True
        """Whether no bytes are under way."""
        self._link, self._source = link, source
        self._asks: dict[int, _Answer] = {}
        self._said, self._say_s = 0.0, min(SAY_S, link.timeout_s / 4)

    def turn(self) -> None:
        """Sends a batch for each of them that has one ready; without any it waits for the receiver's next word."""
        if not self._asks:
            self._note(self._link.hear_patiently(Ask))
        while self._link.heard():
            self._note(self._link.hear(Ask))
        busy = [self._go_on(number, answer) for number, answer in [*self._asks.items()]]
        if any(busy):
            self._said = time.monotonic()
        elif self._asks and not self._link.heard(POLL_S) and time.monotonic() - self._said > self._say_s:
            self._say(Coming())

    def _note(self, ask: Ask) -> None:
        if not ask.dropped:
            self._asks[ask.number] = _Answer(ask)
        elif self._asks.pop(ask.number, None) is not None:
            self._say(Coming(number=ask.number, refusal="it was dropped"))

    def _go_on(self, number: int, answer: _Answer) -> bool:
        """Whether there was something to say."""
        refusal = answer.refusal(self._source)
        parts = answer.batch() if refusal == "" else []
        if refusal or (refusal == "" and not parts and answer.whole):
            del self._asks[number]
            self._say(Coming(number=number, last=not refusal, refusal=refusal or ""))
        elif parts and answer.outlet is not None:
            self._say(Coming(number=number, parts=tuple(parts)))
            self.settled = False
            self._link.carrier.send(self._link, answer.outlet, parts)
            self.settled = True
        else:
            return False
        return True

    def _say(self, words: Coming) -> None:
        self._link.say(words)
        self._said = time.monotonic()


class _Answer:
    """What of one ask is still to be sent."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.outlet: Outlet | None = None
        self._patience = time.monotonic() + DUE_S
        self._unfolding: Unfolding | None = None
        self._ready: collections.deque[CopyPart] = collections.deque()

    @property
    def whole(self) -> bool:
        """Whether nothing is left."""
        return self._unfolding is not None and self._unfolding.whole and not self._ready

    def refusal(self, source: PeerSource) -> str | None:
        """Why nothing (more) can be had, or "" if it can; None: the offer is still to come."""
        ask = self._ask
        if self.outlet is not None:
            held = source.find(ask.transfer_id) is self.outlet and self.outlet.holds()
            return "" if held else "its lease has ended"
        outlet = source.find(ask.transfer_id)
        if outlet is None or _is_due(ask, outlet):
            late = source.has_ended(ask.transfer_id) or time.monotonic() > self._patience
            return "it is not offered (any more)" if late else None
        if refusal := _refusal(ask, outlet):
            return refusal
        self.outlet, transfer = outlet, outlet.transfer
        plan = CopyPlan(parts=ask.parts, num_bytes=0)
        self._unfolding = Unfolding(plan, transfer.layout, transfer.num_written_tokens)
        return self.refusal(source)

    def batch(self) -> list[CopyPart]:
        """What can be sent now, at most `BATCH_BYTES` of it or one piece."""
        assert self.outlet is not None and self._unfolding is not None
        transfer, leases = self.outlet.transfer, self.outlet.pool.leases
        if not self._ready:
            ready = CopyPlan(parts=tuple(self._unfolding.ready(leases.progress(transfer.blocks[-1]))), num_bytes=0)
            self._ready.extend(pieces(ready, transfer.layout, BATCH_BYTES))
        parts, nbytes = [], 0
        while self._ready and (not parts or nbytes + part_bytes(self._ready[0], transfer.layout) <= BATCH_BYTES):
            parts.append(self._ready.popleft())
            nbytes += part_bytes(parts[-1], transfer.layout)
        return parts


def _is_due(ask: Ask, outlet: Outlet) -> bool:
    return outlet.pool.leases.is_due(outlet.transfer.blocks[-1], ask.lease_word)


def _refusal(ask: Ask, outlet: Outlet) -> str:
    """Why an offer's blocks cannot be had like this, or nothing."""
    transfer, pool = outlet.transfer, outlet.pool.tensor
    if ask.lease_word != transfer.lease_word:
        return f"its lease is {transfer.lease_word}, not {ask.lease_word}"
    offered, layers, heads = set(transfer.blocks), pool.shape[0], pool.shape[3]
    for part in ask.parts:
        if not offered.issuperset(part.source_blocks):
            return f"blocks {sorted(set(part.source_blocks) - offered)} are not offered"
        if not (0 <= part.layers[0] < part.layers[1] <= layers and 0 <= part.source_heads[0] < part.source_heads[1] <= heads):
            return f"layers {part.layers} and heads {part.source_heads}: the pool has {layers} and {heads}"
        if len(part.destination_blocks) != len(part.source_blocks):
            return f"{len(part.source_blocks)} blocks for {len(part.destination_blocks)}"
    return ""
