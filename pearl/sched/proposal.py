"""What the cluster should become now: shapes weighed against what is there, against each other, and against their cost.

Owns the order of the questions: what if nobody changes its role; is another shape enough better; does borrowing pay; does it
pay to prepare external workers. It puts planner, gates and transition together and keeps nothing. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pearl.sched.events import Zone
from pearl.sched.planner import Allocation, Budget, fixed_borrow, plan_allocation
from pearl.sched.policy import SwitchGate, Verdict, append_limit, hazard, useful_life_s, weigh_borrow, weigh_expand
from pearl.sched.predictor import AnyPredictor, PaperPredictor, Prediction, Predictor
from pearl.sched.profile import RuntimeProfile, StepTelemetry
from pearl.sched.settings import SchedulerSettings
from pearl.sched.shape import Shape
from pearl.sched.state import Worker
from pearl.sched.transition import TransitionPlan, plan_transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Who serves, who is prepared and waits to (`joiners`), and whose GPUs could be borrowed (`lendable`).

    `batch` trajectories are wanted, `unfinished` of them are still under way or to come.
    """

    serving: Sequence[Worker]
    joiners: Sequence[Worker]
    lendable: Sequence[Worker]
    shape: Shape
    batch: float
    unfinished: float

    @property
    def weight(self) -> float:
        """R / B."""
        return min(1.0, self.unfinished / self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """`target` is None if nothing can serve; then there is no plan. `stay_s`: the makespan without any of it."""

    kind: str
    target: Allocation | None
    stay_s: float
    verdict: Verdict
    plan: TransitionPlan | None


class Adviser:
    """Asks the questions with the present estimates of one profile."""

    def __init__(self, settings: SchedulerSettings, profile: RuntimeProfile, batch: float) -> None:
        self._settings, self._profile, self._batch = settings, profile, batch
        self._found: dict[Budget, Allocation | None] = {}
        workload, costs = profile.workload(batch), profile.costs()
        paper = settings.pd.predictor == "paper"
        self.predictor: AnyPredictor = PaperPredictor(workload, costs) if paper else Predictor(workload, costs)

    def holds(self, settings: SchedulerSettings) -> bool:
        """Whether these are its settings and the profile still says what it said: then nothing has to be worked out again."""
        known, profile = self.predictor, self._profile
        same = profile.workload(self._batch) == known.workload and profile.costs() == known.costs
        return same and settings == self._settings

    def hindsight(self, telemetry: StepTelemetry) -> Predictor:
        """Predicts as if it had been known what a batch would be like."""
        return Predictor(self._profile.workload_of(telemetry, self._batch), self.predictor.costs)

    def propose(self, s: Situation, gate: SwitchGate, now: float) -> Proposal:
        """The next transition of the serving workers; its plan may be empty."""
        workers = len(s.serving) + len(s.joiners)
        stay, base, verdict = self._shape_of(s, workers, s.joiners, gate, now)
        kind = "admit" if s.joiners else "switch"
        joiners, target = list(s.joiners), base
        lent = self._borrow(s, base, workers)
        if lent is not None:
            kind, verdict, count = "borrow", lent[1], lent[0].borrowed
            joiners += s.lendable[:count]
            _, target, _ = self._shape_of(s, workers + count, joiners, gate, now, loan=lent[0])
        plan = None if target is None else plan_transition(s.serving, target.shape, joiners=joiners)
        stay_s = math.inf if stay is None else stay.prediction.makespan_s
        return Proposal(kind=kind, target=target, stay_s=stay_s, verdict=verdict, plan=plan)

    def expand(self, s: Situation, bare: Sequence[Worker], seen: tuple[int, float], now: float) -> tuple[int, Verdict]:
        """How many of the `bare` external workers to prepare: all, or one if all do not pay. `seen`: departures, exposure."""
        expand, profile = self._settings.expand, self._profile
        workers = len(s.serving) + len(s.joiners)
        present = self._best(Budget(fixed=workers, now=s.shape))
        rate = hazard(*seen, expand.prior_life_s)
        verdict = Verdict(act=False, reason="nobody to prepare")
        for count in dict.fromkeys((len(bare), 1)):
            busy = profile.change_s("prepare", count) + profile.change_s("finalise", count)
            ends = [worker.deadline - now for worker in bare[:count] if worker.deadline is not None]
            more = self._best(Budget(fixed=workers + count, now=s.shape))
            cold = 0.0 if more is None else self.predictor.predict(more.shape, joined=count).cold_s
            life = useful_life_s(rate, busy, min(ends, default=math.inf))
            pause = profile.change_s("finalise", count)
            verdict = weigh_expand(present, more, life_s=life, pause_s=pause, cold_s=cold, s=expand)
            if verdict.act:
                return count, verdict
        return 0, verdict

    def longest_append(self, prediction: Prediction) -> int:
        """Tokens that a decode worker is to append itself, in the predicted shape."""
        chosen, predictor = self._settings.pd.append_on_decode, self.predictor
        return append_limit(prediction, predictor.workload, predictor.costs) if chosen == "auto" else int(chosen)

    def _shape_of(
        self,
        s: Situation,
        workers: int,
        joiners: Sequence[Worker],
        gate: SwitchGate,
        now: float,
        loan: Allocation | None = None,
    ) -> tuple[Allocation | None, Allocation | None, Verdict]:
        """(best without a change of role, what to aim for, why) for so many workers; `loan`: the best with borrowed ones.

        While there are such, who changes its role changes back after them, and all it brings is for what is left of the batch.
        """
        stay = self._best(Budget(fixed=workers, keep=s.shape, now=s.shape)) if s.shape.total <= workers else None
        best = loan or self._best(Budget(fixed=workers, now=s.shape))
        cost = 0.0
        if best is not None and (stay is None or best.shape != stay.shape):
            plan = plan_transition(s.serving, best.shape, joiners=joiners)
            cost = self.switch_cost_s(plan)
            if loan is not None or any(worker.zone is Zone.OVERLAP for worker in s.serving):
                back = self._profile.change_s("switch", plan.roles_changed)
                cost = (cost + back) / s.weight if s.weight else math.inf
        verdict = gate.weigh(stay, best, cost_s=cost, now=now)
        return stay, best if verdict.act else stay, verdict

    def switch_cost_s(self, plan: TransitionPlan) -> float:
        """Seconds for the changes of role and for the KV that moves."""
        costs = self.predictor.costs
        moved = plan.moved_kv_tokens * costs.kv_bytes_per_token / costs.transfer_bytes_per_s
        return self._profile.change_s("switch", plan.roles_changed) + moved

    def _borrow(self, s: Situation, base: Allocation | None, workers: int) -> tuple[Allocation, Verdict] | None:
        already = sum(worker.zone is Zone.OVERLAP for worker in s.serving)
        allowed = list(fixed_borrow(self._settings.borrow.workers, already, len(s.lendable)))
        if not s.lendable or not allowed[-1]:
            return None
        counts, costs = np.arange(allowed[-1] + 1), self.predictor.costs
        cost = costs.borrow.seconds(counts) + costs.give_back.seconds(counts)
        if self._settings.borrow.workers == "all_or_none":
            cost[1:-1] = np.inf
        toggle = tuple(cost.tolist())
        best = self._best(
            Budget(
                fixed=workers,
                lendable=allowed[-1],
                least_borrowed=max(allowed[0], int(base is None)),
                toggle_s=toggle,
                weight=s.weight,
                now=s.shape,
            )
        )
        price = toggle[best.borrowed] if best is not None else 0.0
        verdict = weigh_borrow(base, best, weight=s.weight, toggle_s=price, s=self._settings.borrow)
        if best is None or not verdict.act:
            return None
        return best, replace(verdict, reason="borrow")

    def _best(self, budget: Budget) -> Allocation | None:
        if budget not in self._found:
            self._found[budget] = plan_allocation(self.predictor, budget, self._settings.pd).best
        return self._found[budget]
