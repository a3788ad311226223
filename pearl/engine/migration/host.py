"""KV between two processes of one node: the receiver copies straight out of the sender's pool, which it has mapped.

Owns what a pool's address says and the pace of a copy. It does not know requests. Invariants: a copy counts only if the
sender's process was there and its lease whole after the last byte; nothing is written after `done` has said True, has raised,
or after `cancel`; `poll`, `done` and `cancel` never wait for anybody, so a sender that is stopped does no harm.

No thread: `done` copies up to `MOST_BYTES` a call. The sender does nothing at all, and may be killed at any moment.
"""

from __future__ import annotations

import functools
from math import prod

import msgspec
import torch
from torch import Tensor

from pearl.engine.migration.pieces import copy_part, pieces
from pearl.engine.migration.planner import CopyPart, CopyPlan, check_layouts
from pearl.engine.migration.shared_memory import FileAddress, Mappings, lives, own_address, share, unreachable
from pearl.engine.migration.transport import LeaseWords, Pool, Ticket, TransferError, Transport
from pearl.kv_transfer import KVLayout, KVTransfer

MOST_BYTES = 64 << 20
"""Copied between two polls: 4 to 8 milliseconds."""


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool and its lease words are; both are files from byte 0."""

    pool: FileAddress
    words: FileAddress


class HostTransport(Transport):
    """One per engine, at both ends. Not thread-safe."""

    name = "host"

    def __init__(self) -> None:
        self._address: str | None = None
        self._mappings = Mappings()

    def address(self, pool: Pool) -> str | None:
        """None for a pool that is in no memfd (a GPU's). The pool's lease words move into shared memory."""
        file = pool.memory.file(pool.tensor)
        if file is None:
            return None
        if self._address is None:
            address = HostAddress(pool=own_address(file), words=share(pool.leases))
            self._address = msgspec.json.encode(address).decode()
        return self._address

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        """Why not, whatever has become of the sender."""
        if pool.tensor.device.type != "cpu":
            return f"the pool here is on {pool.tensor.device}"
        try:
            address = _address(transfer)
            check_layouts(transfer.layout, pool.layout, heads_may_differ=True)
        except ValueError as error:
            return str(error)
        return unreachable(address.pool)

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        """TransferError if the sender's pool cannot be mapped, or is not as the transfer says."""
        try:
            address = _address(transfer)
            source = pool_tensor(self._mappings.memory(address.pool), transfer.layout, transfer.source.num_blocks)
            words = self._mappings.words(address.words)
        except ValueError as error:
            raise TransferError(transfer.transfer_id, str(error)) from error
        left = [*pieces(plan, transfer.layout, MOST_BYTES)]
        return _Copy(transfer, address.pool, words, source, pool, left[::-1])

    def poll(self) -> None:
        self._mappings.tidy()


class _Copy:
    """A ticket."""

    def __init__(
        self,
        transfer: KVTransfer,
        owner: FileAddress,
        words: LeaseWords,
        source: Tensor,
        pool: Pool,
        left: list[CopyPart],
    ) -> None:
        self._transfer, self._owner = transfer, owner
        self._source: tuple[Tensor, LeaseWords] | None = (source, words)
        """None once it is over: a mapping goes only when nobody has it any more."""
        self._pool, self._left = pool, left
        self._error: TransferError | None = None

    def done(self) -> bool:
        self._go_on()
        if self._error is not None:
            raise self._error
        return self._source is None

    def cancel(self) -> bool:
        if self._source is not None:
            self._end("it was cancelled")
        return True

    def _go_on(self) -> None:
        if self._source is None:
            return
        source, words = self._source
        if self._left:
            copy_part(source, self._pool.tensor, self._left.pop())
        if not lives(self._owner):
            self._end(f"its source in process {self._owner.pid} is gone")
        elif not words.holds(self._transfer.blocks[-1], self._transfer.lease_word):
            self._end("its lease has ended")  # so what was copied may be another request's
        elif not self._left:
            self._source = None

    def _end(self, reason: str) -> None:
        self._error, self._source, self._left = TransferError(self._transfer.transfer_id, reason), None, []


def pool_tensor(memory: Tensor, layout: KVLayout, num_blocks: int) -> Tensor:
    """`memory` (uint8) as the pool kv_L2NG__ that a layout describes. ValueError if it has another size."""
    dtype = getattr(torch, layout.dtype)
    shape = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    if memory.nbytes != prod(shape) * dtype.itemsize:
        raise ValueError(f"the source's pool has nbytes={memory.nbytes}, {prod(shape) * dtype.itemsize} by its layout")
    return memory.view(dtype).view(shape)


def _address(transfer: KVTransfer) -> HostAddress:
    text = transfer.source.addresses.get(HostTransport.name)
    if text is None:
        raise ValueError(f"{transfer.source.worker} has no pool in shared memory of the host")
    return _decoded(text)


@functools.lru_cache(maxsize=256)
def _decoded(text: str) -> HostAddress:
    try:
        return msgspec.json.decode(text, type=HostAddress)
    except msgspec.DecodeError as error:
        raise ValueError(f"address {text!r}: {error}") from error
