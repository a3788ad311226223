"""Requests between two engines: those on their way out, and those on their way in.

Mixed into EngineCore; owns the books of offers and arrivals and their leases (`growing.py` and `credits.py`: what comes before
them). It knows no transport, no clock (`now` is a parameter) and no bytes. A request that moves is "parked": neither waiting
nor running, without a block table; its KV is held by one lease.

Invariants
- Whatever happens to either side, an offer ends: by `finish_export`, by its deadline, or with its request. It is closed (its
  lease word changes) before its blocks can be used again.
- A request that comes in has all its blocks before the first byte moves, and runs only when all of it is there; if it never
  will be, it is computed again from its tokens. Its blocks stay leased until nothing writes into them any more.
- Nothing is held while waiting for room elsewhere: what cannot be taken in at once is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pearl.engine.block_manager import BlockManager
from pearl.engine.credits import Credit, CreditedRoom
from pearl.engine.ending import TextStream
from pearl.engine.growing import GrowingRequests
from pearl.engine.limits import CoreSettings
from pearl.engine.migration.transport import LeaseWords
from pearl.engine.request import Request, RequestStatus
from pearl.engine.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class Export:
    """An offer: the KV of the request's first `num_tokens` tokens, in `blocks`. `taken`: its owner has been told of it.

    `given`: the request is another engine's, only its KV is here until it has arrived there.
    """

    transfer_id: str
    request: Request
    lease: int
    blocks: tuple[int, ...]
    word: int
    num_tokens: int
    weight_version: int
    epoch: int
    expires: float
    taken: bool = False
    given: bool = False


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A request whose KV is coming. The first `num_held` tokens were here before. `live`: it is still waited for.

    `begun_as` is the credit under which the copy has begun already.
    """

    transfer_id: str
    request: Request
    lease: int
    blocks: tuple[int, ...]
    num_tokens: int
    num_held: int
    expires: float
    live: bool = True
    begun_as: str | None = None


