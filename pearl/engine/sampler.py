"""From logits to sampled tokens: penalties, filters, the draw, and the log-probs that go with it.

Owns the meaning of every sampling parameter. It does not know batches, the pool or when a request ends. Invariant: each row
is computed from its own logits, parameters, seed and output position alone; a row whose logits are not finite gets an error
and leaves the others as they are.

Order of the filters, as in transformers: penalties, temperature, top_k (ties at the cut all kept), top_p, min_p. A token is
drawn by inverting the cumulative distribution over the kept tokens in id order, summed in float64.
Shapes: S rows, V vocabulary, R the rows (of S) that a step is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.engine.kernels.interface import Draw, Drawn, DrawRows, Kernels, QueuesDraws, ScoreChanges
from pearl.engine.penalties import SeenTokens, penalised
from pearl.engine.philox import uniforms
from pearl.engine.request import Request, SampledToken
from pearl.protocol import SamplingParams

_SMALLEST_TEMPERATURE = 1e-30
_LARGEST_LOGIT = 3e38
_NOT_FINITE = "logits are not finite (NaN or infinity): the model's numbers broke down"
_NOTHING_LEFT = "no token is left to sample: all are masked before min_tokens"


def sample(
    logits_SV: Tensor, requests: Sequence[Request], positions: Sequence[int], draw: Draw | None = None
) -> list[SampledToken]:
    """Draws one token per row. `logits_SV` is fp32 and is not changed.

    Row s belongs to `requests[s]`, of which `positions[s]` tokens were sampled before; penalties read its first
    `num_prompt_tokens + positions[s]` ids. Never raises for bad logits: that row's `error` says so. `draw` are kernels that do
    what comes after penalties and masks.
    """
    params = [request.params for request in requests]
    if draw is not None:
        scores_SV, masked_out = _min_tokens_masked(_penalised(logits_SV, requests, positions), requests, positions)
        return _as_tokens(draw(scores_SV, logits_SV, _draw_rows(requests, positions)), params, masked_out)
    finite_S = (logits_SV * 0.0).sum(-1) == 0.0  # NaN and infinity times 0 are NaN; several times faster than isfinite
    errors: dict[int, str] = {}
    clean_SV = logits_SV
    if not bool(finite_S.all()):
        errors = dict.fromkeys((~finite_S).nonzero()[:, 0].tolist(), _NOT_FINITE)
        clean_SV = logits_SV.masked_fill(~finite_S[:, None], 0.0)
    scores_SV = _penalised(clean_SV, requests, positions)
    scores_SV, masked_out = _min_tokens_masked(scores_SV, requests, positions)
    errors.update({row: _NOTHING_LEFT for row in masked_out if row not in errors})
    scores_SV = _filtered(_scaled(scores_SV, params), params)
    logprobs_SV = scores_SV.log_softmax(-1)
    ids_S = _draw(logprobs_SV, requests, positions)
    shown_SV = _shown(logprobs_SV, clean_SV, params)
    return _collect(shown_SV, ids_S, params, errors)


# ---------------------------------------------------------------------------------------------------- by kernels


def queue_sample(
    logits_SV: Tensor, requests: Sequence[Request], positions: Sequence[int], kernels: Kernels, before: Before
) -> tuple[Tensor, Callable[[], list[SampledToken]]]:
    """As `sample`: the ids where the logits are (void for rows with an error), and what waits for the tokens.

    Kernels that queue their draws do not make the caller wait for the device; with others the tokens are there already, and
    penalties must find all ids known.
    """
    if not isinstance(kernels, QueuesDraws):
        tokens = sample(logits_SV, requests, positions, kernels.draw)
        ids = [max(token.token_id, 0) for token in tokens]
        return torch.tensor(ids, dtype=torch.int64, device=logits_SV.device), lambda: tokens
    changes = ScoreChanges(
        penalties=before.seen.rows(requests, positions, before.rows),
        masked=_held_back(requests, positions),
        drawn_ids=before.ids,
    )
    ids_S, collect = kernels.queue_draw(logits_SV, _draw_rows(requests, positions), changes)
    return ids_S, lambda: _as_tokens(collect(), [request.params for request in requests], [])


class Before(NamedTuple):
    """What kernels that queue draws need of the steps before: ids that the last one draws (`rows`: for whom), and what
    penalties count."""

    ids: Tensor | None
    rows: Mapping[str, int]
    seen: SeenTokens


def _draw_rows(requests: Sequence[Request], positions: Sequence[int]) -> DrawRows:
    params = [request.params for request in requests]
    return DrawRows(
        temperatures=[p.temperature and max(p.temperature, _SMALLEST_TEMPERATURE) for p in params],
        top_ks=[p.top_k or 0 for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        uniforms=_uniforms(requests, positions) if any(p.temperature for p in params) else [0.0] * len(params),
        raws=[p.logprobs_mode == "raw" for p in params],
        bests=[p.logprobs or 0 for p in params],
    )


def _uniforms(requests: Sequence[Request], positions: Sequence[int]) -> list[float]:
    return uniforms([r.seed for r in requests], [r.index for r in requests], list(positions)).tolist()


def _as_tokens(drawn: Drawn, params: list[SamplingParams], masked_out: list[int]) -> list[SampledToken]:
    tokens = []
    for row, (token_id, logprob, error, best) in enumerate(zip(*drawn, strict=True)):
        if error or row in masked_out:
            said = _NOT_FINITE if error == "not_finite" else _NOTHING_LEFT
            tokens.append(SampledToken(token_id=-1, logprob=math.nan, error=said))
            continue
        top = None
        if params[row].logprobs:
            top = dict(best)
            top.setdefault(token_id, logprob)
        tokens.append(SampledToken(token_id=token_id, logprob=logprob, top_logprobs=top))
    return tokens


# ---------------------------------------------------------------------------------------------------- scores


def _penalised(logits_SV: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al. 2019), presence and frequency over the output alone."""
    rows = [row for row, request in enumerate(requests) if penalised(request.params)]
    if not rows:
        return logits_SV
    chosen = [requests[row] for row in rows]
    firsts = [request.num_prompt_tokens for request in chosen]
    ends = [first + positions[row] for first, row in zip(firsts, rows, strict=True)]
    prompts = [request.token_ids[:first] for request, first in zip(chosen, firsts, strict=True)]
    outputs = [request.token_ids[first:end] for request, first, end in zip(chosen, firsts, ends, strict=True)]
    prompt_RV, output_RV = _counts(prompts, logits_SV), _counts(outputs, logits_SV)
    scores_RV = logits_SV[rows]
    repetition_R1 = _column([request.params.repetition_penalty for request in chosen], logits_SV)
    pushed_RV = torch.where(scores_RV < 0, scores_RV * repetition_R1, scores_RV / repetition_R1)
    scores_RV = torch.where(prompt_RV + output_RV > 0, pushed_RV, scores_RV)
    scores_RV = scores_RV - output_RV * _column([request.params.frequency_penalty for request in chosen], logits_SV)
    scores_RV = scores_RV - (output_RV > 0) * _column([request.params.presence_penalty for request in chosen], logits_SV)
    result_SV = logits_SV.clone()
    result_SV[rows] = scores_RV.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    return result_SV


