"""Giving the trainer's weights to the engines through a snapshot on each machine: shared memory, with room for some versions.

Owns one rank's part in it, with the interface of `publisher.py`. It does not know how a snapshot is kept, nor how messages
travel. Invariants as there; and a version that an engine is reading is never written to, so the next one waits, if it must, for
the slowest of the engines.

The first training rank writes a version once, in the engines' dtype (`SnapshotWriter`); each engine of its machine checks it
and copies it into its live parameters (`SnapshotTaker`). So a version crosses memory once for all engines, with no message at
all. Where other machines serve too, it sends what it writes, as it lies, to one rank of each (`NodeSender`), which receives
into the snapshot there (`NodeReceiver`): a version travels once per machine, and is there for whoever joins later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.engine.weights.pull import SnapshotReceiver
from pearl.engine.weights.snapshot import Draft, Lease, Snapshot, SnapshotReader
from pearl.engine.weights.transfer import WeightSender
from pearl.rl.layout import JobLayout
from pearl.rl.publisher import Metrics, RankPublisher, Source, StagingTarget

PAUSE_TAKING_S = 0.003
"""How long requests wait at a time while buckets are taken, but for the last one of each time."""
SLOW_ENGINES = "engines to be through with an older one"


def snapshot_owners(layout: JobLayout, nodes: Sequence[str]) -> dict[int, int]:
    """For each rank that gives or takes weights the one that owns the snapshot of its node. `nodes`: of all ranks, by number.

    Rank 0 owns that of its own; elsewhere it is the first rank that serves.
    """
    owners: dict[str, int] = {}
    return {rank: owners.setdefault(nodes[rank], rank) for rank in layout.publish_members}


class SnapshotWriter(RankPublisher):
    """The training rank that owns the snapshot."""

    def __init__(self, trainer: Source, snapshot: Snapshot, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: the longest wait for an engine that still reads the version before the last."""
        self._trainer, self._snapshot, self.timeout_s = trainer, snapshot, timeout_s
        self._tensors: Iterable[tuple[str, Tensor]] | None = None

    def begin(self, version: int) -> None:
        super().begin(version)
        self._tensors = None

    def poll(self) -> Metrics | None:
        if self._tensors is None:  # once: several training ranks go through them together
            self._tensors = self._trainer.named_hf_tensors()
            if len(self._snapshot.plan.buckets) == 1:
                self._tensors = list(self._tensors)  # so small a model is there as a whole at no cost, and written in one call
        if not self._snapshot.write(self._tensors, self.version, wait_s=0.0):
            _check_patience(self._began, self.timeout_s, f"version {self.version}", SLOW_ENGINES)
            return None
        self._tensors = None
        return self._metrics(self._snapshot.plan.slot_bytes, 0.0)


