"""Tensor-parallel instances whose ranks are threads of this process, also two of them. Fixtures only, no tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import GREEDY
from gloo_members import run_members
from pair_cases import Pair

from pearl.clock import VirtualClock
from pearl.config import EngineConfig
from pearl.engine.comm.communicator import GroupCommunicator
from pearl.engine.engine import Engine
from pearl.engine.leader import Leader
from pearl.engine.worker import follow
from pearl.protocol import KVTransfer, Role, SamplingParams

FIXED = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "kv_fill": math.nan}


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=folder, **(FIXED | settings))


def outcomes(folder: Path, drive: Callable[[Leader], object], size: int = 2, **settings: Any) -> list:
    """What `drive` made of the first rank's engine, then what became of the others (None, or what they raised)."""
    config = config_of(folder, tensor_parallel=size, **settings)

    def member(comm: GroupCommunicator) -> object:
        if comm.rank:
            return follow(config, comm)
        engine = Leader(config, comm=comm, check_ranks=True)
        try:
            return drive(engine)
        finally:
            engine.close()

    return run_members(size, member)


def led(folder: Path, drive: Callable[[Leader], Any], size: int = 2, **settings: Any) -> Any:
    """What `drive` made of an instance all of whose ranks ended well; an error of the first rank is raised."""
    first, *others = outcomes(folder, drive, size, **settings)
    if isinstance(first, BaseException):
        raise first
    assert others == [None] * (size - 1)
    return first


class Instances(Pair):
    """`p` and `d` as given; what grows in `p` is read along by `d` when the step is through."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p, self.d, self.clock = p, d, VirtualClock()
        self.done, self.tokens, self.texts, self.moved = {}, {}, {}, []
        self.num_steps, self.reverse = 0, False
        self.growing: list[KVTransfer] = []
        self.arriving: list[tuple[str, Engine, Engine]] = []
        p.on_growing = self.growing.append
        for engine in (p, d):
            if isinstance(engine, Leader):
                engine._held._clock = self.clock
            else:
                engine._clock = self.clock


    def step(self) -> None:
        self.num_steps += 1
        for engine in (self.p, self.d):
            self.take(engine)
            self.read_along()
        for source, destination in ((self.p, self.d), (self.d, self.p)):
            for transfer in source.take_handoffs():
                self.move(transfer, source, destination)

    def move(self, transfer: KVTransfer, source: Engine, destination: Engine) -> bool:
        """The source keeps the KV as long as it is on its way."""
        taken = destination.import_kv(transfer)
        destination.check_integrity()
        arriving = destination.is_arriving(transfer.transfer_id)
        source.finish_export(transfer.transfer_id, taken, arrived=not arriving)
        source.check_integrity()
        if arriving:
            self.arriving.append((transfer.transfer_id, source, destination))
        self.moved.append((transfer.request_id, taken))
        return taken

    def take(self, engine: Engine) -> None:
        super().take(engine)
        for transfer_id, source, destination in list(self.arriving):
            if not destination.is_arriving(transfer_id):
                source.finish_export(transfer_id, True)
                self.arriving.remove((transfer_id, source, destination))

    def read_along(self) -> None:
        while self.growing:
            self.d.read_along(self.growing.pop(0))

    def start(self, ids: list[int], params: SamplingParams = GREEDY, rid: str = "r") -> bool:
        self.credit = self.d.reserve_kv(rid, ids, params)
        self.p.add_request(ids, params, request_id=rid, reservation=self.credit)
        return self.credit is not None


def of_size(folder: Path, size: int, role: Role, drive: Callable[[Engine], Any], **settings: Any) -> Any:
    """What `drive` made of an instance of `size` ranks."""
    if size == 1:
        return drive(Engine(config_of(folder, role=role, **settings)))
    return led(folder, drive, size, role=role, **settings)


def together(
    folder: Path, sizes: tuple[int, int], play: Callable[[Instances], Any], p: dict | None = None, d: dict | None = None
) -> Any:
    """What `play` made of a PREFILL instance and a DECODE one."""

    def with_first(prefill: Engine) -> Any:
        return of_size(folder, sizes[1], Role.DECODE, lambda decode: play(Instances(prefill, decode)), **(d or {}))

    return of_size(folder, sizes[0], Role.PREFILL, with_first, **(p or {}))
