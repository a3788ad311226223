"""The source's side of KV over gloo: gives the blocks of its offers to whoever asks, in threads of its own.

Owns who is connected and what of an offer may be had. It does not know requests. Invariants: only blocks of an open offer are
read, and what was read counts only if the lease was whole afterwards (else the message says so and is the last one); a
receiver that is lost, stops or lies costs its own connection; the engine never waits for any of them.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Sequence

from pearl.engine.comm.communicator import Pending
from pearl.engine.migration.blocks import gather_blocks
from pearl.engine.migration.gloo_link import BUFFERS, PIECE_BYTES, RECEIVER, SOURCE, Ask, Link, Message, Reply, Welcome
from pearl.engine.migration.pieces import part_bytes, pieces, view
from pearl.engine.migration.planner import CopyPart, CopyPlan
from pearl.engine.migration.transport import Pool
from pearl.kv_transfer import KVTransfer

Offer = tuple[KVTransfer, Pool]
ACCEPT_PAUSE_S = 0.05


class GlooSource:
    """Serves at `host` and `port` from its making to `close`."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.offers: dict[str, Offer] = {}
        self.problems: list[str] = []
        """How the last connections that failed did."""
        self._timeout_s = timeout_s
        self._generations = itertools.count(1)
        self._links: set[Link] = set()
        self._closing = False
        self._listener = socket.create_server((host, 0))
        self.host, self.port = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="kv source").start()

    def close(self) -> None:
        """Ends all connections; no offer can be had any more."""
        self._closing = True
        self.offers.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in [*self._links]:
            link.interrupt()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
                link = Link(connection, self._timeout_s)
            except OSError as error:  # out of descriptors, or a receiver that has gone again: others may come
                self.problems = [*self.problems[-9:], str(error)]
                time.sleep(ACCEPT_PAUSE_S)
                continue
            self._links.add(link)
            threading.Thread(target=self._converse, args=(link,), daemon=True, name="kv receiver").start()

    def _converse(self, link: Link) -> None:
        """One receiver, as long as it stays."""
        settled, generation = True, next(self._generations)
        try:
            link.say(Welcome(generation=generation))
            link.pair_up(SOURCE, generation)
            while not self._closing:
                ask = link.hear(Ask, patient=True)
                settled = False
                self._answer(link, ask)
                settled = True
        except (RuntimeError, ValueError, OSError) as error:
            self.problems = [*self.problems[-9:], str(error)]
        finally:
            self._links.discard(link)
            link.close(settled=settled)

    def _answer(self, link: Link, ask: Ask) -> None:
        offer = self.offers.get(ask.transfer_id)
        refusal = "it is not offered (any more)" if offer is None else _refusal(ask, *offer)
        link.say(Reply(refusal=refusal))
        if offer is not None and not refusal:
            self._send(link, offer, CopyPlan(parts=ask.parts, num_bytes=0))

    def _send(self, link: Link, offer: Offer, plan: CopyPlan) -> None:
        transfer, pool = offer
        cut = [*pieces(plan, transfer.layout, PIECE_BYTES)]
        buffers = link.buffers(max((part_bytes(piece, transfer.layout) for piece in cut), default=0))
        flying: list[Pending] = []
        for number, piece in enumerate(cut):
            if len(flying) == BUFFERS:
                link.wait(flying.pop(0), _name(transfer, number - BUFFERS, cut))
            message = Message(buffers[number % BUFFERS], part_bytes(piece, transfer.layout))
            _fill(message, pool, piece)
            whole = self.offers.get(transfer.transfer_id) is offer
            void = not (whole and pool.leases.holds(transfer.blocks[-1], transfer.lease_word))
            message.seal(number, void=void)
            flying.append(link.comm.send_async(message.whole, RECEIVER, tag=number % BUFFERS))
            if void:
                break
        for left, pending in enumerate(flying):
            link.wait(pending, _name(transfer, len(cut) - len(flying) + left, cut))


def _fill(message: Message, pool: Pool, piece: CopyPart) -> None:
    blocks = view(pool.tensor, piece.layers, piece.source_heads)
    shape = (*blocks.shape[:2], len(piece.source_blocks), *blocks.shape[3:])
    data = message.data.view(pool.tensor.dtype).view(shape)
    if pool.tensor.is_cuda:
        data.copy_(gather_blocks(blocks, piece.source_blocks))
    else:
        gather_blocks(blocks, piece.source_blocks, data)


def _refusal(ask: Ask, transfer: KVTransfer, pool: Pool) -> str:
    """Why an offer's blocks cannot be had like this, or nothing."""
    if ask.lease_word != transfer.lease_word:
        return f"its lease is {transfer.lease_word}, not {ask.lease_word}"
    offered, layers, heads = set(transfer.blocks), pool.tensor.shape[0], pool.tensor.shape[3]
    for part in ask.parts:
        if not offered.issuperset(part.source_blocks):
            return f"blocks {sorted(set(part.source_blocks) - offered)} are not offered"
        if not (0 <= part.layers[0] < part.layers[1] <= layers and 0 <= part.source_heads[0] < part.source_heads[1] <= heads):
            return f"layers {part.layers} and heads {part.source_heads}: the pool has {layers} and {heads}"
        if len(part.destination_blocks) != len(part.source_blocks):
            return f"{len(part.source_blocks)} blocks for {len(part.destination_blocks)}"
    return ""


def _name(transfer: KVTransfer, number: int, cut: Sequence[CopyPart]) -> str:
    return f"sending piece {number + 1} of {len(cut)} of transfer {transfer.transfer_id!r}"
