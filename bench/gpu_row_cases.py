"""What the GPU suite asks of the kernels beside attention: rows, experts, penalties, sampling, log-probs for training.

Owns the problems, in the form of `gpu_cases.py`. Not run on a GPU yet.
Shapes: T tokens, D hidden, E experts, F intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_cases import Case, Inputs, Problem
from bench.gpu_measure import gap
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.kernels.triton import elementwise, moe, norm_rope, penalties, sampling
from pearl.engine.kernels.triton.launch import Launcher
from pearl.engine.kernels.triton.token_logprobs import token_logprobs

EPS = 1e-6
LOOKED_AT = 16
"""Rows that are compared of those that cost much in float64."""


def add_norm(inputs: Inputs, *, tokens: int, dim: int) -> Problem:
    x_TD, residual_TD, weight_D = inputs.normal(tokens, dim), inputs.normal(tokens, dim), inputs.normal(dim)

    def check(found: tuple[Tensor, ...]) -> float:
        total_TD = (x_TD + residual_TD).double()
        normed_TD = total_TD * (total_TD.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight_D.double()
        return max(gap(found[0], normed_TD), gap(found[1], total_TD))

    others: dict[str, Any] = {}
    if inputs.device.type == "cuda":
        others["torch"] = lambda: F.rms_norm(x_TD + residual_TD, (dim,), weight_D, EPS)
        others["transformers"] = _transformers_norm(x_TD, residual_TD, weight_D)
    return Problem(
        run=lambda launch: norm_rope.add_rms_norm(x_TD, residual_TD, weight_D, EPS, launch),
        check=check,
        nbytes=4 * x_TD.nbytes,
        others=others,
    )


def _transformers_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> Any:
    made: list[torch.nn.Module] = []

    def call() -> object:
        if not made:
            from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

            made.append(Qwen3RMSNorm(len(weight_D), EPS).to(weight_D))
        return made[0](x_TD + residual_TD)

    return call


def rope(inputs: Inputs, *, tokens: int, heads: tuple[int, int], dim: int) -> Problem:
    q_THB, k_TGB = (inputs.normal(tokens, count, dim) for count in heads)
    angle_TB = inputs.normal(tokens, dim, dtype=torch.float32)
    cos_TB, sin_TB = angle_TB.cos(), angle_TB.sin()
    q_weight_B, k_weight_B = inputs.normal(dim), inputs.normal(dim)

    def exact(x_THB: Tensor, weight_B: Tensor) -> Tensor:
        wide = x_THB.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight_B.double()
        first, second = normed.split(dim // 2, dim=-1)
        return normed * cos_TB.double()[:, None] + torch.cat([-second, first], dim=-1) * sin_TB.double()[:, None]

    return Problem(
        run=lambda launch: norm_rope.qk_norm_rope(q_THB, k_TGB, cos_TB, sin_TB, q_weight_B, k_weight_B, EPS, launch),
        check=lambda found: max(gap(found[0], exact(q_THB, q_weight_B)), gap(found[1], exact(k_TGB, k_weight_B))),
        nbytes=2 * (q_THB.nbytes + k_TGB.nbytes) + cos_TB.nbytes + sin_TB.nbytes,
        others=_reference(
            inputs, lambda known: known.qk_norm_rope(q_THB, k_TGB, cos_TB, sin_TB, q_weight_B, k_weight_B, EPS)
        ),
    )


def store(inputs: Inputs, *, tokens: int, kv_heads: int, dim: int, page: int) -> Problem:
    k_TGB, v_TGB = inputs.normal(tokens, kv_heads, dim), inputs.normal(tokens, kv_heads, dim)
    blocks = -(-tokens // page) + 1
    pool = inputs.normal(2, blocks, kv_heads, page, dim)
    slots_T = inputs.place(inputs.random.permutation(blocks * page)[:tokens], torch.int64)

    def run(launch: Launcher) -> tuple[Tensor, ...]:
        elementwise.store_kv(k_TGB, v_TGB, pool, slots_T, launch)
        return (pool,)

    def check(found: tuple[Tensor, ...]) -> float:
        by_slot = found[0].transpose(2, 3).flatten(1, 2)
        return max(gap(by_slot[0, slots_T], k_TGB), gap(by_slot[1, slots_T], v_TGB))

    return Problem(run=run, check=check, nbytes=4 * k_TGB.nbytes)


def activation(inputs: Inputs, *, tokens: int, dim: int) -> Problem:
    gate_up = inputs.normal(tokens, 2 * dim)

    def check(found: tuple[Tensor, ...]) -> float:
        gate, up = gate_up.double().split(dim, dim=-1)
        return gap(found[0], gate * gate.sigmoid() * up)

    return Problem(
        run=lambda launch: (elementwise.silu_and_mul(gate_up, launch),),
        check=check,
        nbytes=3 * gate_up.nbytes // 2,
        others=_reference(inputs, lambda known: known.silu_and_mul(gate_up)),
    )


def experts(inputs: Inputs, *, tokens: int, dim: int, count: int, width: int, top_k: int) -> Problem:
    x_TD, router_ED = inputs.normal(tokens, dim), inputs.normal(count, dim, scale=dim**-0.5)
    gate_up_EFD = inputs.normal(count, 2 * width, dim, scale=dim**-0.5)
    down_EDF = inputs.normal(count, dim, width, scale=width**-0.5)

    def exact(token: int) -> Tensor:
        x_D = x_TD[token].double()
        shares_K, chosen_K = (router_ED.double() @ x_D).softmax(-1).topk(top_k)
        total_D = torch.zeros_like(x_D)
        for share, expert in zip(shares_K / shares_K.sum(), chosen_K.tolist(), strict=True):
            gate_F, up_F = (gate_up_EFD[expert].double() @ x_D).split(width)
            total_D += share * (down_EDF[expert].double() @ (gate_F * gate_F.sigmoid() * up_F))
        return total_D

    def check(found: tuple[Tensor, ...]) -> float:
        rows = list(range(min(tokens, LOOKED_AT)))
        return gap(found[0][rows], torch.stack([exact(row) for row in rows]))

    weights = gate_up_EFD.nbytes + down_EDF.nbytes
    arguments = (x_TD, router_ED, gate_up_EFD, down_EDF)
    return Problem(
        run=lambda launch: (moe.moe(*arguments, top_k=top_k, normalise=True, launch=launch),),
        check=check,
        nbytes=min(weights, weights * tokens * top_k // count) + 2 * x_TD.nbytes,
        flop=6 * tokens * top_k * dim * width,
        others=_reference(inputs, lambda known: known.moe(*arguments, top_k=top_k, normalise=True)),
    )


def _reference(inputs: Inputs, call: Any) -> dict[str, Any]:
    known = ReferenceKernels()
    return {"torch": lambda: call(known)} if inputs.device.type == "cuda" else {}


def draw(inputs: Inputs, *, rows: int, vocab: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Problem:
    """One token per row at temperature 0.7. The gap: of the log-prob, and by how much the uniform misses the token's share."""
    scores_SV = inputs.normal(rows, vocab, scale=3.0, dtype=torch.float32)
    uniforms_S = inputs.random.random(rows)
    alike = (np.full(rows, value) for value in (0.7, top_k, top_p, min_p))
    table = inputs.place(np.stack([*alike, uniforms_S, np.zeros(rows)], axis=1), torch.float64)

    def run(launch: Launcher) -> tuple[Tensor, ...]:
        return sampling.sample(scores_SV, scores_SV, table, launch)[:3]

    def check(found: tuple[Tensor, ...]) -> float:
        ids_S, logprobs_S, states_S = found
        if any(sampling.ERRORS[state] for state in states_S.tolist()):
            return float("nan")
        logprobs_SV = kept_logprobs(scores_SV, top_k, top_p, min_p)
        sums_SV = logprobs_SV.exp().cumsum(-1)
        above_S = sums_SV.gather(1, ids_S[:, None])[:, 0]
        own_S = logprobs_SV.gather(1, ids_S[:, None])[:, 0]
        uniform_S = table[:, 4]
        missed_S = torch.maximum(uniform_S - above_S, above_S - own_S.exp() - uniform_S).clamp_min(0)
        return max(gap(logprobs_S, own_S), float(missed_S.max()))

    return Problem(run=run, check=check, nbytes=scores_SV.nbytes)


