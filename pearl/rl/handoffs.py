"""Requests on their way from one serving member to another, as the controller sees them. Torch-free.

Owns which offer waits for whose answer. Who goes on with a request is the router's choice; the KV itself never comes by here.
An offer asks for room before anything moves: who has none refuses it, the next one is asked, and where nobody has any the
request goes on at its source. So nobody holds room while waiting for room elsewhere, and full pools cannot block each other.
Invariants: whatever becomes of either side, a request is with exactly one of them afterwards, or its session is placed again;
what both would say of it counts once; nothing is on its way for longer than `limit_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pearl.protocol import Abort, FinishExport, KVTransfer, TakenOver, TakeOver, TokenUpdate
from pearl.sched.router import Router


@dataclass(slots=True, kw_only=True)
class _Move:
    session: str
    source: str
    target: str
    transfer: KVTransfer
    refused: set[str] = field(default_factory=set)
    taken: bool = False
    """The target has the request; its KV is still under way."""
    lapsed: bool = False
    """The source went on with it meanwhile."""
    aborted: TokenUpdate | None = None
    """What the source said when it had to stop: counts if the target does not take it."""
    since: float | None = None
    """When time was first looked at."""


class HandOffs:
    """`send(worker, message)` reaches a member; `has(worker, request_id)`: whether that request is awaited, and from there.

    `limit_s`: after so long source and target have given up by themselves, if they are sound (their own deadline is shorter).
    `counts`: offered, taken, refused, nobody (to take it), doubled (offers), unknown (answers), overdue, unoffered (moves that
    were asked for).
    """

    def __init__(
        self, router: Router, send: Callable[[str, Any], None], has: Callable[[str, str], bool], limit_s: float
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._limit_s = limit_s
        self._router, self._send, self._has = router, send, has
        self._moves: dict[str, _Move] = {}
        self._of: dict[str, str] = {}
        """Request -> the transfer by which it is on its way."""
        self._asked: dict[str, tuple[str, str, float | None]] = {}
        """Session -> who was asked to offer which request, and since when."""

    @property
    def under_way(self) -> int:
        return len(self._moves)

    def asked(self, session: str, request_id: str, source: str) -> None:
        """A member was asked to offer a running request of its own."""
        self._asked[session] = (source, request_id, None)

    def expire(self, now: float) -> list[TokenUpdate]:
        """Time passes: ends what has been on its way for too long. Ends of requests that now count."""
        for session, (source, request_id, since) in list(self._asked.items()):
            if not self._has(source, request_id):
                del self._asked[session]  # it has ended meanwhile
            elif since is None:
                self._asked[session] = (source, request_id, now)
            elif now - since > self._limit_s:
                del self._asked[session]
                self.counts["unoffered"] += 1
                self._router.move_failed(session)
        ends = []
        for transfer_id, move in list(self._moves.items()):
            move.since = now if move.since is None else move.since
            if now - move.since > self._limit_s:
                self.counts["overdue"] += 1
                self._close(transfer_id)
                if move.taken:
                    self._send(move.source, FinishExport(transfer_id=transfer_id, ok=True))
                    continue
                self._let_go(move.target, move.transfer.request_id)  # should it have it, nobody was told
                self._stays(move.session, move.source, transfer_id, move.transfer.request_id)
                ends += [move.aborted] if move.aborted is not None else []
        return ends

    def offered(self, source: str, session: str, transfer: KVTransfer) -> None:
        """A member offers a request: it goes to whom the router says, or stays. What nobody awaits from there is ended."""
        if transfer.transfer_id in self._moves:
            self.counts["doubled"] += 1
            return
        self.counts["offered"] += 1
        self._asked.pop(session, None)
        if not self._has(source, transfer.request_id):
            self._send(source, Abort(request_ids=[transfer.request_id]))
            return
        target = self._router.taker(session, source)
        if target is None:
            self.counts["nobody"] += 1
            self._stays(session, source, transfer.transfer_id, transfer.request_id)
            return
        move = _Move(session=session, source=source, target=target, transfer=transfer)
        self._moves[transfer.transfer_id], self._of[transfer.request_id] = move, transfer.transfer_id
        self._send(target, TakeOver(transfer=transfer))

    def answered(self, target: str, event: TakenOver) -> TokenUpdate | None:
        """A member took a request over, or did not; what its source said at its end and now counts, if anything."""
        move = self._moves.get(event.transfer_id)
        if move is None or move.target != target:
            self.counts["unknown"] += 1
            if event.ok:
                self._let_go(target, event.request_id)
            return None
        if move.taken:
            if event.arrived:
                self._close(event.transfer_id)
                self._send(move.source, FinishExport(transfer_id=event.transfer_id, ok=True))
            return None
        if move.lapsed and event.ok:
            self._close(event.transfer_id)
            self._let_go(target, move.transfer.request_id)
            self._send(move.source, FinishExport(transfer_id=event.transfer_id, ok=False))
            return None
        if not event.ok:
            self.counts["refused"] += 1
            if self._asks_next(move):
                return None
            self._close(event.transfer_id)
            self._stays(move.session, move.source, event.transfer_id, move.transfer.request_id)
            return move.aborted
        self.counts["taken"] += 1
        self._router.handed_over(move.session, target)
        move.taken = not event.arrived
        if event.arrived:
            self._close(event.transfer_id)
        self._send(move.source, FinishExport(transfer_id=event.transfer_id, ok=True, arrived=event.arrived))
        return None

    def heard(self, worker: str, update: TokenUpdate) -> bool:
        """An update of a request that `worker` has, by the router. Whether it counts now.

        The source's own end of a request that is on its way is kept until the target has answered. Tokens say that the offer
        has lapsed: the source has gone on with it.
        """
        if not self._moves:
            return True
        move = self._moves.get(self._of.get(update.request_id, ""))
        if move is None or move.source != worker or move.taken:
            return True
        if update.finish_reason == "abort" and not update.token_ids and not move.lapsed:
            move.aborted = update
            return False
        move.lapsed = True
        return True

    def ended(self, request_id: str) -> None:
        """Nobody waits for the request any more: whoever may have it is told."""
        transfer_id = self._of.get(request_id)
        if transfer_id is not None:
            move = self._close(transfer_id)
            self._send(move.target, Abort(request_ids=[request_id]))
            has_kv_alone = FinishExport(transfer_id=transfer_id, ok=True)
            self._send(move.source, has_kv_alone if move.taken else Abort(request_ids=[request_id]))

    def lost(self, worker: str) -> list[TokenUpdate]:
        """A member is gone: what was on its way to it stays where it was; ends of requests that now count."""
        ends = []
        for transfer_id, move in list(self._moves.items()):
            if worker == move.source:  # if it was not taken its session is placed again, and who takes it is told to let it go
                self._close(transfer_id)
            elif worker == move.target:
                self._close(transfer_id)
                if move.taken:
                    self._send(move.source, FinishExport(transfer_id=transfer_id, ok=True))
                    continue
                self._stays(move.session, move.source, transfer_id, move.transfer.request_id)
                ends += [move.aborted] if move.aborted is not None else []
        return ends

    def _asks_next(self, move: _Move) -> bool:
        """Offers what was refused to another that may have room; False: there is none, or the source goes on with it."""
        move.refused.add(move.target)
        over = move.lapsed or move.aborted is not None
        target = None if over else self._router.taker(move.session, move.source, move.refused)
        if target is None:
            return False
        move.target = target
        self._send(target, TakeOver(transfer=move.transfer))
        return True

    def _stays(self, session: str, source: str, transfer_id: str, request_id: str) -> None:
        if self._has(source, request_id):  # else it has ended there meanwhile, and the session may be anywhere
            self._router.handed_over(session, source)
        self._send(source, FinishExport(transfer_id=transfer_id, ok=False))

    def _let_go(self, worker: str, request_id: str) -> None:
        if not self._has(worker, request_id):
            self._send(worker, Abort(request_ids=[request_id]))

    def _close(self, transfer_id: str) -> _Move:
        move = self._moves.pop(transfer_id)
        if self._of.get(move.transfer.request_id) == transfer_id:
            del self._of[move.transfer.request_id]
        return move
