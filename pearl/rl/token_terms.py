"""Log-probs, entropies and exact KL terms of tokens, from hidden states, some rows of logits at a time.

Owns one differentiable operation. It does not know models, losses or packing.
Invariant: no more than `rows` rows of logits exist at once, forwards or backwards; everything over the vocabulary is computed
in fp32 (fp64 for fp64 hidden states), whatever the dtype of hidden states and head.

Shapes: N trained tokens (rows), D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenTerms(NamedTuple):
    """Of the distribution `softmax(logits / temperature)` of each row, in nats: the target's log-prob, the entropy, and the
    KL divergence from it to the reference's distribution (zero without a reference)."""

    logprobs_N: Tensor
    entropy_N: Tensor
    kl_N: Tensor


class Head(NamedTuple):
    """What logits are made of: final-normed hidden states [N, D] and the output matrix [V, D]."""

    hidden_ND: Tensor
    weight_VD: Tensor


def token_terms(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    rows: int = 1024,
    reference: Head | None = None,
) -> TokenTerms:
    """The terms of each row, differentiable in `hidden_ND` and `weight_VD` (not in the reference's).

    The backward pass computes the logits again, unless all of them are no more than `rows` rows.
    """
    theirs = (None, None) if reference is None else (reference.hidden_ND.detach(), reference.weight_VD.detach())
    return TokenTerms(*_TokenTerms.apply(hidden_ND, weight_VD, targets_N, temperature, rows, *theirs))


def log_softmax(hidden_nD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """Log-probs over the vocabulary."""
    wide = torch.float64 if hidden_nD.dtype == torch.float64 else torch.float32
    logits_nV = hidden_nD.to(wide) @ weight_VD.to(wide).T
    return torch.log_softmax(logits_nV if temperature == 1.0 else logits_nV / temperature, dim=-1)


class _TokenTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND, weight_VD, targets_N, temperature, rows, ref_ND, ref_VD):  # type: ignore[no-untyped-def]
        parts, logp_nV = [], None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for start in range(0, max(1, len(targets_N)), rows):
                some = slice(start, start + rows)
                logp_nV = log_softmax(hidden_ND[some], weight_VD, temperature)
                ref_nV = None if ref_ND is None else log_softmax(ref_ND[some], ref_VD, temperature)
                parts.append(_terms(logp_nV, ref_nV, targets_N[some]))
        terms = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, ref_ND, ref_VD, *terms[1:])
        ctx.temperature, ctx.rows = temperature, rows
        ctx.kept_nV = logp_nV if len(parts) == 1 and ctx.needs_input_grad[0] else None
        return tuple(terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        hidden_ND, weight_VD, targets_N, ref_ND, ref_VD, entropy_N, kl_N = ctx.saved_tensors
        wide = entropy_N.dtype
        wide_VD = weight_VD.to(wide)
        hidden_grad_ND = torch.empty_like(hidden_ND)
        weight_grad_VD = torch.zeros_like(wide_VD) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets_N), ctx.rows):
            some = slice(start, start + ctx.rows)
            logp_nV = log_softmax(hidden_ND[some], weight_VD, ctx.temperature) if ctx.kept_nV is None else ctx.kept_nV
            to_logp_n, to_entropy_n, to_kl_n = (gradient[some, None] for gradient in gradients)
            # d entropy = -p (log p + H), d KL = p (log p - log q - KL), d log p[target] = onehot - p, each per logit.
            factor_nV = -to_logp_n - to_entropy_n * (logp_nV + entropy_N[some, None])
            if ref_ND is not None:
                ref_nV = log_softmax(ref_ND[some], ref_VD, ctx.temperature)
                factor_nV += to_kl_n * (logp_nV - ref_nV - kl_N[some, None])
            logits_grad_nV = factor_nV.mul_(logp_nV.exp())
            logits_grad_nV.scatter_add_(1, targets_N[some, None], to_logp_n.to(wide))
            if ctx.temperature != 1.0:
                logits_grad_nV /= ctx.temperature
            hidden_grad_ND[some] = (logits_grad_nV @ wide_VD).to(hidden_ND.dtype)
            if weight_grad_VD is not None:
                weight_grad_VD.addmm_(logits_grad_nV.T, hidden_ND[some].to(wide))
        ctx.kept_nV = None
        weight_grad = None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype)
        return hidden_grad_ND, weight_grad, None, None, None, None, None


def _terms(logp_nV: Tensor, ref_nV: Tensor | None, targets_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logp_n = logp_nV.gather(1, targets_n[:, None]).squeeze(1)
    p_nV = logp_nV.exp()
    # One dot product per row, without a product over the vocabulary in memory.
    entropy_n = -torch.linalg.vecdot(p_nV, logp_nV)
    kl_n = torch.zeros_like(logp_n) if ref_nV is None else torch.linalg.vecdot(p_nV, logp_nV - ref_nV)
    return logp_n, entropy_n, kl_n
