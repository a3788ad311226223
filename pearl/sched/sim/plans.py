"""What a simulated run is given: trajectories, GPUs that come and go, hardware, costs and settings, as frozen values.

Owns the inputs and their checks; what comes out is `results.py`. It knows no events and no workers. Seconds, tokens, bytes.
Invariant: two equal values of `SimSettings`, workload and availability give the same run, event by event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from pearl.field_checks import above_zero, at_least, one_of, within
from pearl.sched.cost_profile import CostProfile
from pearl.sched.settings import SchedulerSettings
from pearl.sched.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """One turn: the policy generates `generated` tokens, the environment takes `env_s` and answers.

    `appended` are the environment's tokens that come before what is generated: 0 in the first turn, whose prompt is the
    trajectory's.
    """

    appended: int
    generated: int
    env_s: float = 0.0

    def __post_init__(self) -> None:
        if self.appended >= 0 and self.generated >= 1 and 0 <= self.env_s < math.inf:
            return  # there are very many of them
        at_least(self, "turn", 0, "appended", whole=True)
        at_least(self, "turn", 1, "generated", whole=True)
        at_least(self, "turn", 0, "env_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryPlan:
    """One trajectory. Its environment is ready `reset_s` after it was started; those of a group have the same first prompt.

    Trajectories are numbered in the order in which they start, `group` likewise; the members of a group follow each other.
    """

    trajectory: int
    group: int
    first_prompt: int
    turns: tuple[TurnPlan, ...]
    reset_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, "trajectory", 0, "trajectory", "group", whole=True)
        at_least(self, "trajectory", 1, "first_prompt", whole=True)
        at_least(self, "trajectory", 0, "reset_s")
        if not self.turns:
            raise ValueError(f"trajectory.turns=() of trajectory {self.trajectory}: must have at least one turn")

    @property
    def generated(self) -> int:
        return sum(turn.generated for turn in self.turns)

    @property
    def tokens(self) -> int:
        """All of them, at its end: what is trained on."""
        return self.first_prompt + sum(turn.appended + turn.generated for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """When external GPUs come (+1) and go (-1): rows (seconds, +1 or -1, names of GPUs), in order of time.

    Each `tp` GPUs that are there make a worker, which ends with the first of them. `notice_s`: how long before it goes a GPU
    is announced to go; 0: not at all. What is there at the beginning has rows at 0.
    """

    events: tuple[tuple[float, int, tuple[str, ...]], ...] = ()
    notice_s: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, "availability", 0, "notice_s")
        last, there = 0.0, set[str]()
        for at_s, sign, gpus in self.events:
            if at_s < last or sign not in (1, -1):
                raise ValueError(f"availability.events: ({at_s}, {sign}) must not come before {last}, and be +1 or -1")
            wrong = [gpu for gpu in gpus if (gpu in there) == (sign > 0)]
            if wrong:
                raise ValueError(f"availability.events: at {at_s} {'come' if sign > 0 else 'go'} GPUs {wrong} for no reason")
            there = there | set(gpus) if sign > 0 else there - set(gpus)
            last = at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """GPUs that are always there. `tp` of them are one worker. The training GPUs, too, can serve while they are lent."""

    training_gpus: int = 16
    reserved_workers: int = 2
    tp: int = 2

    def __post_init__(self) -> None:
        at_least(self, "hardware", 1, "training_gpus", "tp", whole=True)
        at_least(self, "hardware", 0, "reserved_workers", whole=True)
        if self.training_gpus % self.tp:
            raise ValueError(f"hardware.training_gpus={self.training_gpus}: must be a multiple of tp={self.tp}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """The engines' own settings, as in EngineConfig. The size of the pool comes from the costs (`kv_capacity_tokens`).

    Coarse blocks make a run faster and prefixes shorter: what is cached is cut to whole blocks.
    """

    block_size: int = 64
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    decode_prefill_tokens: int = 256
    eviction: Literal["lru", "keep"] = "keep"
    max_model_len: int = 40_960
    transfer_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        names = ("block_size", "max_num_seqs", "max_batch_tokens", "decode_prefill_tokens")
        at_least(self, "engine", 1, *names, whole=True)
        one_of("engine.eviction", self.eviction, ("lru", "keep"))
        at_least(self, "engine", 2, "max_model_len", whole=True)
        above_zero(self, "engine", "transfer_deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, by chance: rates per worker-second and chances per event; all 0 by default.

    `death`: a dedicated worker dies (and is back, bare, after `revive_s`); `order`: an order fails; `silence`: an order is
    never answered; `transfer`: a transfer of KV fails; `hang`: an environment hangs until `hang_s` have passed, and then
    costs its trajectory, which starts again.
    """

    death: float = 0.0
    order: float = 0.0
    silence: float = 0.0
    transfer: float = 0.0
    hang: float = 0.0
    hang_s: float = 300.0
    revive_s: float = 60.0

    def __post_init__(self) -> None:
        at_least(self, "faults", 0, "death", "hang_s", "revive_s")
        within(self, "faults", 0, 1, "order", "silence", "transfer", "hang")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """One run. `costs` are the truth; `workload` is what the scheduler believes before it has measured anything (its costs it
    knows; `believed` in their place if it is to be wrong about them).

    A step trains `batch` trajectories, groups of `group`. `semantics`: with "barrier" a batch starts when the one before is
    complete, with "slots" every trajectory that ends is followed by the next at once, `batch` of them being under way; both no
    earlier than `max_staleness` versions allow. The trainer takes `train_s_per_token` GPU-seconds per token, divided by its
    GPUs, `train_fixed_s` on top, then `publish_s` for the weights to come to all who serve; running requests go on with their
    KV (`update_mode`). Each request has `overhead_s` outside of the engine (its router, tokenizer, Python), and `miss_share`
    of the turns find nothing cached, for no reason that is modelled. `transfer`: KV that a decode worker lacks is sent
    ("append"), or the whole context of each turn ("context"). Time per step of the engine's host is the costs'
    `step_overhead_s`; times of changes are the costs' too. A simulation ends after `max_steps` steps or at `until_s`.
    """

    costs: CostProfile
    workload: Workload
    believed: CostProfile | None = None
    hardware: Hardware = field(default_factory=Hardware)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    engine: EngineSizes = field(default_factory=EngineSizes)
    faults: Faults = field(default_factory=Faults)
    batch: int = 64
    group: int = 16
    max_staleness: int = 1
    semantics: Literal["barrier", "slots"] = "barrier"
    transfer: Literal["append", "context"] = "append"
    update_mode: Literal["keep", "recompute"] = "keep"
    train_s_per_token: float = 7.2e-4
    train_fixed_s: float = 0.0
    publish_s: float = 4.4
    overhead_s: float = 0.0
    miss_share: float = 0.0
    max_steps: int | None = None
    until_s: float | None = None
    tick_s: float = 1.0
    interval_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("semantics", self.semantics, ("barrier", "slots"))
        one_of("transfer", self.transfer, ("append", "context"))
        one_of("update_mode", self.update_mode, ("keep", "recompute"))
        at_least(self, "", 1, "batch", "group", whole=True)
        at_least(self, "", 0, "max_staleness", "seed", whole=True)
        at_least(self, "", 0, "train_s_per_token", "train_fixed_s", "publish_s", "overhead_s")
        above_zero(self, "", "tick_s", "interval_s")
        if not 0 <= self.miss_share <= 1:
            raise ValueError(f"miss_share={self.miss_share}: must be in [0, 1]")
        if self.batch % self.group:
            raise ValueError(f"batch={self.batch}: must be a multiple of group={self.group}")
        if self.max_steps is None and self.until_s is None:
            raise ValueError("max_steps=None, until_s=None: one of them must say when the run ends")
