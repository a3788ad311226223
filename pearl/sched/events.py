"""What happens to the cluster, as its scheduler is told: frozen values, no sockets, no clocks.

Owns the types. `worker` is a name for life, `epoch` the number of the order that the worker obeyed last.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from msgspec import Struct

from pearl.sched.profile import StepTelemetry


class Zone(enum.StrEnum):
    """Dedicated: serves only. Overlap: shares its GPUs with a training worker."""

    DEDICATED = "dedicated"
    OVERLAP = "overlap"


class WorkerRole(enum.StrEnum):
    """A serving worker's role (as `protocol.Role`), or training."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"


class Activity(enum.StrEnum):
    """Transitioning: an order is under way that the worker has not confirmed."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    TRANSITIONING = "transitioning"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker is there. `prepared`: it has an engine; `active`: it serves (or trains) already. `deadline`: known end."""

    worker: str
    gpus: frozenset[str]
    zone: Zone = Zone.DEDICATED
    role: WorkerRole = WorkerRole.MIXED
    external: bool = False
    prepared: bool = True
    active: bool = True
    kv_total: int = 0
    deadline: float | None = None


class WorkerReport(Struct, frozen=True, kw_only=True):
    """A worker's own numbers; `kv_used` and `kv_total` in tokens."""

    worker: str
    epoch: int
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    weight_version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDone:
    """The worker carried out (or could not) the order that made its epoch `epoch`."""

    worker: str
    epoch: int
    ok: bool = True
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReclaimed:
    """Its GPUs will be taken at `deadline`."""

    worker: str
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """It died, was taken, or left when told to."""

    worker: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBegins:
    """A batch is complete: the trainer wants all its GPUs, by `deadline`."""

    step: int
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFinished:
    """The trainer's GPUs idle until the next batch."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """`unfinished` trajectories of the batch being collected; `due`: when it will be complete, if somebody knows."""

    unfinished: int
    due: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """A batch is complete, and this is what it was like. `makespan_s`: its rollout, which `ended` (None: now); None if it took
    no time of its own."""

    telemetry: StepTelemetry
    makespan_s: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """The scheduler's own: `worker` was told to become `role` and `active`; its epoch rises by one. `leaving`: for good."""

    worker: str
    role: WorkerRole
    active: bool = True
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStarted:
    """The scheduler's own: the overlap zone is clear, the trainer runs."""


TableEvent = (
    WorkerJoined | WorkerReport | OrderDone | WorkerReclaimed | WorkerGone | TrainingBegins | TrainingFinished
    | WeightsPublished | Ordered | TrainingStarted
)  # fmt: skip
ClusterEvent = (
    WorkerJoined | WorkerReport | OrderDone | WorkerReclaimed | WorkerGone | TrainingBegins | TrainingFinished
    | WeightsPublished | BatchProgress | StepMeasured | Tick
)  # fmt: skip
