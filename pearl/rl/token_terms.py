"""Log-probs, entropies and exact KL terms of tokens, from hidden states, some columns of the vocabulary at a time.

Owns one differentiable operation. It does not know models, losses or packing.
Invariant: no more logits exist at once, forwards or backwards, than `rows` rows have (or than COLUMNS columns, where that is
more); logits and everything made of them are in fp32 (fp64 for fp64 hidden states), whatever the dtype of hidden states and
head. Where the pass as a whole is in bf16 (`narrow`), so are the factors of products, here too, and nothing else.

The sums over the vocabulary are kept as they are in attention a piece of the keys at a time (Milakov & Gimelshein 2018,
"Online normalizer calculation for softmax"); no piece needs more than its own logits in the backward pass (Wijmans et al.
2024, "Cut Your Losses in Large-Vocabulary Language Models").

Shapes: N trained tokens (rows), D hidden, V vocabulary, C columns of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pearl.engine.kernels.narrow import wide_product

COLUMNS = 1024
"""Pieces of the vocabulary have at least as many columns: narrower ones cost more time than they save memory."""

LOWEST = -1e30
"""The greatest logit of no logits: finite, so that its difference to any other makes no NaN."""


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
    narrow: bool = False,
    reference: Head | None = None,
    tiles: bool | None = None,
) -> TokenTerms:
    """The terms of each row, differentiable in `hidden_ND` and `weight_VD` (not in the reference's).

    The backward pass computes the logits again, unless one piece has them all. `narrow`: factors of products are in bf16.
    `tiles`: by the Triton kernels, in which not even a piece of the logits is in memory on the way forwards; None: on a GPU,
    where there is no reference, whose distributions they do not know (not run on a GPU).
    """
    if reference is None and hidden_ND.dtype != torch.float64 and (hidden_ND.is_cuda if tiles is None else tiles):
        return _by_tiles(hidden_ND, weight_VD, targets_N, temperature, narrow)
    theirs = None if reference is None else Head(reference.hidden_ND.detach(), reference.weight_VD.detach())
    width = max(COLUMNS, len(weight_VD) * rows // max(1, len(targets_N)))
    return TokenTerms(*_TokenTerms.apply(hidden_ND, weight_VD, targets_N, theirs, _How(temperature, width, narrow)))


def _by_tiles(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, narrow: bool) -> TokenTerms:
    from pearl.engine.kernels.triton.token_logprobs import token_logprobs  # an extra, and it takes a second

    dtype = torch.bfloat16 if narrow else torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logprobs_N, entropy_N = token_logprobs(hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, temperature)
    return TokenTerms(logprobs_N, entropy_N, torch.zeros_like(logprobs_N))


class _How(NamedTuple):
    temperature: float
    width: int
    narrow: bool


@dataclass(slots=True)
class _Softmax:
    """Sums over the columns so far of each row: the greatest logit, and of e = exp(logit - greatest) the sum, and that of
    e * log e (the entropy is made of these without a difference of large numbers)."""

    top_N: Tensor
    sum_N: Tensor
    mean_N: Tensor

    @classmethod
    def of_none(cls, like_N: Tensor) -> _Softmax:
        return cls(torch.full_like(like_N, LOWEST), torch.zeros_like(like_N), torch.zeros_like(like_N))

    def add(self, logits_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Takes a piece in; (e of the piece, what sums over e so far are to be multiplied by)."""
        top_N = torch.maximum(self.top_N, logits_NC.amax(1))
        below_N = self.top_N - top_N
        fade_N = below_N.exp()
        lowered_NC = logits_NC - top_N[:, None]
        e_NC = lowered_NC.exp()
        self.mean_N = (self.mean_N + self.sum_N * below_N) * fade_N + torch.linalg.vecdot(e_NC, lowered_NC)
        self.sum_N = self.sum_N * fade_N + e_NC.sum(1)
        self.top_N = top_N
        return e_NC, fade_N

    @property
    def log_sum_N(self) -> Tensor:
        """The logarithm of the sum of exp(logit)."""
        return self.top_N + self.sum_N.log()


class _TokenTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND, weight_VD, targets_N, theirs, how):  # type: ignore[no-untyped-def]
        ours = Head(hidden_ND, weight_VD)
        softmax = _Softmax.of_none(_wide(hidden_ND).new_empty(len(targets_N)))
        picked_N, apart_N, reference = torch.zeros_like(softmax.top_N), torch.zeros_like(softmax.top_N), None
        if theirs is not None:
            reference = _Softmax.of_none(softmax.top_N)
        kept_NC = None
        for first, logits_NC in _pieces(ours, how):
            kept_NC = logits_NC if how.width >= len(weight_VD) and ctx.needs_input_grad[0] else None
            here_n, column_n = _in_piece(targets_N, first, logits_NC.shape[1])
            picked_N[here_n] = logits_NC[here_n, column_n]
            e_NC, fade_N = softmax.add(logits_NC)
            if reference is not None:
                their_NC = _logits(theirs, first, how)
                reference.add(their_NC)
                apart_N = apart_N * fade_N + torch.linalg.vecdot(e_NC, logits_NC - their_NC)
        log_sum_N, entropy_N = softmax.log_sum_N, softmax.sum_N.log() - softmax.mean_N / softmax.sum_N
        kl_N = torch.zeros_like(picked_N)
        if reference is not None:
            kl_N = apart_N / softmax.sum_N - (log_sum_N - reference.log_sum_N)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, log_sum_N, entropy_N, kl_N)
        ctx.theirs, ctx.how, ctx.kept_NC = theirs, how, kept_NC
        ctx.their_log_sum_N = None if reference is None else reference.log_sum_N
        ctx.set_materialize_grads(False)
        return picked_N - log_sum_N, entropy_N, kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logp_N: Tensor | None, to_entropy_N: Tensor | None, to_kl_N: Tensor | None) -> tuple:
        hidden_ND, weight_VD, targets_N, log_sum_N, entropy_N, kl_N = ctx.saved_tensors
        how, kept_NC, ctx.kept_NC = ctx.how, ctx.kept_NC, None
        wide = log_sum_N.dtype
        products = torch.bfloat16 if how.narrow else wide
        operand_ND = hidden_ND.to(products)
        hidden_grad_ND = torch.zeros_like(hidden_ND, dtype=wide)
        weight_grad_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        if weight_grad_VD is not None and not len(targets_N):
            weight_grad_VD.zero_()
        for first, logits_NC in _pieces(Head(hidden_ND, weight_VD), how) if kept_NC is None else [(0, kept_NC)]:
            logp_NC = logits_NC.sub_(log_sum_N[:, None])
            # d entropy = -p (log p + H), d KL = p (log p - log q - KL), d log p[target] = onehot - p, each per logit.
            factor_NC = 0.0 if to_logp_N is None else -to_logp_N[:, None]
            if to_entropy_N is not None:
                factor_NC = factor_NC - to_entropy_N[:, None] * (logp_NC + entropy_N[:, None])
            if ctx.theirs is not None and to_kl_N is not None:
                logq_NC = _logits(ctx.theirs, first, how).sub_(ctx.their_log_sum_N[:, None])
                factor_NC = factor_NC + to_kl_N[:, None] * (logp_NC - logq_NC - kl_N[:, None])
            gradient_NC = logp_NC.exp_().mul_(factor_NC)
            if to_logp_N is not None:
                here_n, column_n = _in_piece(targets_N, first, gradient_NC.shape[1])
                gradient_NC[here_n, column_n] += to_logp_N[here_n]
            if how.temperature != 1.0:
                gradient_NC /= how.temperature
            gradient_NC, some = gradient_NC.to(products), slice(first, first + gradient_NC.shape[1])
            hidden_grad_ND += gradient_NC @ weight_VD[some].to(products)
            if weight_grad_VD is not None:
                weight_grad_VD[some] = gradient_NC.T @ operand_ND
        return hidden_grad_ND.to(hidden_ND.dtype), weight_grad_VD, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _pieces(head: Head, how: _How) -> Iterator[tuple[int, Tensor]]:
    """(number of the first column, logits of the piece), all of the vocabulary."""
    for first in range(0, len(head.weight_VD), how.width):
        yield first, _logits(head, first, how)


def _logits(head: Head, first: int, how: _How) -> Tensor:
    """The logits [N, C] of the columns from `first` on, over the temperature."""
    weight_CD = head.weight_VD[first : first + how.width]
    with torch.autocast(head.hidden_ND.device.type, enabled=False):
        logits_NC = wide_product(head.hidden_ND, weight_CD) if how.narrow else _wide(head.hidden_ND) @ _wide(weight_CD).T
    return logits_NC if how.temperature == 1.0 else logits_NC.div_(how.temperature)


def _in_piece(targets_N: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """The rows whose target is in the piece, and its columns there."""
    here_n = ((targets_N >= first) & (targets_N < first + width)).nonzero()[:, 0]
    return here_n, targets_N[here_n] - first
