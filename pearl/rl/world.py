"""The torch side of a rank's start: WORLD, the groups inside it, and this rank's trainer, engine and publisher.

Owns which parts a rank has, by its place in the layout. Invariants: groups are made once, by all ranks in the same order,
and passed on as Communicators; nothing else reads an ambient group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pearl.config import Config
from pearl.engine.comm.communicator import Communicator, GroupCommunicator
from pearl.engine.comm.groups import LOCAL, meet
from pearl.engine.engine import Engine
from pearl.engine.node import node
from pearl.engine.weights.holding import SnapshotHolding
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan, SnapshotReader
from pearl.rl.layout import JobLayout
from pearl.rl.node_publisher import NodeReceiver, NodeSender, SnapshotFetcher, SnapshotTaker, SnapshotWriter, snapshot_owners
from pearl.rl.publisher import GatheringPublisher, LocalPublisher, RankPublisher
from pearl.rl.rank import Publisher
from pearl.rl.trainer import Trainer
from pearl.rl.waking import Fetcher
from pearl.rl.weight_check import CheckedPublisher

ELSEWHERE = "198.51.100.1"
"""An address of no machine (RFC 5737, TEST-NET-2): the way to it is that to any other machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """This rank's Communicators; None for a group that it is not in, or that would have one member."""

    training: Communicator | None
    publish: Communicator | None
    """Rank 0 and the owners of other machines' snapshots."""
    owners: dict[int, int]
    """For each rank that gives or takes weights the one that owns the snapshot of its machine."""
    lenders: dict[int, int] = dataclasses.field(default_factory=dict)
    """For each training rank that can lend its device the one that owns the snapshot of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank works with."""

    trainer: Trainer | None
    engine: Engine | None
    publisher: Publisher
    fetcher: Fetcher | None
    """How an engine that sleeps on a training rank gets the newest version."""
    pulls: PullServer | None
    """Where others can have the versions of this machine's snapshot, on the rank that owns it."""


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
    told: list[int] | None = None

    def watch(left: list[int]) -> None:
        nonlocal told
        if left != told:
            missing(left)
            told = left

    try:
        meet(store, rank, world, timeout_s, watch)
    except TimeoutError as error:
        raise RuntimeError(str(error)) from None
    missing([])


def make_groups(layout: JobLayout, rank: int, timeout_s: float, store: dist.Store, *, lend: bool = False) -> Groups:
    """The sub-groups of WORLD; every rank calls this once. `lend`: training ranks have an engine too, which sleeps."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store.set(f"node/{rank}", node())
    nodes = [store.get(f"node/{other}").decode() for other in range(layout.world)]
    owners = snapshot_owners(layout, nodes)
    of_node = {nodes[owner]: owner for owner in owners.values()}
    lending = layout.training if lend and not layout.takes_turns else ()
    lenders = {other: of_node[nodes[other]] for other in lending if nodes[other] in of_node}

    def made(members: list[int]) -> Communicator | None:
        group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
        return GroupCommunicator(group) if group is not None and rank in members else None

    training = made(list(layout.training))
    return Groups(training=training, publish=made(sorted({0, *owners.values()})), owners=owners, lenders=lenders)


def build_parts(
    config: Config, layout: JobLayout, rank: int, groups: Groups, folder: Path, store: dist.Store
) -> Parts:
    """Trainer, engine and publisher of this rank. Serving ranks wait for rank 0's trainer, which completes a fresh folder."""
    trainer = Trainer(folder, config, comm=groups.training) if rank in layout.training else None
    if rank == 0:
        store.set("policy", str(folder))
    store.wait(["policy"], datetime.timedelta(seconds=config.timeouts.start_s))
    engine, lent = None, None
    if rank in layout.serving or rank in groups.lenders:
        engine_config = dataclasses.replace(config.engine, model=str(folder), seed=config.seed)
        engine = Engine(engine_config, load_weights=False, text=False)
    if engine is not None and rank in groups.lenders:
        engine, lent = None, _dormant(engine, config.borrow.workers)
    snapshot = _snapshot(config, layout, rank, groups.owners | groups.lenders, store, trainer, engine)
    publisher = _publisher(layout, trainer, engine, groups.publish, snapshot, config.timeouts.command_s)
    if config.check_weights:
        publisher = CheckedPublisher(publisher, trainer, engine, getattr(torch, config.engine.dtype))
    pulls = None
    if isinstance(snapshot, Snapshot):
        # One version at a time: whatever becomes of those who pull, the next one has a slot to be written to.
        pulls = PullServer(SnapshotHolding(snapshot.reader(), versions=1), host=_pull_host(config, groups.publish is not None))
    fetcher = None
    if lent is not None and snapshot is not None:
        reader = snapshot.reader() if isinstance(snapshot, Snapshot) else snapshot
        fetcher = SnapshotFetcher(lent, reader, timeout_s=config.timeouts.command_s)
    return Parts(trainer=trainer, engine=engine or lent, publisher=publisher, fetcher=fetcher, pulls=pulls)


