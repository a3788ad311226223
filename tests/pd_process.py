"""An engine in a process of its own that computes, offers and takes in requests as it is told; the parent's side is in
`pd_cases.py`. No tests.
"""

from __future__ import annotations

import math
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from pearl.clock import Clock
from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.migration import gloo, host, peer_source
from pearl.engine.migration.copying import Copying
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.peer_receiver import PeerTicket
from pearl.engine.request import RequestUpdate
from pearl.kv_transfer import KVReservation, KVTransfer
from pearl.protocol import Role, SamplingParams


class Setup(msgspec.Struct, kw_only=True):
    """`transport`: the engine's only one; None: all there are. `hold`: transfers in this process, as their source ("give") or
    receiver ("take"), stop after `MOST_HELD` pieces, for good. `timeout_s`: gloo's."""

    folder: str
    role: Role
    transport: str | None = None
    settings: dict[str, Any] = {}
    hold: str | None = None
    timeout_s: float = 20.0


class Add(msgspec.Struct, tag=True, kw_only=True):
    name: str
    ids: list[int]
    params: SamplingParams
    reservation: KVReservation | None = None


class Reserve(msgspec.Struct, tag=True, kw_only=True):
    name: str
    ids: list[int]
    params: SamplingParams


class Take(msgspec.Struct, tag=True, kw_only=True):
    transfer: KVTransfer


class ReadAlong(msgspec.Struct, tag=True, kw_only=True):
    transfer: KVTransfer


class Finish(msgspec.Struct, tag=True, kw_only=True):
    transfer_id: str
    ok: bool
    arrived: bool = True


class Release(msgspec.Struct, tag=True, kw_only=True):
    reservation: KVReservation


class Switch(msgspec.Struct, tag=True, kw_only=True):
    role: Role


class Look(msgspec.Struct, tag=True, kw_only=True):
    pass


class Go(msgspec.Struct, tag=True, kw_only=True):
    """Transfers that were stopped go on."""


class Updates(msgspec.Struct, tag=True, kw_only=True):
    updates: list[RequestUpdate]


class Offer(msgspec.Struct, tag=True, kw_only=True):
    transfer: KVTransfer


class Took(msgspec.Struct, tag=True, kw_only=True):
    """`arrived`: its source need not keep its KV. That comes in a second answer if it was not so in the first."""

    transfer_id: str
    ok: bool
    arrived: bool


class Reserved(msgspec.Struct, tag=True, kw_only=True):
    name: str
    reservation: KVReservation | None


class Seen(msgspec.Struct, tag=True, kw_only=True):
    """`held`: pieces that have moved before transfers were stopped."""

    free: bool
    unfinished: bool
    arriving: int
    offered: int
    preemptions: int
    stale: int
    held: int


Order = Add | Reserve | Take | ReadAlong | Finish | Release | Switch | Look | Go
Answer = Updates | Offer | Took | Reserved | Seen


def make(setup: Setup, clock: Clock | None = None) -> Engine:
    """Its pool is poisoned: what was neither computed nor sent is NaN."""
    fixed = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "kv_fill": math.nan, "max_num_seqs": 64}
    config = EngineConfig(model=setup.folder, role=setup.role, **(fixed | setup.settings))
    ways = {"host": HostTransport, "gloo": lambda: GlooTransport(timeout_s=setup.timeout_s)}
    return Engine(config, clock, transports=None if setup.transport is None else [ways[setup.transport]()])


MOST_HELD = 3


