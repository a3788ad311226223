"""The part of Engine that takes requests in from other engines: imports, credits, and copies of prompts that still grow.

Owns what credits say and what becomes of copies; into which blocks they go is the core's (`moving.py`, `credits.py`), how they
are made that of `transfers.py`. Invariant: a request is lost or doubled by no failure of a transfer: whoever accepted it has
all of it but the KV, and computes that again if it does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pearl.clock import Clock
from pearl.config import EngineConfig
from pearl.engine.core import EngineCore
from pearl.engine.limits import check_request
from pearl.engine.migration.planner import check_layouts
from pearl.engine.migration.transport import TransferError, Transport
from pearl.engine.moving import Arrival
from pearl.engine.request import Request
from pearl.engine.siblings import Siblings
from pearl.engine.transfers import HERE, LOST, Transfers, Way
from pearl.engine.travel import request_of
from pearl.engine.weights.store import WeightStore
from pearl.kv_transfer import why_impossible
from pearl.protocol import KVEndpoint, KVLayout, KVReservation, KVTransfer, SamplingParams


class TakingIn:
    """Mixed into HandOff, which has the pool and the transfers."""

    config: EngineConfig
    max_model_len: int
    _clock: Clock
    _core: EngineCore
    _store: WeightStore
    _siblings: Siblings
    _whole_text: set[str]
    _text_folder: Path | None
    _transfers: Transfers
    _whole_layout: KVLayout
    _endpoints: list[KVEndpoint]

    def _known(self, request_id: str) -> bool:
        raise NotImplementedError

    def _request(self, name: str, ids: list[int], params: SamplingParams, seed: int, index: int) -> Request:
        raise NotImplementedError

    def _check_prompt(self, prompt: str | Sequence[int], params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ on the way in

    def import_kv(self, transfer: KVTransfer, transport: str | Transport = "auto") -> bool:
        """Goes on with another engine's request, with the same tokens; never waits.

        True: the request is this engine's, and runs once its KV is here; if that does not come in time it is computed again.
        False: no room now (blocks, a place among the running, weights), or its KV cannot be had any more; nothing changed.
        ValueError, nothing changed either: this engine can never take it (layout, length, id in use, transport).
        """
        request, ways = self._check_import(transfer, transport)
        return self._take_in(transfer, request, ways) is not None

    def _check_import(self, transfer: KVTransfer, transport: str | Transport) -> tuple[Request, list[Way]]:
        """The request as it is to be here, and how its KV comes. ValueError if it can never run here."""
        if not isinstance(transfer, KVTransfer) or transfer.growing:
            raise ValueError(f"transfer={transfer!r}: must be a KVTransfer that is not growing any more")
        check_layouts(transfer.layout, self._whole_layout)
        return self._checked(transfer), self._transfers.ways(transfer, self._whole_layout, transport)

    def _take_in(self, transfer: KVTransfer, request: Request, ways: list[Way]) -> Arrival | None:
        """Makes the request one of this engine's, and has its KV come; None if it cannot be had or there is no room."""
        arrival = self._book(transfer, request)
        if arrival is None:
            return None
        try:
            self._begin(arrival, ways)
        except BaseException:
            self._refuse(arrival)
            raise
        if self._transfers.is_lost(arrival.transfer_id):
            self._refuse(arrival)
            return None
        self._settle_moves()
        return arrival

    def _book(self, transfer: KVTransfer, request: Request) -> Arrival | None:
        """Finds room for a request; None if there is none. Nothing of its KV has begun to come."""
        if self._core.asleep or not self._store.ready or transfer.transfer_id in self._core.arrivals:
            return None
        self._core.expire(self._clock.now())
        self._end_other(transfer)
        arrival = self._core.take_in(
            request,
            transfer_id=transfer.transfer_id,
            num_tokens=transfer.num_written_tokens,
            version=transfer.weight_version,
            reservation_id=transfer.reservation_id,
            expires=self._clock.now() + transfer.deadline,
        )
        if arrival is not None:
            try:
                self._admit(request, transfer)
            except BaseException:
                self._refuse(arrival)
                raise
        return arrival

    def _begin(self, arrival: Arrival, ways: list[Way] | TransferError) -> None:
        """Its KV comes; what has come already while it was computed goes on to come."""
        if arrival.begun_as is not None:
            self._transfers.rename(arrival.begun_as, arrival.transfer_id)
        else:
            self._transfers.begin(arrival.transfer_id, ways, arrival.blocks, arrival.num_held)

    def _refuse(self, arrival: Arrival) -> None:
        self._core.refuse(arrival.transfer_id)
        self._forget(arrival.request)
        self._settle_moves()

    def _checked(self, transfer: KVTransfer) -> Request:
        """The request as it is to be here. ValueError if it can never run here."""
        state = transfer.state
        if wrong := why_impossible(transfer):
            raise ValueError(wrong)
        if not self._siblings.fits(state.request_id, state.name, self._core.requests):
            raise ValueError(f"request_id={state.request_id!r}: is in use by a request that has not finished")
        arrival = self._core.arrivals.get(transfer.transfer_id)
        if arrival is not None and arrival.live:
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

    def is_arriving(self, transfer_id: str) -> bool:
        """Whether KV of a request that was taken in is still waited for: its source must keep it so long."""
        arrival = self._core.arrivals.get(transfer_id)
        return arrival is not None and arrival.live

    def read_along(self, transfer: KVTransfer, transport: str | Transport = "auto") -> bool:
        """Begins to copy a prompt that another engine is still computing (`on_growing` there) into the room of its credit here,
        as it is written. `import_kv` of the same transfer goes on with it; if that never comes, the credit ends as ever.

        False: there is no such credit (any more), or its KV cannot be had like this; nothing changed. It raises for nothing but
        what does not grow.
        """
        ways = self._ways_along(transfer, transport)
        return ways is not None and self._read_along(transfer, ways)

    def _ways_along(self, transfer: KVTransfer, transport: str | Transport) -> list[Way] | None:
        if not isinstance(transfer, KVTransfer) or not transfer.growing:
            raise ValueError(f"transfer={transfer!r}: must be a growing KVTransfer")
        try:
            return self._transfers.ways(transfer, self._whole_layout, transport)
        except ValueError:
            return None  # `import_kv` of the offer will say why

    def _read_along(self, transfer: KVTransfer, ways: list[Way] | TransferError) -> bool:
        now = self._clock.now()
        self._core.expire(now)
        self._end_other(transfer)
        prompt = request_of(transfer.state, now)
        credit = self._core.read_along(transfer.transfer_id, transfer.reservation_id, prompt, transfer.weight_version)
        if credit is None:
            return False
        self._transfers.begin(credit.reservation_id, ways, credit.blocks, credit.num_held)
        self._settle_moves()
        return credit.early is not None

    def _end_other(self, transfer: KVTransfer) -> None:
        """What came into the room of its credit under another id is worth nothing: its source has begun anew since."""
        credit = self._core.credits.get(transfer.reservation_id or "")
        if credit is not None and credit.early not in (None, transfer.transfer_id):
            self._core.early_lost(credit.reservation_id)
            self._settle_moves()

    # ------------------------------------------------------------------------------------------------ credits

    def reserve_kv(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str | None = None
    ) -> KVReservation | None:
        """Credit for a request that another engine will compute and hand over here: room for its prompt and first token (of n
        siblings: the first's), held until it comes, `release_reservation`, a change of role, or its deadline.

        None: full now. ValueError: this engine could never take it. A second credit for an id ends the first.
        """
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
            layout=self._whole_layout,
            weight_version=credit.weight_version,
            epoch=credit.epoch,
            deadline=credit.expires - now,
        )

    def release_reservation(self, reservation: KVReservation) -> None:
        """Gives the room back; one that has been used or has ended is ignored and counted."""
        self._core.release_credit(reservation.reservation_id)
        self._settle_moves()

    # ------------------------------------------------------------------------------------------------ between two steps

    def _poll_moves(self) -> None:
        """Transfers in both directions go on."""
        self._transfers.poll()
        self._core.expire(self._clock.now())
        self._settle_arrivals()
        self._withdraw_ended()

    def _settle_moves(self) -> None:
        """After a call that ended something; several ranks hear of it with the next step, and ask together then."""
        if not self._transfers.by_steps:
            self._settle_arrivals()
        self._withdraw_ended()

    def _settle_arrivals(self) -> None:
        """Asks every copy under way; runs what has come, computes what will not, frees what nobody writes any more."""
        core = self._core
        early = [name for name, credit in core.credits.items() if credit.early is not None and credit.state == "coming"]
        coming = [name for name, arrival in core.arrivals.items() if arrival.live]
        for name, status in zip(early + coming, self._transfers.statuses(early + coming), strict=True):
            if status == LOST:
                core.give_up(name) if name in core.arrivals else core.early_lost(name)
            elif status == HERE and name in core.credits:
                core.credits[name].state = "here"
            elif status == HERE:
                core.arrived(name)
                self._transfers.forget(name)
        ending = [name for name, credit in core.credits.items() if credit.early is not None and credit.state == "lost"]
        ending += [name for name, arrival in core.arrivals.items() if not arrival.live]
        for name in self._transfers.ended(ending):
            core.release_arrival(name) if name in core.arrivals else core.early_over(name)

    def _withdraw_ended(self) -> None:
        growing = {one.transfer_id for one in self._core.growing.values()}
        self._transfers.withdraw_others(growing | self._core.exports.keys())

    def _forget(self, request: Request) -> None:
        self._whole_text.discard(request.request_id)
        self._siblings.forget(request.request_id)
