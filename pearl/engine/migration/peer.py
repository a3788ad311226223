"""KV that its source sends, between any two processes: the transport's two faces, whatever the bytes travel by.

Owns which sources an engine takes from, and its own one. It does not know requests, nor how bytes travel: subclasses give a
`Carrier`. Invariants as in `peer_source.py` and `peer_receiver.py`. Nothing is opened before something is offered or taken.
"""

from __future__ import annotations

from typing import Any

import torch

from pearl.engine.comm.groups import LOCAL
from pearl.engine.migration.peer_link import Carrier, Outlet
from pearl.engine.migration.peer_receiver import PeerReceiver, PeerTicket
from pearl.engine.migration.peer_source import PeerSource
from pearl.engine.migration.planner import CopyPlan, check_layouts
from pearl.engine.migration.transport import Pool, Ticket, TransferError, Transport
from pearl.engine.node import node
from pearl.kv_transfer import KVTransfer

TIMEOUT_S = 10.0


class PeerTransport(Transport):
    """One per engine, at both ends. Address "HOST:PORT"; where HOST is this machine's own, "HOST:PORT NODE"."""

    def __init__(self, host: str = LOCAL, timeout_s: float = TIMEOUT_S) -> None:
        """`host`: the address of this machine that others reach; by default those of this machine alone do. `timeout_s`
        bounds every wait for the other end."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        self._host, self._timeout_s = host, timeout_s
        self._source: PeerSource | None = None
        self._receivers: dict[str, PeerReceiver] = {}

    def _carrier(self, pool: Pool) -> Carrier:
        """A new one, for a link of this pool's engine."""
        raise NotImplementedError

    def address(self, pool: Pool) -> str | None:
        """Takes a port, which answers from the first offer on."""
        if self._source is None:
            self._source = PeerSource(self._host, self._timeout_s, lambda: self._carrier(pool))
        place = f"{self._source.host}:{self._source.port}"
        return f"{place} {node()}" if self._host == LOCAL else place

    def offer(self, transfer: KVTransfer, pool: Pool) -> None:
        if self._source is not None:
            self._source.offer(Outlet(transfer=transfer, pool=pool, queue=_queue(pool)))

    def withdraw(self, transfer_id: str) -> None:
        if self._source is not None:
            self._source.withdraw(transfer_id)

    def poll(self) -> None:
        """Sending goes on by itself; connections that others have ended are forgotten."""
        self._receivers = {address: receiver for address, receiver in self._receivers.items() if not receiver.gone()}

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        address = transfer.source.addresses.get(self.name)
        if address is None:
            return f"{transfer.source.worker} has no address for it"
        place, _, where = address.partition(" ")
        if where and where != node():
            return f"{transfer.source.worker} gives KV to its own machine only, at {place}; give its transport a host"
        try:
            check_layouts(transfer.layout, pool.layout, heads_may_differ=True)
        except ValueError as error:
            return str(error)
        return None

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        address = transfer.source.addresses.get(self.name)
        if address is None:
            raise TransferError(transfer.transfer_id, f"{transfer.source.worker} has no address for {self.name}")
        place = address.partition(" ")[0]
        if place not in self._receivers:
            self._receivers[place] = PeerReceiver(place, self._timeout_s, lambda: self._carrier(pool))
        ticket = PeerTicket(plan, transfer, pool, _queue(pool))
        self._receivers[place].take(ticket)
        return ticket

    def close(self) -> None:
        """Ends all connections, in both directions."""
        for receiver in self._receivers.values():
            receiver.close()
        if self._source is not None:
            self._source.close()


def _queue(pool: Pool) -> Any:
    """The stream on which the caller uses the pool; None if that is no GPU's."""
    return torch.cuda.current_stream(pool.tensor.device) if pool.tensor.is_cuda else None
