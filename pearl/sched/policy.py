"""When a change pays: the gates between what would be better and what is done.

Owns thresholds, cool-downs and the expected life of a GPU. Shapes and plans come from elsewhere; it knows no workers. Pure but
for the memory of the last change (`SwitchGate`). Invariant: after a change of shape that nothing forced, no other one follows
within the cool-down while the number of workers stays the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.sched.cost_profile import CostProfile
from pearl.sched.planner import Allocation
from pearl.sched.predictor import Prediction
from pearl.sched.settings import BorrowSettings, ExpandSettings, PdSettings
from pearl.sched.shape import Shape
from pearl.sched.workload import Workload

MOST_APPENDED = 4096
"""No append of more tokens is computed on a decode worker; what pays is found in steps of a 64th of it."""

FAR = 4.0
"""So many times beyond what was measured a prediction pays all of `unsure_penalty`; nearer, in proportion. A split pool decodes
in larger batches than anything mixed ever shows: what only a try can measure must not need an exceptional gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to act. `gain_s` and `cost_s` in the same seconds; `reason` is for the log."""

    act: bool
    reason: str
    gain_s: float = 0.0
    cost_s: float = 0.0
    threshold_s: float = 0.0
    forced: bool = False


class SwitchGate:
    """Changes of shape, with hysteresis."""

    def __init__(self, settings: PdSettings) -> None:
        self._settings = settings
        self._changed_at = -math.inf
        self._changed_total = -1

    def weigh(self, stay: Allocation | None, best: Allocation | None, *, cost_s: float, now: float) -> Verdict:
        """`stay`: the best without any change of role, None if that is not possible, and then the change is forced."""
        if best is None:
            return Verdict(act=False, reason="no shape is possible")
        if stay is None:
            return Verdict(act=True, reason="what is there cannot go on", gain_s=math.inf, cost_s=cost_s, forced=True)
        if best.shape == stay.shape:
            return Verdict(act=False, reason="nothing is better")
        gain = stay.prediction.makespan_s - best.prediction.makespan_s
        s = self._settings
        share = s.ratio_threshold if best.shape.mode == stay.shape.mode else s.mode_threshold
        share += s.unsure_penalty * min(1.0, (best.prediction.reach - 1.0) / (FAR - 1.0))
        threshold = share * stay.prediction.makespan_s
        figures: dict[str, Any] = {"gain_s": gain, "cost_s": cost_s, "threshold_s": threshold}
        if gain <= threshold:
            return Verdict(act=False, reason="below the threshold", **figures)
        if gain <= cost_s:
            return Verdict(act=False, reason="does not pay for itself", **figures)
        if now - self._changed_at < s.cooldown_s and stay.shape.total == self._changed_total:
            return Verdict(act=False, reason="cooling down", **figures)
        return Verdict(act=True, reason="better", **figures)

    def changed(self, shape: Shape, now: float) -> None:
        """A change to `shape` was ordered."""
        self._changed_at, self._changed_total = now, shape.total


def weigh_borrow(
    without: Allocation | None, borrowed: Allocation | None, *, weight: float, toggle_s: float, s: BorrowSettings
) -> Verdict:
    """(R/B) * (T_dedicated - T_with_borrowed) > T_toggle, the rule of PEARL (arXiv 2609.35158), for any number of workers.

    Without anybody else to serve the trainers' GPUs are borrowed whatever it costs.
    """
    if borrowed is None or not borrowed.borrowed:
        return Verdict(act=False, reason="nothing is better")
    if without is None:
        return Verdict(act=True, reason="nobody else serves", gain_s=math.inf, cost_s=toggle_s, forced=True)
    gain = weight * (without.prediction.makespan_s - borrowed.prediction.makespan_s)
    pays = s.workers not in ("auto", "all_or_none", "none") or gain > s.margin * toggle_s
    reason = "better" if pays else "does not pay for itself"
    return Verdict(act=pays, reason=reason, gain_s=gain, cost_s=toggle_s, threshold_s=s.margin * toggle_s)


def hazard(departures: int, exposure_s: float, prior_life_s: float) -> float:
    """Departures per worker-second: what was seen, and a prior that counts as one departure after `prior_life_s`."""
    return (departures + 1.0) / (exposure_s + prior_life_s)


def useful_life_s(rate: float, busy_s: float, known_s: float = math.inf) -> float:
    """Expected seconds of service of a worker that is of no use for its first `busy_s`, under a constant hazard `rate`.

    The integral of exp(-rate * t) from `busy_s` to `known_s`, when its GPUs go in any case.
    """
    if known_s <= busy_s:
        return 0.0
    end = math.exp(-rate * known_s) if known_s < math.inf else 0.0
    return (math.exp(-rate * busy_s) - end) / rate


def weigh_expand(
    now: Allocation | None, more: Allocation | None, *, life_s: float, pause_s: float, cold_s: float, s: ExpandSettings
) -> Verdict:
    """Are workers worth preparing that will serve `life_s` seconds each?

    Gain: the seconds of rollout that are saved while they serve. Cost: `pause_s` in which no new request is admitted, as far
    as that holds up the present workers, and `cold_s` of contexts computed anew.
    """
    if s.external == "never" or more is None:
        return Verdict(act=False, reason="not wanted" if s.external == "never" else "no shape is possible")
    if s.external == "always" or now is None:
        return Verdict(act=True, reason="wanted", gain_s=math.inf, forced=True)
    before, after = now.prediction.makespan_s, more.prediction.makespan_s
    gain, cost = life_s * (before / after - 1.0), pause_s + cold_s
    pays = gain > s.margin * cost
    reason = "better" if pays else "will not live long enough to pay"
    return Verdict(act=pays, reason=reason, gain_s=gain, cost_s=cost, threshold_s=s.margin * cost)


def return_lead_s(expected_s: float, cautious_s: float, s: BorrowSettings) -> float:
    """How long before the trainer needs them borrowed GPUs are called back."""
    return max(s.return_margin * expected_s, cautious_s) + s.return_extra_s


def append_limit(prediction: Prediction, workload: Workload, costs: CostProfile) -> int:
    """The longest append, in tokens, that takes less from all sequences together on the decode worker that holds its KV.

    There it holds up everybody who decodes, whose step's host time is paid anyway, and makes a captured step one that is
    launched kernel by kernel. On a prefill worker what was generated since the last prompt is computed again too, behind the
    prompts of others, and the KV goes its way.
    """
    new, context, others = np.arange(64, MOST_APPENDED + 1, MOST_APPENDED // 64), workload.context, prediction.decode_batch
    launched = (costs.eager - 1) * costs.decode.seconds(max(1.0, others), context)
    beside = costs.prefill_beside_s(new, context)
    here = beside + max(0.0, 1 - others) * costs.step_overhead_s + others * (costs.mixing * beside + launched)
    queued = 1 / (1 - min(0.9, prediction.prefill_busy))
    computed = costs.prefill_s(new + workload.generated, context) + costs.hand_over.give_s
    sent = costs.transfer_s(new) + costs.hand_over.take_s
    there = queued * computed + sent + others * costs.taking_s(new)
    return int(np.max(new[here <= there], initial=0))
