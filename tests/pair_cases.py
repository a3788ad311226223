"""Two engines in one process that hand requests over, and a transport that fails as it is told. Fixtures only, no tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

from engine_cases import assert_free

from pearl.clock import VirtualClock
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.planner import CopyPlan
from pearl.engine.migration.transport import Pool, Ticket, TransferError
from pearl.engine.request import Completion
from pearl.protocol import KVTransfer, Role

FIXED = {"dtype": "float32", "block_size": 4, "num_blocks": 100, "kv_fill": math.nan, "transfer_deadline_s": 5.0}


class FaultyTransport(LocalTransport):
    """Takes the next of `faults` at each transfer, or none when they are used up.

    "refused": raises at once. "slow": all comes at the third question, if the lease still holds. "lost": fails at the third.
    "stuck": never comes; once it is cancelled, garbage is still written into its blocks for two more questions.
    """

    name = "faulty"

    def __init__(self, faults: list[str], begun: list[int]) -> None:
        """`begun` gets the number of blocks of each transfer; both lists may be shared."""
        super().__init__()
        self.faults, self.begun = faults, begun

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        self.begun.append(sum(len(part.source_blocks) for part in plan.parts))
        fault = self.faults.pop(0) if self.faults else "none"
        if fault == "refused":
            raise TransferError(transfer.transfer_id, "refused as told")
        copy = functools.partial(super().begin, plan, transfer, pool)
        return copy() if fault == "none" else FaultyTicket(fault, transfer.transfer_id, plan, pool, copy)


class FaultyTicket:
    def __init__(self, fault: str, transfer_id: str, plan: CopyPlan, pool: Pool, copy: Callable[[], Ticket]) -> None:
        self.fault, self.transfer_id, self.plan, self.pool, self.copy = fault, transfer_id, plan, pool, copy
        self.asked = self.cancelled = 0
        self.inner: Ticket | None = None

    def done(self) -> bool:
        self.asked += 1
        if self.asked < 3 or self.fault == "stuck":
            return False
        if self.fault == "lost":
            raise TransferError(self.transfer_id, "lost as told")
        self.inner = self.inner or self.copy()
        return self.inner.done()

    def cancel(self) -> bool:
        self.cancelled += 1
        if self.inner is not None:
            return self.inner.cancel()
        if self.fault == "stuck" and self.cancelled < 3:
            for part in self.plan.parts:
                self.pool.tensor[:, :, list(part.destination_blocks)] = 1e30
            return False
        return True


class Pair:
    """`p` computes prompts and `d` decodes; what either offers goes to the other. Both see one clock, which tests move."""

    def __init__(self, folder: Path, faults: list[str] | None = None, *, p: dict | None = None, d: dict | None = None) -> None:
        self.clock = VirtualClock()
        self.faults, self.begun = faults or [], []
        self.p = self._engine(folder, {"role": Role.PREFILL} | (p or {}))
        self.d = self._engine(folder, {"role": Role.DECODE} | (d or {}))
        self.done: dict[tuple[str, int], Completion] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.num_steps = 0
        self.moved: list[tuple[str, bool]] = []
        self.reverse = False

    def _engine(self, folder: Path, settings: dict) -> Engine:
        config = EngineConfig(model=folder, **(FIXED | settings))
        return Engine(config, self.clock, transports=[FaultyTransport(self.faults, self.begun)])

    def step(self) -> None:
        """One step of each engine, then what they offer goes to the other one."""
        self.num_steps += 1
        for engine in (self.p, self.d):
            self.take(engine)
        for source, destination in ((self.p, self.d), (self.d, self.p)):
            transfers = source.take_handoffs()
            for transfer in reversed(transfers) if self.reverse else transfers:
                self.move(transfer, source, destination)

    def take(self, engine: Engine) -> None:
        for update in engine.step_updates():
            key = (update.request_id, update.index)
            assert key not in self.done
            self.tokens.setdefault(key, []).extend(update.token_ids)
            self.texts[key] = self.texts.get(key, "") + update.text
            if update.completion is not None:
                self.done[key] = update.completion
        engine.check_integrity()

    def move(self, transfer: KVTransfer, source: Engine, destination: Engine) -> bool:
        try:
            ok = destination.import_kv(transfer)
        except ValueError:
            ok = False
        destination.check_integrity()
        source.finish_export(transfer.transfer_id, ok)
        source.check_integrity()
        self.moved.append((transfer.request_id, ok))
        return ok

    def run(self, most: int = 400) -> dict[tuple[str, int], Completion]:
        """Until nothing is left; then both pools are as before."""
        while self.p.has_unfinished() or self.d.has_unfinished():
            assert self.num_steps < most, (self.p.stats(), self.d.stats())
            self.step()
        self.assert_free()
        for key, completion in self.done.items():
            assert self.tokens[key] == completion.token_ids and self.texts[key] == completion.text
        return self.done

    def assert_free(self) -> None:
        for engine in (self.p, self.d):
            assert_free(engine)
            engine.check_integrity()
