"""The numbers of a step: what a batch was like, and where the step's time went. docs/metrics.md explains each key."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from pearl.clock import Clock
from pearl.protocol import Done
from pearl.rl.collector import Collector
from pearl.rl.layout import JobLayout
from pearl.rl.types import Group, Trajectory

TRAINER_METRICS = (
    "loss",
    "kl",
    "entropy",
    "clip_fraction",
    "ratio_mean",
    "grad_norm",
    "lr",
    "logprob_gap",
    "logprob_gap_max",
    "logprob_gap_k3",
    "logprob_gap_sequence",
    "policy_shift",
    "importance_weight_mean",
    "importance_capped",
    "value_loss",
    "explained_variance",
    "critic_grad_norm",
    "trained_tokens",
)
"""What a step's row takes over from the trainer."""


PROMPTS_KEPT = 64
"""First prompts of groups whose text is remembered."""
WAITED_SHARE = 0.5
"""A batch was what the run waited for if so much of the time since the last one was spent waiting for it."""


def batch_metrics(batch: list[Group], weight_version: int) -> dict[str, Any]:
    """Rewards, successes, turns and staleness of a batch that was trained from `weight_version`."""
    members = [trajectory for group in batch for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in members])
    turns = [turn for trajectory in members for turn in trajectory.turns]
    staleness = [weight_version - oldest for trajectory in members if (oldest := trajectory.oldest_version) >= 0]
    flat = [len({trajectory.reward for trajectory in group.trajectories}) == 1 for group in batch]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "success_rate": float(np.mean([trajectory.success for trajectory in members])),
        "turns_mean": len(turns) / len(members),
        "invalid_rate": float(np.mean([bool(turn.info.get("invalid")) for turn in turns])) if turns else 0.0,
        "zero_variance_groups": float(np.mean(flat)),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "staleness_max": max(staleness, default=0),
        "batch_tokens": sum(len(trajectory.token_ids) for trajectory in members),
    }


class StepMeter:
    """Splits the time of each step: waiting for trajectories, training, publishing, the rest.

    `barrier`: a batch is played from its step's beginning, not while others train.
    """

    def __init__(self, clock: Clock, collector: Collector, layout: JobLayout, *, barrier: bool = False) -> None:
        self._barrier = barrier
        self._serving_ranks = len(layout.serving)
        self._takes_turns = layout.takes_turns
        self._clock = clock
        self._collector = collector
        self._began = clock.now()
        self._first = self._began
        self._collected = self._began
        self._counts = dict(collector.counts)
        self._engine_s = collector.engine_seconds
        self._env_s = collector.env_seconds
        self._cpu_s = time.process_time()

    def collected(self) -> float | None:
        """The batch is complete; training begins. How long its rollout took, None if the run waited for something else.

        Where trajectories are played while others train, that is the time from one batch to the next, if most of it was
        spent waiting for the batch.
        """
        before, self._collected = self._collected, self._clock.now()
        waited, since = self._collected - self._began, self._collected - before
        if self._barrier:
            return waited
        return since if waited > WAITED_SHARE * since else None

    def finish(self, trained: Done, published: dict[int, Done], eval_s: float) -> dict[str, Any]:
        """The step is over: its times and rates; the next step begins now."""
        publish_s = max(done.seconds for done in published.values())
        pauses = [done.metrics.get("commit_s") or 0.0 for done in published.values()]
        now = self._clock.now()
        counts = {name: count - self._counts[name] for name, count in self._collector.counts.items()}
        total, rollout_s = now - self._began, self._collected - self._began
        engine_s = self._collector.engine_seconds - self._engine_s
        env_s = self._collector.env_seconds - self._env_s
        cpu_s = time.process_time()
        work_s = engine_s + env_s + trained.seconds + publish_s + eval_s
        row: dict[str, Any] = {
            "time_s": total,
            "elapsed_s": now - self._first,
            "rollout_s": rollout_s,
            "train_s": trained.seconds,
            "publish_s": publish_s,
            "eval_s": eval_s,
            "other_s": total - rollout_s - trained.seconds - publish_s - eval_s,
            "engine_s": engine_s,
            "env_s": env_s,
            "controller_cpu_s": cpu_s - self._cpu_s,
            "overhead_s": max(0.0, total - work_s) if self._takes_turns else None,
            "train_busy": trained.seconds / total,
            "serve_busy": engine_s / total / self._serving_ranks,
            "publish_pause_s": max(pauses),
            "generated_tokens": counts["generated_tokens"],
            "tokens_per_s": (counts["generated_tokens"] + (trained.metrics.get("tokens") or 0)) / total,
            "prefix_hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
        }
        row |= {name: trained.metrics.get(name) for name in TRAINER_METRICS} | self._collector.token_books()
        self._cpu_s = cpu_s
        self._began, self._counts = now, dict(self._collector.counts)
        self._engine_s, self._env_s = self._collector.engine_seconds, self._collector.env_seconds
        return row

class EpisodeRows:
    """Trajectories as lines of trajectories.jsonl: text for people, ids for machines. `decode` makes text of ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._prompts: dict[int, tuple[list[int], str]] = {}
        """Of groups: ids of a first prompt and their text, the one asked for last at the end."""

    def row(self, trajectory: Trajectory) -> dict[str, Any]:
        """All but the `step` in which it ended."""
        return {"prompt": self._prompt_of(trajectory)} | episode_row(trajectory)

    def _prompt_of(self, trajectory: Trajectory) -> str:
        """The text before the first sampled token. Siblings have the same, and end one after the other."""
        mask = trajectory.loss_mask
        ids = trajectory.token_ids[: mask.index(1)] if 1 in mask else trajectory.token_ids
        known, text = self._prompts.pop(trajectory.group_id, ([], ""))
        if known != ids:
            text = self._decode(ids)
        self._prompts[trajectory.group_id] = list(ids), text
        if len(self._prompts) > PROMPTS_KEPT:
            del self._prompts[next(iter(self._prompts))]
        return text


def episode_row(trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory was, without its first prompt as text. `logprobs` are of the sampled tokens alone, those with loss
    mask 1."""
    versions = set(trajectory.weight_versions)
    return {
        "trajectory_id": trajectory.trajectory_id,
        "env_seed": trajectory.env_seed,
        "outcome": trajectory.outcome,
        "error": trajectory.error,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "turns": trajectory.turns,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": np.array(list(compress(trajectory.logprobs, trajectory.loss_mask))).round(4).tolist(),
        "weight_versions": [min(versions - {-1}, default=-1), max(versions, default=-1)],
    }
