"""How long a batch of trajectories takes in a given shape of the cluster.

Owns two predictors behind one interface: `PaperPredictor`, the closed forms of PEARL (arXiv 2609.35158), and `Predictor`, a
queueing model (`turn_model.py`) that adds memory, cache misses, unequal trajectories, hybrid pools and cold caches. They know
no workers, thresholds or clocks. Invariant: a Prediction is the sum of its named terms, so that each can be compared with what
was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pearl.sched.cost_profile import CostProfile
from pearl.sched.shape import Shape
from pearl.sched.turn_model import TurnModel
from pearl.sched.workload import Workload

Array = Any

KNOWN_SHARE = 0.99
"""Of a batch's time, of which it must be known how it was spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds for one batch: `makespan_s` = `calibration` * (wait + prefill + transfer + decode + interference + queue) + cold.

    `wait_s` is environment and overhead, `interference_s` what prefills cost those who decode beside them, `queue_s` waiting
    for room for KV; `tail_s` is the part of all these in which less than half of the batch is still under way. `cold_s`:
    contexts computed anew because workers joined. The rest describes the bulk: sequences decoding per worker, how busy prefill
    workers are, the share of turns that computed their context again, the share that did for lack of memory alone
    (`lost_share`), context over the room for it, and the share of trajectories in the split part. `unsure`: reasons why the
    figures were not measured here, and `reach` how many times as far as anything measured they lie. `infeasible`: why it cannot
    be, with an infinite makespan.
    """

    shape: Shape
    makespan_s: float
    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    interference_s: float = 0.0
    queue_s: float = 0.0
    tail_s: float = 0.0
    cold_s: float = 0.0
    calibration: float = 1.0
    decode_batch: float = 0.0
    prefill_busy: float = 0.0
    miss_share: float = 0.0
    lost_share: float = 0.0
    kv_use: float = 0.0
    split_share: float = 0.0
    unsure: tuple[str, ...] = ()
    reach: float = 1.0
    infeasible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured against predicted makespan. `ratio` is measured over predicted. For a `share` of the time, at least half of it,
    there were pools of one kind, with prefill workers or without; of these there was `shape` the longest."""

    shape: Shape
    predicted_s: float
    measured_s: float
    ratio: float
    share: float


class AnyPredictor(Protocol):
    """What a planner asks. Arrays of counts of equal length; infinite where a shape cannot be."""

    workload: Workload
    costs: CostProfile

    def makespans(self, mixed: Array, prefill: Array, decode: Array) -> Array: ...

    def predict(self, shape: Shape, joined: int = 0) -> Prediction: ...


def residual(predictor: AnyPredictor, spent: Mapping[Shape, float], measured_s: float) -> Residual | None:
    """Of a batch that took `measured_s` and spent so many seconds of it in each shape.

    In t seconds of a shape in which a batch takes T it does t / T of one; so it was predicted to do the sum of these, and did
    one. (Batches that change in each step would else never be compared. What the changes themselves cost is in it.) None if it
    is not known how all of the time was spent, or nothing was predicted for any of it.
    """
    if not 0 < measured_s < float("inf") or not sum(spent.values()) > KNOWN_SHARE * measured_s:
        return None
    done = sum(seconds / predictor.predict(shape).makespan_s for shape, seconds in spent.items())
    if not done:
        return None
    kinds = [{shape: s for shape, s in spent.items() if (shape.prefill > 0) is split} for split in (False, True)]
    most = max(kinds, key=lambda kind: sum(kind.values()))
    shape, share = max(most, key=lambda one: most[one]), sum(most.values()) / sum(spent.values())
    return Residual(shape=shape, predicted_s=measured_s / done, measured_s=measured_s, ratio=done, share=share)


def why_not(shape: Shape, workload: Workload, costs: CostProfile) -> str:
    """Why no trajectory could ever end in this shape; empty if that can be."""
    if shape.mode == "empty":
        return "nobody serves"
    if shape.mode == "broken":
        return f"{shape}: a split pool needs both prefill and decode workers"
    if workload.longest > costs.kv_capacity_tokens:
        return f"a trajectory of {workload.longest:.0f} tokens does not fit a worker's {costs.kv_capacity_tokens:.0f}"
    return ""


def beyond_measured(batch: float, workload: Workload, costs: CostProfile) -> tuple[str, ...]:
    """Reasons why step times are guessed beyond what was measured."""
    reasons = []
    if batch > costs.max_batch:
        reasons.append(f"{batch:.0f} sequences per step, measured up to {costs.max_batch:.0f}")
    if workload.context > costs.max_context:
        reasons.append(f"contexts of {workload.context:.0f} tokens, measured up to {costs.max_context:.0f}")
    return tuple(reasons)


def reach_of(batch: float, workload: Workload, costs: CostProfile) -> float:
    """How many times as large as anything measured the batch or the context is; 1 within what was measured."""
    return max(1.0, batch / costs.max_batch, workload.context / costs.max_context)


