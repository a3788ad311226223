"""One TrainStep under way on a rank: what was decided as it began, and the sums its metrics are made of.

Owns the definitions of a step's metrics. It does not know models, optimizer mathematics or collectives: the trainer adds
sums over ranks in place (`sums`, `drift`) before `metrics` divides them.
Invariant: every mean is over trained tokens (or sequences, or updates) of the whole step, on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.protocol import TrainStep
from pearl.rl.micro_batch import MicroBatch

PHASES = ("prepare", "score", "forward", "reference", "backward", "optimizer")
"""Parts of a step whose seconds are measured; `score` is the pass over later updates' tokens before the first update."""


class TrainingStep:
    """`trained[u]` are the trained tokens of update u over all ranks; `sums` follow `metric_names`, over updates so far.

    `drift` is (sum of |engine - trainer| log-prob over fresh tokens, their count, the same two over stale tokens).
    """

    def __init__(
        self,
        *,
        command: TrainStep,
        lr: float,
        optimizer: torch.optim.Optimizer,
        advantages: list[float],
        metric_names: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self.command = command
        self.lr = lr
        self.optimizer = optimizer
        self.advantages = advantages
        self.metric_names = metric_names
        counts = [sum(sequence.loss_mask) for sequence in command.sequences]
        self.trained = [sum(counts[i] for rank in ranks for batch in rank for i in batch) for ranks in command.plan.updates]
        self.sums = torch.zeros(len(metric_names), dtype=torch.float64, device=device)
        self.drift = torch.zeros(4, dtype=torch.float64, device=device)
        self.norms: list[float] = []
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @property
    def is_policy(self) -> bool:
        return self.command.objective == "policy"

    def add_drift(self, logp_N: Tensor, batch: MicroBatch) -> None:
        """Compares log-probs under the weights that the step began with to the engine's."""
        difference_N = (logp_N - batch.behaviour_N).abs().double()
        zero = difference_N.new_zeros(())
        for place, chosen_N in ((0, batch.fresh_N), (2, batch.stale_N)):
            self.drift[place] += torch.where(chosen_N, difference_N, zero).sum()
            self.drift[place + 1] += chosen_N.sum()

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
            metrics |= self._policy_metrics(means, with_kl) | self._importance()
        return metrics | {f"{phase}_s": seconds for phase, seconds in self.seconds.items()}

    def _policy_metrics(self, means: dict[str, float], with_kl: bool) -> dict[str, float | None]:
        gap, gap_count, shift, shift_count = self.drift.tolist()
        size = max(1, len(self.advantages))
        return {
            "kl": means["kl"] if with_kl else None,
            "entropy": means["entropy"],
            "clip_fraction": means["clipped"],
            "ratio_mean": means["ratio"],
            "log_ratio_abs": means["log_ratio_abs"],
            "logprob_gap": gap / gap_count if gap_count else None,
            "policy_shift": shift / shift_count if shift_count else None,
            "advantage_abs_mean": sum(map(abs, self.advantages)) / size,
            "advantage_max": max(self.advantages, default=0.0),
            "advantage_zero_fraction": sum(value == 0.0 for value in self.advantages) / size,
        }

    def _importance(self) -> dict[str, float | None]:
        """Of the tokens that another policy than the step's first one sampled (see `policy_loss`)."""
        sums = dict(zip(self.metric_names, self.sums.tolist(), strict=True))
        count = sums["corrected"]
        return {
            "importance_weight_mean": sums["importance"] / count if count else None,
            "importance_capped": sums["capped"] / count if count else None,
        }
