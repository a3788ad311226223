"""What a cluster scheduler tells those who carry out: frozen values.

Owns the types. `decision` is the number of the decision that they belong to; `epoch` is the worker's new one, which its answer
(`events.OrderDone`) repeats. A driver that gets the same command twice carries it out once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.sched.events import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Build an engine on this worker in the background. Its weights come later, with `Admit`."""

    decision: int
    worker: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a group that is admitted."""

    worker: str
    epoch: int
    role: WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Let these prepared workers serve, all or none, at `weight_version` (the newest). Each answers for itself.

    New requests are held back meanwhile, running ones go on.
    """

    decision: int
    members: tuple[Member, ...]
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """Change the role in place (`protocol.SwitchRole`); requests that cannot stay are handed over."""

    decision: int
    worker: str
    epoch: int
    role: WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrow:
    """Put the trainer's state on these GPUs aside and wake the engine, in this role, at `weight_version`."""

    decision: int
    worker: str
    epoch: int
    role: WorkerRole
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Stop dispatch, interrupt what is left, put the engine to sleep: the trainer needs the GPUs by `deadline`."""

    decision: int
    worker: str
    epoch: int
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Stop dispatch, interrupt what is left, and end before `deadline` (None: at leisure)."""

    decision: int
    worker: str
    epoch: int
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """These sessions' requests lost their worker: place them again, from their last token."""

    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSession:
    """Hand a running request over, with its KV."""

    session: str
    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMayBegin:
    """Nobody borrows GPUs any more."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """This worker cannot take part."""

    worker: str
    reason: str


ClusterCommand = (
    Prepare | Admit | SetRole | Borrow | GiveBack | Leave | Requeue | MoveSession | TrainerMayBegin | Refuse
)  # fmt: skip
