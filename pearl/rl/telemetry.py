"""What an RL step teaches the cluster scheduler: engine steps as they were reported, and the batch as it was played.

Owns the sums between two steps, and how they become a `StepTelemetry`. It decides nothing. Torch-free.

Steps are gathered by their size (powers of two). A step that computed one token per running request is a decode step; of any
other, what exceeds a decode step of its requests is put down to the prompts in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pearl.protocol import Tokens
from pearl.rl.types import Group, Trajectory
from pearl.sched.profile import DecodeSample, PrefillSample, StepTelemetry
from pearl.sched.workload import QUANTILES


@dataclass(slots=True)
class _Steps:
    """Sums over steps of about one size: `size` sequences or new prompt tokens, `batch` requests beside them."""

    count: int = 0
    size: float = 0.0
    context: float = 0.0
    batch: float = 0.0
    seconds: float = 0.0

    def add(self, size: int, context: float, batch: int, seconds: float) -> None:
        self.count += 1
        self.size += size
        self.context += context
        self.batch += batch
        self.seconds += seconds


class TelemetryMeter:
    """`stepped` takes every engine step, `finish` what came of them; then the next RL step begins."""

    def __init__(self) -> None:
        self._decode: dict[int, _Steps] = {}
        self._prefill: dict[int, _Steps] = {}
        self._env_s = 0.0

    def stepped(self, event: Tokens) -> None:
        """One engine step of any member."""
        batch = len(event.updates)
        if not event.computed or not batch:
            return
        new = event.computed - batch
        context = event.context / max(1, event.running)
        steps, size = (self._prefill, new) if new > 0 else (self._decode, batch)
        steps.setdefault(size.bit_length(), _Steps()).add(size, context, batch, event.seconds)

    def finish(
        self, batch: Sequence[Group], env_s: float, *, prompt_tokens: int, cached_tokens: int, trajectories: int
    ) -> StepTelemetry:
        """What was measured since the last time, and what this batch was like.

        `env_s`: seconds in environments since the job began. `prompt_tokens` were asked for since the last time and
        `cached_tokens` of them found cached, while so many `trajectories` ended.
        """
        played = [one for group in batch for one in group.trajectories if one.turns]
        decode, prefill = self._samples()
        self._decode, self._prefill = {}, {}
        spent, self._env_s = env_s - self._env_s, env_s
        if not played:
            return StepTelemetry(trajectories=0, decode=decode, prefill=prefill)
        turns = np.array([len(one.turns) for one in played], dtype=float)
        lengths = np.array([len(one.token_ids) for one in played], dtype=float)
        first = np.array([_first_prompt(one) for one in played], dtype=float)
        generated = sum(sum(one.loss_mask) for one in played)
        appended = float(lengths.sum() - first.sum() - generated) / max(1.0, float(turns.sum() - len(played)))
        fresh = float(first.mean()) + appended * float(turns.mean() - 1)  # of a trajectory; nobody can have that cached
        known = max(1.0, prompt_tokens - trajectories * fresh)
        return StepTelemetry(
            trajectories=len(played),
            turns=float(turns.mean()),
            appended=max(0.0, appended),
            generated=generated / float(turns.sum()),
            first_prompt=float(first.mean()),
            context=float((first + lengths).mean() / 2),
            longest=float(lengths.max()),
            env_s=spent / max(1.0, trajectories * float(turns.mean())),
            miss_share=min(1.0, max(0.0, 1.0 - cached_tokens / known)),
            turn_quantiles=tuple(np.quantile(turns, QUANTILES) / turns.mean()),
            decode=decode,
            prefill=prefill,
        )

    def _samples(self) -> tuple[tuple[DecodeSample, ...], tuple[PrefillSample, ...]]:
        decode = tuple(
            DecodeSample(batch=one.size / one.count, context=one.context / one.count, seconds=_each(one), count=one.count)
            for one in self._decode.values()
            if one.seconds > 0
        )
        prefill = tuple(
            PrefillSample(
                new=one.size / one.count,
                prefix=one.context / one.count,
                seconds=max(_each(one) - _decode_s(decode, one.batch / one.count), 0.1 * _each(one)),
                count=one.count,
            )
            for one in self._prefill.values()
            if one.seconds > 0
        )
        return decode, prefill


def _each(steps: _Steps) -> float:
    return steps.seconds / steps.count


def _decode_s(samples: Sequence[DecodeSample], batch: float) -> float:
    """How long a decode step of so many sequences takes, less what a step takes in any case; 0 if nobody knows."""
    if len(samples) < 2:
        return 0.0
    sizes, seconds = [one.batch for one in samples], [one.seconds for one in samples]
    slope, _ = np.polyfit(sizes, seconds, 1, w=np.sqrt([one.count for one in samples]))
    return max(0.0, float(slope)) * batch


def _first_prompt(trajectory: Trajectory) -> int:
    return trajectory.loss_mask.index(1) if 1 in trajectory.loss_mask else len(trajectory.token_ids)
