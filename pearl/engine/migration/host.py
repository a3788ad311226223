"""KV between two processes of one node: the receiver copies straight out of the sender's pool, which it has mapped.

Owns what a pool's address says and the pace of a copy (`copying.py` makes it). It does not know requests. Invariants: a copy
counts only if the sender's process was there and its lease whole after the last byte; `poll`, `done` and `cancel` never wait
for anybody, so a sender that is stopped does no harm.

No thread: `done` copies up to `MOST_BYTES` a call. The sender does nothing but say how far it has written, and may be killed
at any moment.
"""

from __future__ import annotations

import functools
from math import prod

import msgspec
import torch
from torch import Tensor

from pearl.engine.migration.copying import Copying
from pearl.engine.migration.planner import CopyPlan, check_layouts
from pearl.engine.migration.shared_memory import FileAddress, Mappings, lives, own_address, share, unreachable
from pearl.engine.migration.transport import Pool, Ticket, TransferError, Transport
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

        def gone() -> str | None:
            return None if lives(address.pool) else f"its source in process {address.pool.pid} is gone"

        return Copying(transfer, plan, source, words, pool, gone=gone, most_bytes=MOST_BYTES)

    def poll(self) -> None:
        self._mappings.tidy()


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
