"""The part of Engine that moves requests between engines: offers out, imports in, credits, and the change of role.

Owns the transports and the tickets of transfers under way; who may move, when, and into which blocks is the core's
(`moving.py`). Invariant: a request is lost or doubled by no failure of a transfer. Whoever accepted it has all of it but the
KV, and computes that again if it does not come.

    for transfer in prefill.take_handoffs():
        prefill.finish_export(transfer.transfer_id, decode.import_kv(transfer))
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from pearl.clock import Clock
from pearl.config import EngineConfig
from pearl.engine.assembly import Parts
from pearl.engine.core import EngineCore
from pearl.engine.limits import check_request
from pearl.engine.migration.planner import check_layouts, plan_copy
from pearl.engine.migration.registry import all_transports
from pearl.engine.migration.transport import LeaseWords, Pool, Ticket, TransferError, Transport, choose
from pearl.engine.moving import Arrival, Export
from pearl.engine.request import Request, RequestStatus, RequestUpdate
from pearl.engine.role import DRAINS, Drain, RoleSwitchReport
from pearl.engine.siblings import Siblings
from pearl.engine.travel import request_of, state_of
from pearl.engine.weights.store import WeightStore
from pearl.protocol import KVEndpoint, KVLayout, KVReservation, KVTransfer, Role, SamplingParams

_numbers = itertools.count()
"""Engines of this process."""


class HandOff:
    """Mixed into Engine, which calls `_own_pool`."""

    config: EngineConfig
    max_model_len: int
    _clock: Clock
    _core: EngineCore
    _store: WeightStore
    _siblings: Siblings
    _pending: list[RequestUpdate]
    _whole_text: set[str]
    _text_folder: Path | None

    def _own_pool(self, parts: Parts, transports: Sequence[Transport] | None) -> None:
        pool: Tensor = parts.runner.kv_pool
        self._pool = Pool(
            tensor=pool,
            memory=parts.kv_memory,
            layout=KVLayout(
                dtype=parts.model.dtype,
                block_size=self.config.block_size,
                num_layers=pool.shape[0],
                num_kv_heads=pool.shape[3],
                head_dim=parts.model.head_dim,
                order=parts.runner.kernels.kv_layout,
            ),
            leases=LeaseWords(np.zeros(parts.num_blocks, dtype=np.int64)),
        )
        self._transports = all_transports() if transports is None else list(transports)
        found = {transport.name: transport.address(self._pool) for transport in self._transports}
        addresses = {name: address for name, address in found.items() if address is not None}
        host, pid = socket.gethostname(), os.getpid()
        worker = f"{host}:{pid}:{next(_numbers)}"
        self._endpoint = KVEndpoint(worker=worker, host=host, pid=pid, num_blocks=parts.num_blocks, addresses=addresses)
        self._tickets: dict[str, Ticket] = {}
        self._offered: set[str] = set()

    def step_updates(self) -> list[RequestUpdate]:
        raise NotImplementedError

    def _known(self, request_id: str) -> bool:
        raise NotImplementedError

    def _request(self, name: str, ids: list[int], params: SamplingParams, seed: int, index: int) -> Request:
        raise NotImplementedError

    def _check_prompt(self, prompt: str | Sequence[int], params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ on the way out

    def take_handoffs(self) -> list[KVTransfer]:
        """What this engine offers to others since the last call: finished prompts of a PREFILL engine, and what a change of
        role hands over. Each must be answered by `finish_export`; after its deadline the request goes on here."""
        self._check_moves("take_handoffs")
        now = self._clock.now()
        self._core.expire(now)
        return [self._transfer(export, now) for export in self._core.take_offers()]

    def export_kv(self, request_id: str) -> KVTransfer:
        """Offers a waiting or running request by hand, to be answered like a hand-off; of n siblings the first still here.

        ValueError if there is none.
        """
        self._check_moves("export_kv")
        here = (RequestStatus.RUNNING, RequestStatus.WAITING)
        members = [self._core.requests.get(name) for name in self._siblings.members(request_id)]
        found = [request for request in members if request is not None and request.status in here]
        if not found:
            raise ValueError(f"request_id={request_id!r}: no such request is waiting or running here")
        now = self._clock.now()
        export = self._core.offer(found[0], now)
        export.taken = True
        return self._transfer(export, now)

    def finish_export(self, transfer_id: str, ok: bool) -> None:
        """Answers an offer. `ok`: another engine has the request, and its blocks are free here. Otherwise it goes on here,
        whatever the role. An unknown or ended offer is ignored and counted (`stats().stale_messages`);
        if it lapsed and is accepted after all, the request, which has gone on here meanwhile, ends here without a word."""
        self._check_moves("finish_export")
        gone = self._core.finish_export(transfer_id, ok)
        if gone is not None:
            self._forget(gone)
        self._settle_moves()

    def _transfer(self, export: Export, now: float) -> KVTransfer:
        request = export.request
        transfer = KVTransfer(
            transfer_id=export.transfer_id,
            request_id=self._siblings.outer(request.request_id),
            state=state_of(
                request,
                request_id=self._siblings.outer(request.request_id),
                streaming=request.request_id not in self._whole_text,
            ),
            source=self._endpoint,
            blocks=list(export.blocks),
            lease_word=export.word,
            num_written_tokens=export.num_tokens,
            layout=self._pool.layout,
            weight_version=export.weight_version,
            epoch=export.epoch,
            deadline=export.expires - now,
            reservation_id=request.reservation_id,
        )
        self._offered.add(transfer.transfer_id)
        for transport in self._transports:
            transport.offer(transfer, self._pool)
        return transfer

    def _withdraw_ended(self) -> None:
        """Tells the transports of offers that have ended."""
        for transfer_id in self._offered - self._core.exports.keys():
            self._offered.discard(transfer_id)
            for transport in self._transports:
                transport.withdraw(transfer_id)

    def _forget(self, request: Request) -> None:
        self._whole_text.discard(request.request_id)
        self._siblings.forget(request.request_id)

    # ------------------------------------------------------------------------------------------------ on the way in

    def import_kv(self, transfer: KVTransfer, transport: str | Transport = "auto") -> bool:
        """Goes on with another engine's request, with the same tokens; never waits.

        True: the request is this engine's, and runs once its KV is here; if that does not come in time it is computed again.
        False: no room now (blocks, a place among the running, weights), or its KV cannot be had any more; nothing changed.
        ValueError, nothing changed either: this engine can never take it (layout, length, id in use, transport).
        """
        self._check_moves("import_kv")
        if not isinstance(transfer, KVTransfer):
            raise ValueError(f"transfer={transfer!r}: must be a KVTransfer")
        check_layouts(transfer.layout, self._pool.layout)
        request = self._checked(transfer)
        way = choose(transport, self._transports, transfer, self._pool) if transfer.blocks else None
        if self._core.asleep or not self._store.ready:
            return False
        self._core.expire(self._clock.now())
        arrival = self._core.take_in(
            request,
            transfer_id=transfer.transfer_id,
            num_tokens=transfer.num_written_tokens,
            version=transfer.weight_version,
            reservation_id=transfer.reservation_id,
            expires=self._clock.now() + transfer.deadline,
        )
        if arrival is None:
            return False
        try:
            self._admit(request, transfer)
            self._begin(arrival, transfer, way)
        except BaseException as error:
            self._core.refuse(arrival.transfer_id)
            self._forget(request)
            self._settle_arrivals()
            if isinstance(error, TransferError):
                return False
            raise
        self._settle_arrivals()
        return True

    def _checked(self, transfer: KVTransfer) -> Request:
        """The request as it is to be here. ValueError if it can never run here."""
        state = transfer.state
        if not self._siblings.fits(state.request_id, state.name, self._core.requests):
            raise ValueError(f"request_id={state.request_id!r}: is in use by a request that has not finished")
        if transfer.transfer_id in self._core.arrivals:
            raise ValueError(f"transfer_id={transfer.transfer_id!r}: is being taken in already")
        if state.params.stop and self._text_folder is None:
            raise ValueError(f"stop={state.params.stop!r}: needs a tokenizer, which this engine has not")
        request = request_of(state, self._clock.now())
        check_request(request, self._core.settings)
        most = state.num_prompt_tokens + state.max_tokens
        if most > self.max_model_len:
            raise ValueError(f"request {state.request_id!r} may have {most} tokens: max_model_len={self.max_model_len}")
        return request

    def _admit(self, request: Request, transfer: KVTransfer) -> None:
        if not transfer.state.streaming:
            self._whole_text.add(request.request_id)
        self._siblings.admit(transfer.request_id, request.request_id, request.params.n)
        self._core.resume_text(request)

    def _begin(self, arrival: Arrival, transfer: KVTransfer, way: Transport | None) -> None:
        """Starts the copies; a transfer that is lost at once raises TransferError."""
        if way is None:
            return
        plan = plan_copy(
            transfer.layout,
            transfer.blocks,
            self._pool.layout,
            arrival.blocks,
            first_token=arrival.num_held,
            num_tokens=transfer.num_written_tokens,
        )
        ticket = self._tickets[arrival.transfer_id] = way.begin(plan, transfer, self._pool)
        ticket.done()

    def _settle_arrivals(self) -> None:
        """Asks every transfer under way; runs what has come, computes what will not, frees what nobody writes any more."""
        for transfer_id, arrival in list(self._core.arrivals.items()):
            ticket = self._tickets.get(transfer_id)
            came = _come(ticket) if arrival.live else False
            if came:
                self._core.arrived(transfer_id)
            elif came is None:
                self._core.give_up(transfer_id)
            if not arrival.live and (ticket is None or ticket.cancel()):
                self._core.release_arrival(transfer_id)
            if transfer_id not in self._core.arrivals:
                self._tickets.pop(transfer_id, None)

    def _poll_moves(self) -> None:
        """Between two steps: transfers in both directions go on."""
        for transport in self._transports:
            transport.poll()
        self._core.expire(self._clock.now())
        self._settle_moves()

    def _settle_moves(self) -> None:
        self._settle_arrivals()
        self._withdraw_ended()

    # ------------------------------------------------------------------------------------------------ credits

    def reserve_kv(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None
    ) -> KVReservation | None:
        """Credit for a request that another engine will compute and hand over here: room for its prompt and first token (of n
        siblings: the first's), held until it comes, `release_reservation`, a change of role, or its deadline.

        None: full now. ValueError: this engine could never take it. A second credit for an id ends the first.
        """
        self._check_moves("reserve_kv")
        ids, params = self._check_prompt(prompt_token_ids, params)
        if self._known(request_id):
            raise ValueError(f"request_id={request_id!r}: is in use by a request that has not finished")
        request = self._request(request_id, ids, params, 0, 0)
        request.cache_salt = cache_salt
        check_request(request, self._core.settings)
        if self._core.asleep or not self._store.ready:
            return None
        now = self._clock.now()
        self._core.expire(now)
        credit = self._core.reserve(request, now)
        if credit is None:
            return None
        return KVReservation(
            reservation_id=credit.reservation_id,
            request_id=request_id,
            destination=self._endpoint,
            blocks=list(credit.blocks),
            num_cached_tokens=credit.num_held,
            layout=self._pool.layout,
            weight_version=credit.weight_version,
            epoch=credit.epoch,
            deadline=credit.expires - now,
        )

    def release_reservation(self, reservation: KVReservation) -> None:
        """Gives the room back; one that has been used or has ended is ignored and counted."""
        self._check_moves("release_reservation")
        self._core.release_credit(reservation.reservation_id)

    # ------------------------------------------------------------------------------------------------ role

    def switch_role(self, role: Role, drain: Drain = "handover") -> RoleSwitchReport:
        """Changes the role in place, between two steps; weights, pool and prefix cache stay as they are.

        Only requests that are being decoded when the role becomes `prefill` cannot simply go on: they are offered in
        `take_handoffs` ("handover"), decoded to their end first, in steps whose updates come with the next one ("finish"), or
        computed anew when their turn comes ("recompute"). ValueError, or an error of such a step, leaves the old role.
        """
        if drain not in DRAINS:
            raise ValueError(f"drain={drain!r}: must be one of {', '.join(DRAINS)}")
        if role == Role.PREFILL:
            self._check_moves(f"role={str(role)!r}")
        start = self._clock.now()
        finished = self._finish_decoding() if drain == "finish" and role == Role.PREFILL else 0
        switch = self._core.switch_role(role, drain, self._clock.now())
        self._withdraw_ended()
        left = len(switch.leaving)
        moved, recomputed = (0, left) if drain == "recompute" else (left, 0)
        return RoleSwitchReport(seconds=self._clock.now() - start, moved=moved, finished=finished, recomputed=recomputed)

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
                if not came:
                    break
        finally:
            self._pending[:0] = updates
        return len(first - self._core.requests.keys())

    def _check_moves(self, what: str) -> None:
        if self.config.tensor_parallel > 1:
            raise ValueError(f"{what}: is not served by an instance of {self.config.tensor_parallel} ranks, only by one rank")


def _come(ticket: Ticket | None) -> bool | None:
    """Whether a transfer is complete (one without copies is); None if it never will be."""
    try:
        return ticket is None or ticket.done()
    except TransferError:
        return None
