"""What a transport of KV is: how bytes get from one engine's pool into another's, without anybody waiting.

Owns the interface, the words by which a reader knows what it may read and that it was still under lease afterwards, and the
choice among several transports. It does not know tensors (a Pool's is opaque), requests or clocks. Invariants:
- a copy counts only if its lease was whole before and after it (`LeaseWords`), so late data of a finished offer is never used;
- what has not been written yet is not read: whoever copies goes by `LeaseWords.progress`;
- no call blocks: waiting is polling, and who polls has the deadline.

The receiver pulls: it calls `begin` on its own transport. A transport whose source has to take part (it sends) hears there of
each offer (`offer`, `withdraw`), and is given a turn between two steps (`poll`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from pearl.engine.migration.planner import CopyPlan
from pearl.kv_transfer import KVLayout, KVTransfer


class TransferError(RuntimeError):
    """A transfer that will not come to its end; the message begins with its id."""

    def __init__(self, transfer_id: str, reason: str) -> None:
        super().__init__(f"transfer {transfer_id!r}: {reason}")
        self.transfer_id = transfer_id


class Progress(NamedTuple):
    """What of a transfer's KV is in the pool: the first `written` tokens in all layers, the first `next_tokens` in the first
    `layers` layers."""

    written: int
    next_tokens: int
    layers: int


STEP_BITS, CHUNK_BITS, TOKEN_BITS, LAYER_BITS = 22, 17, 24, 16
"""Of a progress word: which step it is about, the tokens that this adds, those before; and of the layer word."""
ALL = (1 << TOKEN_BITS) - 1
"""More tokens than any request has: an offer that is not being added to."""


class LeaseWords:
    """Two words per block of a pool and one for the pool, int64 [2 * num_blocks + 1], possibly in memory that others read.

    An offer takes the words of its last block, which no other request shares. The first is its lease: opening and closing an
    offer each make it another number, before any of its blocks can be written again; open ones are odd. The second is its
    progress. The pool's own says how many layers of the running step are through, so that it changes with one store per layer.
    One writer: the engine that owns the pool. On a machine that lets stores overtake each other (none is served) a reader
    could see a word before the KV that it is about.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    @classmethod
    def zeros(cls, num_blocks: int) -> LeaseWords:
        """Of a new pool: nothing is on offer."""
        return cls(np.zeros(2 * num_blocks + 1, dtype=np.int64))

    def open(self, block: int, written: int = ALL) -> int:
        """The word of a new offer that ends with this block; `written` tokens of it are there."""
        self.memory[self._num_blocks + block] = _packed(written, 0, 0)
        self.memory[block] += 1
        return int(self.memory[block])

    def close(self, block: int) -> None:
        """What was read under the word so far does not count any more."""
        self.memory[block] += 1

    def holds(self, block: int, word: int) -> bool:
        return self._is_block(block) and int(self.memory[block]) == word

    def is_due(self, block: int, word: int) -> bool:
        """Whether the offer with this word is still to be opened: one of several ranks may be a moment behind the first."""
        return self._is_block(block) and int(self.memory[block]) < word

    def _is_block(self, block: int) -> bool:
        """Who offers says which blocks; it may be wrong."""
        return 0 <= block < self._num_blocks

    # ------------------------------------------------------------------------------------------------ progress

    def announce(self, block: int, written: int, next_tokens: int, step: int) -> None:
        """`written` tokens of an open offer are there; those up to `next_tokens` are written layer by layer in `step`."""
        self.memory[self._num_blocks + block] = _packed(written, next_tokens - written, step)

    def progress(self, block: int) -> Progress:
        """What of the offer that ends with this block may be read, if its lease holds before and after."""
        word = int(self.memory[self._num_blocks + block])
        step_and_layers = int(self.memory[-1])
        written, chunk, step = _unpacked(word)
        running = step_and_layers >> LAYER_BITS & (1 << STEP_BITS) - 1 == step
        if not running or int(self.memory[self._num_blocks + block]) != word:
            return Progress(written, written, 0)
        return Progress(written, written + chunk, step_and_layers & (1 << LAYER_BITS) - 1)

    def layer_done(self, step: int, layers: int) -> None:
        """The KV of all tokens of `step` is in the pool, in its first `layers` layers."""
        self.memory[-1] = (step << LAYER_BITS) + layers

    @property
    def layer_address(self) -> int:
        """Where native code makes the store of `layer_done` itself."""
        return int(self.memory.ctypes.data) + (self.memory.size - 1) * self.memory.itemsize

    @property
    def _num_blocks(self) -> int:
        return self.memory.size // 2


def _packed(written: int, chunk: int, step: int) -> int:
    """One word, so that a reader never sees half of a change. A chunk too long for it is told of when it is through."""
    chunk = chunk if chunk < 1 << CHUNK_BITS else 0
    return (written << CHUNK_BITS | chunk) << STEP_BITS | step & (1 << STEP_BITS) - 1


def _unpacked(word: int) -> tuple[int, int, int]:
    rest, step = word >> STEP_BITS, word & (1 << STEP_BITS) - 1
    return rest >> CHUNK_BITS, rest & (1 << CHUNK_BITS) - 1, step


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


class AllOf:
    """A transfer in several parts, as one ticket: there when all are, lost when one is and nothing is written any more."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets
        self._error: TransferError | None = None

    def done(self) -> bool:
        if self._error is None:
            try:
                came = [ticket.done() for ticket in self._tickets]  # all go on, whatever the first says
                return all(came)
            except TransferError as error:
                self._error = error
        if self.cancel():
            raise self._error
        return False

    def cancel(self) -> bool:
        over = [ticket.cancel() for ticket in self._tickets]
        return all(over)


class Lost:
    """The ticket of a transfer that could not be begun."""

    def __init__(self, error: TransferError) -> None:
        self._error = error

    def done(self) -> bool:
        raise self._error

    def cancel(self) -> bool:
        return True


class Transport(Protocol):
    """One way for bytes. Subclasses inherit the methods that they have no use for."""

    name: str

    def address(self, pool: Pool) -> str | None:
        """How others find this pool by this transport, as it goes into `KVEndpoint.addresses`; None: they cannot."""
        return None

    def offer(self, transfer: KVTransfer, pool: Pool) -> None:
        """On the source: its blocks may be asked for from now on, as far as `pool.leases` says that they are written. Once
        for each id: a growing transfer that is offered later is the same one."""
        return

    def withdraw(self, transfer_id: str) -> None:
        """On the source: the offer is over; nothing of it is sent any more."""
        return

    def poll(self) -> None:
        """On the source, between two steps: goes on with what is being sent, without waiting."""
        return

    def close(self) -> None:
        """Ends its connections and threads; nothing is sent or brought any more."""
        return

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        """On the receiver: why this transport can never bring `transfer` into `pool`, or None. A source that is gone is no
        reason: `begin` finds that out."""

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        """On the receiver: begins to bring the planned blocks into `pool`. TransferError if that is impossible by now.

        A plan without parts moves nothing and still asks for the lease. What of a growing transfer is not written yet comes
        when it is; its ticket is the same when it is offered after all.
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
