"""Who has a weight version to give: a snapshot, or the weights that a worker serves itself.

Owns how one version is held still while it is sent, and what sends it. It does not know receivers. Invariant: what is sent to
its end is one whole version; if that cannot be, the receiver is told so in words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from pearl.engine.comm.communicator import Communicator
from pearl.engine.weights.snapshot import MAX_SLOTS, Lease, SnapshotPlan, SnapshotReader
from pearl.engine.weights.transfer import WeightSender


class GivingSender(WeightSender):
    """Sends one version that is held. `digest`, once it is finished: the sum of the checksums of all that was sent."""

    digest = 0

    def __init__(self, comm: Communicator, plan: SnapshotPlan, timeout_s: float) -> None:
        super().__init__(comm, plan.config, plan.dtype, bucket_bytes=plan.bucket_bytes, timeout_s=timeout_s)


class HoldingBusy(ValueError):
    """A version cannot be held as long as others are."""


class Held(Protocol):
    """One version, held until `close`."""

    @property
    def version(self) -> int: ...

    def sender(self, comm: Communicator, timeout_s: float) -> GivingSender:
        """Sends it to member 1 of the group; begun, to be polled."""

    def close(self) -> None: ...


class Holding(Protocol):
    """Who has versions."""

    plan: SnapshotPlan

    @property
    def newest(self) -> int:
        """-1 if there is none."""

    def hold(self, version: int) -> Held:
        """ValueError if it is not here."""


class SnapshotHolding:
    """The versions of a snapshot."""

    def __init__(self, reader: SnapshotReader, *, versions: int = MAX_SLOTS) -> None:
        """`versions`: how many different ones may be held at a time; the slots of the others are left to the writer."""
        self.plan, self._reader, self._most = reader.plan, reader, versions
        self._held: list[int] = []
        self._lock = threading.Lock()

    @property
    def newest(self) -> int:
        return self._reader.newest

    def hold(self, version: int) -> Held:
        with self._lock:
            others = set(self._held) - {version}
            if len(others) >= self._most:
                raise HoldingBusy(f"version={version}: {', '.join(map(str, sorted(others)))} is still being sent")
            lease = self._reader.lease(version)
            self._held.append(version)
        return _HeldSlot(self, lease)

    def let_go(self, version: int) -> None:
        """One transfer of it is over."""
        with self._lock:
            self._held.remove(version)


class _HeldSlot:
    def __init__(self, holding: SnapshotHolding, lease: Lease) -> None:
        self.version, self._holding, self._lease = lease.version, holding, lease

    def sender(self, comm: Communicator, timeout_s: float) -> GivingSender:
        sender = _SlotSender(comm, self._holding.plan, timeout_s)
        sender.lease, sender.digest = self._lease, self._lease.digest
        sender.begin((), self.version)
        return sender

    def close(self) -> None:
        self._lease.close()
        self._holding.let_go(self.version)


class _SlotSender(GivingSender):
    """Sends a slot's messages as they lie: nothing is copied, converted or added up."""

    lease: Lease

    def _allocate(self) -> None:
        self._messages = list(self.lease.messages)

    def _fill(self, index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """They are sealed already."""


class LiveHolding:
    """The weights that a worker serves, read by another thread while it goes on serving.

    Nobody waits for anybody: whoever changes the weights does so inside `changing`, and a transfer under way then ends in a
    refusal.
    """

    def __init__(
        self, plan: SnapshotPlan, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: Callable[[], int]
    ) -> None:
        """`tensors`: the whole model under Hugging Face names, in its order, or a ValueError why it cannot be had (one rank of
        several has parts of it); `version`: which one that is, -1 for none."""
        self.plan, self.tensors, self._version = plan, tensors, version
        self._changes = 0
        """Odd while the weights are being changed."""

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around every change of the weights, a commit above all."""
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    @property
    def newest(self) -> int:
        return self._version()

    def hold(self, version: int) -> Held:
        changes = self._changes
        if self._version() != version:
            raise ValueError(f"version={version}: this worker serves {self._version()}")
        held = _HeldLive(self, version, changes, self.tensors())
        held.check()
        return held

    @property
    def changes(self) -> int:
        return self._changes


class _HeldLive:
    def __init__(self, holding: LiveHolding, version: int, changes: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.version, self._holding, self._changes, self._tensors = version, holding, changes, tensors

    def check(self) -> None:
        """ValueError unless the weights have been left alone since they were held."""
        if self._changes % 2 or self._holding.changes != self._changes:
            raise ValueError(f"version {self.version} is giving way to the next one here")

    def sender(self, comm: Communicator, timeout_s: float) -> GivingSender:
        sender = _LiveSender(comm, self._holding.plan, timeout_s)
        sender.held = self
        sender.begin(self._tensors, self.version)
        return sender

    def close(self) -> None:
        """There is nothing to give back."""


class _LiveSender(GivingSender):
    held: _HeldLive

    def _fill(self, index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.held.check()
        super()._fill(index, tensors)
        self.held.check()  # what was read in between is of one version
        total = self.digest + int(self._messages[index].words[0])
        self.digest = (total + (1 << 63)) % (1 << 64) - (1 << 63)