def _pull_host(config: Config, several: bool) -> str:
    """The address at which this machine's versions are given: one that others reach, if there may be others."""
    host = config.elastic.listen.rpartition(":")[0]
    own = own_address() if several else LOCAL
    if own != LOCAL or host in ("", LOCAL, "localhost"):
        return own
    if host not in ("0.0.0.0", "*"):
        return host
    address = _address_towards(ELSEWHERE)  # not by its name: many machines know that as one of the loopback's, 127.0.1.1
    if address == LOCAL:  # a network with no way out: its name is all that tells
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
    return address


def _dormant(engine: Engine, workers: str) -> Engine | None:
    """A training rank's engine, asleep; None where memory cannot be given back and nobody insists on it."""
    try:
        engine.sleep("drop")
    except ValueError:
        if workers not in ("auto", "all_or_none"):
            raise
        return None
    return engine


def own_address() -> str:
    """The address of this machine that the ranks of others reach, as the way to the meeting point shows."""
    return _address_towards(os.environ.get("MASTER_ADDR", LOCAL))


def _address_towards(host: str) -> str:
    """The address that `host` would see of this machine."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: it only chooses the way
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:  # a name that cannot be resolved here, or there is no way to anywhere
        return LOCAL


def _snapshot(
    config: Config,
    layout: JobLayout,
    rank: int,
    owners: dict[int, int],
    store: dist.Store,
    trainer: Trainer | None,
    engine: Engine | None,
) -> Snapshot | SnapshotReader | None:
    """This machine's snapshot, on the rank that owns it; a view of it on the others that serve. None where there is none."""
    part = trainer or engine
    if layout.takes_turns or rank not in owners or part is None:
        return None
    dtype = getattr(torch, config.engine.dtype)
    if owners[rank] == rank:
        snapshot = Snapshot(part.model_config, dtype)
        store.set(f"snapshot/{rank}", snapshot.address)
        return snapshot
    return SnapshotReader.attach(store.get(f"snapshot/{owners[rank]}").decode(), SnapshotPlan.of(part.model_config, dtype))


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
        if not isinstance(snapshot, Snapshot):  # not this rank's, if it has a view of one
            return GatheringPublisher(trainer)
        if comm is not None:
            return NodeSender(trainer, comm, snapshot, timeout_s=timeout_s)
        return SnapshotWriter(trainer, snapshot, timeout_s=timeout_s)
    if engine is not None and isinstance(snapshot, SnapshotReader):
        return SnapshotTaker(engine, snapshot, timeout_s=timeout_s)
    if engine is not None and comm is not None and isinstance(snapshot, Snapshot):
        return NodeReceiver(engine, comm, snapshot, timeout_s=timeout_s)
    raise RuntimeError("a rank that does not train must serve, and have its machine's snapshot")
