"""KV between any two hosts: the receiver asks, the source sends pieces over a group of the two (gloo), checked on arrival.

Owns the receiver's side and the transport's two faces (`gloo_source.py` is the other). It does not know requests. Invariants:
the caller never waits, all waiting is in threads; after `done` has said True or raised, and after `cancel`, nothing is written;
a piece is written only if its checksum is right and its source was under lease when it was read.

Pools may be on a CPU or, by way of host memory, on a GPU (that part has not been run).
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from pearl.engine.comm.communicator import Pending
from pearl.engine.comm.groups import LOCAL
from pearl.engine.migration.blocks import scatter_blocks
from pearl.engine.migration.gloo_link import (
    BUFFERS,
    PIECE_BYTES,
    RECEIVER,
    SOURCE,
    Ask,
    Link,
    LinkError,
    Message,
    Reply,
    Welcome,
)
from pearl.engine.migration.gloo_source import GlooSource
from pearl.engine.migration.pieces import part_bytes, pieces, view
from pearl.engine.migration.planner import CopyPart, CopyPlan, check_layouts
from pearl.engine.migration.transport import Pool, Ticket, TransferError, Transport
from pearl.kv_transfer import KVTransfer

TIMEOUT_S = 10.0


class GlooTransport(Transport):
    """One per engine, at both ends. Address "HOST:PORT"."""

    name = "gloo"

    def __init__(self, host: str = LOCAL, timeout_s: float = TIMEOUT_S) -> None:
        """`host`: the address of this machine that others reach. `timeout_s` bounds every wait for the other end."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        self._host, self._timeout_s = host, timeout_s
        self._source: GlooSource | None = None
        self._receivers: dict[str, _Receiver] = {}

    def address(self, pool: Pool) -> str | None:
        """Opens a port."""
        if self._source is None:
            self._source = GlooSource(self._host, self._timeout_s)
        return f"{self._source.host}:{self._source.port}"

    def offer(self, transfer: KVTransfer, pool: Pool) -> None:
        if self._source is not None:
            self._source.offers[transfer.transfer_id] = (transfer, pool)

    def withdraw(self, transfer_id: str) -> None:
        if self._source is not None:
            self._source.offers.pop(transfer_id, None)

    def poll(self) -> None:
        """Sending goes on by itself; connections that others have ended are forgotten."""
        self._receivers = {address: receiver for address, receiver in self._receivers.items() if not receiver.gone()}

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        if self.name not in transfer.source.addresses:
            return f"{transfer.source.worker} has no address for it"
        try:
            check_layouts(transfer.layout, pool.layout, heads_may_differ=True)
        except ValueError as error:
            return str(error)
        return None

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        address = transfer.source.addresses.get(self.name)
        if address is None:
            raise TransferError(transfer.transfer_id, f"{transfer.source.worker} has no address for {self.name}")
        ticket = _Ticket(plan, transfer, pool)
        self._receivers.setdefault(address, _Receiver(address, self._timeout_s)).take(ticket)
        return ticket

    def close(self) -> None:
        """Ends all connections, in both directions."""
        for receiver in self._receivers.values():
            receiver.close()
        if self._source is not None:
            self._source.close()


class _Ticket:
    """What came of it is said by `land` and `end`, from the receiver's thread."""

    def __init__(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> None:
        self.plan, self.transfer, self._pool = plan, transfer, pool
        self._lock = threading.Lock()
        self._through = False
        self._error: TransferError | None = None

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._through

    def cancel(self) -> bool:
        self.end("it was cancelled")
        return True

    def check(self) -> None:
        """LinkError if it is over: what is under way is not wanted any more."""
        if self._error is not None:
            raise LinkError(str(self._error))

    def land(self, message: Message, piece: CopyPart) -> None:
        """Writes a piece into the pool."""
        blocks = view(self._pool.tensor, piece.layers, piece.destination_heads)
        shape = (*blocks.shape[:2], len(piece.destination_blocks), *blocks.shape[3:])
        data = message.data.view(blocks.dtype).view(shape).to(blocks.device)
        with self._lock:
            self.check()
            scatter_blocks(blocks, piece.destination_blocks, data)

    def end(self, reason: str | None) -> None:
        """It is through, or why not; the first word counts."""
        with self._lock:
            if self._error is None and not self._through:
                self._through = reason is None
                self._error = None if reason is None else TransferError(self.transfer.transfer_id, reason)


class _Receiver:
    """Takes transfers from one source, one after the other; a thread does while there are any."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._link: Link | None = None
        self._waiting: deque[_Ticket] = deque()
        self._lock = threading.Lock()
        self._running = False

    def take(self, ticket: _Ticket) -> None:
        with self._lock:
            self._waiting.append(ticket)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True, name=f"kv from {self._address}").start()

    def gone(self) -> bool:
        """Whether it has nothing to do and the source has hung up (or never answered)."""
        with self._lock:
            if self._running or (self._link is not None and not self._link.gone()):
                return False
            self._drop(settled=True)
            return True

    def close(self) -> None:
        with self._lock:
            for ticket in self._waiting:
                ticket.end("this engine's transport was closed")
            if self._running and self._link is not None:
                self._link.interrupt()
            elif not self._running:
                self._drop(settled=True)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                ticket = self._waiting.popleft()
            try:
                ticket.check()
                self._receive(ticket)
            except (RuntimeError, ValueError, OSError) as error:
                ticket.end(str(error))

    def _receive(self, ticket: _Ticket) -> None:
        settled = False
        try:
            link = self._connected()
            transfer = ticket.transfer
            link.say(Ask(transfer_id=transfer.transfer_id, lease_word=transfer.lease_word, parts=ticket.plan.parts))
            refusal = link.hear(Reply).refusal
            if refusal:
                ticket.end(f"its source refuses: {refusal}")
            else:
                _take_pieces(link, ticket)
            settled = True
        finally:
            if not settled:
                with self._lock:
                    self._drop(settled=False)

    def _connected(self) -> Link:
        if self._link is not None and self._link.gone():
            self._drop(settled=True)  # nothing is due: the source has hung up
        if self._link is None:
            host, _, port = self._address.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
            except OSError as error:
                what = f"{self._address} cannot be reached within {self._timeout_s:g} s"
                raise LinkError(f"{what}: {error}") from error
            link = self._link = Link(connection, self._timeout_s)
            link.pair_up(RECEIVER, link.hear(Welcome).generation)
        return self._link

    def _drop(self, *, settled: bool) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(settled=settled)


def _take_pieces(link: Link, ticket: _Ticket) -> None:
    layout = ticket.transfer.layout
    cut = [*pieces(ticket.plan, layout, PIECE_BYTES)]
    buffers = link.buffers(max((part_bytes(piece, layout) for piece in cut), default=0))
    messages = [Message(buffers[number % BUFFERS], part_bytes(piece, layout)) for number, piece in enumerate(cut)]

    def ask(number: int) -> Pending:
        return link.comm.recv_async(messages[number].whole, SOURCE, tag=number % BUFFERS)

    flying = [ask(number) for number in range(min(BUFFERS, len(cut)))]
    for number, piece in enumerate(cut):
        link.wait(flying.pop(0), f"piece {number + 1} of {len(cut)} from {ticket.transfer.source.worker}", ticket.check)
        if not messages[number].open(number):
            raise LinkError("its lease has ended")
        ticket.land(messages[number], piece)
        if number + BUFFERS < len(cut):
            flying.append(ask(number + BUFFERS))
    ticket.end(None)