def lost_share(misses: float, other: float) -> float:
    """Of turns that do not miss for `other` reasons, the share that misses all the same, if `misses` do in all."""
    return max(0.0, 1 - (1 - misses) / (1 - other)) if other < 1 else 0.0


class Predictor:
    """The queueing model over the segments of a batch. One per (workload, costs); it holds no other state."""

    def __init__(self, workload: Workload, costs: CostProfile) -> None:
        self.workload, self.costs = workload, costs
        self._model = TurnModel(workload, costs)
        alive, turns = zip(*workload.segments(), strict=True)
        self._alive, self._turns = np.array(alive), np.array(turns)
        self._fits = not why_not(Shape(mixed=1), workload, costs)

    def makespans(self, mixed: Array, prefill: Array, decode: Array) -> Array:
        mixed, prefill, decode = (np.asarray(count, dtype=np.float64) for count in (mixed, prefill, decode))
        result = np.full(mixed.shape, np.inf)
        valid = ((prefill > 0) == (decode > 0)) & (mixed + prefill + decode > 0)
        if not self._fits or not valid.any():
            return result
        pure = valid & ((mixed == 0) | (prefill == 0))
        for chosen, beside in ((pure, False), (valid & ~pure, True)):
            if chosen.any():
                turn = self._turns_of(mixed[chosen], prefill[chosen], decode[chosen], beside).turn
                w = self.workload
                factor = np.where(prefill[chosen] > 0, w.split_calibration, w.calibration)
                result[chosen] = factor * (turn @ self._turns)
        return result

    def _turns_of(self, mixed: Array, prefill: Array, decode: Array, beside: bool) -> Any:
        mixed, prefill, decode = (count[:, None] for count in (mixed, prefill, decode))
        if beside:
            return self._model.solve_beside(decode, prefill, mixed, self._alive)
        return self._model.solve(np.where(prefill > 0, decode, mixed), prefill, self._alive)

    def predict(self, shape: Shape, joined: int = 0) -> Prediction:
        """All terms; `joined` of the workers have an empty cache."""
        infeasible = why_not(shape, self.workload, self.costs)
        if infeasible:
            return Prediction(shape=shape, makespan_s=float("inf"), infeasible=infeasible)
        counts = [np.array([float(count)]) for count in (shape.mixed, shape.prefill, shape.decode)]
        turn = self._turns_of(counts[0], counts[1], counts[2], shape.mode == "hybrid")
        names = ("wait", "prefill", "transfer", "decode", "interference", "queue")
        terms: dict[str, Any] = {f"{name}_s": float(getattr(turn, name)[0] @ self._turns) for name in names}
        gap = float(turn.turn[0] @ self._turns) - sum(terms.values())  # a turn is Little's, its terms are sums: rounding
        terms["decode_s"] += gap
        tail = self._alive < 0.5 * self._alive[0]
        factor = self.workload.calibration_of(split=shape.prefill > 0)
        cold = self._cold_s(shape, joined)
        return Prediction(
            shape=shape,
            makespan_s=factor * sum(terms.values()) + cold,
            tail_s=float(turn.turn[0][tail] @ self._turns[tail]),
            cold_s=cold,
            calibration=factor,
            decode_batch=float(turn.decode_batch[0, 0]),
            prefill_busy=float(turn.prefill_busy[0, 0]),
            miss_share=float(turn.miss_share[0, 0]),
            lost_share=lost_share(float(turn.miss_share[0, 0]), self.workload.miss_share),
            kv_use=float(turn.kv_use[0, 0]),
            split_share=float(turn.trajectories[0, 0]) / self._alive[0] if shape.prefill else 0.0,
            unsure=beyond_measured(float(turn.decode_batch[0, 0]), self.workload, self.costs),
            reach=reach_of(float(turn.decode_batch[0, 0]), self.workload, self.costs),
            **terms,
        )

    def _cold_s(self, shape: Shape, joined: int) -> float:
        """The contexts that move to `joined` empty workers, computed once by those who compute prompts."""
        moved = self.workload.concurrency * min(joined, shape.total) / shape.total
        return float(moved * self.costs.prefill_s(self.workload.context, 0.0) / (shape.prefill or shape.mixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperInputs:
    """The letters of the paper: B trajectories of S turns, dL new and r generated tokens per turn, seconds per token t_pre,
    a decode step of A + b * n seconds, T_over and T_env (a batch's), theta, KV bytes per token K over bandwidth BW, tokens of
    a trajectory K_seq and of a worker's pool H_max."""

    B: float
    S: float
    dL: float
    r: float
    t_pre: float
    A: float
    b: float
    T_over: float = 0.0
    T_env: float = 0.0
    theta: float = 0.0
    K_over_BW: float = 0.0
    K_seq: float = 0.0
    H_max: float = float("inf")


def paper_inputs(workload: Workload, costs: CostProfile) -> PaperInputs:
    """A and b are the chord of the step time between one sequence and all of the batch on two workers."""
    w, many = workload, max(2.0, workload.batch / 2)
    one, all_of_it = costs.decode_step_s(1.0, w.context), costs.decode_step_s(many, w.context)
    slope = float(all_of_it - one) / (many - 1)
    return PaperInputs(
        B=w.batch,
        S=w.turns,
        dL=w.appended,
        r=w.generated,
        t_pre=float(costs.prefill_s(w.appended, w.context)) / w.appended if w.appended else 0.0,
        A=float(one) - slope,
        b=slope,
        T_over=w.overhead_s,
        T_env=w.turns * w.env_s,
        theta=w.theta,
        K_over_BW=costs.kv_bytes_per_token / costs.transfer_bytes_per_s,
        K_seq=w.context,
        H_max=costs.kv_capacity_tokens,
    )


def paper_colocated(p: PaperInputs, workers: Array) -> Array:
    """T_coloc = S * [(B*dL/N) * t_pre + r * (A + b*B/N) + T_over] + T_env."""
    return p.S * (p.B * p.dL / workers * p.t_pre + p.r * (p.A + p.b * p.B / workers) + p.T_over) + p.T_env


def paper_decode(p: PaperInputs, workers: Array) -> Array:
    """T_dec = S * r * (A + b * B / (N_D * (1 + theta))) * (1 + theta)."""
    return p.S * p.r * (p.A + p.b * p.B / (workers * (1 + p.theta))) * (1 + p.theta)


def paper_prefill(p: PaperInputs, workers: Array) -> Array:
    """T_pre = S * ((B*dL/N_P) * t_pre + B*dL*K/BW)."""
    return p.S * (p.B * p.dL / workers * p.t_pre + p.B * p.dL * p.K_over_BW)


def paper_split(p: PaperInputs, prefill: Array, decode: Array) -> Array:
    """T_dis = max(T_pre, T_dec) + T_env."""
    return np.maximum(paper_prefill(p, prefill), paper_decode(p, decode)) + p.T_env


class PaperPredictor:
    """The closed forms: all mixed or all split, and the decode pool must hold the KV of the whole batch.

    `Workload.calibration` is left out. The system that these forms are the baseline of (docs/simulator.md) refits their letters
    after each step, as is done here, and corrects no makespan by what was measured: that is part of what it is compared with.
    So its predictions are as far off as the forms are, and residuals are logged for both alike.
    """

    def __init__(self, workload: Workload, costs: CostProfile, inputs: PaperInputs | None = None) -> None:
        self.workload, self.costs = workload, costs
        self.inputs = inputs or paper_inputs(workload, costs)

    def makespans(self, mixed: Array, prefill: Array, decode: Array) -> Array:
        mixed, prefill, decode = (np.asarray(count, dtype=np.float64) for count in (mixed, prefill, decode))
        p = self.inputs
        all_mixed = (mixed > 0) & (prefill == 0) & (decode == 0)
        some = [np.where(count > 0, count, 1.0) for count in (mixed, prefill, decode)]
        all_split = (mixed == 0) & (prefill > 0) & (decode > 0) & (p.B * p.K_seq <= some[2] * p.H_max)
        split = np.where(all_split, paper_split(p, some[1], some[2]), np.inf)
        return np.where(all_mixed, paper_colocated(p, some[0]), split)

    def predict(self, shape: Shape, joined: int = 0) -> Prediction:
        """The terms that the forms have; `joined` makes no difference here."""
        p, counts = self.inputs, (shape.mixed, shape.prefill, shape.decode)
        total = float(self.makespans(*([count] for count in counts))[0])
        per_worker = p.B / max(1, shape.decode or shape.mixed)
        unsure = beyond_measured(per_worker, self.workload, self.costs)
        reach = reach_of(per_worker, self.workload, self.costs)
        if total == float("inf"):
            short = f"{shape}: the decode pool holds {shape.decode * p.H_max:.0f} of {p.B * p.K_seq:.0f} tokens"
            hybrid = f"{shape}: the closed forms know no hybrid"
            reason = why_not(shape, self.workload, self.costs) or (hybrid if shape.mixed else short)
            return Prediction(shape=shape, makespan_s=total, infeasible=reason)
        terms: dict[str, Any] = {"wait_s": p.T_env, "decode_batch": per_worker / (1 + p.theta)}
        if shape.mode == "mixed":
            terms |= {"prefill_s": p.S * p.B * p.dL / shape.mixed * p.t_pre, "wait_s": p.S * p.T_over + p.T_env}
        else:
            prefill_s, decode_s = paper_prefill(p, shape.prefill), paper_decode(p, shape.decode)
            terms["prefill_busy"] = min(1.0, prefill_s / decode_s)
            if prefill_s > decode_s:
                terms["transfer_s"] = p.S * p.B * p.dL * p.K_over_BW
                terms["prefill_s"] = prefill_s - terms["transfer_s"]
                return Prediction(shape=shape, makespan_s=total, unsure=unsure, reach=reach, **terms)
        decode_s = total - terms["wait_s"] - terms.get("prefill_s", 0.0)
        return Prediction(shape=shape, makespan_s=total, unsure=unsure, reach=reach, decode_s=decode_s, **terms)
