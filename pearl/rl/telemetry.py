"""What an RL step teaches the cluster scheduler: engine steps as they were reported, and the batch as it was played.

Owns the sums between two steps, and how they become a `StepTelemetry`. It decides nothing. Torch-free.

Steps are gathered by their size, by the members already (`token_report.py`); `sched/step_samples.py` says what they cost. A
hand-over lasts from its offer to the first token after it, less the step that made that token. Invariant: no member fills
the memory with offers that nobody goes on with: beyond MOST_OFFERS the oldest is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.protocol import HandedOff, KVTransfer, Tokens
from pearl.rl.types import Group, Trajectory
from pearl.sched.profile import StepTelemetry, TransferSample
from pearl.sched.step_samples import StepSamples
from pearl.sched.workload import QUANTILES

LONGEST_MOVE_S = 60.0
"""An offer that nobody went on with for so long is forgotten."""

MOST_OFFERS = 16_384
"""Open at a time: far more than requests are under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A request on its way: `tokens` is None for what a prefill worker hands over, of which the taker has a part."""

    rank: int
    at: float
    tokens: int | None


class TelemetryMeter:
    """`stepped` takes what members say of their engine steps, `handed_off` every offer, `playing` how many trajectories are
    under way; `finish` says what came of them, and then the next RL step begins. Times are of the caller's clock.
    """

    def __init__(self) -> None:
        self._steps = StepSamples()
        self._moves: list[tuple[int | None, float]] = []
        self._offers: dict[str, _Offer] = {}
        self._env_s = 0.0
        self._flight = self._flight_s = 0.0
        self._flight_at: float | None = None

    def stepped(self, event: Tokens, now: float) -> None:
        """Engine steps of any member."""
        if self._offers:
            self._end_moves(event, now)
        for sums in event.steps:
            self._steps.add(sums)

    def handed_off(self, event: HandedOff, now: float) -> None:
        """A member offers requests."""
        for transfer in event.transfers:
            self._offers.pop(transfer.request_id, None)
            self._offers[transfer.request_id] = _Offer(rank=event.rank, at=now, tokens=_whole(transfer))
        while len(self._offers) > MOST_OFFERS:
            del self._offers[next(iter(self._offers))]

    def playing(self, trajectories: int, now: float) -> None:
        """So many are under way, and were since the last call."""
        if self._flight_at is not None:
            self._flight += trajectories * (now - self._flight_at)
            self._flight_s += now - self._flight_at
        self._flight_at = now

    def finish(
        self,
        batch: Sequence[Group],
        env_s: float,
        *,
        miss_share: float | None,
        trajectories: int,
        local_tokens: int,
        now: float,
    ) -> StepTelemetry:
        """What was measured since the last time, and what this batch was like.

        `env_s`: seconds in environments since the job began. So many `trajectories` ended since the last time, and their
        turns missed `miss_share` of what could be cached (`sched/found_prefixes.py`). `local_tokens`: up to so many that the
        environment adds are computed where their session's KV is, if that is a decode worker.
        """
        played = [one for group in batch for one in group.trajectories if one.turns]
        decode_share = self._steps.decode_share(self._flight)
        decode, prefill = self._steps.take()
        spent, self._env_s = env_s - self._env_s, env_s
        flight = self._flight / self._flight_s if self._flight_s else None
        moves = self._begin_again(now)
        if not played:
            return StepTelemetry(trajectories=0, decode=decode, prefill=prefill)
        turns = np.array([len(one.turns) for one in played], dtype=float)
        lengths = np.array([len(one.token_ids) for one in played], dtype=float)
        first = np.array([_first_prompt(one) for one in played], dtype=float)
        generated = sum(sum(one.loss_mask) for one in played)
        appended = float(lengths.sum() - first.sum() - generated) / float(turns.sum())
        local = [size for one in played for size in _local_appends(one, local_tokens)]
        per_turn = appended + float(first.mean()) / float(turns.mean())
        return StepTelemetry(
            trajectories=len(played),
            turns=float(turns.mean()),
            appended=max(0.0, appended),
            generated=generated / float(turns.sum()),
            first_prompt=float(first.mean()),
            context=float((first + lengths).mean() / 2),
            longest=float(lengths.max()),
            env_s=spent / max(1.0, trajectories * float(turns.mean())),
            miss_share=miss_share,
            local_share=len(local) / float(turns.sum()),
            local_appended=float(np.mean(local)) if local else None,
            decode_share=decode_share,
            in_flight=flight,
            turn_quantiles=tuple(np.quantile(turns, QUANTILES) / turns.mean()),
            decode=decode,
            prefill=prefill,
            transfer=_transfers(moves, per_turn),
        )

    def _end_moves(self, event: Tokens, now: float) -> None:
        """Hand-overs of which this is the first word after them."""
        for update in event.updates:
            offer = self._offers.pop(update.request_id, None)
            if offer is not None and update.token_ids and event.rank != offer.rank:
                self._moves.append((offer.tokens, max(0.0, now - offer.at - event.step_s)))

    def _begin_again(self, now: float) -> list[tuple[int | None, float]]:
        """Empties the sums; the hand-overs that there were."""
        moves, self._moves = self._moves, []
        self._flight = self._flight_s = 0.0
        self._offers = {name: offer for name, offer in self._offers.items() if now - offer.at < LONGEST_MOVE_S}
        return moves


def _whole(transfer: KVTransfer) -> int | None:
    """Tokens that move, if it is all of the request's; None for a prompt with its first token, which its session's last decode
    worker takes as a rule."""
    state = transfer.state
    return None if len(state.token_ids) == state.num_prompt_tokens + 1 else transfer.num_written_tokens


def _transfers(moves: Sequence[tuple[int | None, float]], per_turn: float) -> tuple[TransferSample, ...]:
    """`per_turn`: new tokens of a turn."""
    kinds = [[(per_turn if size is None else size, s) for size, s in moves if (size is None) is turn] for turn in (True, False)]
    means = [(np.mean(rows, axis=0), len(rows)) for rows in kinds if rows]
    return tuple(TransferSample(tokens=float(mean[0]), seconds=float(mean[1]), count=count) for mean, count in means)


def _first_prompt(trajectory: Trajectory) -> int:
    return trajectory.loss_mask.index(1) if 1 in trajectory.loss_mask else len(trajectory.token_ids)


def _local_appends(trajectory: Trajectory, most: int) -> list[int]:
    """Tokens that the environment added, for each later turn to which it added `most` at most."""
    edges: Any = np.flatnonzero(np.diff(np.array([0, *trajectory.loss_mask])))
    starts, ends = edges[::2], edges[1::2]  # of what was sampled
    return [int(size) for size in starts[1:] - ends[: len(starts) - 1] if size <= most]
