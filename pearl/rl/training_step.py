"""One TrainStep under way on a rank: what was decided as it began, and the sums its metrics are made of.

Owns the definitions of a step's metrics. It does not know models, optimizer mathematics or collectives: the trainer adds
sums over ranks in place (`sums`, `drift`) before `metrics` divides them.
Invariant: every mean is over trained tokens (or sequences, or updates) of the whole step, on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.protocol import TrainStep
from pearl.rl.algorithms import token_weights
from pearl.rl.micro_batch import MicroBatch
from pearl.rl.objectives import MAX_LOG_RATIO, sequence_sums

PHASES = ("prepare", "score", "forward", "reference", "backward", "critic", "optimizer")
"""Parts of a step whose seconds are measured; `score` is the pass over later updates' tokens before the first update."""

DRIFT = ("gap", "fresh", "k3", "sequence_gap", "sequences", "shift", "stale")
"""Sums: |engine - trainer| log-prob over fresh tokens, their number, k3 of KL(engine || trainer) over them; the same gap of
whole fresh sequences' log-probs, their number; the first two over stale tokens."""


class TrainingStep:
    """`trained[u]` are the trained tokens of update u over all ranks; `sums` follow `metric_names`, over updates so far.

    `weights[u]` is what the losses of a sequence's tokens are multiplied by in update u, by the sequence's number. `sums` of
    the loss are of an update's loss times its trained tokens. `drift` follows DRIFT, on this rank until the step ends.
    """

    def __init__(
        self,
        *,
        command: TrainStep,
        lr: float,
        advantages: list[float],
        metric_names: tuple[str, ...],
        device: torch.device,
        aggregation: str = "token_mean",
        loss_divisor: int | None = None,
    ) -> None:
        self.command = command
        self.lr = lr
        self.advantages = advantages
        self.metric_names = metric_names
        counts = [sum(sequence.loss_mask) for sequence in command.sequences]
        self.trained, self.weights = [], []
        for ranks in command.plan.updates:
            members = [index for rank in ranks for batch in rank for index in batch]
            of_update = [counts[index] for index in members]
            self.trained.append(sum(of_update))
            self.weights.append(dict(zip(members, token_weights(of_update, aggregation, loss_divisor), strict=True)))
        self.sums = torch.zeros(len(metric_names), dtype=torch.float64, device=device)
        self.drift = torch.zeros(len(DRIFT), dtype=torch.float64, device=device)
        self.gap_max = 0.0
        self.critic: list[dict[str, float]] = []
        self.norms: list[float] = []
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @property
    def is_policy(self) -> bool:
        return self.command.objective == "policy"

    def add_drift(self, logp_N: Tensor, batch: MicroBatch) -> None:
        """Compares log-probs under the weights that the step began with to the engine's."""
        difference_N = (logp_N - batch.behaviour_N).double()
        fresh_N, stale_N = difference_N[batch.fresh_N], difference_N[batch.stale_N]
        if not len(difference_N):
            return
        sums_N, counts_N = sequence_sums(torch.where(batch.fresh_N, difference_N, 0.0), batch.sequence_N)
        shares_N = (1.0 / counts_N)[batch.fresh_N]  # of a sequence, which is fresh as a whole or not at all
        k3_N = fresh_N.clamp(max=MAX_LOG_RATIO).exp() - fresh_N - 1.0
        of_sequences = (sums_N[batch.fresh_N].abs() * shares_N).sum()
        gaps = (fresh_N.abs().sum(), fresh_N.new_tensor(len(fresh_N)), k3_N.sum(), of_sequences, shares_N.sum())
        self.drift += torch.stack((*gaps, stale_N.abs().sum(), stale_N.new_tensor(len(stale_N))))
        self.gap_max = max(self.gap_max, float(fresh_N.abs().max()) if len(fresh_N) else 0.0)

    def metrics(self, *, with_kl: bool) -> dict[str, float | None]:
        """All numbers of the finished step; None where there is nothing to average (no fresh token, no reference)."""
        total = max(1, sum(self.trained))
        means = dict(zip(self.metric_names, (self.sums / total).tolist(), strict=True))
        metrics: dict[str, float | None] = {
            "loss": means["loss"],
            "grad_norm": sum(self.norms) / max(1, len(self.norms)),
            "grad_norm_max": max(self.norms, default=0.0),
            "lr": self.lr,
            "updates": len(self.norms),
            "tokens": sum(len(sequence.token_ids) for sequence in self.command.sequences),
            "trained_tokens": sum(self.trained),
        }
        if self.is_policy:
            metrics |= self._policy_metrics(means, with_kl) | self._importance() | self._gaps() | self._critic()
        return metrics | {f"{phase}_s": seconds for phase, seconds in self.seconds.items()}

    def _policy_metrics(self, means: dict[str, float], with_kl: bool) -> dict[str, float | None]:
        size = max(1, len(self.advantages))
        return {
            "kl": means["kl"] if with_kl else None,
            "entropy": means["entropy"],
            "clip_fraction": means["clipped"],
            "ratio_mean": means["ratio"],
            "log_ratio_abs": means["log_ratio_abs"],
            "advantage_abs_mean": sum(map(abs, self.advantages)) / size,
            "advantage_max": max(self.advantages, default=0.0),
            "advantage_zero_fraction": sum(value == 0.0 for value in self.advantages) / size,
        }

    def _gaps(self) -> dict[str, float | None]:
        """Between engine and trainer over fresh tokens; over stale ones, how far the policy moved."""
        sums = dict(zip(DRIFT, self.drift.tolist(), strict=True))
        fresh, sequences, stale = sums["fresh"], sums["sequences"], sums["stale"]
        return {
            "logprob_gap": sums["gap"] / fresh if fresh else None,
            "logprob_gap_max": self.gap_max if fresh else None,
            "logprob_gap_k3": sums["k3"] / fresh if fresh else None,
            "logprob_gap_sequence": sums["sequence_gap"] / sequences if sequences else None,
            "policy_shift": sums["shift"] / stale if stale else None,
        }

    def _critic(self) -> dict[str, float | None]:
        """Means over the step's updates."""
        names = self.critic[0] if self.critic else ()
        return {name: sum(update[name] for update in self.critic) / len(self.critic) for name in names}

    def _importance(self) -> dict[str, float | None]:
        """Of the tokens that another policy than the step's first one sampled (see `policy_loss`)."""
        sums = dict(zip(self.metric_names, self.sums.tolist(), strict=True))
        count = sums["corrected"]
        return {
            "importance_weight_mean": sums["importance"] / count if count else None,
            "importance_capped": sums["capped"] / count if count else None,
        }
