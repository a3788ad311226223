"""Room that is kept for requests which other engines are computing, and whose KV may come into it before they do.

Mixed into EngineCore; owns the credits and their leases. It knows no transport, no clock (`now` is a parameter) and no bytes.
Invariants: a credit ends by use, by its deadline or by a change of role; its blocks are used for nothing else before all that
is copied into them has ended; nothing is held while waiting for room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pearl.engine.block_manager import BlockManager
from pearl.engine.limits import CoreSettings
from pearl.engine.request import Request
from pearl.engine.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class Credit:
    """Room that is kept for `request` (its prompt and one token), of which `num_held` tokens are cached here.

    `early`: the transfer that is read along into it; `state`: whether that is under way, through, or was lost and may still
    write into the room.
    """

    reservation_id: str
    request: Request
    lease: int
    blocks: tuple[int, ...]
    num_held: int
    weight_version: int
    epoch: int
    expires: float
    early: str | None = None
    state: Literal["coming", "here", "lost"] = "coming"


class CreditedRoom:
    """Mixed into MovingRequests, which has `_next_id` and `_vacate`."""

    settings: CoreSettings
    blocks: BlockManager
    scheduler: Scheduler
    weight_version: int
    epoch: int

    def _init_credits(self) -> None:
        self.credits: dict[str, Credit] = {}
        self.num_stale_messages = 0

    def _next_id(self, kind: str) -> str:
        raise NotImplementedError

    def _vacate(self, credit: Credit) -> None:
        raise NotImplementedError

    @property
    def is_reading_along(self) -> bool:
        """Whether there is something to copy of prompts that grow elsewhere."""
        return any(credit.early is not None and credit.state != "here" for credit in self.credits.values())

    def reserve(self, request: Request, now: float) -> Credit | None:
        """Keeps room for a request that is not here yet: its tokens, one more, and a place among the running; None if full.

        Only the newest credit for a request counts.
        """
        for credit in [credit for credit in self.credits.values() if credit.request.request_id == request.request_id]:
            self.release_credit(credit.reservation_id)
        found = self._room_for(request, len(request.token_ids) + 1, cached=True)
        if found is None:
            return None
        lease, blocks, num_held = found
        credit = Credit(
            reservation_id=self._next_id("r"),
            request=request,
            lease=lease,
            blocks=blocks,
            num_held=num_held,
            weight_version=self.weight_version,
            epoch=self.epoch,
            expires=now + self.settings.transfer_deadline,
        )
        self.credits[credit.reservation_id] = credit
        self.scheduler.num_reserved += 1
        return credit

    def release_credit(self, reservation_id: str) -> None:
        """Gives the room back; a credit that has ended already is ignored and counted."""
        if reservation_id not in self.credits:
            self.num_stale_messages += 1
            return
        self._vacate(self._spend(reservation_id))

    def _spend(self, reservation_id: str) -> Credit:
        self.scheduler.num_reserved -= 1
        return self.credits.pop(reservation_id)

    def read_along(self, transfer_id: str, reservation_id: str | None, prompt: Request, version: int) -> Credit | None:
        """The credit whose room the KV of a growing `prompt` is copied into from now on; None if it has none that fits it."""
        credit = self.credits.get(reservation_id or "")
        if credit is None or credit.early is not None or not self._fits(credit, prompt, version):
            self.num_stale_messages += credit is None
            return None
        credit.early, credit.state = transfer_id, "coming"
        return credit

    def early_lost(self, reservation_id: str) -> None:
        """What was read along is worth nothing; the credit stays, its room is used again after `early_over`."""
        self.credits[reservation_id].state = "lost"

    def early_over(self, reservation_id: str) -> None:
        """Nothing is written into the room of a credit any more."""
        self.credits[reservation_id].early = None

    def _release_credits(self) -> None:
        for reservation_id in list(self.credits):
            self.release_credit(reservation_id)

    def _fits(self, credit: Credit, request: Request, version: int) -> bool:
        """Whether a request begins with the prompt that a credit is for, and may use what the cache had of it."""
        prompt, same = credit.request.token_ids, credit.request.cache_salt == request.cache_salt
        current = request.cacheable and version == credit.weight_version == self.weight_version
        return request.token_ids[: len(prompt)] == prompt and (not credit.num_held or (same and current))

    def _room_for(self, request: Request, num_tokens: int, *, cached: bool) -> tuple[int, tuple[int, ...], int] | None:
        """(lease, blocks, tokens of them that the cache had) for a request from elsewhere, or None; `cached`: it may be used.

        One that waits here for room comes first.
        """
        if not self.scheduler.has_seat or self.scheduler.is_blocked:
            return None
        told = request.num_cached_tokens
        num_held = self.blocks.match_prefix(request, self.weight_version) if cached else 0
        request.num_cached_tokens = told
        missing = self.blocks.num_missing(request, num_tokens) + self.scheduler.num_spare
        if missing > self.blocks.num_available or not self.blocks.grow(request, num_tokens):
            self.blocks.free(request)
            return None
        blocks = tuple(request.block_table)
        lease = self.blocks.lease(blocks)
        self.blocks.free(request)
        return lease, blocks, num_held