def _counts(lists: list[list[int]], like_SV: Tensor) -> Tensor:
    """How often each id occurs in each list: [R, V]."""
    vocab = like_SV.shape[1]
    counts_N = like_SV.new_zeros(len(lists) * vocab)
    flat = [row * vocab + token_id for row, ids in enumerate(lists) for token_id in ids]
    index_M = torch.tensor(flat, dtype=torch.int64, device=like_SV.device)
    return counts_N.index_add_(0, index_M, counts_N.new_ones(len(flat))).view(len(lists), vocab)


def _min_tokens_masked(scores_SV: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Removes EOS and stop ids from requests still below `min_tokens`; also returns the rows that have nothing left."""
    pairs = _held_back(requests, positions)
    if not pairs:
        return scores_SV, []
    rows, ids = zip(*pairs, strict=True)
    scores_SV = scores_SV.clone()
    scores_SV[list(rows), list(ids)] = -math.inf
    empty_S = scores_SV.amax(-1) == -math.inf
    return scores_SV.masked_fill(empty_S[:, None], 0.0), empty_S.nonzero()[:, 0].tolist()


def _held_back(requests: Sequence[Request], positions: Sequence[int]) -> list[tuple[int, int]]:
    """(row, id) of what may not be drawn yet, because of `min_tokens`."""
    return [
        (row, token_id)
        for row, request in enumerate(requests)
        if positions[row] < request.params.min_tokens
        for token_id in request.eos_token_ids | request.stop_token_ids
    ]


def _scaled(scores_SV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Divides by the temperature; greedy rows keep their scale. Rows are shifted first, so that tiny temperatures work."""
    temperatures = [p.temperature or 1.0 for p in params]
    if all(value == 1.0 for value in temperatures):
        return scores_SV
    column_S1 = _column([max(value, _SMALLEST_TEMPERATURE) for value in temperatures], scores_SV)
    shifted_SV = (scores_SV - scores_SV.amax(-1, keepdim=True)) / column_S1
    return torch.where(column_S1 == 1.0, scores_SV, shifted_SV)


def _filtered(scores_SV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Sets what top_k, top_p and min_p remove to -inf. At least one token stays in every row."""
    vocab = scores_SV.shape[1]
    top_ks = [_kept(p, vocab) for p in params]
    rows = [
        row
        for row, p in enumerate(params)
        if p.temperature != 0 and (top_ks[row] < vocab or p.top_p < 1.0 or p.min_p > 0.0)
    ]
    if not rows:
        return scores_SV
    kept_RV = _top_k(scores_SV[rows], [top_ks[row] for row in rows])
    kept_RV = _top_p(kept_RV, [params[row].top_p for row in rows])
    kept_RV = _min_p(kept_RV, [params[row].min_p for row in rows])
    result_SV = scores_SV.clone()
    result_SV[rows] = kept_RV
    return result_SV


def _kept(params: SamplingParams, vocab: int) -> int:
    """The effective top_k: None, 0, -1 and anything past the vocabulary mean all of it."""
    return params.top_k if params.top_k is not None and 0 < params.top_k < vocab else vocab


def _top_k(scores_RV: Tensor, counts: list[int]) -> Tensor:
    if min(counts) == scores_RV.shape[1]:
        return scores_RV
    limit = max(count for count in counts if count < scores_RV.shape[1])
    best_RK = scores_RV.topk(limit, -1).values
    index_R1 = torch.tensor([[min(count, limit) - 1] for count in counts], device=scores_RV.device)
    cut_R1 = best_RK.gather(1, index_R1)
    everything_R1 = torch.tensor([[count == scores_RV.shape[1]] for count in counts], device=scores_RV.device)
    return scores_RV.masked_fill((scores_RV < cut_R1) & ~everything_R1, -math.inf)


def _top_p(scores_RV: Tensor, shares: list[float]) -> Tensor:
    """Removes the least likely tokens whose shares add up to at most 1 - top_p; among equals the higher ids go first."""
    if min(shares) == 1.0:
        return scores_RV
    falling_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    rising_RV, order_RV = falling_RV.flip(-1), order_RV.flip(-1)
    spare_R1 = 1.0 - torch.tensor(shares, dtype=torch.float64, device=scores_RV.device)[:, None]
    removed_RV = rising_RV.softmax(-1).cumsum(-1) <= spare_R1.to(scores_RV.dtype)
    removed_RV &= spare_R1 > 0
    removed_RV[:, -1] = False
    return scores_RV.masked_fill(removed_RV.scatter(1, order_RV, removed_RV), -math.inf)


def _min_p(scores_RV: Tensor, shares: list[float]) -> Tensor:
    """Removes tokens less likely than `min_p` times the likeliest."""
    if max(shares) == 0.0:
        return scores_RV
    probs_RV = scores_RV.softmax(-1)
    best_R1 = probs_RV.amax(-1, keepdim=True)
    removed_RV = (probs_RV < _column(shares, scores_RV) * best_R1) & (probs_RV < best_R1)
    return scores_RV.masked_fill(removed_RV, -math.inf)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


# ---------------------------------------------------------------------------------------------------- the draw


def _draw(logprobs_SV: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
    """Greedy rows take the lowest of the best ids; the others invert their cumulative distribution at one uniform."""
    drawn = [row for row, request in enumerate(requests) if request.params.temperature != 0]
    if not drawn:
        return logprobs_SV.argmax(-1).tolist()
    every = len(drawn) == len(requests)
    rows_RV = logprobs_SV if every else logprobs_SV[drawn]
    numbers_R = uniforms(
        [requests[row].seed for row in drawn], [requests[row].index for row in drawn], [positions[row] for row in drawn]
    )
    sums_RV = rows_RV.double().exp_().cumsum(-1)
    # A uniform is at most 1 - 2**-53, and that times a total rounds to less than the total: some sum is always greater.
    target_R1 = torch.from_numpy(numbers_R).to(sums_RV.device)[:, None] * sums_RV[:, -1:]
    found = torch.searchsorted(sums_RV, target_R1, right=True)[:, 0].tolist()
    if every:
        return found
    ids = logprobs_SV.argmax(-1).tolist()
    for row, token_id in zip(drawn, found, strict=True):
        ids[row] = token_id
    return ids


# ---------------------------------------------------------------------------------------------------- what is reported


def _shown(logprobs_SV: Tensor, logits_SV: Tensor, params: list[SamplingParams]) -> Tensor:
    """The log-probs each request asked for: of the distribution drawn from, or of the model's own softmax."""
    raw = [row for row, p in enumerate(params) if p.logprobs_mode == "raw"]
    if not raw:
        return logprobs_SV
    shown_SV = logprobs_SV.clone()
    shown_SV[raw] = logits_SV[raw].log_softmax(-1)
    return shown_SV


def _collect(shown_SV: Tensor, ids: list[int], params: list[SamplingParams], errors: dict[int, str]) -> list[SampledToken]:
    index_S1 = torch.tensor(ids, dtype=torch.int64, device=shown_SV.device)[:, None]
    logprobs = shown_SV.gather(1, index_S1)[:, 0].tolist()
    best = _best(shown_SV, params)
    tokens = []
    for row, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if row in errors:
            tokens.append(SampledToken(token_id=-1, logprob=math.nan, error=errors[row]))
            continue
        top = best.get(row)
        if top is not None:
            top.setdefault(token_id, logprob)
        tokens.append(SampledToken(token_id=token_id, logprob=logprob, top_logprobs=top))
    return tokens


def _best(shown_SV: Tensor, params: list[SamplingParams]) -> dict[int, dict[int, float]]:
    """Row -> its `logprobs` best ids (best first, lowest id first among equals); ids of no probability are left out."""
    rows = [row for row, p in enumerate(params) if p.logprobs]
    if not rows:
        return {}
    values_RV, order_RV = shown_SV[rows].sort(dim=-1, descending=True, stable=True)
    result = {}
    for row, values, order in zip(rows, values_RV.tolist(), order_RV.tolist(), strict=True):
        count = params[row].logprobs or 0
        pairs = zip(order[:count], values[:count], strict=True)
        result[row] = {token_id: value for token_id, value in pairs if value > -math.inf}
    return result
