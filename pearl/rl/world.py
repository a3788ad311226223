"""The torch side of a rank's start: WORLD, the groups inside it, and this rank's trainer, engine and publisher.

Owns which parts a rank has, by its place in the layout. Invariants: groups are made once, by all ranks in the same order,
and passed on as Communicators; nothing else reads an ambient group.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pearl.config import Config
from pearl.engine.comm.communicator import Communicator, GroupCommunicator
from pearl.engine.engine import Engine
from pearl.engine.node import node
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan, SnapshotReader
from pearl.rl.layout import JobLayout
from pearl.rl.node_publisher import SnapshotTaker, SnapshotWriter
from pearl.rl.publisher import LocalPublisher, RankPublisher, ReceivingPublisher, SendingPublisher
from pearl.rl.rank import Publisher
from pearl.rl.trainer import Trainer
from pearl.rl.weight_check import CheckedPublisher

MEET_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """This rank's Communicators; None for a group that it is not in, or that would have one member."""

    training: Communicator | None
    publish: Communicator | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank works with."""

    trainer: Trainer | None
    engine: Engine | None
    publisher: Publisher


def join(timeout_s: float, missing: Callable[[list[int]], None] = lambda ranks: None) -> dist.Store:
    """Makes the one WORLD process group of the job from torchrun's environment; returns the job's store.

    `missing` is told, at once and whenever that changes, which ranks have not come yet. RuntimeError names them.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _rendezvous(rank, world, timeout)
    store.set_timeout(timeout)
    _meet(dist.PrefixStore("here", store), rank, world, timeout_s, missing)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world, timeout=timeout)
    return dist.PrefixStore("job", store)


def _rendezvous(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store:
    """The launcher's own store, or without one that of rank 0, which does not wait in silence for the others to connect."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ValueError(f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}: must be set; start with torchrun, or with `pearl run`")
    return dist.TCPStore(host, int(port), world, rank == 0, timeout, wait_for_workers=False)


def _meet(store: dist.Store, rank: int, world: int, timeout_s: float, missing: Callable[[list[int]], None]) -> None:
    """Returns once all ranks have called this."""
    store.set(str(rank), "")
    left, told = list(range(world)), None
    deadline = time.monotonic() + timeout_s
    while left := [other for other in left if not store.check([str(other)])]:
        if left != told:
            missing(left)
            told = left
        if time.monotonic() > deadline:
            names = ", ".join(map(str, left))
            raise RuntimeError(f"rank {names} of {world} did not come within {timeout_s:g} s")
        time.sleep(MEET_POLL_S)
    missing([])


def make_groups(layout: JobLayout, rank: int, timeout_s: float) -> Groups:
    """The sub-groups of WORLD; every rank calls this once."""
    timeout = datetime.timedelta(seconds=timeout_s)

    def made(members: list[int]) -> Communicator | None:
        group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
        return GroupCommunicator(group) if group is not None and rank in members else None

    training = made(list(layout.training))
    return Groups(training=training, publish=made(list(layout.publish_members)))


def build_parts(
    config: Config, layout: JobLayout, rank: int, groups: Groups, folder: Path, store: dist.Store
) -> Parts:
    """Trainer, engine and publisher of this rank. Serving ranks wait for rank 0's trainer, which completes a fresh folder."""
    trainer = Trainer(folder, config, comm=groups.training) if rank in layout.training else None
    if rank == 0:
        store.set("policy", str(folder))
    store.wait(["policy"], datetime.timedelta(seconds=config.timeouts.start_s))
    engine = None
    if rank in layout.serving:
        engine_config = dataclasses.replace(config.engine, model=str(folder), seed=config.seed)
        engine = Engine(engine_config, load_weights=False, text=False)
    snapshot = _snapshot(config, layout, rank, store, trainer, engine)
    publisher = _publisher(layout, trainer, engine, groups.publish, snapshot, config.timeouts.command_s)
    if config.check_weights:
        publisher = CheckedPublisher(publisher, trainer, engine, getattr(torch, config.engine.dtype))
    return Parts(trainer=trainer, engine=engine, publisher=publisher)


def _snapshot(
    config: Config, layout: JobLayout, rank: int, store: dist.Store, trainer: Trainer | None, engine: Engine | None
) -> Snapshot | SnapshotReader | None:
    """Rank 0's snapshot, for the serving ranks a view of it. None if there is none: one rank alone, or several machines."""
    members = layout.publish_members
    if layout.takes_turns or rank not in members:
        return None
    store.set(f"node/{rank}", node())
    if len({store.get(f"node/{member}") for member in members}) > 1:
        return None
    if trainer is not None:
        snapshot = Snapshot(trainer.model_config, getattr(torch, config.engine.dtype))
        store.set("snapshot", snapshot.address)
        return snapshot
    assert engine is not None
    plan = SnapshotPlan.of(engine.model_config, getattr(torch, config.engine.dtype))
    return SnapshotReader.attach(store.get("snapshot").decode(), plan)


def _publisher(
    layout: JobLayout,
    trainer: Trainer | None,
    engine: Engine | None,
    comm: Communicator | None,
    snapshot: Snapshot | SnapshotReader | None,
    timeout_s: float,
) -> RankPublisher:
    if layout.takes_turns and trainer is not None and engine is not None:
        return LocalPublisher(trainer, engine)
    if trainer is not None:
        if isinstance(snapshot, Snapshot):
            return SnapshotWriter(trainer, snapshot, timeout_s=timeout_s)
        return SendingPublisher(trainer, comm, timeout_s=timeout_s)
    if engine is None or comm is None:
        raise RuntimeError("a rank that does not train must serve, and be in the publish group")
    if isinstance(snapshot, SnapshotReader):
        return SnapshotTaker(engine, snapshot, timeout_s=timeout_s)
    return ReceivingPublisher(engine, comm, timeout_s=timeout_s)