class Hold:
    """While it lasts, transfers that this process receives or sends go piece by piece, and stop after `MOST_HELD` of them
    until `go`. A piece is one block of one layer."""

    def __init__(self, side: str) -> None:
        self.side, self.count, self.go = side, 0, threading.Event()
        self._undo = [(host, "MOST_BYTES", host.MOST_BYTES), (peer_source, "BATCH_BYTES", peer_source.BATCH_BYTES)]
        for owner, name in ((Copying, "_copy"), (PeerTicket, "land"), (gloo, "fill")):
            self._undo.append((owner, name, getattr(owner, name)))

    def __enter__(self) -> Hold:
        host.MOST_BYTES = peer_source.BATCH_BYTES = 1
        copy, land, fill = (value for _, _, value in self._undo[2:])

        def counted(work: Any) -> Any:
            def piece(*args: Any) -> None:
                if self.count >= MOST_HELD and not self.go.wait(60):
                    raise RuntimeError("held for too long")
                work(*args)
                self.count += 1

            return piece

        def copy_or_not(*args: Any) -> None:
            if self.count < MOST_HELD or self.go.is_set():
                copy(*args)
                self.count += 1

        if self.side == "take":
            Copying._copy, PeerTicket.land = copy_or_not, counted(land)  # type: ignore[method-assign]
        else:
            gloo.fill = counted(fill)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        for owner, name, value in self._undo:
            setattr(owner, name, value)


class Loop:
    def __init__(self, engine: Engine, parent: Connection, hold: Hold | None) -> None:
        self.engine, self.parent, self.hold = engine, parent, hold
        self.arriving: set[str] = set()
        engine.on_growing = lambda transfer: self.say(Offer(transfer=transfer))

    def run(self) -> None:
        """Until the parent goes."""
        pause = 0.005
        while True:
            while self.parent.poll(pause):
                self.obey(msgspec.msgpack.decode(self.parent.recv_bytes(), type=Order))
                pause = 0.0
            pause = 0.002
            if self.engine.has_unfinished():
                if updates := self.engine.step_updates():
                    self.say(Updates(updates=updates))
                    pause = 0.0
            for transfer in self.engine.take_handoffs():
                self.say(Offer(transfer=transfer))
            for name in [name for name in self.arriving if not self.engine.is_arriving(name)]:
                self.arriving.remove(name)
                self.say(Took(transfer_id=name, ok=True, arrived=True))

    def obey(self, order: Order) -> None:
        engine = self.engine
        match order:
            case Add():
                engine.add_request(order.ids, order.params, request_id=order.name, reservation=order.reservation)
            case Reserve():
                credit = engine.reserve_kv(order.name, order.ids, order.params)
                self.say(Reserved(name=order.name, reservation=credit))
            case Take():
                name, ok = order.transfer.transfer_id, engine.import_kv(order.transfer)
                if arriving := engine.is_arriving(name):
                    self.arriving.add(name)
                self.say(Took(transfer_id=name, ok=ok, arrived=not arriving))
            case ReadAlong():
                engine.read_along(order.transfer)
            case Finish():
                engine.finish_export(order.transfer_id, order.ok, arrived=order.arrived)
            case Release():
                engine.release_reservation(order.reservation)
            case Switch():
                engine.switch_role(order.role)
            case Go() if self.hold is not None:
                self.hold.go.set()
            case Look():
                self.say(seen(engine, 0 if self.hold is None else self.hold.count))

    def say(self, answer: Answer) -> None:
        self.parent.send_bytes(msgspec.msgpack.encode(answer))


def seen(engine: Engine, held: int = 0) -> Seen:
    stats = engine.stats()
    engine.check_integrity()
    return Seen(
        free=stats.free_blocks + stats.cached_blocks == stats.total_blocks,
        unfinished=engine.has_unfinished(),
        arriving=stats.arriving,
        offered=stats.offered,
        preemptions=stats.num_preemptions,
        stale=stats.stale_messages,
        held=held,
    )


def main() -> None:
    torch.set_num_threads(1)
    parent, setup = Connection(int(sys.argv[1])), msgspec.json.decode(sys.argv[2], type=Setup)
    hold = None if setup.hold is None else Hold(setup.hold).__enter__()
    try:
        loop = Loop(make(setup), parent, hold)
        loop.say(seen(loop.engine))
        loop.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has gone


if __name__ == "__main__":
    main()
