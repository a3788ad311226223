"""KV between two engines of one process: a plain copy from pool to pool. What is written is copied when `begin` returns.

Owns the list of this process's pools by address (`copying.py` makes the copies). It does not know requests. Invariant: a pool
is found only while its engine lives.
"""

from __future__ import annotations

import functools
import itertools
import os
import uuid
import weakref

from pearl.engine.migration.copying import Copying
from pearl.engine.migration.planner import CopyPlan
from pearl.engine.migration.transport import Pool, Ticket, TransferError, Transport
from pearl.kv_transfer import KVTransfer

_numbers = itertools.count()
_pools: weakref.WeakValueDictionary[str, _Entry] = weakref.WeakValueDictionary()


class _Entry:
    """A pool of this process; its engine's transport keeps it alive."""

    __slots__ = ("__weakref__", "pool")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool


class LocalTransport(Transport):
    """One per engine; address "PROCESS:number", where PROCESS is never that of another process, on whatever host."""

    name = "local"

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._address = f"{_process(os.getpid())}:{next(_numbers)}"

    def address(self, pool: Pool) -> str | None:
        if self._entry is None:
            self._entry = _pools[self._address] = _Entry(pool)
        return self._address

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        address = transfer.source.addresses.get(self.name, "")
        if address.rpartition(":")[0] == _process(os.getpid()):
            return None
        return f"{transfer.source.worker} (pid {transfer.source.pid}) is no engine of this process"

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        address = transfer.source.addresses.get(self.name, "")
        entry = _pools.get(address)
        if entry is None:
            raise TransferError(transfer.transfer_id, "its source is gone")
        words, block = entry.pool.leases, transfer.blocks[-1]
        if not words.holds(block, transfer.lease_word) and not words.is_due(block, transfer.lease_word):
            raise TransferError(transfer.transfer_id, "its lease has ended")

        def gone() -> str | None:
            return None if address in _pools else "its source is gone"

        ticket = Copying(transfer, plan, entry.pool.tensor, words, pool, gone=gone, most_bytes=max(1, plan.num_bytes))
        ticket.done()
        return ticket


@functools.cache
def _process(pid: int) -> str:
    """A name of this process; its children by fork have other ones, since their pools are copies."""
    return f"{uuid.uuid4().hex}-{pid}"
