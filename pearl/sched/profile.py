"""What the running job has taught about its workload and its costs, on top of a cost profile.

Owns the estimates and their confidence; it hands out frozen snapshots (`workload`, `costs`). It knows no workers and decides
nothing. Invariant: absurd telemetry changes nothing and is counted in `rejected`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pearl.sched.cost_profile import CHANGES, ChangeCost, CostProfile, DecodeCost, PrefillCost
from pearl.sched.fit import MOST_COUNTED, Average, StepFit
from pearl.sched.workload import QUANTILES, Workload

MEANS = {
    "turns": (1.0, 1e5),
    "appended": (0.0, 1e7),
    "generated": (1e-3, 1e7),
    "first_prompt": (0.0, 1e7),
    "context": (1.0, 1e8),
    "longest": (1.0, 1e8),
    "env_s": (0.0, 1e5),
    "overhead_s": (0.0, 1e4),
    "miss_share": (0.0, 1.0),
    "local_share": (0.0, 1.0),
    "local_appended": (0.0, 1e7),
    "decode_share": (1e-3, 1.0),
    "in_flight": (0.0, 1e7),
}
"""Fields of Workload that are learned, and what is believed of them."""

BY_CHANCE = ("turns", "appended", "generated", "first_prompt", "context", "longest", "env_s")
"""In which one batch differs from another without telling anything of the costs."""

LEAST_MOVING = 0.1
"""Share of what a hand-over was measured to take that is its way at least, however long taking it in is said to take."""

MOST_CALIBRATION = 4.0
SHORTEST_STEP_S, LONGEST_STEP_S, MOST_SEQUENCES, MOST_TOKENS, MOST_EAGER = 1e-9, 600.0, 1e5, 1e8, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """`count` decode steps of `batch` sequences of `context` tokens on average took `seconds` each."""

    batch: float
    context: float
    seconds: float
    count: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """`count` prompts of `new` tokens on `prefix` cached ones took `seconds` each. `beside` so many decodes: by so much longer
    than those alone the step was.
    """

    new: float
    prefix: float
    seconds: float
    count: float = 1.0
    beside: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """`count` requests that went on elsewhere, `tokens` of KV moving with each, lost `seconds` by it: until their next token,
    less its step. What the target's host spends on taking them in (`HandOverCost.take_s`) is part of it.
    """

    tokens: float
    seconds: float
    count: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTelemetry:
    """What one RL step measured, over `trajectories` of them; None where nobody measured. Names as in Workload.

    `turn_quantiles`: turns over their mean at QUANTILES.
    """

    trajectories: int
    turns: float | None = None
    appended: float | None = None
    generated: float | None = None
    first_prompt: float | None = None
    context: float | None = None
    longest: float | None = None
    env_s: float | None = None
    overhead_s: float | None = None
    miss_share: float | None = None
    local_share: float | None = None
    local_appended: float | None = None
    decode_share: float | None = None
    in_flight: float | None = None
    turn_quantiles: tuple[float, ...] = ()
    decode: tuple[DecodeSample, ...] = ()
    prefill: tuple[PrefillSample, ...] = ()
    transfer: tuple[TransferSample, ...] = ()


class RuntimeProfile:
    """Begins with `costs` and `workload` as priors, worth `prior` trajectories (or steps); `keep` per RL step is remembered.

    `measured`: whether the costs are more than a guess: of a profile that was measured before, or of steps of this job.
    """

    def __init__(
        self, costs: CostProfile, workload: Workload, *, keep: float = 0.7, prior: float = 4.0, guessed: bool = False
    ) -> None:
        self.measured = not guessed
        self.rejected: Counter[str] = Counter()
        self._costs, self._workload = costs, workload
        self.means = {
            name: Average(value=getattr(workload, name), low=low, high=high, keep=keep, prior=prior, guessed=guessed)
            for name, (low, high) in MEANS.items()
        }
        shape = workload.turn_quantiles or (1.0,) * len(QUANTILES)
        self._quantiles = [Average(value=value, low=1e-3, high=1e3, keep=keep, prior=prior, guessed=guessed) for value in shape]
        self.calibration = {
            split: Average(value=workload.calibration_of(split), low=1e-3, high=1e3, keep=keep, prior=2.0)
            for split in (False, True)
        }
        """Of pools with prefill workers (True) and without."""
        self.changes = {kind: Average(value=0.0, high=1e5, keep=keep, prior=1.0) for kind in CHANGES}
        batches, contexts = (1.0, 8.0, 32.0, 128.0), (512.0, 8192.0, 32768.0)
        self._decode = StepFit(
            _decode_coefficients(costs),
            [self._decode_row(n, c) for n in batches for c in contexts],
            keep=keep,
            guessed=guessed,
        )
        new, prefixes = (64.0, 512.0, 2048.0), (0.0, 8192.0, 32768.0)
        points = [_prefill_row(n, p, beside=False) for n in new for p in prefixes]
        self._prefill = StepFit(_prefill_coefficients(costs), points, keep=keep, guessed=guessed)
        self._beside = Average(value=0.0, keep=keep, guessed=True)
        """Decodes beside which prompts were computed."""
        moved = [(1.0, tokens) for tokens in (64.0, 512.0, 2048.0, 16384.0)]
        token_s = costs.kv_bytes_per_token / costs.transfer_bytes_per_s
        self._transfer = StepFit([costs.transfer_base_s, token_s], moved, keep=keep, guessed=guessed)
        self._seen_batch, self._seen_context = costs.max_batch, costs.max_context

    def observe(self, telemetry: StepTelemetry, lost_share: float = 0.0) -> None:
        """One finished RL step. `lost_share` of the turns missed their prefix for lack of memory, which is priced apart."""
        count = telemetry.trajectories
        for name, mean in self.means.items():
            value = getattr(telemetry, name)
            if name == "miss_share" and value is not None and 0 <= value <= 1:
                value = max(0.0, 1 - (1 - value) / max(1e-9, 1 - lost_share))
            if value is not None and not mean.observe(value, count):
                self.rejected[name] += 1
        self._observe_quantiles(telemetry)
        self._observe_decode(telemetry.decode)
        self._observe_prefill(telemetry.prefill)
        self._observe_transfer(telemetry.transfer)

    def observe_change(self, kind: str, seconds: float, workers: int = 1) -> None:
        """A change (one of CHANGES) of `workers` took `seconds`; learned as a factor on the profile's cost."""
        if kind not in CHANGES:
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(CHANGES)}")
        mean = self.changes[kind]
        value = seconds / self._unit_s(kind, max(1, workers))
        if mean.weight == 0 and math.isfinite(value) and value > 0:
            mean.value = min(value, 100.0)  # the first measurement tells more than the profile, unless it is absurd
        if not mean.observe(value):
            self.rejected[kind] += 1

    def observe_residual(self, ratio: float, split: bool, share: float = 1.0) -> None:
        """Measured over predicted makespan, the prediction being one of `workload()` at its present calibration, of a pool with
        prefill workers or without. A batch that was there for a `share` of its time counts for so much. What nobody has tried
        yet is believed to be as far off as what was."""
        mean, other = self.calibration[split], self.calibration[not split]
        if not mean.observe(self._calibration(split) * ratio, share):
            self.rejected["calibration"] += 1
        elif not other.weight:
            other.value = mean.value

    def _calibration(self, split: bool) -> float:
        """As predictions use it."""
        return min(MOST_CALIBRATION, max(1 / MOST_CALIBRATION, self.calibration[split].value))

    def change_s(self, kind: str, workers: int, cautious: bool = False) -> float:
        """Expected seconds of a change of so many workers; `cautious`: seldom exceeded."""
        mean = self.changes[kind]
        if mean.weight == 0:
            return float(getattr(self._costs, kind).seconds(workers))
        return (mean.cautious if cautious else mean.value) * self._unit_s(kind, workers) if workers else 0.0

    def _unit_s(self, kind: str, workers: int) -> float:
        """The profile's cost; a second where it has none, so that a factor is seconds."""
        return float(getattr(self._costs, kind).seconds(workers)) or 1.0

    def workload(self, batch: float | None = None) -> Workload:
        """The present estimate."""
        learned: dict[str, Any] = {name: mean.value for name, mean in self.means.items()}
        learned["longest"] = max(learned["longest"], learned["context"])
        observed = self._workload.turn_quantiles or any(one.weight for one in self._quantiles)
        marks = tuple(np.maximum.accumulate([one.value for one in self._quantiles]).tolist()) if observed else ()
        learned |= {"calibration": self._calibration(False), "split_calibration": self._calibration(True)}
        return replace(self._workload, batch=batch or self._workload.batch, turn_quantiles=marks, **learned)

    def workload_of(self, telemetry: StepTelemetry, batch: float | None = None) -> Workload:
        """The present estimate, but for what this very batch was like."""
        told = {name: getattr(telemetry, name) for name in BY_CHANCE}
        known = {name: value for name, value in told.items() if value is not None and MEANS[name][0] <= value <= MEANS[name][1]}
        present = self.workload(batch)
        context = known.get("context", present.context)
        known["longest"] = max(known.get("longest", present.longest), context)
        if _rising(telemetry.turn_quantiles):
            known["turn_quantiles"] = telemetry.turn_quantiles
        return replace(present, **known)

    def costs(self) -> CostProfile:
        """The present estimate. Of what was measured of steps, the profile's part is host time, as much slower or faster as
        both kinds are; `max_batch` and `max_context` grow with what was seen.
        """
        base, per_seq, per_context, experts = (float(value) for value in self._decode.coefficients)
        start, _, per_token, per_pair = (float(value) for value in self._prefill.coefficients)
        host_s = min(self._costs.step_overhead_s * min(self._decode.scale, self._prefill.scale), base, start)
        decode = DecodeCost(
            base_s=base - host_s,
            per_seq_s=per_seq,
            per_context_s=per_context,
            experts_s=experts,
            expert_keep=self._costs.decode.expert_keep,
        )
        prefill = PrefillCost(base_s=start - host_s, per_token_s=max(per_token, 1e-12), per_pair_s=per_pair)
        wait_s, token_s = (float(value) for value in self._transfer.coefficients)
        learned: dict[str, Any] = {kind: self._change(kind) for kind in CHANGES} | self._beside_costs(decode, host_s)
        return replace(
            self._costs,
            decode=decode,
            prefill=prefill,
            transfer_bytes_per_s=self._costs.kv_bytes_per_token / max(token_s, 1e-12),
            transfer_base_s=wait_s,
            step_overhead_s=host_s,
            max_batch=self._seen_batch,
            max_context=self._seen_context,
            **learned,
        )

    def confidence(self) -> dict[str, float]:
        """0 (the prior alone) to 1, by name."""
        fits = {"decode": self._decode, "prefill": self._prefill, "transfer": self._transfer}
        learned = {name: fit.weight / (fit.weight + fit.prior) for name, fit in fits.items()}
        return {name: mean.confidence for name, mean in self.means.items()} | learned

    def _beside_costs(self, decode: DecodeCost, host_s: float) -> dict[str, float]:
        """What a turn's prompt costs those who decode beside it: the share of what it costs alone without host time, or, if it
        is more than that, so many times longer decodes as explain the rest. Nothing, where nobody has seen such steps."""
        if not self._beside.weight:
            return {}
        learned = {name: mean.value for name, mean in self.means.items()}
        new, context = learned["appended"] + learned["first_prompt"] / learned["turns"], learned["context"]
        rows = [_prefill_row(max(1.0, new), context, beside=side) for side in (False, True)]
        alone_s, beside_s = (float(np.dot(row, self._prefill.coefficients)) for row in rows)
        alone_s = max(1e-9, alone_s - host_s)
        longer_s, step_s = max(0.0, beside_s - alone_s), max(1e-9, float(decode.seconds(max(1.0, self._beside.value), context)))
        return {"mixing": min(1.0, beside_s / alone_s), "eager": 1.0 + min(longer_s / step_s, MOST_EAGER)}

    def _change(self, kind: str) -> ChangeCost:
        """The profile's cost of `kind`, times the factor that was learned."""
        given: ChangeCost = getattr(self._costs, kind)
        mean = self.changes[kind]
        if mean.weight == 0:
            return given
        if given.seconds(1) == 0:
            return ChangeCost(fixed_s=mean.value)
        return ChangeCost(fixed_s=given.fixed_s * mean.value, per_worker_s=given.per_worker_s * mean.value)

    def _observe_quantiles(self, telemetry: StepTelemetry) -> None:
        marks = telemetry.turn_quantiles
        if not marks:
            return
        if not _rising(marks):
            self.rejected["turn_quantiles"] += 1
            return
        for mean, mark in zip(self._quantiles, marks, strict=True):
            mean.observe(mark, telemetry.trajectories)

    def _observe_decode(self, samples: tuple[DecodeSample, ...]) -> None:
        good = [one for one in samples if _sound(one.seconds, one.count, one.batch, MOST_SEQUENCES, one.context)]
        self.rejected["decode"] += len(samples) - len(good)
        if good:
            self.measured = True
            rows = [self._decode_row(one.batch, one.context) for one in good]
            self._decode.observe(rows, [one.seconds for one in good], [one.count for one in good])
            self._seen_batch = max(self._seen_batch, *(one.batch for one in good))
            self._seen_context = max(self._seen_context, *(one.context for one in good))

    def _observe_prefill(self, samples: tuple[PrefillSample, ...]) -> None:
        good = [one for one in samples if _sound(one.seconds, one.count, one.new, MOST_TOKENS, one.prefix)]
        good = [one for one in good if 0 <= one.beside <= MOST_SEQUENCES]
        self.rejected["prefill"] += len(samples) - len(good)
        if good:
            rows = [_prefill_row(one.new, one.prefix, one.beside > 0) for one in good]
            self._prefill.observe(rows, [one.seconds for one in good], [one.count for one in good])
            near = [one for one in good if one.beside > 0]
            if near:
                counts = sum(one.count for one in near)
                self._beside.observe(sum(one.beside * one.count for one in near) / counts, counts)

    def _observe_transfer(self, samples: tuple[TransferSample, ...]) -> None:
        good = [one for one in samples if _sound(one.seconds, one.count, one.tokens, MOST_TOKENS, 0.0)]
        self.rejected["transfer"] += len(samples) - len(good)
        if good:
            taking = self._costs.hand_over.take_s  # is priced apart
            seconds = [max(one.seconds - taking, LEAST_MOVING * one.seconds) for one in good]
            self._transfer.observe([(1.0, one.tokens) for one in good], seconds, [one.count for one in good])

    def _decode_row(self, batch: float, context: float) -> list[float]:
        keep = self._costs.decode.expert_keep
        return [1.0, batch, batch * context, 1.0 - keep**batch if keep else 0.0]


