"""The sections of a job's configuration that say what the cluster may become, and from when a change pays.

Owns the settings and their checks; what is decided by them is in `sched/`, and docs/scheduler.md has the rules. Invariant:
every automatic choice has a fixed setting; the threshold of a change of mode is not below that of a change of ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pearl.field_checks import above_zero, at_least, one_of

MODES = ("mixed", "split", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSettings:
    """How the serving workers share prefill and decode, their shape, and when it changes (docs/scheduler.md). `mode`: auto,
    mixed, split or hybrid. `ratio`: "auto", or "P:D" as in "3:5", for split pools. `predictor` of makespans: "full", a
    queueing network that telemetry corrects, or "paper", closed forms.

    Thresholds are shares of the present makespan, by which it must fall: `ratio_threshold` in the same mode, `mode_threshold`
    (not less) for another, up to `unsure_penalty` on top for shapes beyond anything measured. `hybrid_margin`: a hybrid must
    be better than the best of the simple shapes by so much. `cooldown_s`: no further change of shape that nothing forces, at
    the same number of workers. `append_on_decode`: appends of up to how many tokens are computed by the decode worker that
    holds the KV, instead of a prefill worker: "auto" as many as pay, or a number as text ("0": none).
    """

    mode: str = "auto"
    ratio: str = "auto"
    mode_threshold: float = 0.03
    ratio_threshold: float = 0.02
    hybrid_margin: float = 0.03
    unsure_penalty: float = 0.10
    cooldown_s: float = 120.0
    predictor: Literal["full", "paper"] = "full"
    append_on_decode: str = "auto"

    def __post_init__(self) -> None:
        one_of("pd.mode", self.mode, ("auto", *MODES))
        one_of("pd.predictor", self.predictor, ("full", "paper"))
        at_least(self, "pd", 0, "ratio_threshold", "hybrid_margin", "unsure_penalty", "cooldown_s")
        at_least(self, "pd", self.ratio_threshold, "mode_threshold")
        if self.append_on_decode != "auto" and not self.append_on_decode.isdecimal():
            raise ValueError(f"pd.append_on_decode={self.append_on_decode!r}: must be auto or a number")
        if self.ratio != "auto":
            self.parts()

    def parts(self) -> tuple[int, int]:
        """(P, D) of a fixed ratio."""
        parts = self.ratio.split(":")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"pd.ratio={self.ratio!r}: must be auto or like 3:5, both at least 1")
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowSettings:
    """How many training `workers` serve while nothing is trained: "auto", "all", "none", "all_or_none" or a number as text.

    "auto" borrows as many as pay, "all_or_none" all if they pay, "all" and a number whether they pay or not. `margin`: what is
    gained must be so many times the cost. `return_margin`: the lead of a return, in multiples of its expected time,
    `return_extra_s` seconds on top.
    """

    workers: str = "auto"
    margin: float = 1.0
    return_margin: float = 1.5
    return_extra_s: float = 0.5

    def __post_init__(self) -> None:
        if self.workers not in ("auto", "all", "none", "all_or_none") and not self.workers.isdecimal():
            raise ValueError(f"borrow.workers={self.workers!r}: must be auto, all, none, all_or_none or a number")
        at_least(self, "borrow", 0, "margin", "return_extra_s")
        at_least(self, "borrow", 1, "return_margin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandSettings:
    """Whether `external` workers are prepared: "auto" (if they live long enough to pay), "always" or "never".

    `prior_life_s`: their expected life before any has been seen to leave; `margin` as `borrow.margin`.
    """

    external: str = "auto"
    margin: float = 1.0
    prior_life_s: float = 3600.0

    def __post_init__(self) -> None:
        one_of("expand.external", self.external, ("auto", "always", "never"))
        at_least(self, "expand", 0, "margin")
        above_zero(self, "expand", "prior_life_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedOptions:
    """How orders are followed up. `change_timeout_s`: a change that a worker has not confirmed by then (`prepare_timeout_s`: a
    new engine) is ordered again, `tries` times in all, and then the worker counts as lost. The cluster is thought over every
    `consider_s` at least. `tail_share`: from so small a rest of the batch (a share of it) on, requests move to idle workers.
    """

    change_timeout_s: float = 30.0
    prepare_timeout_s: float = 600.0
    tries: int = 3
    consider_s: float = 10.0
    tail_share: float = 0.25

    def __post_init__(self) -> None:
        above_zero(self, "sched", "change_timeout_s", "prepare_timeout_s", "consider_s")
        at_least(self, "sched", 1, "tries", whole=True)
        at_least(self, "sched", 0, "tail_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Workers that come and go while the job runs (docs/elasticity.md). `listen`: "HOST:PORT" where they may join (port 0: a
    free one); "" nowhere.

    One that was silent for `silence_s` counts as gone; it is pinged every `heartbeat_s`, which is less. So does one that
    answers pings, but whose engine's loop has said nothing for `stuck_s` while it serves. `reconnect_s`: for how long a worker
    looks for a job that vanished; `notice_s`: what it is given to leave. `trace`: a file of arrivals and departures of nodes
    (lines of ms, add or remove, node) to play with workers on this machine, `speedup` times as fast, and no more than
    `trace_nodes` of them at a time; should the process that plays it end, the job goes on without these workers, unless
    `trace_required`.
    """

    listen: str = ""
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    stuck_s: float = 120.0
    reconnect_s: float = 60.0
    notice_s: float = 30.0
    trace: str = ""
    speedup: float = 1.0
    trace_nodes: int = 4
    trace_required: bool = False

    def __post_init__(self) -> None:
        above_zero(self, "elastic", "heartbeat_s", "silence_s", "stuck_s", "reconnect_s", "notice_s", "speedup")
        at_least(self, "elastic", 1, "trace_nodes", whole=True)
        host, _, port = self.listen.rpartition(":")
        if self.listen and not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"elastic.listen={self.listen!r}: must be HOST:PORT, for example 127.0.0.1:0, or empty")
        if self.trace and not self.listen:
            raise ValueError(f"elastic.trace={self.trace!r}: needs elastic.listen, where its workers join")
