"""Transfers: the ways for KV that one rank has, the copies under way into its pool, and what all ranks conclude of them.

Owns transports and tickets; which requests move, and into which blocks, is the core's (`moving.py`). It decides nothing.
Invariants: over several ranks a copy counts as come when it has on all of them, and as lost when it is on one; so all ranks,
which ask at the same place of the same step, hear the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pearl.engine.comm.agreement import greatest
from pearl.engine.comm.communicator import Communicator
from pearl.engine.migration.planner import Range, check_layouts, plan_copy, plan_sources
from pearl.engine.migration.transport import AllOf, Lost, Pool, Ticket, TransferError, Transport, choose
from pearl.kv_transfer import KVLayout, KVTransfer, lacking

HERE, PENDING, LOST = 0, 1, 2
"""Of a copy, the worse the greater: of several ranks' the greatest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One rank of a source: what it offers, of which it has these heads, and by what they come here."""

    transport: Transport
    transfer: KVTransfer
    heads: Range


class Transfers:
    """Of the rank whose `pool` has `heads` of the model's kv heads. `comm`: the group of all ranks, if there are several."""

    def __init__(self, pool: Pool, heads: Range, transports: Sequence[Transport], comm: Communicator | None) -> None:
        self.pool, self.heads, self.transports = pool, heads, list(transports)
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._tickets: dict[str, Ticket] = {}
        self._offered: set[str] = set()

    # ------------------------------------------------------------------------------------------------ on the way out

    def offer(self, transfer: KVTransfer) -> None:
        """Tells the transports of an offer of this rank's, once."""
        if transfer.transfer_id not in self._offered:
            self._offered.add(transfer.transfer_id)
            for transport in self.transports:
                transport.offer(transfer, self.pool)

    def is_offered(self, transfer_id: str) -> bool:
        return transfer_id in self._offered

    def withdraw_others(self, open_offers: set[str]) -> None:
        """Tells the transports of offers that have ended: all but these."""
        for transfer_id in self._offered - open_offers:
            self._offered.discard(transfer_id)
            for transport in self.transports:
                transport.withdraw(transfer_id)

    def poll(self) -> None:
        for transport in self.transports:
            transport.poll()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()

    # ------------------------------------------------------------------------------------------------ on the way in

    @property
    def by_steps(self) -> bool:
        """Whether ranks must ask together, which they do once a step."""
        return self._comm is not None

    def ways(self, transfer: KVTransfer, whole: KVLayout, transport: str | Transport) -> list[Way]:
        """How this rank's heads of a transfer would come here; `whole`: the layout of this engine's pools taken together.

        ValueError if they never can.
        """
        check_layouts(transfer.layout, whole)
        if wrong := lacking(transfer):
            raise ValueError(wrong)
        if not transfer.blocks:
            return []
        sources = [transfer.source, *transfer.peers]
        held = [source.heads or (0, transfer.layout.num_kv_heads) for source in sources]
        plan_sources(held, (0, whole.num_kv_heads))  # other ranks here need the others of them
        ways = []
        for number in plan_sources(held, self.heads, turn=0 if self._comm is None else self._comm.rank):
            count = held[number][1] - held[number][0]
            part = msgspec.structs.replace(
                transfer,
                source=sources[number],
                peers=[],
                layout=msgspec.structs.replace(transfer.layout, num_kv_heads=count),
            )
            ways.append(Way(transport=choose(transport, self.transports, part, self.pool), transfer=part, heads=held[number]))
        return ways

    def begin(self, name: str, ways: Sequence[Way] | TransferError, blocks: Sequence[int], first_token: int) -> None:
        """Begins the copies into these blocks, as one that is known by `name`; what cannot be begun is lost."""
        if isinstance(ways, TransferError):
            self._tickets[name] = Lost(ways)
            return
        tickets: list[Ticket] = []
        self._tickets[name] = AllOf(tickets)
        for way in ways:
            plan = plan_copy(
                way.transfer.layout,
                way.transfer.blocks,
                self.pool.layout,
                blocks,
                first_token=first_token,
                num_tokens=way.transfer.num_written_tokens,
                source_heads=way.heads,
                destination_heads=self.heads,
            )
            try:
                tickets.append(way.transport.begin(plan, way.transfer, self.pool))
            except TransferError as error:
                tickets.append(Lost(error))

    def rename(self, name: str, new: str) -> None:
        self._tickets[new] = self._tickets.pop(name)

    def is_lost(self, name: str) -> bool:
        """Whether this rank's copy will not come, or has not begun; goes on with it."""
        return self._status(name) == LOST

    def statuses(self, names: Sequence[str]) -> list[int]:
        """HERE, PENDING or LOST of each copy, over all ranks; goes on with them."""
        return self._agreed([self._status(name) for name in names])

    def ended(self, names: Sequence[str]) -> list[str]:
        """Gives up these copies. Those are returned that nothing is written by any more, on any rank; they are forgotten."""
        ended = self._agreed([HERE if self._end(name) else PENDING for name in names])
        over = [name for name, status in zip(names, ended, strict=True) if status == HERE]
        for name in over:
            self.forget(name)
        return over

    def forget(self, name: str) -> None:
        """A copy that has come, or has ended."""
        self._tickets.pop(name, None)

    def _status(self, name: str) -> int:
        ticket = self._tickets.get(name)
        try:
            return HERE if ticket is None or ticket.done() else PENDING
        except TransferError:
            return LOST

    def _end(self, name: str) -> bool:
        ticket = self._tickets.get(name)
        return ticket is None or ticket.cancel()

    def _agreed(self, statuses: list[int]) -> list[int]:
        return statuses if self._comm is None or not statuses else greatest(self._comm, statuses)
