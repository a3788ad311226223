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

POLICY_METRICS = ("loss", "kl", "entropy", "clipped", "ratio", "log_ratio_abs", "corrected", "importance", "capped")
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
    proximal_N: Tensor | None = None,
    corrected_N: Tensor | None = None,
    reference_NV: Tensor | None = None,
    temperature: float = 1.0,
) -> LossSums:
    """Sum over rows of `-w * min(ratio * A, clip(ratio) * A) + kl_coef * KL - entropy_coef * H`.

    `ratio = exp(logp - behaviour)` is clipped to [1 - clip_low, 1 + clip_high] (PPO, Schulman et al. 2017; with bounds of
    their own for the two sides as in DAPO, Yu et al. 2025) and w is 1. Rows in the mask `corrected_N` were sampled by another
    policy than the one the step began with, whose log-probs are `proximal_N` (None: it is the present one). For them the
    ratio is to the proximal policy, and w, without a gradient, leads from the behaviour to it (decoupled PPO, Hilton et al.
    2022): `w = min(exp(proximal - behaviour), importance_cap)` (truncated importance sampling, Ionides 2008).
    `behaviour_N=None` means that the behaviour is not known: all ratios are to the proximal policy, all w are 1.
    `reference_NV` are the reference's logits; without them the KL is 0.
    Metrics: `loss` (as returned), `kl`, `entropy` (nats), `clipped` (tokens whose gradient the clip took away), `ratio`,
    `log_ratio_abs`; `corrected` (rows), and over those `importance` (w) and `capped` (rows whose w the cap cut).
    """
    logp_NV = log_softmax(logits_NV, temperature)
    logp_N = picked(logp_NV, targets_N)
    start_N = logp_N.detach() if proximal_N is None else proximal_N
    log_ratio_N = logp_N - _denominator(start_N, behaviour_N, corrected_N)
    ratio_N = log_ratio_N.exp()
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    zero = logp_N.new_zeros(())
    importance = (zero, zero, zero)
    if behaviour_N is not None and corrected_N is not None:
        weight_N = (start_N - behaviour_N).exp()
        capped_N = corrected_N & (weight_N > options.importance_cap)
        weight_N = weight_N.clamp(max=options.importance_cap)
        surrogate_N = surrogate_N * torch.where(corrected_N, weight_N, 1.0)
        importance = (corrected_N.sum(), torch.where(corrected_N, weight_N, 0.0).sum(), capped_N.sum())
    loss = -surrogate_N.sum()
    kl = zero
    if reference_NV is not None:
        kl = _kl_sum(logp_NV, logp_N, targets_N, log_softmax(reference_NV.detach(), temperature), options)
        loss = loss + options.kl_coef * kl
    with torch.set_grad_enabled(options.entropy_coef != 0.0 and torch.is_grad_enabled()):
        entropy = -(logp_NV.exp() * logp_NV).sum()
    if options.entropy_coef != 0.0:
        loss = loss - options.entropy_coef * entropy
    clipped_N = torch.where(advantages_N > 0, ratio_N > high, ratio_N < low) & (advantages_N != 0)
    values = (loss, kl, entropy, clipped_N.sum(), ratio_N.sum(), log_ratio_N.abs().sum(), *importance)
    metrics = {name: value.detach().double() for name, value in zip(POLICY_METRICS, values, strict=True)}
    return LossSums(loss=loss, metrics=metrics, logprobs_N=logp_N.detach())


def _denominator(start_N: Tensor, behaviour_N: Tensor | None, corrected_N: Tensor | None) -> Tensor:
    """Log-probs of the policy that each row's ratio refers to."""
    if behaviour_N is None:
        return start_N
    return behaviour_N if corrected_N is None else torch.where(corrected_N, start_N, behaviour_N)


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
