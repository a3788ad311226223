"""KV between GPUs by NCCL: each link has a communicator of two, with a unique id of its own, and a stream per end.

Owns the messages, their order on the stream, and what is aborted. It does not know offers, tickets or requests (`peer.py`).
Invariants: no call waits without a limit; what does not end in time is aborted, and until it has ended the receiver's blocks
count as being written.

Both ends cut alike, into pieces, and each piece into one message for each layer's keys and one for its values, all in one NCCL
group. A side whose blocks lie one behind the other sends or takes them in place; where they are scattered, or are some of the
heads, they go through a buffer (`csrc/migration` gathers and scatters on the same stream).

It has not been run on a GPU: it is tested against a library with NCCL's prototypes, on host memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pearl.engine.comm.groups import LOCAL
from pearl.engine.comm.pynccl import Nccl, NcclComm, NcclUnavailable
from pearl.engine.migration.blocks import gather_blocks, scatter_blocks
from pearl.engine.migration.peer import TIMEOUT_S, PeerTransport
from pearl.engine.migration.peer_link import RECEIVER, SOURCE, Carrier, Inlet, Link, LinkError, Outlet, Welcome
from pearl.engine.migration.pieces import part_bytes, pieces, view
from pearl.engine.migration.planner import CopyPart, CopyPlan, Range
from pearl.engine.migration.transport import Pool
from pearl.kv_transfer import KVLayout, KVTransfer

PIECE_BYTES = 32 << 20
"""What a buffer holds, and what is begun at once."""
POLL_S = 0.0002
SIZE = 2


class Stream(Protocol):
    """Where one link's work is queued, in order."""

    number: int
    """As NCCL takes it, a cudaStream_t."""

    def after(self, queue: Any) -> None:
        """What is queued from now on waits for what is on `queue` by now."""

    def current(self) -> contextlib.AbstractContextManager[object]:
        """What torch does goes here."""

    def mark(self) -> Callable[[], bool]:
        """Tells whether all that was queued up to now is through; never waits."""


