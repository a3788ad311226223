"""Giving the trainer's weights to the engines of the same machine: through a snapshot in shared memory, with no message at all.

Owns one rank's part in it, with the interface of `publisher.py`. It does not know how a snapshot is kept. Invariants as there;
and a version that an engine is reading is never written to, so the next one waits, if it must, for the slowest of the engines.

The training rank writes a version once, in the engines' dtype; each engine checks it and copies it into its live parameters.
So a version crosses memory once for all engines, and the snapshot is there for whoever joins later.
"""

from __future__ import annotations

import time

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.weights.snapshot import Snapshot, SnapshotReader
from pearl.rl.publisher import Metrics, RankPublisher, Source, StagingTarget


class SnapshotWriter(RankPublisher):
    """The training rank that owns the snapshot."""

    def __init__(self, trainer: Source, snapshot: Snapshot, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: the longest wait for an engine that still reads the version before the last."""
        self._trainer, self._snapshot, self._timeout_s = trainer, snapshot, timeout_s

    def poll(self) -> Metrics | None:
        if not self._snapshot.write(self._trainer.named_hf_tensors(), self.version, wait_s=0.0):
            _check_patience(self._began, self._timeout_s, f"version {self.version}", "engines to be through with an older one")
            return None
        return self._metrics(self._snapshot.plan.slot_bytes, 0.0)


class SnapshotTaker(RankPublisher):
    """A serving rank of the same machine."""

    def __init__(self, engine: StagingTarget, reader: SnapshotReader, *, timeout_s: float = 600.0) -> None:
        """`timeout_s`: the longest wait for a version that was announced."""
        self._engine, self._reader, self._timeout_s = engine, reader, timeout_s

    def begin(self, version: int) -> None:
        super().begin(version)
        if version <= self._engine.weight_version:
            present = self._engine.weight_version
            raise ValueError(f"version={version}: must be greater than {present}, the present version")

    def poll(self) -> Metrics | None:
        if self._reader.newest < self.version:
            _check_patience(self._began, self._timeout_s, f"version {self.version}", "it to be in the snapshot")
            return None
        with self._reader.lease(self.version) as lease:
            lease.check()
            try:
                for message in lease.messages:
                    self._engine.stage_weights(message.rows, self.version, adopt=True)
                start = time.perf_counter()
                self._engine.commit_weights(self.version, mode="keep")
            except BaseException:
                self._engine.discard_weights()
                raise
        return self._metrics(self._reader.plan.slot_bytes, time.perf_counter() - start)


def _check_patience(began: float, timeout_s: float, version: str, what: str) -> None:
    if time.perf_counter() - began > timeout_s:
        raise CollectiveError(f"{version}: waited {timeout_s:g} s for {what}")
