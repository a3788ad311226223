"""What a transport of KV is: how bytes get from one engine's pool into another's, without anybody waiting.

Owns the interface, the words by which a reader knows that what it read was still under lease, and the choice among several
transports. It does not know tensors (a Pool's is opaque), requests or clocks. Invariants:
- a copy counts only if its lease was whole before and after it (`LeaseWords`), so late data of a finished offer is never used;
- no call blocks: waiting is polling, and who polls has the deadline.

The receiver pulls: it calls `begin` on its own transport. A transport whose source has to take part (it sends) hears there of
each offer (`offer`, `withdraw`) and is given a turn between two steps (`poll`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pearl.engine.migration.planner import CopyPlan
from pearl.kv_transfer import KVLayout, KVTransfer


class TransferError(RuntimeError):
    """A transfer that will not come to its end; the message begins with its id."""

    def __init__(self, transfer_id: str, reason: str) -> None:
        super().__init__(f"transfer {transfer_id!r}: {reason}")
        self.transfer_id = transfer_id


class LeaseWords:
    """One word per block of a pool, int64 [num_blocks], possibly in memory that other processes read.

    An offer takes the word of its last block, which no other request shares; opening and closing an offer each make it another
    number, before any of its blocks can be written again. One writer: the engine that owns the pool.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def open(self, block: int) -> int:
        """The word of a new offer that ends with this block."""
        self.words[block] += 1
        return int(self.words[block])

    def close(self, block: int) -> None:
        """What was read under the word so far does not count any more."""
        self.words[block] += 1

    def holds(self, block: int, word: int) -> bool:
        return int(self.words[block]) == word


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """An engine's own pool. `tensor` is kv[layer, 2, block, kv_head, ...]; `memory` is the Arena that it lies in."""

    tensor: Any
    memory: Any
    layout: KVLayout
    leases: LeaseWords


class Ticket(Protocol):
    """A transfer under way into the receiver's pool."""

    def done(self) -> bool:
        """Whether all bytes are there and were under lease all the time. TransferError (also: the lease has ended) if they
        will not come; after True or an error nothing is written any more."""

    def cancel(self) -> bool:
        """Gives the transfer up. True once nothing will be written into the pool any more; False: ask again."""


class Transport(Protocol):
    """One way for bytes. Subclasses inherit the methods that they have no use for."""

    name: str

    def address(self, pool: Pool) -> str | None:
        """How others find this pool by this transport, as it goes into `KVEndpoint.addresses`; None: they cannot."""
        return None

    def offer(self, transfer: KVTransfer, pool: Pool) -> None:
        """On the source: its blocks may be asked for from now on."""
        return

    def withdraw(self, transfer_id: str) -> None:
        """On the source: the offer is over; nothing of it is sent any more."""
        return

    def poll(self) -> None:
        """On the source, between two steps: goes on with what is being sent, without waiting."""
        return

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        """On the receiver: why this transport can never bring `transfer` into `pool`, or None. A source that is gone is no
        reason: `begin` finds that out."""

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        """On the receiver: begins to bring the planned blocks into `pool`. TransferError if that is impossible by now.

        A plan without parts moves nothing and still asks for the lease.
        """


def choose(name: str | Transport, transports: Sequence[Transport], transfer: KVTransfer, pool: Pool) -> Transport:
    """The transport of that name, or the given one; "auto" is the first that does not refuse. ValueError with the reasons if
    there is none."""
    if not isinstance(name, str):
        transports, name = [name], name.name
    wanted = [transport for transport in transports if name in ("auto", transport.name)]
    if not wanted:
        valid = ", ".join(["auto", *(transport.name for transport in transports)])
        raise ValueError(f"transport={name!r}: must be one of {valid}")
    reasons = []
    for transport in wanted:
        reason = transport.refusal(transfer, pool)
        if reason is None:
            return transport
        reasons.append(f"{transport.name}: {reason}")
    raise ValueError(f"transport={name!r}: none can bring transfer {transfer.transfer_id!r} here: {'; '.join(reasons)}")