class MovingRequests(GrowingRequests, CreditedRoom):
    """Mixed into EngineCore, which calls `_init_moving`."""

    settings: CoreSettings
    blocks: BlockManager
    scheduler: Scheduler
    requests: dict[str, Request]
    weight_version: int
    epoch: int
    _texts: dict[str, TextStream]
    _new_text: Callable[[Request], TextStream] | None

    def _init_moving(self, name: str, words: LeaseWords) -> None:
        self.name, self._words = name, words
        self.exports: dict[str, Export] = {}
        self.arrivals: dict[str, Arrival] = {}
        self._lapsed: dict[str, str] = {}
        """Offers that ended without an answer -> the request, as long as that is here."""
        self._num_ids = 0
        self._init_growing()
        self._init_credits()

    # ------------------------------------------------------------------------------------------------ on the way out

    @property
    def only_offers(self) -> bool:
        """Whether all requests here wait for an answer to their offer."""
        return bool(self.requests) and self.num_offered == len(self.requests)

    @property
    def num_offered(self) -> int:
        """Requests that wait for an answer to their offer."""
        return sum(not export.given for export in self.exports.values())

    def offer(self, request: Request, now: float) -> Export:
        """Parks a request that no unfinished output holds, under a lease on its written KV. RuntimeError otherwise."""
        if request.num_in_flight:
            raise RuntimeError(f"request {request.request_id!r} is in {request.num_in_flight} unfinished outputs")
        num_tokens = request.num_written_tokens
        blocks = tuple(request.block_table[: self.blocks.blocks_for(num_tokens)])
        lease = self.blocks.lease(request.block_table)  # all of it: in the middle of a prompt it has room for the rest
        self.scheduler.park(request)
        known = self._taken_over(request, num_tokens)
        if known is None:
            known = self._next_id("t"), self._words.open(blocks[-1]) if blocks else 0

        export = Export(
            transfer_id=known[0],
            request=request,
            lease=lease,
            blocks=blocks,
            word=known[1],
            num_tokens=num_tokens,
            weight_version=self.weight_version,
            epoch=self.epoch,
            expires=now + self.settings.transfer_deadline,
        )
        self.exports[export.transfer_id] = export
        return export

    def take_offers(self) -> list[Export]:
        """The offers that have not been taken yet, oldest first."""
        offers = [export for export in self.exports.values() if not export.taken]
        for export in offers:
            export.taken = True
        return offers

    def finish_export(self, transfer_id: str, ok: bool, arrived: bool = True) -> Request | None:
        """Ends an offer. `ok`: another engine has the request, which is forgotten here and returned. Else it goes on here.
        Unless its KV has `arrived`, that stays to be read, until a second such answer says so or its deadline has passed.

        An offer that has ended already is ignored and counted; but if it had lapsed and its request, now going on here, turns
        out to have been taken after all, it is given up here.
        """
        export = self.exports.get(transfer_id)
        if export is None:
            self.num_stale_messages += 1
            lapsed = self._lapsed.pop(transfer_id, None)
            request = None if lapsed is None else self.requests.get(lapsed)
            if not ok or request is None or request.status is RequestStatus.FINISHED:
                return None
            return self._forget(request)
        if export.given:
            if arrived:
                self._close(export)
            return None
        if not ok:
            self._take_back(export)
            return None
        export.given = not arrived
        return self._forget(export.request)

    def _take_back(self, export: Export, *, lost: bool = False) -> None:
        """The request goes on here with its KV, or from its tokens if that is `lost` or there is none."""
        request = export.request
        request.stays = not lost
        if lost or not export.num_tokens:
            self._close(export)
            self.scheduler.requeue(request, lost=export.num_tokens > 0)
            return
        self._withdraw(export)
        self.blocks.adopt(request, export.lease, export.num_tokens)
        self.scheduler.unpark(request)

    def _lapse(self, export: Export, *, lost: bool = False) -> None:
        """Takes an offer back that somebody may have accepted meanwhile; only closes one whose request has been given away."""
        if export.given:
            self._close(export)
            return
        self._take_back(export, lost=lost)
        self._lapsed[export.transfer_id] = export.request.request_id

    def _close(self, export: Export) -> None:
        """Nobody needs its KV any more."""
        self._withdraw(export)
        self.blocks.release_lease(export.lease)

    def _withdraw(self, export: Export) -> None:
        del self.exports[export.transfer_id]
        if export.blocks:
            self._words.close(export.blocks[-1])

    def _forget(self, request: Request) -> Request:
        """Takes a request out of the books without an ending: it goes on elsewhere."""
        self._drop_move(request)
        request.status = RequestStatus.FINISHED
        self.scheduler.remove(request)
        self.blocks.remember_session(request)
        if not request.num_in_flight:
            del self.requests[request.request_id]
        self._texts.pop(request.request_id, None)
        return request

    # ------------------------------------------------------------------------------------------------ on the way in

    def take_in(
        self, request: Request, *, transfer_id: str, num_tokens: int, version: int, reservation_id: str | None, expires: float
    ) -> Arrival | None:
        """Parks a request whose KV (`num_tokens` tokens, made with weights of `version`) is to come; None without room.

        What the prefix cache holds of it need not come, if all of its KV is of the version served here; otherwise all of it
        has to come, and none of it is ever cached.
        """
        request.cacheable = request.cacheable and version == self.weight_version
        credit = self._credited(request, reservation_id, transfer_id, version)
        found = None if credit is None else (credit.lease, credit.blocks, credit.num_held)
        if found is None:
            found = self._room_for(request, len(request.token_ids), cached=request.cacheable)
        if found is None:
            return None
        lease, blocks, num_held = found
        arrival = Arrival(
            transfer_id=transfer_id,
            request=request,
            lease=lease,
            blocks=blocks,
            num_tokens=max(num_tokens, num_held),
            num_held=num_held,
            expires=expires,
            begun_as=None if credit is None or credit.early is None else credit.reservation_id,
        )
        self.arrivals[transfer_id] = arrival
        self.requests[request.request_id] = request
        self.scheduler.parked[request.request_id] = request
        request.status = RequestStatus.PARKED
        request.stays = True
        return arrival

    def _credited(self, request: Request, reservation_id: str | None, transfer_id: str, version: int) -> Credit | None:
        """The request's credit, which is spent; None, the room given back, if it does not fit the request."""
        if reservation_id not in self.credits:
            self.num_stale_messages += reservation_id is not None
            return None
        credit = self._spend(reservation_id)
        enough = self.blocks.blocks_for(len(request.token_ids)) <= len(credit.blocks)
        mine = credit.early is None or (credit.early == transfer_id and credit.state != "lost")
        if enough and mine and self._fits(credit, request, version):
            return credit
        self._vacate(credit)
        return None

    def _vacate(self, credit: Credit) -> None:
        """The room of a spent credit; one into which something is still copied waits for `release_arrival`."""
        if credit.early is None:
            self.blocks.release_lease(credit.lease)
            return
        self.arrivals[credit.reservation_id] = Arrival(
            transfer_id=credit.reservation_id,
            request=credit.request,
            lease=credit.lease,
            blocks=credit.blocks,
            num_tokens=credit.request.num_prompt_tokens,
            num_held=credit.num_held,
            expires=credit.expires,
            live=False,
        )

    def arrived(self, transfer_id: str) -> None:
        """All of it is here: the request runs."""
        arrival = self.arrivals.pop(transfer_id)
        request = arrival.request
        if not arrival.num_tokens:
            self.blocks.release_lease(arrival.lease)
            self.scheduler.requeue(request)
            return
        self.blocks.adopt(request, arrival.lease, arrival.num_tokens)
        self.scheduler.unpark(request)
        self.blocks.register(request, self.weight_version)

    def give_up(self, transfer_id: str) -> None:
        """Its KV will not come: the request is computed here from its tokens. Its blocks wait for `release_arrival`."""
        arrival = self.arrivals[transfer_id]
        if arrival.live:
            arrival.live = False
            self.scheduler.requeue(arrival.request, lost=arrival.num_tokens > 0)

    def refuse(self, transfer_id: str) -> None:
        """As if it had never come; `release_arrival` is still due."""
        self._forget(self.arrivals[transfer_id].request)

    def release_arrival(self, transfer_id: str) -> None:
        """Nothing is written into the blocks of an arrival that has ended: they may be used again."""
        self.blocks.release_lease(self.arrivals.pop(transfer_id).lease)

    def resume_text(self, request: Request) -> None:
        """Makes the text of a request that has come with tokens, as far as it has been given out elsewhere."""
        if self._new_text is not None:
            stream = self._texts[request.request_id] = self._new_text(request)
            for token_id in request.output_token_ids:
                stream.push(token_id)

    # ------------------------------------------------------------------------------------------------ what may happen

    def expire(self, now: float) -> None:
        """Ends what is past its deadline: offers are taken back, arrivals computed here, credits released."""
        for export in [export for export in self.exports.values() if export.expires <= now]:
            self._lapse(export)
        for arrival in self.arrivals.values():
            if arrival.expires <= now:
                self.give_up(arrival.transfer_id)
        for credit in [credit for credit in self.credits.values() if credit.expires <= now]:
            self.release_credit(credit.reservation_id)

    def _lose_moving_kv(self) -> None:
        """KV computed so far is worth nothing any more, wherever it is."""
        for export in list(self.exports.values()):
            self._lapse(export, lost=True)
        for transfer_id in self.arrivals:
            self.give_up(transfer_id)
        self._release_credits()

    def _drop_move(self, request: Request) -> None:
        """A request that ends is not on its way any more, and no late answer is about it."""
        if self._lapsed:
            self._lapsed = {offer: name for offer, name in self._lapsed.items() if name != request.request_id}
        self._end_growing(request.request_id)
        for export in [export for export in self.exports.values() if export.request is request and not export.given]:
            self._close(export)
        for arrival in self.arrivals.values():
            if arrival.request is request:
                arrival.live = False

    def _check_moving(self) -> None:
        """Every parked request is in exactly one book; raises RuntimeError otherwise."""
        moving = [export.request.request_id for export in self.exports.values() if not export.given]
        moving += [arrival.request.request_id for arrival in self.arrivals.values() if arrival.live]
        if sorted(moving) != sorted(self.scheduler.parked):
            raise RuntimeError(f"parked requests {sorted(self.scheduler.parked)} are not those on their way: {sorted(moving)}")
        strays = [name for name, growing in self.growing.items() if growing.request is not self.scheduler.running.get(name)]
        if strays:
            raise RuntimeError(f"requests {strays} may be read along but do not run")
        if self.scheduler.num_reserved != len(self.credits):
            raise RuntimeError(f"{self.scheduler.num_reserved} places are reserved by {len(self.credits)} credits")

    def _next_id(self, kind: str) -> str:
        self._num_ids += 1
        return f"{self.name}/{kind}{self._num_ids}"
