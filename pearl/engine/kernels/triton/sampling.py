"""From logits to a token and its log-prob, one program per row and without a sort.

Owns the kernels and their meaning, which is `engine/sampler.py`'s after penalties and masks: temperature, top_k (ties at the
cut all kept), top_p, min_p, then the inverse of the cumulative distribution over the kept tokens in id order, at a given
uniform. What the three filters keep is always "every token above a cut, and of those at the cut the lowest ids", so it is
enough to find the cut: by bisection between values that occur in the row, each round one pass over it. Sums that decide are
in fp64.
Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.interface import Drawn, DrawRows
from pearl.engine.kernels.triton.launch import Launcher, run, tile_of
from pearl.engine.kernels.upload import on_device

TILE = 4096
COLUMNS = 6
"""Of the table of what rows ask for: temperature, top_k, top_p, min_p, uniform, raw."""
BOUNDS = 4
"""Of what is told of a row's distribution: greatest score, cut, last id kept at the cut, log of the sum of exp."""
NOT_FINITE, GOOD, NOTHING_LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ERRORS = ("not_finite", "", "nothing_left")
"""By state of a row."""
SMALLEST_TEMPERATURE = 1e-30


@triton.jit
def _tile(scores, start, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Part of a row, -inf past its end."""
    index = start + tl.arange(0, TILE)
    return tl.load(scores + index, mask=index < VOCAB, other=float("-inf"))


@triton.jit
def _power(score, top, scale):
    """What a score weighs beside the greatest one."""
    return tl.exp((score - top) * scale)


@triton.jit
def _cut(scores, top, scale, floor, lowest, target, VOCAB: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr):
    """The smallest score of the row (from `lowest` on) above which less than `target` is left, of tokens at `floor` or above.

    What is left is counted (COUNT), or weighed. The greatest score is the answer if no other is. Scores are compared as they
    are, so equal ones stay equal.
    """
    low = lowest
    high = top
    while low < high:
        middle = tl.maximum(low * 0.5 + high * 0.5, low)
        middle = tl.where(middle >= high, low, middle)
        left = tl.zeros([TILE], tl.float64)
        above = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, VOCAB, TILE):
            score = _tile(scores, start, VOCAB, TILE)
            greater = (score > middle) & (score >= floor)
            if COUNT:
                left += tl.where(greater, 1.0, 0.0)
            else:
                left += tl.where(greater, _power(score, top, scale), 0.0)
            above = tl.where(greater, tl.minimum(above, score), above)
            below = tl.where(score <= middle, tl.maximum(below, score), below)
        if tl.sum(left, 0) < target:
            high = tl.max(below, 0)
        else:
            low = tl.min(above, 0)
    return high


@triton.jit
def _nth_tie(scores, cut, number, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The id of the `number`-th token (counting from 1) whose score is `cut`."""
    before = 0
    found = VOCAB
    for start in range(0, VOCAB, TILE):
        tie = (_tile(scores, start, VOCAB, TILE) == cut).to(tl.int32)
        rank = before + tl.cumsum(tie, 0)
        index = start + tl.arange(0, TILE)
        found = tl.minimum(found, tl.min(tl.where((tie > 0) & (rank == number), index, VOCAB), 0))
        before += tl.sum(tie, 0)
    return found


@triton.jit
def _weights(scores, start, top, scale, cut, last_tie, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """What the tokens that are kept weigh, fp64; 0 for the others."""
    index = start + tl.arange(0, TILE)
    score = _tile(scores, start, VOCAB, TILE)
    kept = (score > cut) | ((score == cut) & (index <= last_tie))
    return tl.where(kept & (index < VOCAB), _power(score, top, scale), 0.0).to(tl.float64)


@triton.jit
def _total(scores, top, scale, cut, last_tie, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """What all tokens that are kept weigh together, fp64."""
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, VOCAB, TILE):
        total += _weights(scores, start, top, scale, cut, last_tie, VOCAB, TILE)
    return tl.sum(total, 0)


@triton.jit
def _top_p(scores, top, scale, top_p, floor, lowest, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """(cut, last id kept at the cut) of the fewest of the likeliest tokens that weigh `top_p` of those at `floor` or above."""
    target = top_p * _total(scores, top, scale, floor, VOCAB, VOCAB, TILE)
    cut = _cut(scores, top, scale, floor, tl.maximum(lowest, floor), target, VOCAB, TILE, False)
    missing = target - _total(scores, top, scale, cut, -1, VOCAB, TILE)
    ties = tl.zeros([TILE], tl.int32)
    for start in range(0, VOCAB, TILE):
        ties += (_tile(scores, start, VOCAB, TILE) == cut).to(tl.int32)
    needed = tl.maximum(tl.ceil(missing / _power(cut, top, scale).to(tl.float64)), 1.0)
    last_tie = tl.full([], VOCAB, tl.int32)
    if needed < tl.sum(ties, 0):
        last_tie = _nth_tie(scores, cut, needed.to(tl.int32), VOCAB, TILE)
    return cut, last_tie


@triton.jit
def _min_p(scores, top, scale, min_p, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The least score that weighs `min_p` or more: a weight never falls as the score rises, so this is a cut too."""
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, VOCAB, TILE):
        score = _tile(scores, start, VOCAB, TILE)
        least = tl.where(_power(score, top, scale) >= min_p, tl.minimum(least, score), least)
    return tl.minimum(tl.min(least, 0), top)


@triton.jit
def _at(scores, target, top, scale, cut, last_tie, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The first id at which the running sum of the weights, in id order, passes `target`."""
    before = target * 0.0
    chosen = VOCAB
    last = 0
    start = 0
    while start < VOCAB:
        index = start + tl.arange(0, TILE)
        weight = _weights(scores, start, top, scale, cut, last_tie, VOCAB, TILE)
        sums = before + tl.cumsum(weight, 0)
        chosen = tl.min(tl.where((sums > target) & (weight > 0.0), index, VOCAB), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, index, 0), 0))
        before += tl.sum(weight, 0)
        start = tl.where(chosen < VOCAB, VOCAB, start + TILE)
    # Rounding may leave the target a hair above the last sum.
    return tl.where(chosen < VOCAB, chosen, last)


@triton.jit
def _greatest(scores, VOCAB: tl.constexpr, TILE: tl.constexpr):
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, VOCAB, TILE):
        best = tl.maximum(best, _tile(scores, start, VOCAB, TILE))
    return tl.max(best, 0)


@triton.jit
def _first_of(scores, wanted, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The lowest id whose score is `wanted`."""
    first = VOCAB
    for start in range(0, VOCAB, TILE):
        index = start + tl.arange(0, TILE)
        first = tl.minimum(first, tl.min(tl.where(_tile(scores, start, VOCAB, TILE) == wanted, index, VOCAB), 0))
    return first


@triton.jit
def sample_kernel(
    scores, logits, table, ids, logprobs, state, bounds,
    VOCAB: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """One row. `scores` are the logits after penalties and masks, `logits` those of the model (for `raw`)."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * VOCAB
    logits += row * VOCAB
    table += row * COLUMNS
    asked = tl.load(table).to(tl.float32)
    greedy = asked == 0.0
    scale = 1.0 / tl.where(greedy, 1.0, tl.maximum(asked, SMALLEST))
    top_k = tl.load(table + 1)
    top_p = tl.load(table + 2)
    min_p = tl.load(table + 3).to(tl.float32)

    # One pass: the least score that is not masked, and whether all is finite (NaN and infinity times 0 are NaN).
    least = tl.full([TILE], float("inf"), tl.float32)
    spoilt = tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        score = _tile(scores, start, VOCAB, TILE)
        least = tl.minimum(least, tl.where(score > float("-inf"), score, float("inf")))
        index = start + tl.arange(0, TILE)
        spoilt += tl.load(logits + index, mask=index < VOCAB, other=0.0) * 0.0
    top = _greatest(scores, VOCAB, TILE)
    whole = tl.sum(spoilt, 0) == 0.0
    good = whole & (top > float("-inf"))
    tl.store(state + row, tl.where(good, GOOD, tl.where(whole, NOTHING_LEFT, NOT_FINITE)).to(tl.int8))
    tl.store(ids + row, 0)
    tl.store(logprobs + row, float("nan"))
    if good:
        lowest = tl.min(least, 0)
        cut = float("-inf")
        last_tie = tl.full([], VOCAB, tl.int32)
        if (not greedy) & (top_k > 0) & (top_k < VOCAB):
            cut = _cut(scores, top, scale, cut, lowest, top_k, VOCAB, TILE, True)
        if (not greedy) & (top_p < 1.0):
            cut, last_tie = _top_p(scores, top, scale, top_p, cut, lowest, VOCAB, TILE)
        if (not greedy) & (min_p > 0.0):
            higher = _min_p(scores, top, scale, min_p, VOCAB, TILE)
            if higher > cut:
                cut = higher
                last_tie = tl.full([], VOCAB, tl.int32)
        total = _total(scores, top, scale, cut, last_tie, VOCAB, TILE)
        if greedy:
            chosen = _first_of(scores, top, VOCAB, TILE)
        else:
            chosen = _at(scores, tl.load(table + 4) * total, top, scale, cut, last_tie, VOCAB, TILE)
        tl.store(ids + row, chosen.to(tl.int64))
        shown = tl.load(scores + chosen)
        if tl.load(table + 5) > 0.0:
            shown = tl.load(logits + chosen)
            top = _greatest(logits, VOCAB, TILE)
            scale = 1.0
            cut = -float("inf")
            last_tie = tl.full([], VOCAB, tl.int32)
            total = _total(logits, top, scale, cut, last_tie, VOCAB, TILE)
        log_total = tl.log(total).to(tl.float32)
        tl.store(logprobs + row, (shown - top) * scale - log_total)
        tl.store(bounds + row * BOUNDS, top)
        tl.store(bounds + row * BOUNDS + 1, cut)
        tl.store(bounds + row * BOUNDS + 2, last_tie.to(tl.float32))
        tl.store(bounds + row * BOUNDS + 3, log_total)


def draw(scores_SV: Tensor, logits_SV: Tensor, rows: DrawRows, launch: Launcher = run) -> Drawn:
    """As `interface.Draw` says; the scores are contiguous."""
    return queue(scores_SV, logits_SV, rows, launch)[1]()


def queue(
    scores_SV: Tensor, logits_SV: Tensor, rows: DrawRows, launch: Launcher = run
) -> tuple[Tensor, Callable[[], Drawn]]:
    """The draw as `interface.QueuesDraws` says: one copy to the device, and those back are queued behind it."""
    ids_S, logprobs_S, states_S, bounds_S4 = sample(scores_SV, logits_SV, asked_table(rows, scores_SV.device), launch)
    # Page-locked on the host: a copy that does not wait. Only what comes before the event is waited for.
    copies = [part.to("cpu", non_blocking=True) for part in (ids_S, logprobs_S, states_S)]
    through = torch.cuda.current_stream(ids_S.device).record_event() if ids_S.is_cuda else None

    def collect() -> Drawn:
        if through is not None:
            through.synchronize()
        return _collected(copies, scores_SV, logits_SV, bounds_S4, rows)

    return ids_S, collect


def _collected(
    copies: list[Tensor], scores_SV: Tensor, logits_SV: Tensor, bounds_S4: Tensor, rows: DrawRows
) -> Drawn:
    """What is told of each row; the likeliest ids, where they are asked for, wait for all that is queued."""
    ids_S, logprobs_S, states_S = copies
    bests: list[list[tuple[int, float]]] = [[] for _ in rows.bests]
    for row, count in enumerate(rows.bests):
        if count:
            source_V = (logits_SV if rows.raws[row] else scores_SV)[row]
            temperature = 1.0 if rows.raws[row] else rows.temperatures[row] or 1.0
            bests[row] = _best(source_V, temperature, bounds_S4[row], count)
    errors = [ERRORS[state] for state in states_S.tolist()]
    return Drawn(ids_S.tolist(), logprobs_S.tolist(), errors, bests)


def asked_table(rows: DrawRows, device: torch.device) -> Tensor:
    """What the rows ask for, fp64 [S, COLUMNS] on the device."""
    columns = [rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.uniforms, rows.raws]
    return on_device(np.ascontiguousarray(np.array(columns, dtype=np.float64).T), device)


def _best(scores_V: Tensor, temperature: float, bounds_4: Tensor, count: int) -> list[tuple[int, float]]:
    """The likeliest ids and their log-probs, best first, the lowest id first among equals."""
    top, cut, last_tie, log_total = bounds_4
    id_V = torch.arange(len(scores_V), device=scores_V.device)
    kept_V = (scores_V > cut) | ((scores_V == cut) & (id_V <= last_tie))
    logprobs_V = (scores_V - top) / max(temperature, SMALLEST_TEMPERATURE) - log_total
    logprobs, order = logprobs_V.masked_fill(~kept_V, -torch.inf).sort(descending=True, stable=True)
    pairs = zip(order[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if logprob > -torch.inf]


def sample(
    scores_SV: Tensor, logits_SV: Tensor, table: Tensor, launch: Launcher = run
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws one token per row of `scores_SV` (fp32, contiguous, not changed), without waiting for the device.

    Returns ids (int64), their log-probs (fp32), states (int8: GOOD, or NOT_FINITE if the row's `logits_SV` are not,
    NOTHING_LEFT if its scores are all masked; the rest is void then), and the bounds of its distribution (fp32 [S, BOUNDS]).
    """
    count, vocab = scores_SV.shape
    ids_S = scores_SV.new_empty(count, dtype=torch.int64)
    logprobs_S, states_S = scores_SV.new_empty(count), scores_SV.new_empty(count, dtype=torch.int8)
    bounds_S4 = scores_SV.new_empty(count, BOUNDS)
    launch(
        sample_kernel,
        (count,),
        scores=scores_SV,
        logits=logits_SV,
        table=table,
        ids=ids_S,
        logprobs=logprobs_S,
        state=states_S,
        bounds=bounds_S4,
        VOCAB=vocab,
        TILE=min(TILE, tile_of(vocab)),
        COLUMNS=COLUMNS,
        BOUNDS=BOUNDS,
        SMALLEST=SMALLEST_TEMPERATURE,
        num_warps=16,
    )
    return ids_S, logprobs_S, states_S, bounds_S4