def _rising(marks: tuple[float, ...]) -> bool:
    """Whether these can be turns at QUANTILES."""
    sound = len(marks) == len(QUANTILES) and all(math.isfinite(mark) and mark > 0 for mark in marks)
    return sound and list(marks) == sorted(marks)


def _prefill_row(new: float, prefix: float, beside: bool) -> list[float]:
    """A prompt beside decodes has a start of its own: they read the weights in the same step."""
    return [float(not beside), float(beside), new, new * (prefix + new / 2)]


def _decode_coefficients(costs: CostProfile) -> list[float]:
    cost = costs.decode
    return [cost.base_s + costs.step_overhead_s, cost.per_seq_s, cost.per_context_s, cost.experts_s]


def _prefill_coefficients(costs: CostProfile) -> list[float]:
    start = costs.prefill.base_s + costs.prefill.per_prompt_s
    return [start + costs.step_overhead_s, start, costs.prefill.per_token_s, costs.prefill.per_pair_s]


def _sound(seconds: float, count: float, size: float, most: float, context: float) -> bool:
    """Whether these can be a time, a number of times, a number of sequences or tokens, and of tokens before them."""
    counts = 1 <= count <= MOST_COUNTED and 1 <= size <= most and 0 <= context <= MOST_TOKENS
    return counts and SHORTEST_STEP_S <= seconds <= LONGEST_STEP_S