class CudaStream:
    """One of its own on a pool's device."""

    def __init__(self, pool: Pool) -> None:
        self._stream = torch.cuda.Stream(pool.tensor.device)
        self.number = int(self._stream.cuda_stream)

    def after(self, queue: Any) -> None:
        self._stream.wait_stream(queue)

    def current(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # makes its device the thread's too

    def mark(self) -> Callable[[], bool]:
        return self._stream.record_event().query


class NcclTransport(PeerTransport):
    """One per engine, at both ends; for pools on GPUs."""

    name = "nccl"

    def __init__(self, host: str = LOCAL, timeout_s: float = TIMEOUT_S) -> None:
        """As for `PeerTransport`: `host` is where the two meet; NCCL finds its own ways between them."""
        super().__init__(host, timeout_s)
        self._nccl: Nccl | None = None

    def address(self, pool: Pool) -> str | None:
        """None for a pool that is not on a GPU, or without NCCL."""
        return super().address(pool) if self._missing(pool) is None else None

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        return self._missing(pool) or super().refusal(transfer, pool)

    def _carrier(self, pool: Pool) -> Carrier:
        return NcclCarrier(self._library(), lambda: CudaStream(pool), self._timeout_s)

    def _missing(self, pool: Pool) -> str | None:
        """Why NCCL cannot serve this pool."""
        if not pool.tensor.is_cuda:
            return f"the pool here is on {pool.tensor.device}, not on a GPU"
        try:
            self._library()
        except NcclUnavailable as error:
            return str(error)
        return None

    def _library(self) -> Nccl:
        if self._nccl is None:
            self._nccl = Nccl()
        return self._nccl


class NcclCarrier:
    """A communicator, a stream and a buffer."""

    def __init__(self, nccl: Nccl, stream: Callable[[], Stream], timeout_s: float) -> None:
        """`stream`: makes the one of this link, in its own thread."""
        self._nccl, self._make_stream, self._timeout_s = nccl, stream, timeout_s
        self._comm: NcclComm | None = None
        self._stream: Stream | None = None
        self._buffer: Tensor | None = None

    def greeting(self) -> bytes:
        """The group's unique id."""
        return self._nccl.unique_id()

    def join(self, link: Link, rank: int, welcome: Welcome) -> None:
        self._stream = self._make_stream()
        with self._stream.current():
            self._comm = NcclComm(self._nccl, welcome.greeting, rank, SIZE, link.timeout_s)

    def send(self, link: Link, outlet: Outlet, parts: Sequence[CopyPart]) -> None:
        comm, stream = self._joined()
        what = f"sending transfer {outlet.transfer.transfer_id!r}"
        with self._ending(link, what), stream.current():
            if outlet.queue is not None:
                stream.after(outlet.queue)
            for piece in _cut(parts, outlet.transfer.layout):
                place = self._place(outlet.pool, piece, piece.source_heads, piece.source_blocks)
                if place.buffer is not None:
                    gather_blocks(place.blocks, piece.source_blocks, place.buffer)
                with _grouped(comm):
                    for row in place.rows:
                        comm.send(row, RECEIVER, stream.number)
            _await(link, stream.mark(), what)

    def receive(self, link: Link, inlet: Inlet, parts: Sequence[CopyPart]) -> None:
        comm, stream = self._joined()
        what = f"{len(parts)} parts from {inlet.transfer.source.worker}"
        wanted = inlet.open()
        with self._ending(link, what, inlet.shut), stream.current():
            if inlet.queue is not None:
                stream.after(inlet.queue)
            for piece in _cut(parts, inlet.transfer.layout):
                place = self._place(inlet.pool, piece, piece.destination_heads, piece.destination_blocks, direct=wanted)
                with _grouped(comm):
                    for row in place.rows:
                        comm.recv(row, SOURCE, stream.number)
                if place.buffer is not None and wanted:
                    scatter_blocks(place.blocks, piece.destination_blocks, place.buffer)
            _await(link, stream.mark(), what)

    def close(self, *, settled: bool) -> None:
        """Never waits for the other end, as leaving in order would; what is through stays."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    @contextlib.contextmanager
    def _ending(self, link: Link, what: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Whatever happens in it, nothing of it is on the stream afterwards; only then is `then` called."""
        comm, stream = self._joined()
        try:
            yield
        except BaseException:
            comm.abort()
            through, deadline = stream.mark(), time.monotonic() + self._timeout_s
            while not through():
                if time.monotonic() > deadline:
                    raise LinkError(f"{what}: what was aborted has not ended within {self._timeout_s:g} s") from None
                time.sleep(POLL_S)
            then()
            raise
        then()

    def _joined(self) -> tuple[NcclComm, Stream]:
        if self._comm is None or self._stream is None:
            raise LinkError("the link is closed")
        return self._comm, self._stream

    def _place(self, pool: Pool, piece: CopyPart, heads: Range, ids: Sequence[int], *, direct: bool = True) -> Place:
        """Where a piece is sent from, or taken into; `direct`: it may be the blocks themselves."""
        blocks = view(pool.tensor, piece.layers, heads)
        shape = (*blocks.shape[:2], len(ids), *blocks.shape[3:])
        if direct and blocks.shape[3] == pool.tensor.shape[3] and list(ids) == list(range(ids[0], ids[0] + len(ids))):
            return Place(blocks, blocks[:, :, ids[0] : ids[0] + len(ids)], None)
        nbytes = part_bytes(piece, pool.layout)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = torch.empty(max(nbytes, PIECE_BYTES), dtype=torch.uint8, device=blocks.device)
        buffer = self._buffer[:nbytes].view(blocks.dtype).view(shape)
        return Place(blocks, buffer, buffer)


class Place:
    """Some blocks of a pool, and the memory in which they lie one behind the other: their own, or a `buffer`."""

    def __init__(self, blocks: Tensor, flat: Tensor, buffer: Tensor | None) -> None:
        self.blocks, self.buffer = blocks, buffer
        self.rows = [flat[layer, side] for layer in range(flat.shape[0]) for side in range(2)]


@contextlib.contextmanager
def _grouped(comm: NcclComm) -> Iterator[None]:
    comm.group_start()
    try:
        yield
    finally:
        comm.group_end()


def _cut(parts: Sequence[CopyPart], layout: KVLayout) -> Iterator[CopyPart]:
    return pieces(CopyPlan(parts=tuple(parts), num_bytes=0), layout, PIECE_BYTES)


def _await(link: Link, mark: Callable[[], bool], what: str) -> None:
    def through(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not mark():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    link.wait(through, what)
