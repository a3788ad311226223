"""The part of Engine that hands requests to other engines, and changes its role; `taking_in.py` is the other side.

Owns what offers say; who may move, and when, is the core's (`moving.py`, `growing.py`). Invariant: a request is lost or doubled
by no failure of a transfer: it is here until another engine is known to have it.

    for transfer in prefill.take_handoffs():
        taken = decode.import_kv(transfer)
        prefill.finish_export(transfer.transfer_id, taken, arrived=not decode.is_arriving(transfer.transfer_id))
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from pearl.engine.assembly import Parts
from pearl.engine.comm.agreement import gather_bytes
from pearl.engine.comm.communicator import Communicator
from pearl.engine.growing import Growing
from pearl.engine.migration.registry import all_transports
from pearl.engine.migration.transport import LeaseWords, Pool, Transport
from pearl.engine.model_runner import ModelRunner
from pearl.engine.models.params import Shard, kv_heads
from pearl.engine.moving import Export
from pearl.engine.request import RequestStatus, RequestUpdate
from pearl.engine.role import DRAINS, Drain, RoleSwitchReport
from pearl.engine.steps import Steps
from pearl.engine.taking_in import TakingIn
from pearl.engine.transfers import Transfers
from pearl.engine.travel import state_of
from pearl.protocol import KVEndpoint, KVLayout, KVTransfer, Role

_numbers = itertools.count()
"""Engines of this process."""


class HandOff(TakingIn):
    """Mixed into Engine, which calls `_own_pool`.

    `on_growing` is told of each prompt that an engine with room for it may read along (`read_along`), before any of it is
    computed here; it must neither wait nor raise.
    """

    on_growing: Callable[[KVTransfer], None] | None
    _runner: ModelRunner
    _pending: list[RequestUpdate]
    _steps: Steps

    def _own_pool(self, parts: Parts, transports: Sequence[Transport] | None, comm: Communicator | None) -> None:
        tensor: Tensor = parts.runner.kv_pool
        heads = kv_heads(parts.model, Shard(rank=comm.rank if comm else 0, size=comm.size if comm else 1))
        self._whole_layout = KVLayout(
            dtype=parts.model.dtype,
            block_size=self.config.block_size,
            num_layers=tensor.shape[0],
            num_kv_heads=parts.model.num_kv_heads,
            head_dim=parts.model.head_dim,
            order=parts.runner.kernels.kv_layout,
        )
        layout = msgspec.structs.replace(self._whole_layout, num_kv_heads=tensor.shape[3])
        leases = LeaseWords.zeros(parts.num_blocks)
        self._pool = Pool(tensor=tensor, memory=parts.kv_memory, layout=layout, leases=leases)
        ways = all_transports() if transports is None else transports
        self._transfers = Transfers(self._pool, heads, ways, comm)
        found = {transport.name: transport.address(self._pool) for transport in ways}
        addresses = {name: address for name, address in found.items() if address is not None}
        host, pid = socket.gethostname(), os.getpid()
        self._endpoint = KVEndpoint(
            worker=f"{host}:{pid}:{next(_numbers)}",
            host=host,
            pid=pid,
            num_blocks=parts.num_blocks,
            addresses=addresses,
            heads=heads,
        )
        self._endpoints = [self._endpoint]
        self.on_growing = None

    def meet(self, comm: Communicator) -> None:
        """Tells all ranks of an instance where the pools of all are, and gives their offers the same names; all call it."""
        mine = msgspec.msgpack.encode(self._endpoint)
        self._endpoints = [msgspec.msgpack.decode(one, type=KVEndpoint) for one in gather_bytes(comm, mine)]
        self._core.name = self._endpoints[0].worker

    def step_updates(self) -> list[RequestUpdate]:
        raise NotImplementedError

    def _settle_steps(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ on the way out

    def take_handoffs(self) -> list[KVTransfer]:
        """What this engine offers to others since the last call: finished prompts of a PREFILL engine, and what a change of
        role hands over. Each must be answered by `finish_export`; after its deadline the request goes on here."""
        now = self._clock.now()
        self._core.expire(now)
        return [self._outward_transfer(export, now) for export in self._core.take_offers()]

    def export_kv(self, request_id: str) -> KVTransfer:
        """Offers a waiting or running request by hand, to be answered like a hand-off; of n siblings the first still here.

        ValueError if there is none.
        """
        self._settle_steps()
        here = (RequestStatus.RUNNING, RequestStatus.WAITING)
        members = [self._core.requests.get(name) for name in self._siblings.members(request_id)]
        found = [request for request in members if request is not None and request.status in here]
        if not found:
            raise ValueError(f"request_id={request_id!r}: no such request is waiting or running here")
        now = self._clock.now()
        export = self._core.offer(found[0], now)
        export.taken = True
        self._announce_offers()
        return self._outward_transfer(export, now)

    def finish_export(self, transfer_id: str, ok: bool, *, arrived: bool = True) -> None:
        """Answers an offer. `ok`: another engine has the request, and its blocks are free here. Otherwise it goes on here,
        whatever the role.

        `arrived=False`: the request is not here any more, but its KV has to stay until another answer, when the receiver's
        `is_arriving` has become False, or until the offer's deadline. An unknown or ended offer is ignored and counted
        (`stats().stale_messages`); if it lapsed and is accepted after all, the request, which has gone on here meanwhile, ends
        here without a word."""
        gone = self._core.finish_export(transfer_id, ok, arrived)
        if gone is not None:
            self._forget(gone)
        self._settle_moves()

    def _outward_transfer(self, offer: Export | Growing, now: float) -> KVTransfer:
        """As others are to see it: of all ranks."""
        first, *peers = self._endpoints
        return msgspec.structs.replace(self._transfer(offer, now), source=first, peers=peers, layout=self._whole_layout)

    def _transfer(self, offer: Export | Growing, now: float) -> KVTransfer:
        request = offer.request
        outer = self._siblings.outer(request.request_id)
        growing = isinstance(offer, Growing)
        return KVTransfer(
            transfer_id=offer.transfer_id,
            request_id=outer,
            state=state_of(request, request_id=outer, streaming=request.request_id not in self._whole_text),
            source=self._endpoint,
            blocks=list(offer.blocks),
            lease_word=offer.word,
            num_written_tokens=offer.num_tokens,
            layout=self._pool.layout,
            weight_version=offer.weight_version,
            epoch=offer.epoch,
            deadline=self.config.transfer_deadline_s if growing else offer.expires - now,
            reservation_id=request.reservation_id,
            growing=growing,
        )

    def _announce_growing(self) -> None:
        """Before a step: of what it computes others may read along."""
        growing = self._core.growing
        on_host = self._pool.tensor.device.type == "cpu"  # elsewhere layers are through later than they are queued
        self._runner.progress = self._pool.leases if growing and on_host else None
        for one in list(growing.values()):
            if not self._transfers.is_offered(one.transfer_id):
                self._transfers.offer(self._transfer(one, self._clock.now()))
                if self.on_growing is not None:
                    self.on_growing(self._outward_transfer(one, self._clock.now()))

    def _announce_offers(self) -> None:
        """Tells the transports of new offers, whoever may ask for them first."""
        for export in self._core.exports.values():
            if not self._transfers.is_offered(export.transfer_id):
                self._transfers.offer(self._transfer(export, self._clock.now()))

    # ------------------------------------------------------------------------------------------------ role

    def switch_role(self, role: Role, drain: Drain = "handover") -> RoleSwitchReport:
        """Changes the role in place, between two steps; weights, pool and prefix cache stay as they are.

        Only requests that are being decoded when the role becomes `prefill` cannot simply go on: they are offered in
        `take_handoffs` ("handover"), decoded to their end first, in steps whose updates come with the next one ("finish"), or
        computed anew when their turn comes ("recompute"). ValueError, or an error of such a step, leaves the old role.
        """
        if drain not in DRAINS:
            raise ValueError(f"drain={drain!r}: must be one of {', '.join(DRAINS)}")
        start = self._clock.now()
        finished = self._finish_decoding() if drain == "finish" and role == Role.PREFILL else 0
        left = self._switch(role, drain)
        moved, recomputed = (0, left) if drain == "recompute" else (left, 0)
        return RoleSwitchReport(seconds=self._clock.now() - start, moved=moved, finished=finished, recomputed=recomputed)

    def _switch(self, role: Role, drain: Drain) -> int:
        """The change itself; how many requests leave."""
        self._settle_steps()
        switch = self._core.switch_role(role, drain, self._clock.now())
        self._announce_offers()
        self._settle_moves()
        return len(switch.leaving)

    def _finish_decoding(self) -> int:
        """Steps until what is being decoded now has ended; returns how many that were. What has to wait for room is left."""
        if self._core.scheduler.policy.role is Role.PREFILL:
            return 0
        if self._core.paused or self._core.asleep or not self._store.ready:
            raise ValueError("drain='finish': the engine is paused, asleep or without weights, so that nothing would finish")
        running = self._core.scheduler.running
        first = left = {request_id for request_id, request in running.items() if request.is_decoding}
        updates: list[RequestUpdate] = []
        try:
            while left:
                came = self.step_updates()
                updates += came
                left = left & running.keys()
                if not came and not self._steps.queued:
                    break
        finally:
            self._pending[:0] = updates
        return len(first - self._core.requests.keys())