def penalise(inputs: Inputs, *, rows: int, vocab: int, seen: int) -> Problem:
    """Penalties of `seen` ids in every row, in a copy of the logits; in every other row one more id is known to the device."""
    logits_SV = inputs.normal(rows, vocab, scale=3.0, dtype=torch.float32)
    ids_SE = np.stack([inputs.random.permutation(vocab)[:seen] for _ in range(rows)])
    counts_SE = inputs.random.integers(0, 4, (rows, seen))
    begin_S = np.arange(rows) * seen
    late_S = np.where(np.arange(rows) % 2, np.arange(rows), -1)
    drawn_S = inputs.random.integers(0, vocab, rows)
    table = np.stack([np.arange(rows), begin_S, begin_S + seen, late_S], axis=1)
    values = np.tile(np.array([1.3, 0.5, 0.2], dtype=np.float32), (rows, 1))
    parts = [inputs.place(part, torch.int32) for part in (table, ids_SE.reshape(-1), counts_SE.reshape(-1))]
    arguments = (*parts, inputs.place(values, torch.float32), inputs.place(drawn_S, torch.int64))

    def run(launch: Launcher) -> tuple[Tensor, ...]:
        scores_SV = logits_SV.clone()
        penalties.penalise(scores_SV, *arguments, launch)
        return (scores_SV,)

    def check(found: tuple[Tensor, ...]) -> float:
        counts_SV = np.full((rows, vocab), -1.0)
        np.put_along_axis(counts_SV, ids_SE, counts_SE, axis=1)
        for row in range(1, rows, 2):
            counts_SV[row, drawn_S[row]] = max(counts_SV[row, drawn_S[row]], 0) + 1
        count_SV, wide_SV = inputs.place(counts_SV, torch.float64), logits_SV.double()
        pushed_SV = torch.where(wide_SV < 0, wide_SV * 1.3, wide_SV / 1.3) - 0.2 * count_SV - 0.5 * (count_SV > 0)
        return gap(found[0], torch.where(count_SV >= 0, pushed_SV, wide_SV))

    return Problem(run=run, check=check, nbytes=2 * logits_SV.nbytes + 16 * rows * seen)


