"""The losses, as weighted sums over trained tokens: policy objective with importance, KL and entropy terms; cross entropy.

Owns formulae on rows that were gathered already. It does not know models, packing, ranks or optimizers: each row's weight
has the aggregation in it, its divisor being of the whole optimizer update (over micro-batches and ranks), so that no way of
splitting the update changes the gradient.
Invariant: no rows give a loss of 0 that still has a graph, and finite metrics.

Shapes: N trained tokens (rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.rl.algorithms import Algorithm
from pearl.rl.objectives import MAX_LOG_RATIO, OBJECTIVES, sequence_sums
from pearl.rl.token_terms import TokenTerms

POLICY_METRICS = ("loss", "kl", "entropy", "clipped", "ratio", "log_ratio_abs", "corrected", "importance", "capped")
"""Keys of LossSums.metrics of `policy_loss`."""

SFT_METRICS = ("loss",)
"""Keys of LossSums.metrics of `sft_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRows:
    """What is known of each row beside the policy's own terms.

    `behaviour_N` are log-probs of the policy that sampled the token (None: not known), `proximal_N` those of the policy that
    the step began with (None: it is the present one), `corrected_N` the rows to be weighted by their importance (None:
    none). `sequence_N` says whose the row is; rows of a sequence are consecutive and all here. `reference_N` are the
    reference's log-probs (None: no KL in the loss; an exact KL is in the policy's terms already, and needs no values here).
    """

    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    behaviour_N: Tensor | None
    proximal_N: Tensor | None = None
    corrected_N: Tensor | None = None
    reference_N: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over rows, `loss` weighted and with a graph, `metrics` (scalars) plain; these and `logprobs_N` are detached."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprobs_N: Tensor


def policy_loss(terms: TokenTerms, rows: PolicyRows, algorithm: Algorithm) -> LossSums:
    """The weighted sum over rows of `-w * objective(log-ratio, advantage) + kl_coef * KL - entropy_coef * H`.

    The log-ratio is to the behaviour, and w is 1. For corrected rows the log-ratio is to the proximal policy, and w, without a
    gradient, leads from the behaviour to it (decoupled PPO, Hilton et al. 2022), see `importance`. Where the behaviour is
    not known, all ratios are to the proximal policy.
    Metrics: `loss` (as returned), `kl`, `entropy` (nats), `clipped` (tokens whose ratio the clip cut), `ratio`,
    `log_ratio_abs`; `corrected` (rows), and over those `importance` (w) and `capped` (rows whose w the cap cut).
    """
    options, logp_N = algorithm.options, terms.logprobs_N
    start_N = logp_N.detach() if rows.proximal_N is None else rows.proximal_N
    log_ratio_N = logp_N - _denominator(start_N, rows)
    surrogate = OBJECTIVES[algorithm.objective](log_ratio_N, rows.advantages_N, rows.sequence_N, algorithm)
    values_N, zero = surrogate.values_N, logp_N.new_zeros(())
    counts = (zero, zero, zero)
    if rows.behaviour_N is not None and rows.corrected_N is not None:
        weight_N, capped_N = importance(start_N - rows.behaviour_N, rows.corrected_N, rows.sequence_N, algorithm)
        values_N = values_N * torch.where(rows.corrected_N, weight_N, 1.0)
        counts = (rows.corrected_N.sum(), torch.where(rows.corrected_N, weight_N, 0.0).sum(), capped_N.sum())
    loss_N, kl = -values_N, zero
    if rows.reference_N is not None:
        kl_N = kl_terms(terms, rows.reference_N, options.kl_estimator)
        loss_N, kl = loss_N + options.kl_coef * kl_N, kl_N.sum()
    if options.entropy_coef != 0.0:
        loss_N = loss_N - options.entropy_coef * terms.entropy_N
    loss = (loss_N * rows.weights_N).sum()
    ratio = log_ratio_N.detach().clamp(max=MAX_LOG_RATIO).exp().sum()
    sums = (loss, kl, terms.entropy_N.sum(), surrogate.clipped_N.sum(), ratio, log_ratio_N.abs().sum(), *counts)
    metrics = {name: value.detach().double() for name, value in zip(POLICY_METRICS, sums, strict=True)}
    return LossSums(loss=loss, metrics=metrics, logprobs_N=logp_N.detach())


def _denominator(start_N: Tensor, rows: PolicyRows) -> Tensor:
    """Log-probs of the policy that each row's ratio refers to."""
    if rows.behaviour_N is None:
        return start_N
    return rows.behaviour_N if rows.corrected_N is None else torch.where(rows.corrected_N, start_N, rows.behaviour_N)


@torch.no_grad()
def importance(log_weight_N: Tensor, corrected_N: Tensor, sequence_N: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """(weights, rows whose weight was cut) for the log importance of each row, of which only `corrected_N` count.

    Of the token, or of the sequence: the product over its corrected rows, for all of them. `truncate`: at most the cap
    (truncated importance sampling, Ionides 2008); `mask`: none where it leaves [1/cap, cap] (Liu et al. 2025, masked IS).
    """
    options = algorithm.options
    if options.importance_level == "sequence":
        log_weight_N, _ = sequence_sums(torch.where(corrected_N, log_weight_N, 0.0), sequence_N)
    weight_N, cap = log_weight_N.exp(), options.importance_cap
    if options.importance_rule == "mask":
        cut_N = corrected_N & ((weight_N > cap) | (weight_N < 1.0 / cap))
        return torch.where(cut_N, 0.0, weight_N), cut_N
    return weight_N.clamp(max=cap), corrected_N & (weight_N > cap)


def kl_terms(terms: TokenTerms, reference_N: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) of each row in nats: exact, or Schulman's (2020) estimates from the sampled token.

    With d = log q - log p: k1 = -d (in a loss, its gradient is zero in expectation), k2 = d^2 / 2, k3 = e^d - d - 1. None is
    clamped: that would take the gradient away exactly where the policy has drifted furthest.
    """
    if estimator == "exact":
        return terms.kl_N
    difference_N = reference_N - terms.logprobs_N
    if estimator == "k1":
        return -difference_N
    return 0.5 * difference_N.square() if estimator == "k2" else difference_N.exp() - difference_N - 1.0


def sft_loss(terms: TokenTerms, weights_N: Tensor) -> LossSums:
    """Weighted sum of the cross entropy of the targets, in nats."""
    loss = -(terms.logprobs_N * weights_N).sum()
    return LossSums(loss=loss, metrics={"loss": loss.detach().double()}, logprobs_N=terms.logprobs_N.detach())