class SnapshotTaker(RankPublisher):
    """A serving rank, on the machine of the snapshot. It takes some buckets between two steps, then commits between two."""

    _checks = True
    _lease: Lease | None = None
    """The version that it is taking, and how many of its buckets it has."""
    _taken = 0

    def __init__(self, engine: StagingTarget, reader: SnapshotReader, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: the longest wait for a version that was announced."""
        self._engine, self._reader, self.timeout_s = engine, reader, timeout_s

    def begin(self, version: int) -> None:
        super().begin(version)
        if version <= self._engine.weight_version:
            present = self._engine.weight_version
            raise ValueError(f"version={version}: must be greater than {present}, the present version")

    def poll(self) -> Metrics | None:
        if self._lease is None:
            if self._reader.newest < self.version:
                _check_patience(self._began, self.timeout_s, f"version {self.version}", "it to be in the snapshot")
                return None
            self._lease, self._taken = self._reader.lease(self.version), 0
        try:
            if not self._take(self._lease):
                return None
            start = time.perf_counter()
            self._engine.commit_weights(self.version, mode="keep")
        except BaseException:
            self._engine.discard_weights()
            self._let_go()
            raise
        self._let_go()
        return self._metrics(self._reader.plan.slot_bytes, time.perf_counter() - start)

    def _take(self, lease: Lease) -> bool:
        """Takes buckets, one at least, for about `PAUSE_TAKING_S`; whether it has all."""
        until = time.perf_counter() + PAUSE_TAKING_S
        while self._taken < len(lease.messages):
            if self._checks:
                lease.check(self._taken)
            self._engine.stage_weights(lease.messages[self._taken].rows, self.version, adopt=True)
            self._taken += 1
            if time.perf_counter() > until:
                break
        return self._taken == len(lease.messages)

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease = None


class NodeReceiver(SnapshotTaker):
    """The serving rank of another machine that owns the snapshot there: a version arrives in it, for all engines around."""

    _checks = False
    """Each bucket is checked as it comes."""

    def __init__(self, engine: StagingTarget, comm: Communicator, snapshot: Snapshot, *, timeout_s: float = 600.0) -> None:
        """`comm`: the group of `NodeSender` and all of this kind. `timeout_s`: the longest wait for any one message."""
        super().__init__(engine, snapshot.reader(), timeout_s=timeout_s)
        self._snapshot, self._receiver = snapshot, SnapshotReceiver(comm, snapshot, timeout_s)
        self._draft: Draft | None = None

    def poll(self) -> Metrics | None:
        if self._reader.newest < self.version and not self._receive():
            return None
        return super().poll()

    def _receive(self) -> bool:
        """Whether all of the version is in the snapshot now."""
        if self._draft is None:
            self._draft = _draft_of(self._snapshot, self)
            if self._draft is None:
                return False
            self._receiver.receive(self._draft)
        try:
            self._receiver.poll()
        except BaseException:
            draft, self._draft = self._draft, None
            if self._receiver.settle(0.0):
                draft.discard()
            else:  # a message that is under way might still be written there
                draft.abandon()
            raise
        if self._receiver.finished:
            self._draft.finish()
            self._draft = None
        return self._receiver.finished


class NodeSender(RankPublisher):
    """The training rank that owns the snapshot of its machine, when others serve too: what it writes there is what it sends."""

    def __init__(self, trainer: Source, comm: Communicator, snapshot: Snapshot, *, timeout_s: float = 600.0) -> None:
        """`comm`: the group of this rank and each `NodeReceiver`. `timeout_s`: the longest wait for any one message, or for an
        engine that still reads the version before the last."""
        self._trainer, self._snapshot, self.timeout_s = trainer, snapshot, timeout_s
        plan = snapshot.plan
        self._sender = _DraftSender(comm, plan.config, plan.dtype, bucket_bytes=plan.bucket_bytes, timeout_s=timeout_s)

    def begin(self, version: int) -> None:
        super().begin(version)
        self._sender.draft = None

    def poll(self) -> Metrics | None:
        if self._sender.draft is None:
            draft = _draft_of(self._snapshot, self)
            if draft is None:
                return None
            self._sender.send(draft, self._trainer.named_hf_tensors())
        try:
            through = self._sender.poll()
        except BaseException:
            self._sender.drop()
            raise
        return self._metrics(self._snapshot.plan.slot_bytes, 0.0) if through else None


class _DraftSender(WeightSender):
    """Fills a draft, bucket by bucket, and sends each from there."""

    draft: Draft | None = None
    _written = False

    def send(self, draft: Draft, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.draft, self._messages, self._written = draft, list(draft.messages), False
        self.begin(tensors, draft.version)

    def drop(self) -> None:
        """After a failure: nobody shall see the version, if that can still be."""
        if self.draft is not None and not self._written:
            self.draft.discard()
        self.draft = None

    def _fill(self, index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        super()._fill(index, tensors)
        if index + 1 == len(self._messages) and self.draft is not None:
            self.draft.finish()
            self._written = True


class SnapshotFetcher:
    """The way to the newest version for a rank of the snapshot's machine that has no part in publishing
    (`pearl.rl.waking.Fetcher`). Who else has it does not matter."""

    def __init__(self, engine: StagingTarget, reader: SnapshotReader, *, timeout_s: float = 30.0) -> None:
        """`timeout_s`: the longest wait for a version that is not in the snapshot yet."""
        self._engine, self._reader, self._timeout_s = engine, reader, timeout_s
        self._version, self._began = -1, 0.0

    def begin(self, version: int, pulls: list[str]) -> None:
        self._version, self._began = version, time.perf_counter()

    def poll(self) -> Metrics | None:
        newest = self._reader.newest
        if newest < self._version:
            _check_patience(self._began, self._timeout_s, f"version {self._version}", "it to be in the snapshot")
            return None
        commit_s = take_version(self._engine, self._reader, newest)
        seconds = time.perf_counter() - self._began
        return {"fetch_s": seconds, "bytes": float(self._reader.plan.slot_bytes), "commit_s": commit_s}

    def cancel(self) -> None:
        """A version is taken within one poll: nothing is ever under way."""


def take_version(engine: StagingTarget, reader: SnapshotReader, version: int) -> float:
    """Copies a version from a snapshot into an engine; the seconds for which running requests were held up.

    Raises, the engine as it was, for a version that is not there (any more) or is not sound.
    """
    with reader.lease(version) as lease:
        lease.check()
        try:
            for message in lease.messages:
                engine.stage_weights(message.rows, version, adopt=True)
            start = time.perf_counter()
            engine.commit_weights(version, mode="keep")
        except BaseException:
            engine.discard_weights()
            raise
        return time.perf_counter() - start


def _draft_of(snapshot: Snapshot, publisher: NodeReceiver | NodeSender) -> Draft | None:
    """A slot for the publisher's version; None while all are read. CollectiveError after its `timeout_s`."""
    draft = snapshot.draft(publisher.version, wait_s=0.0)
    if draft is None:
        _check_patience(publisher._began, publisher.timeout_s, f"version {publisher.version}", SLOW_ENGINES)
    return draft


def _check_patience(began: float, timeout_s: float, version: str, what: str) -> None:
    if time.perf_counter() - began > timeout_s:
        raise CollectiveError(f"{version}: waited {timeout_s:g} s for {what}")
