"""The GPU-worker-role table: who is there, on which GPUs, in which role, and doing what.

Owns one row of small numbers per worker; no requests, no decisions. `apply` is the only way to change it, and an event that
was seen before, or that is of an epoch that is over, changes nothing and is counted.

Invariants (`check`): a worker keeps its slot and GPUs for life, also if it comes back before it is forgotten; no two dedicated
workers share a GPU, nor two training or two overlap workers, nor a dedicated one with either; on no GPU do a trainer and a
borrower run at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from pearl.sched.events import (
    Activity,
    OrderDone,
    Ordered,
    TableEvent,
    TrainingBegins,
    TrainingFinished,
    TrainingStarted,
    WeightsPublished,
    WorkerGone,
    WorkerJoined,
    WorkerReclaimed,
    WorkerReport,
    WorkerRole,
    Zone,
)
from pearl.sched.shape import Shape


class Worker(Struct, frozen=True, kw_only=True):
    """One row; a struct, since each report makes it anew. While it is transitioning `role` and `was_active` are still the old
    ones, `next_role` and `next_active` what was ordered; `overtaken`: an order to serve has no answer, and may be carried out
    by now. `deadline`: when its GPUs are reclaimed. `since`: when it joined. KV in tokens."""

    name: str
    slot: int
    zone: Zone
    gpus: frozenset[str]
    role: WorkerRole
    activity: Activity
    external: bool
    prepared: bool
    epoch: int
    since: float
    next_role: WorkerRole
    next_active: bool
    was_active: bool
    overtaken: bool = False
    ordered_at: float = 0.0
    leaving: bool = False
    deadline: float | None = None
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    weight_version: int = -1

    @property
    def serves(self) -> bool:
        """It has, or will have after what was ordered, a part in serving."""
        return self.role is not WorkerRole.TRAINING and self.next_active and not self.leaving

    @property
    def on_device(self) -> bool:
        """Its state may be on its GPUs."""
        return self.was_active or self.next_active or self.overtaken

    @property
    def bare(self) -> bool:
        """GPUs that could serve, once an engine is built there."""
        return self.zone is Zone.DEDICATED and not self.prepared

    @property
    def lendable(self) -> bool:
        """An overlap worker that nothing is done with."""
        idle = self.activity is Activity.INACTIVE and self.prepared and not self.leaving
        return self.zone is Zone.OVERLAP and self.role is not WorkerRole.TRAINING and idle


REMEMBERED = 256
"""Workers that are gone and known again if they come back; before them, who left first is forgotten."""


@dataclass(frozen=True, slots=True)
class _Past:
    slot: int
    gpus: frozenset[str]
    epoch: int


class ClusterState:
    """`training`: idle, wanted (from a deadline on) or running. `dropped` counts events without effect by reason."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.training: Literal["idle", "wanted", "running"] = "idle"
        self.training_deadline = 0.0
        self.training_step = -1
        self.weight_version = -1
        self.dropped: Counter[str] = Counter()
        self.external_seconds = 0.0
        """Worker-seconds for which external workers were there, for their expected life."""
        self.departures = 0
        """External workers that were reclaimed or lost."""
        self._past: dict[str, _Past] = {}
        self._slots = 0
        self._counted_until: float | None = None
        self._external = 0

    def apply(self, event: TableEvent, now: float) -> bool:
        """Whether it changed anything. ValueError, nothing changed, for a worker whose GPUs are someone else's."""
        self._count_time(now)
        match event:
            case WorkerJoined():
                return self._join(event, now)
            case TrainingBegins():
                return self._training_begins(event)
            case TrainingFinished():
                return self._training_finished(event)
            case TrainingStarted():
                return self._training_started()
            case WeightsPublished():
                newer = event.version > self.weight_version
                self.weight_version = max(self.weight_version, event.version)
                return newer or self._drop("old_version")
        worker = self.workers.get(event.worker)
        if worker is None:
            return self._drop("unknown_worker")
        match event:
            case WorkerReport():
                return self._report(worker, event)
            case OrderDone():
                return self._done(worker, event)
            case Ordered():
                return self._ordered(worker, event, now)
            case WorkerReclaimed():
                return self._reclaim(worker, event)
            case WorkerGone():
                return self._gone(worker)

    def serving(self) -> Iterator[Worker]:
        """Those with a part in serving, in the order in which they joined."""
        return (worker for worker in self.workers.values() if worker.serves)

    def shape(self, without: Collection[str] = ()) -> Shape:
        """The counts of `serving`, in the roles that were ordered."""
        roles = Counter(worker.next_role for worker in self.serving() if worker.name not in without)
        return Shape(mixed=roles[WorkerRole.MIXED], prefill=roles[WorkerRole.PREFILL], decode=roles[WorkerRole.DECODE])

    def check(self) -> None:
        """AssertionError if an invariant of the table does not hold."""
        slots = [worker.slot for worker in self.workers.values()] + [past.slot for past in self._past.values()]
        assert len(slots) == len(set(slots)), f"slots are shared: {sorted(slots)}"
        for kind in ("training", "overlap"):
            owners: dict[str, str] = {}
            for worker in self.workers.values():
                for gpu in worker.gpus if _kind(worker) in ("dedicated", kind) else ():
                    assert gpu not in owners, f"{worker.name} shares {gpu} with {owners[gpu]}"
                    owners[gpu] = worker.name
        for worker in self.workers.values():
            assert worker.zone is Zone.OVERLAP or _kind(worker) != "training", f"{worker.name} trains in the dedicated zone"
            moving = worker.activity is Activity.TRANSITIONING
            assert moving or (worker.role, worker.was_active) == (worker.next_role, worker.next_active), worker
            assert moving or worker.was_active == (worker.activity is Activity.ACTIVE), worker
            assert worker.prepared or not worker.was_active, f"{worker.name} serves unprepared"
        training = {gpu for worker in self.workers.values() if worker.role is WorkerRole.TRAINING for gpu in worker.gpus}
        running = self.training == "running"
        for worker in self.workers.values():
            borrowed = worker.zone is Zone.OVERLAP and worker.role is not WorkerRole.TRAINING and worker.on_device
            assert not (running and borrowed), f"{worker.name} is on its GPUs while they train"
            if worker.role is WorkerRole.TRAINING:
                assert (worker.activity is Activity.ACTIVE) == running, f"{worker.name}: training is {self.training}"
            elif worker.zone is Zone.OVERLAP and training:
                assert worker.gpus <= training, f"{worker.name} overlaps with no trainer"
        assert self._external == sum(worker.external for worker in self.workers.values())

    def _join(self, event: WorkerJoined, now: float) -> bool:
        if event.worker in self.workers:
            if self.workers[event.worker].gpus != event.gpus:
                raise ValueError(f"worker={event.worker!r}: has {sorted(self.workers[event.worker].gpus)} for life")
            return self._drop("doubled")
        self._refuse(event)
        past = self._past.pop(event.worker, None)
        slot = past.slot if past else self._slots
        self._slots += past is None
        training = event.role is WorkerRole.TRAINING
        active = self.training == "running" if training else event.active and event.prepared
        self.workers[event.worker] = Worker(
            name=event.worker,
            slot=slot,
            zone=event.zone,
            gpus=event.gpus,
            role=event.role,
            activity=Activity.ACTIVE if active else Activity.INACTIVE,
            external=event.external,
            prepared=event.prepared,
            epoch=past.epoch + 1 if past else 0,
            since=now,
            next_role=event.role,
            next_active=active,
            was_active=active,
            deadline=event.deadline,
            kv_total=event.kv_total,
        )
        self._external += event.external
        return True

    def _refuse(self, event: WorkerJoined) -> None:
        name = event.worker
        if not name or not event.gpus:
            raise ValueError(f"worker={name!r}, gpus={sorted(event.gpus)}: must have a name and at least one GPU")
        past = self._past.get(name)
        if past is not None and past.gpus != event.gpus:
            raise ValueError(f"worker={name!r}: has {sorted(past.gpus)} for life, came back with {sorted(event.gpus)}")
        training = event.role is WorkerRole.TRAINING
        if training and event.zone is not Zone.OVERLAP:
            raise ValueError(f"worker={name!r}: role training must be in zone overlap, not {event.zone}")
        if event.zone is Zone.OVERLAP and not training and event.active and self.training == "running":
            raise ValueError(f"worker={name!r}: cannot be active while its GPUs train")
        for other in self.workers.values():
            together = event.zone is Zone.OVERLAP and other.zone is Zone.OVERLAP
            if together and training != (other.role is WorkerRole.TRAINING):
                continue
            shared = event.gpus & other.gpus
            if shared:
                raise ValueError(f"worker={name!r}: GPUs {sorted(shared)} are those of {other.name!r}")

    def _report(self, worker: Worker, event: WorkerReport) -> bool:
        if event.epoch != worker.epoch:
            return self._drop("old_epoch" if event.epoch < worker.epoch else "epoch_ahead")
        self.workers[worker.name] = replace(
            worker,
            running=event.running,
            waiting=event.waiting,
            kv_used=event.kv_used,
            kv_total=event.kv_total or worker.kv_total,
            weight_version=event.weight_version,
        )
        return True

    def _ordered(self, worker: Worker, event: Ordered, now: float) -> bool:
        self.workers[worker.name] = replace(
            worker,
            activity=Activity.TRANSITIONING,
            next_role=event.role,
            next_active=event.active,
            overtaken=worker.on_device and not worker.was_active,
            leaving=worker.leaving or event.leaving,
            epoch=worker.epoch + 1,
            ordered_at=now,
        )
        return True

    def _done(self, worker: Worker, event: OrderDone) -> bool:
        """A failed order leaves the worker as it was."""
        if event.epoch != worker.epoch:
            return self._drop("old_epoch" if event.epoch < worker.epoch else "epoch_ahead")
        if worker.activity is not Activity.TRANSITIONING:
            return self._drop("doubled")
        if worker.leaving:
            return self._gone(worker)
        role = worker.next_role if event.ok else worker.role
        active = worker.next_active if event.ok else worker.was_active
        self.workers[worker.name] = replace(
            worker,
            role=role,
            next_role=role,
            was_active=active,
            next_active=active,
            overtaken=False,
            activity=Activity.ACTIVE if active else Activity.INACTIVE,
            prepared=worker.prepared or event.ok,
        )
        return True

    def _reclaim(self, worker: Worker, event: WorkerReclaimed) -> bool:
        if worker.deadline is not None and worker.deadline <= event.deadline:
            return self._drop("doubled")
        self.departures += worker.external and worker.deadline is None
        self.workers[worker.name] = replace(worker, deadline=event.deadline)
        return True

    def _gone(self, worker: Worker) -> bool:
        del self.workers[worker.name]
        self._past[worker.name] = _Past(slot=worker.slot, gpus=worker.gpus, epoch=worker.epoch)
        if len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]
        self._external -= worker.external
        self.departures += worker.external and worker.deadline is None
        return True

    def _training_begins(self, event: TrainingBegins) -> bool:
        if event.step <= self.training_step:
            return self._drop("doubled")
        self.training, self.training_step, self.training_deadline = "wanted", event.step, event.deadline
        return True

    def _training_started(self) -> bool:
        if self.training != "wanted":
            return self._drop("training_not_wanted")
        self._set_training("running")
        return True

    def _training_finished(self, event: TrainingFinished) -> bool:
        if event.step != self.training_step or self.training == "idle":
            return self._drop("doubled")
        self._set_training("idle")
        return True

    def _set_training(self, what: Literal["idle", "running"]) -> None:
        self.training, active = what, what == "running"
        for worker in list(self.workers.values()):
            if worker.role is WorkerRole.TRAINING:
                activity = Activity.ACTIVE if active else Activity.INACTIVE
                changed = replace(worker, activity=activity, was_active=active, next_active=active)
                self.workers[worker.name] = changed

    def _count_time(self, now: float) -> None:
        if self._counted_until is not None and now > self._counted_until:
            self.external_seconds += self._external * (now - self._counted_until)
        self._counted_until = now if self._counted_until is None else max(now, self._counted_until)

    def _drop(self, reason: str) -> bool:
        self.dropped[reason] += 1
        return False


def _kind(worker: Worker) -> str:
    return "training" if worker.role is WorkerRole.TRAINING else str(worker.zone)
