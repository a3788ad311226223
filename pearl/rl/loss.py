"""The losses, as sums over trained tokens: clipped policy gradient with KL and entropy terms, and cross entropy.

Owns formulae on rows that were gathered already. It does not know models, packing, ranks or optimizers: whoever calls
divides the sums by the trained tokens of the whole optimizer update (over its micro-batches and ranks), which makes the
gradient a token mean that no way of splitting the update can change.
Invariant: no rows give a loss of 0 that still has a graph, and finite metrics.

Shapes: N trained tokens (rows), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.config import AlgorithmOptions

POLICY_METRICS = ("loss", "kl", "entropy", "clipped", "ratio", "log_ratio_abs")
"""Keys of LossSums.metrics of `policy_loss`."""

SFT_METRICS = ("loss",)
"""Keys of LossSums.metrics of `sft_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over rows. `loss` has a graph; `metrics` (scalars) and `logprobs_N` (of the targets) are detached."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprobs_N: Tensor


def log_softmax(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of the distribution that tokens are drawn from, `softmax(logits / temperature)`, in the logits' dtype."""
    return torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)


def picked(logp_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The log-prob of each row's target."""
    return logp_NV.gather(1, targets_N[:, None]).squeeze(1)


def policy_loss(
    logits_NV: Tensor,
    targets_N: Tensor,
    behaviour_N: Tensor | None,
    advantages_N: Tensor,
    options: AlgorithmOptions,
    *,
    reference_NV: Tensor | None = None,
    temperature: float = 1.0,
) -> LossSums:
    """Sum over rows of `-min(ratio * A, clip(ratio) * A) + kl_coef * KL - entropy_coef * H`.

    `ratio = exp(logp - behaviour)` is clipped to [1 - clip_low, 1 + clip_high] (PPO, Schulman et al. 2017; with bounds of
    their own for the two sides as in DAPO, Yu et al. 2025). `behaviour_N=None` means that the present policy is the
    behaviour: the ratio is 1 and carries the gradient. `reference_NV` are the reference's logits; without them the KL
    is 0. Metrics: `loss` (as returned), `kl`, `entropy` (nats), `clipped` (tokens whose gradient the clip took away), `ratio`,
    `log_ratio_abs`.
    """
    logp_NV = log_softmax(logits_NV, temperature)
    logp_N = picked(logp_NV, targets_N)
    log_ratio_N = logp_N - (logp_N.detach() if behaviour_N is None else behaviour_N)
    ratio_N = log_ratio_N.exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    loss = -surrogate_N.sum()
    kl = loss.new_zeros(())
    if reference_NV is not None:
        kl = _kl_sum(logp_NV, logp_N, targets_N, log_softmax(reference_NV.detach(), temperature), options)
        loss = loss + options.kl_coef * kl
    with torch.set_grad_enabled(options.entropy_coef != 0.0 and torch.is_grad_enabled()):
        entropy = -(logp_NV.exp() * logp_NV).sum()
    if options.entropy_coef != 0.0:
        loss = loss - options.entropy_coef * entropy
    clipped_N = torch.where(advantages_N > 0, ratio_N > high, ratio_N < low) & (advantages_N != 0)
    values = (loss, kl, entropy, clipped_N.sum(), ratio_N.sum(), log_ratio_N.abs().sum())
    metrics = {name: value.detach().double() for name, value in zip(POLICY_METRICS, values, strict=True)}
    return LossSums(loss=loss, metrics=metrics, logprobs_N=logp_N.detach())


def _kl_sum(logp_NV: Tensor, logp_N: Tensor, targets_N: Tensor, logq_NV: Tensor, options: AlgorithmOptions) -> Tensor:
    if options.kl_estimator == "exact":
        return exact_kl(logp_NV, logq_NV).sum()
    return k3(logp_N, picked(logq_NV, targets_N)).sum()


def exact_kl(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """KL(p || q) of each row in nats, summed over the vocabulary: sum_v p (log p - log q). Its gradient is exact too."""
    return (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1)


def k3(logp_N: Tensor, logq_N: Tensor) -> Tensor:
    """Schulman's (2020) estimate of KL(p || q) from one sample: exp(q - p) - (q - p) - 1, never clamped.

    Clamping it would take the gradient away exactly where the policy has drifted furthest.
    """
    difference_N = logq_N - logp_N
    return difference_N.exp() - difference_N - 1.0


def sft_loss(logits_NV: Tensor, targets_N: Tensor) -> LossSums:
    """Sum of the cross entropy of the targets, in nats."""
    logp_N = picked(log_softmax(logits_NV), targets_N)
    loss = -logp_N.sum()
    return LossSums(loss=loss, metrics={"loss": loss.detach().double()}, logprobs_N=logp_N.detach())
