"""KV between any two hosts by gloo: in pieces of bounded size, each with its number and a checksum.

Owns the messages. It does not know offers, tickets or requests (`peer.py`). Invariant: a piece is written only if its
checksum is right, so that a byte that changed on the way is noticed.

A message is a header of int64 (checksum of all that follows, number) and the data, [layer, 2, block, kv_head, ...] as in the
pool, filled up to whole words. Pools may be on a CPU or, by way of host memory, on a GPU (that part has not been run).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator, Pending
from pearl.engine.comm.conversation import pair_over
from pearl.engine.comm.pairs import Pair
from pearl.engine.migration.blocks import gather_blocks
from pearl.engine.migration.peer import PeerTransport
from pearl.engine.migration.peer_link import RECEIVER, SOURCE, Carrier, Inlet, Link, LinkError, Outlet, Welcome
from pearl.engine.migration.pieces import part_bytes, pieces, view
from pearl.engine.migration.planner import CopyPart, CopyPlan
from pearl.engine.migration.transport import Pool
from pearl.kv_transfer import KVLayout

HEADER_BYTES = 64
PIECE_BYTES = 4 << 20
"""Small enough that filling, checking and sending find it in a processor's cache."""
BUFFERS = 2


class GlooTransport(PeerTransport):
    """One per engine, at both ends."""

    name = "gloo"

    def _carrier(self, pool: Pool) -> Carrier:
        return GlooCarrier()


class GlooCarrier:
    """A group of the two; messages of one end are numbered through."""

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self._buffers: list[Tensor] = []

    def greeting(self) -> bytes:
        return b""

    def join(self, link: Link, rank: int, welcome: Welcome) -> None:
        self._pair = pair_over(link.conversation, rank, welcome.generation, link.timeout_s)

    def send(self, link: Link, outlet: Outlet, parts: Sequence[CopyPart]) -> None:
        transfer, cut = outlet.transfer, _cut(parts, outlet.transfer.layout)
        if outlet.queue is not None:
            torch.cuda.current_stream(outlet.pool.tensor.device).wait_stream(outlet.queue)
        flying: list[tuple[Pending, str]] = []
        for number, (piece, message) in enumerate(self._messages(cut, transfer.layout)):
            if len(flying) == BUFFERS:
                _await(link, *flying.pop(0))
            fill(message, outlet.pool, piece)
            message.seal(number)
            what = f"sending piece {number + 1} of {len(cut)} of transfer {transfer.transfer_id!r}"
            flying.append((self._comm.send_async(message.whole, RECEIVER, tag=number % BUFFERS), what))
        for pending, what in flying:
            _await(link, pending, what)

    def receive(self, link: Link, inlet: Inlet, parts: Sequence[CopyPart]) -> None:
        transfer, cut = inlet.transfer, _cut(parts, inlet.transfer.layout)
        messages = [*self._messages(cut, transfer.layout)]

        def ask(number: int) -> Pending:
            return self._comm.recv_async(messages[number][1].whole, SOURCE, tag=number % BUFFERS)

        flying = [ask(number) for number in range(min(BUFFERS, len(cut)))]
        for number, (piece, message) in enumerate(messages):
            what = f"piece {number + 1} of {len(cut)} from {transfer.source.worker}"
            _await(link, flying.pop(0), what)
            message.check(number)
            inlet.land(piece, message.data)
            if number + BUFFERS < len(cut):
                flying.append(ask(number + BUFFERS))

    def close(self, *, settled: bool) -> None:
        """At once."""
        if self._pair is not None:
            self._pair.close(settled=settled)

    @property
    def _comm(self) -> Communicator:
        if self._pair is None or self._pair.comm is None:
            raise LinkError("the link is closed")
        return self._pair.comm

    def _messages(self, cut: list[CopyPart], layout: KVLayout) -> list[tuple[CopyPart, Message]]:
        """The pieces, each with its message in one of the buffers, which are kept from call to call."""
        sizes = [part_bytes(piece, layout) for piece in cut]
        size = HEADER_BYTES + -(-max(sizes, default=0) // 8) * 8
        if not self._buffers or self._buffers[0].nbytes < size:
            self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(BUFFERS)]
        messages = [Message(self._buffers[number % BUFFERS], nbytes) for number, nbytes in enumerate(sizes)]
        return list(zip(cut, messages, strict=True))


class Message:
    """`nbytes` of data at the beginning of a buffer."""

    def __init__(self, buffer: Tensor, nbytes: int) -> None:
        self.whole = buffer[: HEADER_BYTES + -(-nbytes // 8) * 8]
        self.data = buffer[HEADER_BYTES : HEADER_BYTES + nbytes]
        self._words = self.whole.view(torch.int64)

    def seal(self, number: int) -> None:
        self._words[1] = number
        self._words[0] = self._words[1:].sum()

    def check(self, number: int) -> None:
        """LinkError for a changed byte or another message."""
        checksum, found = self._words[:2].tolist()
        if int(self._words[1:].sum()) != checksum:
            raise LinkError(f"piece {number + 1}: the checksum differs")
        if found != number:
            raise LinkError(f"piece {number + 1}: number {found + 1} came")


def fill(message: Message, pool: Pool, piece: CopyPart) -> None:
    """The source's blocks of a piece, as the message's data."""
    blocks = view(pool.tensor, piece.layers, piece.source_heads)
    shape = (*blocks.shape[:2], len(piece.source_blocks), *blocks.shape[3:])
    data = message.data.view(pool.tensor.dtype).view(shape)
    if pool.tensor.is_cuda:
        data.copy_(gather_blocks(blocks, piece.source_blocks))
    else:
        gather_blocks(blocks, piece.source_blocks, data)


def _cut(parts: Sequence[CopyPart], layout: KVLayout) -> list[CopyPart]:
    return [*pieces(CopyPlan(parts=tuple(parts), num_bytes=0), layout, PIECE_BYTES)]


def _await(link: Link, pending: Pending, what: str) -> None:
    """Until a message is through."""

    def through(seconds: float) -> bool:
        try:
            if seconds > 0:
                pending.wait(seconds)
            return pending.done()
        except CollectiveError as error:
            try:
                return pending.done()
            except CollectiveError:
                raise LinkError(f"{what}: {error}") from error

    link.wait(through, what)
