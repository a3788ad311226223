"""The serving half of a rank: its engine's requests, roles, hand-offs, sleep and wake. Torch-free.

Owns what the engine is doing on behalf of the controller. It decides nothing, and knows engine, trainer and the way to newer
weights only as what was injected. Invariants: every request that was submitted is answered, handed over or given up to an
`Abort`; all tokens of a request are sent before it is offered to others, and with its end; an order of an epoch that is over,
or doubled, changes nothing and is counted; an order that cannot be carried out leaves the engine as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pearl.protocol import (
    Abort,
    Fetch,
    FinishExport,
    HandedOff,
    HandOver,
    KVTransfer,
    NewRequest,
    Report,
    Role,
    Submit,
    SwitchRole,
    TakenOver,
    TakeOver,
    Tokens,
    Wake,
)
from pearl.rl.token_report import TokenReport
from pearl.rl.waking import Fetcher, SleepingTrainer, Waking

REPORT_EVERY_S = 1.0
"""How often a member tells its numbers, or `report_s` if that is longer: together with tokens, but never twice as late."""
LONGEST_REPORT_S = 10.0
DRY_WAIT_S = 0.001
"""How long the loop waits for messages after a step that gave nothing (all wait for others, or for KV to come)."""
OFFERED_TOKENS = 50_000
"""A message with more than one offer has no more tokens of requests: of external workers messages have a largest size
(`door.py`), and a change of role offers all that runs."""
QUIET_LIMIT_S = 5.0
"""How long at most sleep waits for copies into or out of the pool to end."""


class ServingEngine(Protocol):
    """What the loop needs of an engine (`pearl.engine.engine.Engine` has it)."""

    weight_version: int
    asleep: bool

    def add_request(self, prompt: list[int], params: Any, request_id: str | None = None, **options: Any) -> str: ...
    def step_updates(self) -> Iterable[Any]: ...
    def abort(self, request_id: str) -> bool: ...
    def discard(self, request_id: str) -> bool: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> Any: ...
    def switch_role(self, role: Role) -> Any: ...
    def take_handoffs(self) -> list[KVTransfer]: ...
    def export_kv(self, request_id: str) -> KVTransfer: ...
    def import_kv(self, transfer: KVTransfer) -> bool: ...
    def is_arriving(self, transfer_id: str) -> bool: ...
    def finish_export(self, transfer_id: str, ok: bool, *, arrived: bool = True) -> None: ...
    def sleep(self, weights: Any = "keep") -> None: ...
    def wake(self) -> None: ...


class Serving:
    """`send(event)` reaches the controller. `trainer`: of a training rank that lends its device; such a rank begins asleep.

    `report_s`: how long tokens of requests that have not ended may wait for others before they are sent.
    """

    def __init__(
        self,
        rank: int,
        engine: ServingEngine,
        send: Callable[[Any], None],
        *,
        fetcher: Fetcher | None = None,
        trainer: SleepingTrainer | None = None,
        block_size: int = 16,
        report_s: float = 0.0,
    ) -> None:
        self.waking = Waking(engine, fetcher, trainer)
        self.rank = rank
        self.engine = engine
        self.active = False
        self.epoch = 0
        self.stale = 0
        self._send, self._block_size = send, block_size
        self._live: set[str] = set()
        self._offers: list[KVTransfer] = []
        self._offered: dict[str, str] = {}
        """Offers without an answer: transfer -> request."""
        self._given: set[str] = set()
        """Offers that others have taken and whose KV is still read."""
        self._arriving: dict[str, str] = {}
        self._dry = False
        self._computed = 0
        self._seconds = self._step_s = self._pieces_s = 0.0
        """Of steps that were not told yet; of the last one; of those that computed something and gave no token: pieces of long
        prompts, which are part of the next that does."""
        self._reported = 0.0
        self._told = 0
        """Messages with tokens so far."""
        self._heard = 0
        """How many of these there were when the numbers could have been told."""
        self._every_s = max(REPORT_EVERY_S, min(report_s, LONGEST_REPORT_S))
        self._unsent = TokenReport(report_s)

    # ------------------------------------------------------------------------------------------------ the loop

    @property
    def has_work(self) -> bool:
        return self.active and (self.engine.has_unfinished() or bool(self._offers))

    @property
    def patience_s(self) -> float:
        """How long a loop with work may wait for messages."""
        return DRY_WAIT_S if self._dry else 0.0

    def take(self, message: Any) -> bool:
        """Request traffic; False for anything else."""
        match message:
            case Submit():
                self._submit(message.requests)
            case Abort():
                for request_id in message.request_ids:
                    self._live.discard(request_id)
                    self._unsent.drop(request_id)
                    self.engine.discard(request_id)
                self._offered = {name: one for name, one in self._offered.items() if one not in message.request_ids}
            case HandOver():
                self._hand_over(message.request_ids)
            case TakeOver():
                self._take_over(message.transfer)
            case FinishExport():
                self._finish_export(message)
            case _:
                return False
        self._dry = False
        return True

    def step(self) -> None:
        """One step of the engine: what it gave is sent once it is due, then what it offers, then whose KV has arrived."""
        started = time.perf_counter()
        updates = self.engine.step_updates()
        batch, prompts = self._unsent.add(updates)
        self._dry = not batch
        seconds = time.perf_counter() - started
        if batch:
            self._count(batch, prompts, self._pieces_s + seconds)
        elif self.engine.stats().num_computed_tokens > self._computed:
            self._pieces_s += seconds
        offers, self._offers = self._offers + self.engine.take_handoffs(), []
        self._tell(everything=bool(offers))
        if offers:
            self._offered |= {offer.transfer_id: offer.request_id for offer in offers}
            for some in _shared_out(offers):
                self._send(HandedOff(rank=self.rank, transfers=some))
        for transfer_id in [name for name in self._arriving if not self.engine.is_arriving(name)]:
            request_id = self._arriving.pop(transfer_id)
            self._send(TakenOver(rank=self.rank, transfer_id=transfer_id, request_id=request_id, ok=True))

    def report(self, now: float) -> None:
        """Tells its numbers if the last time is long enough ago, and tokens that are due."""
        self._tell()
        wakes, self._heard = self._told == self._heard, self._told
        passed = now - self._reported
        if not self.active or passed < self._every_s * (2 if wakes else 1):  # who is awake hears more for less
            return
        self._reported = now
        stats = self.engine.stats()
        blocks = stats.total_blocks, stats.used_blocks + stats.leased_blocks
        self._send(
            Report(
                rank=self.rank,
                epoch=self.epoch,
                running=stats.running,
                waiting=stats.waiting,
                kv_used=blocks[1] * self._block_size,
                kv_total=blocks[0] * self._block_size,
                weight_version=stats.weight_version,
            )
        )

    # ------------------------------------------------------------------------------------------------ requests

    def _submit(self, requests: list[NewRequest]) -> None:
        for request in requests:
            if request.request_id in self._live:
                self.stale += 1
                continue
            if self.engine.asleep:  # it was sent before the controller heard that this rank is to sleep
                self._unsent.end(request.request_id, "abort")
                continue
            try:
                self.engine.add_request(
                    request.prompt_token_ids, request.params, request_id=request.request_id, session_id=request.session_id,
                    most_computed=request.most_computed,
                )  # fmt: skip
                self._live.add(request.request_id)
            except ValueError as error:  # the request's own fault; its trajectory pays, the rank goes on
                self._unsent.end(request.request_id, "error", str(error))
        self._tell()

    def _hand_over(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            try:
                self._offers.append(self.engine.export_kv(request_id))
            except ValueError:  # it has ended meanwhile, or is on its way already
                self.stale += 1

    def _take_over(self, transfer: KVTransfer) -> None:
        ok = False
        if not self.engine.asleep:
            try:
                ok = self.engine.import_kv(transfer)
            except ValueError as error:
                print(f"request {transfer.request_id} cannot be taken over: {error}", flush=True)
        arrived = not (ok and self.engine.is_arriving(transfer.transfer_id))
        if ok:
            state = transfer.state
            self._live.add(transfer.request_id)
            self._unsent.taken_over(transfer.request_id, begun=len(state.token_ids) > state.num_prompt_tokens)
        if not arrived:
            self._arriving[transfer.transfer_id] = transfer.request_id
        self._send(
            TakenOver(
                rank=self.rank, transfer_id=transfer.transfer_id, request_id=transfer.request_id, ok=ok, arrived=arrived
            )
        )

    def _finish_export(self, answer: FinishExport) -> None:
        self.engine.finish_export(answer.transfer_id, answer.ok, arrived=answer.arrived)
        request_id = self._offered.pop(answer.transfer_id, None)
        if answer.arrived:
            self._given.discard(answer.transfer_id)
        elif request_id is not None:
            self._given.add(answer.transfer_id)
        if answer.ok and request_id is not None:
            self._live.discard(request_id)
            self._unsent.drop(request_id)

    def _count(self, batch: int, prompts: int, seconds: float) -> None:
        """A step gave `batch` requests a token, `prompts` of them their first."""
        stats = self.engine.stats()
        computed, self._computed = stats.num_computed_tokens - self._computed, stats.num_computed_tokens
        self._seconds += seconds
        self._step_s, self._pieces_s = seconds, 0.0
        if computed:
            context = stats.used_blocks * self._block_size / max(1, stats.running)
            self._unsent.add_step(computed=computed, batch=batch, prompts=prompts, context=context, seconds=seconds)

    def _tell(self, *, everything: bool = False) -> None:
        """Sends the tokens that are due, or all."""
        now = time.monotonic()
        if not everything and not self._unsent.due(now):
            return
        updates, steps = self._unsent.take(now, everything=everything)
        if not updates and not steps:
            return
        for update in updates:
            if update.finish_reason is not None:
                self._live.discard(update.request_id)
        stats = self.engine.stats()
        self._send(
            Tokens(
                rank=self.rank,
                updates=updates,
                seconds=self._seconds,
                waiting=stats.waiting,
                running=stats.running,
                free_blocks=stats.free_blocks,
                step_s=self._step_s,
                steps=steps,
                place=self._told,
            )
        )
        self._seconds = 0.0
        self._told += 1

    # ------------------------------------------------------------------------------------------------ orders

    def is_stale(self, epoch: int) -> bool:
        """Whether an order is of an epoch that is over; it is counted. Otherwise its epoch begins."""
        if epoch <= self.epoch:
            self.stale += 1
            return True
        self.epoch = epoch
        return False

    def switch(self, order: SwitchRole) -> dict[str, Any]:
        """Changes the role in place; what leaves by it is offered with the next step. ValueError: the role is the old one."""
        report = self.engine.switch_role(order.role)
        return {"switch_s": report.seconds, "moved": report.moved}

    def wake(self, order: Wake | Fetch) -> dict[str, Any] | None:
        """Begins to wake, or to take a newer version; what was measured if it is through at once: else `poll_wake`.

        ValueError: nothing has changed.
        """
        return self._woken(order, self.waking.begin(order))

    def poll_wake(self) -> dict[str, Any] | None:
        """Moves on what `wake` began; what was measured once it is through. ValueError as there."""
        return self._woken(self.waking.under_way, self.waking.poll())

    def sleep(self) -> dict[str, Any]:
        """Interrupts what is left, gives the engine's memory back and brings the trainer back. ValueError: it serves on."""
        interrupted = self.interrupt()
        self.waking.fall_asleep()
        self.active = False
        return {"interrupted": interrupted}

    def interrupt(self) -> int:
        """Ends every request that is here as "abort", and tells so; how many."""
        if not self.active:
            return 0
        names, self._live = sorted(self._live), set()
        for request_id in names:
            self.engine.abort(request_id)
        for transfer_id in self._given:
            self.engine.finish_export(transfer_id, True)
        self._offers, self._offered, self._given = [], {}, set()
        deadline = time.monotonic() + QUIET_LIMIT_S
        ended: set[str] = set()
        while True:
            updates = list(self.engine.step_updates())
            self._unsent.add(updates)
            ended |= {update.request_id for update in updates if update.completion is not None}
            if not self.engine.stats().leased_blocks or time.monotonic() > deadline:
                break
            time.sleep(DRY_WAIT_S)
        for request_id in names:
            if request_id not in ended:
                self._unsent.end(request_id, "abort")
        for transfer_id, request_id in self._arriving.items():
            self._send(TakenOver(rank=self.rank, transfer_id=transfer_id, request_id=request_id, ok=True))
        self._arriving = {}
        self._tell(everything=True)
        return len(names)

    def _woken(self, order: Wake | Fetch | None, metrics: dict[str, Any] | None) -> dict[str, Any] | None:
        if metrics is not None and isinstance(order, Wake):
            self.active, self._dry = True, False
        return metrics


def _shared_out(offers: list[KVTransfer]) -> Iterable[list[KVTransfer]]:
    """In messages of a bounded size, in their order."""
    some: list[KVTransfer] = []
    tokens = 0
    for offer in offers:
        size = len(offer.state.token_ids)
        if some and tokens + size > OFFERED_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(offer)
        tokens += size
    yield some