def kept_logprobs(scores_SV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Float64 log-probs at temperature 0.7 after top_k, top_p and min_p; -inf for what is left out."""
    wide_SV = scores_SV.double()
    if top_k:
        wide_SV = wide_SV.masked_fill(wide_SV < wide_SV.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        falling_SV, order_SV = (wide_SV / 0.7).softmax(-1).sort(dim=-1, descending=True, stable=True)
        dropped_SV = falling_SV.cumsum(-1) - falling_SV >= top_p
        wide_SV = wide_SV.masked_fill(torch.zeros_like(dropped_SV).scatter(1, order_SV, dropped_SV), -torch.inf)
    if min_p:
        probs_SV = (wide_SV / 0.7).softmax(-1)
        wide_SV = wide_SV.masked_fill(probs_SV < min_p * probs_SV.amax(-1, keepdim=True), -torch.inf)
    return (wide_SV / 0.7).log_softmax(-1)


def training_logprobs(inputs: Inputs, *, tokens: int, dim: int, vocab: int) -> Problem:
    """Log-probs and entropies with the gradients of both: four products of tokens x dim x vocab."""
    hidden_ND = inputs.normal(tokens, dim).requires_grad_()
    head_VD = inputs.normal(vocab, dim, scale=2 * dim**-0.5).requires_grad_()
    targets_N = inputs.place(inputs.random.integers(0, vocab, tokens), torch.int64)

    def run(launch: Launcher) -> tuple[Tensor, ...]:
        logprobs_N, entropy_N = token_logprobs(hidden_ND, head_VD, targets_N, 0.9, launch)
        grads = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), (hidden_ND, head_VD))
        return logprobs_N.detach(), entropy_N.detach(), grads[0]

    def check(found: tuple[Tensor, ...]) -> float:
        rows = min(tokens, LOOKED_AT)
        wide_ND = hidden_ND[:rows].detach().double().requires_grad_()
        logprobs_NV = (wide_ND @ head_VD.detach().double().T / 0.9).log_softmax(-1)
        picked_N = logprobs_NV.gather(1, targets_N[:rows, None])[:, 0]
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        (grad_ND,) = torch.autograd.grad(picked_N.sum() + entropy_N.sum(), wide_ND)
        exact = (picked_N.detach(), entropy_N.detach(), grad_ND)
        return max(gap(part[:rows], right) for part, right in zip(found, exact, strict=True))

    products = 8 * tokens * dim * vocab
    return Problem(run=run, check=check, nbytes=3 * head_VD.nbytes + 3 * hidden_ND.nbytes, flop=products)


def row_cases() -> list[Case]:
    """Everything beside attention, at the sizes of Qwen3-8B and Qwen3-30B-A3B."""
    moe_sizes = dict(dim=2048, count=128, width=768, top_k=8)
    few = dict(tokens=9, dim=32, count=8, width=24, top_k=2)
    filters = dict(top_k=50, top_p=0.9, min_p=0.02)
    heads, stored = dict(heads=(32, 8), dim=128), dict(kv_heads=8, dim=128, page=16)
    drawn, vocab = dict(rows=4, vocab=301), dict(rows=64, vocab=151936)
    found: list[tuple[str, str, Callable[..., Problem], dict[str, Any], dict[str, Any]]] = [
        ("rows", "add and norm 8K x 4096", add_norm, dict(tokens=5, dim=96), dict(tokens=8192, dim=4096)),
        ("rows", "norm and rope 8K, 32/8 heads", rope, dict(tokens=5, heads=(6, 2), dim=48), dict(tokens=8192, **heads)),
        ("rows", "store 8K, 8 heads", store, dict(tokens=13, kv_heads=2, dim=24, page=4), dict(tokens=8192, **stored)),
        ("rows", "silu and multiply 8K x 12288", activation, dict(tokens=5, dim=48), dict(tokens=8192, dim=12288)),
        ("experts", "8 of 128 experts, 64 tokens", experts, few, dict(tokens=64, **moe_sizes)),
        ("experts", "8 of 128 experts, 8K tokens", experts, few, dict(tokens=8192, **moe_sizes)),
        ("ends", "draw 64 x 151936", draw, drawn, vocab),
        ("ends", "penalties 64 x 151936, 8K seen", penalise, dict(rows=4, vocab=301, seen=40), dict(**vocab, seen=8192)),
        ("ends", "draw 64 x 151936, filters", draw, dict(**drawn, **filters), dict(**vocab, **filters)),
        (
            "ends", "log-probs 8K x 4096 x 151936", training_logprobs, dict(tokens=7, dim=40, vocab=150),
            dict(tokens=8192, dim=4096, vocab=151936),
        ),
    ]  # fmt: skip
    return [
        Case(section=section, name=name, make=make, small=small, real=real) for section, name, make, small, real in found
    ]
