"""Log-probs of given tokens and the entropy of their distributions from hidden states and head, with gradients.

Owns the kernels and the autograd function. Logits never exist as a whole: forward keeps a tile of them at a time (Wijmans et
al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"), backward one part of the vocabulary in the model's dtype,
`GRADIENT_ELEMENTS` at most. Products accumulate in fp32; what has no gradient asked for costs no product.

With p = softmax(z), z = hidden . head / temperature:
    log p_t = z_t - lse,   H = lse - sum p z,   d log p_t / dz_v = [v = t] - p_v,   dH / dz_v = -p_v (log p_v + H)
Shapes: N tokens, D hidden, V vocabulary, C part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.triton.launch import PRECISION, Launcher, run

PROGRAMS = 512
"""As many at least share the forward pass: few tokens are split over the vocabulary."""
NOTHING = tl.constexpr(-1e30)
"""The logit of what is not there: its exp is 0, and so is their product."""
GRADIENT_ELEMENTS = 1 << 26
"""Tokens x part of the vocabulary whose gradient is held at once."""


@triton.jit
def _logits(
    hidden, weight, first_token, first_id, tokens,
    DIM: tl.constexpr, VOCAB: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of logits, not yet divided by the temperature; tokens and ids past the end are the last ones once more."""
    step_D = tl.arange(0, STEP)
    hidden += tl.cast(first_token, tl.int64) * DIM
    weight += tl.cast(first_id, tl.int64) * DIM
    row_N = tl.minimum(tl.arange(0, ROWS), tokens - 1 - first_token) * DIM
    row_V = tl.minimum(tl.arange(0, COLS), VOCAB - 1 - first_id) * DIM
    logit_NV = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(0, DIM, STEP):
        dim_D = start + step_D
        if DIM % STEP == 0:
            h_ND = tl.load(hidden + row_N[:, None] + dim_D[None, :])
            w_DV = tl.load(weight + row_V[None, :] + dim_D[:, None])
        else:
            h_ND = tl.load(hidden + row_N[:, None] + dim_D[None, :], mask=(dim_D < DIM)[None, :], other=0.0)
            w_DV = tl.load(weight + row_V[None, :] + dim_D[:, None], mask=(dim_D < DIM)[:, None], other=0.0)
        logit_NV = tl.dot(h_ND, w_DV, logit_NV, input_precision=PRECISION)
    return logit_NV


@triton.jit(do_not_specialize=["tokens", "part"])
def logprob_kernel(
    hidden, weight, targets, tops, sums, means, picks, scale, tokens, part,
    DIM: tl.constexpr, VOCAB: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, part of the vocabulary): greatest logit, sum of e = exp(logit - greatest), sum of e * log e
    (the entropy is made of these without a difference of large numbers), the target's logit.

    All four are [part, token]; a target outside of the part counts 0.
    """
    first_token = tl.program_id(0) * ROWS
    token_N = first_token + tl.arange(0, ROWS)
    here_N = token_N < tokens
    target_N = tl.load(targets + token_N, mask=here_N, other=-1)
    top_N = tl.full([ROWS], NOTHING, tl.float32)
    sum_N = tl.zeros([ROWS], tl.float32)
    mean_N = tl.zeros([ROWS], tl.float32)
    pick_N = tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * part
    for start in range(first, tl.minimum(first + part, VOCAB), COLS):
        logit_NV = scale * _logits(hidden, weight, first_token, start, tokens, DIM, VOCAB, ROWS, COLS, STEP, PRECISION)
        id_V = start + tl.arange(0, COLS)
        pick_N += tl.sum(tl.where(id_V[None, :] == target_N[:, None], logit_NV, 0.0), 1)
        if start + COLS > VOCAB:
            logit_NV = tl.where((id_V < VOCAB)[None, :], logit_NV, NOTHING)
        new_top_N = tl.maximum(top_N, tl.max(logit_NV, 1))
        fade_N = tl.exp(top_N - new_top_N)
        logit_NV -= new_top_N[:, None]
        power_NV = tl.exp(logit_NV)
        mean_N = (mean_N + sum_N * (top_N - new_top_N)) * fade_N + tl.sum(power_NV * logit_NV, 1)
        sum_N = sum_N * fade_N + tl.sum(power_NV, 1)
        top_N = new_top_N
    place_N = tl.program_id(1).to(tl.int64) * tokens + token_N
    tl.store(tops + place_N, top_N, mask=here_N)
    tl.store(sums + place_N, sum_N, mask=here_N)
    tl.store(means + place_N, mean_N, mask=here_N)
    tl.store(picks + place_N, pick_N, mask=here_N)


@triton.jit(do_not_specialize=["tokens", "first", "width"])
def logit_gradient_kernel(
    hidden, weight, targets, lse, entropy, grad_logprob, grad_entropy, out, scale, tokens, first, width,
    DIM: tl.constexpr, VOCAB: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to `hidden . head` of ids `first` to `first + width`: [tokens, width] in the model's dtype."""
    first_token = tl.program_id(0) * ROWS
    token_N = first_token + tl.arange(0, ROWS)
    here_N = token_N < tokens
    column_V = tl.program_id(1) * COLS + tl.arange(0, COLS)
    start = first + tl.program_id(1) * COLS
    logit_NV = scale * _logits(hidden, weight, first_token, start, tokens, DIM, VOCAB, ROWS, COLS, STEP, PRECISION)
    target_N = tl.load(targets + token_N, mask=here_N, other=-1)
    logp_NV = logit_NV - tl.load(lse + token_N, mask=here_N, other=0.0)[:, None]
    share_NV = tl.exp(logp_NV)
    chosen_NV = tl.where((first + column_V)[None, :] == target_N[:, None], 1.0, 0.0)
    grad_NV = tl.load(grad_logprob + token_N, mask=here_N, other=0.0)[:, None] * (chosen_NV - share_NV)
    spread_NV = share_NV * (logp_NV + tl.load(entropy + token_N, mask=here_N, other=0.0)[:, None])
    grad_NV -= tl.load(grad_entropy + token_N, mask=here_N, other=0.0)[:, None] * spread_NV
    place_NV = token_N.to(tl.int64)[:, None] * width + column_V[None, :]
    tl.store(out + place_NV, (scale * grad_NV).to(out.dtype.element_ty), mask=here_N[:, None] & (column_V < width)[None, :])


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float = 1.0, launch: Launcher = run
) -> tuple[Tensor, Tensor]:
    """fp32 log-probs of `targets_N` (int64, in the vocabulary) and entropies (nats) under softmax(hidden . head / temperature).

    Both have gradients with respect to hidden states and head. ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be > 0")
    return _TokenLogprobs.apply(hidden_ND, weight_VD, targets_N, 1.0 / temperature, launch)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float, launch: Launcher
    ) -> tuple[Tensor, Tensor]:
        lse_N, entropy_N, picked_N = _summed(hidden_ND.contiguous(), weight_VD, targets_N, scale, launch)
        ctx.save_for_backward(hidden_ND.contiguous(), weight_VD, targets_N, lse_N, entropy_N)
        ctx.scale, ctx.launch = scale, launch
        return picked_N - lse_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, lse_N, entropy_N = ctx.saved_tensors
        tokens, vocab = len(hidden_ND), len(weight_VD)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if wants_weight else None
        grads = (grad_logprob_N.contiguous(), grad_entropy_N.contiguous())
        cols = _tiles(hidden_ND)["COLS"]
        width = max(1, GRADIENT_ELEMENTS // max(tokens, 1) // cols) * cols
        for first in range(0, vocab, width):
            last = min(first + width, vocab)
            grad_NC = _logit_gradient(
                hidden_ND, weight_VD, targets_N, lse_N, entropy_N, grads, first, last - first, ctx.scale, ctx.launch
            )
            if grad_hidden_ND is not None:
                grad_hidden_ND += _product(grad_NC, weight_VD[first:last])
            if grad_weight_VD is not None:
                grad_weight_VD[first:last] = _product(grad_NC.T, hidden_ND)
        return None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype), grad_weight_VD, None, None, None


def _summed(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: float, launch: Launcher
) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the sum of exp, entropy, the target's logit) of each token, fp32."""
    tokens, dim = hidden_ND.shape
    vocab, tiles = len(weight_VD), _tiles(hidden_ND)
    row_tiles, col_tiles = triton.cdiv(tokens, tiles["ROWS"]), triton.cdiv(vocab, tiles["COLS"])
    part = triton.cdiv(col_tiles, min(col_tiles, triton.cdiv(PROGRAMS, max(row_tiles, 1)))) * tiles["COLS"]
    parts = triton.cdiv(vocab, part)
    found = hidden_ND.new_empty((4, parts, tokens), dtype=torch.float32)
    launch(
        logprob_kernel,
        (row_tiles, parts),
        hidden=hidden_ND,
        weight=weight_VD,
        targets=targets_N,
        tops=found[0],
        sums=found[1],
        means=found[2],
        picks=found[3],
        scale=scale,
        tokens=tokens,
        part=part,
        DIM=dim,
        VOCAB=vocab,
        PRECISION=PRECISION.get(hidden_ND.dtype, "tf32"),
        **tiles,
    )
    tops_PN, sums_PN, means_PN, picks_PN = found
    top_N = tops_PN.amax(0)
    below_PN = tops_PN - top_N
    sum_N = (sums_PN * below_PN.exp()).sum(0)
    mean_N = ((means_PN + sums_PN * below_PN) * below_PN.exp()).sum(0) / sum_N
    return top_N + sum_N.log(), sum_N.log() - mean_N, picks_PN.sum(0)


def _logit_gradient(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, lse_N: Tensor, entropy_N: Tensor, grads: tuple[Tensor, Tensor],
    first: int, width: int, scale: float, launch: Launcher,
) -> Tensor:  # fmt: skip
    tokens, dim = hidden_ND.shape
    tiles = _tiles(hidden_ND)
    out_NC = hidden_ND.new_empty((tokens, width))
    launch(
        logit_gradient_kernel,
        (triton.cdiv(tokens, tiles["ROWS"]), triton.cdiv(width, tiles["COLS"])),
        hidden=hidden_ND,
        weight=weight_VD,
        targets=targets_N,
        lse=lse_N,
        entropy=entropy_N,
        grad_logprob=grads[0],
        grad_entropy=grads[1],
        out=out_NC,
        scale=scale,
        tokens=tokens,
        first=first,
        width=width,
        DIM=dim,
        VOCAB=len(weight_VD),
        PRECISION=PRECISION.get(hidden_ND.dtype, "tf32"),
        **tiles,
    )
    return out_NC


def _tiles(hidden_ND: Tensor) -> dict[str, int]:
    """Tile sizes and how a program of them runs, by dtype."""
    if hidden_ND.element_size() == 2:
        return dict(ROWS=128, COLS=128, STEP=64, num_warps=8, num_stages=3)
    return dict(ROWS=64, COLS=64, STEP=32, num_warps=8, num_stages=2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result: of 16-bit factors too, which torch offers on CUDA alone."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
