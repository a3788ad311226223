"""Scores from logits before a draw, on the device: penalties of what was said before, and ids that may not be drawn yet.

Owns the kernel and its meaning, which is `engine/sampler.py`'s, without a table of counts over the vocabulary: an entry for
every id that a row has seen. Invariants: the logits stay as they are; nothing here waits for the device, not even for an id
that it is still drawing. Shapes: S rows, V vocabulary, R rows with penalties, E entries of all of them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pearl.engine.kernels.interface import ScoreChanges
from pearl.engine.kernels.triton.launch import Launcher, run
from pearl.engine.kernels.upload import on_device

TILE = 512
LARGEST_LOGIT = 3e38


@triton.jit
def _penalised(score, count, repetition, presence, frequency, LARGEST: tl.constexpr):
    """Scores of ids that were seen, `count` times in the output."""
    score = tl.where(score < 0.0, score * repetition, score / repetition)
    score -= count * frequency
    score -= tl.where(count > 0.0, presence, 0.0)
    return tl.minimum(tl.maximum(score, -LARGEST), LARGEST)


@triton.jit
def penalise_kernel(
    scores, rows, ids, counts, values, drawn, VOCAB: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr
):
    """One row with penalties, in place: `rows` [R, 4] and `values` [R, 3] are those of `PenaltyRows`.

    An id that is only known to the device counts once more, as one of the row's entries or beside them.
    """
    number = tl.program_id(0)
    scores += tl.load(rows + number * 4).to(tl.int64) * VOCAB
    begin = tl.load(rows + number * 4 + 1)
    end = tl.load(rows + number * 4 + 2)
    late_row = tl.load(rows + number * 4 + 3)
    late = tl.load(drawn + late_row, mask=late_row >= 0, other=-1).to(tl.int32)
    repetition = tl.load(values + number * 3)
    presence = tl.load(values + number * 3 + 1)
    frequency = tl.load(values + number * 3 + 2)
    met = tl.zeros([TILE], tl.int32)
    for first in range(begin, end, TILE):
        entry = first + tl.arange(0, TILE)
        there = entry < end
        id = tl.load(ids + entry, mask=there, other=0)
        again = there & (id == late)
        met |= again.to(tl.int32)
        count = tl.load(counts + entry, mask=there, other=0) + again.to(tl.int32)
        score = tl.load(scores + id, mask=there, other=0.0)
        score = _penalised(score, count.to(tl.float32), repetition, presence, frequency, LARGEST)
        tl.store(scores + id, score, mask=there)
    if (late >= 0) & (tl.max(met, 0) == 0):
        score = _penalised(tl.load(scores + late), 1.0, repetition, presence, frequency, LARGEST)
        tl.store(scores + late, score)


def changed(logits_SV: Tensor, changes: ScoreChanges, launch: Launcher = run) -> Tensor:
    """The scores that tokens are drawn from: a copy of the (contiguous) logits where anything changes. Waits for nothing."""
    if changes.penalties is None and not changes.masked:
        return logits_SV
    scores_SV = logits_SV.clone()
    if changes.penalties is not None:
        parts = [on_device(part, scores_SV.device) for part in changes.penalties]
        drawn_ids = parts[0].new_zeros(1, dtype=torch.int64) if changes.drawn_ids is None else changes.drawn_ids
        penalise(scores_SV, *parts, drawn_ids, launch)
    if changes.masked:
        rows, ids = np.array(changes.masked, dtype=np.int64).T
        places = on_device(rows * scores_SV.shape[1] + ids, scores_SV.device)
        scores_SV.view(-1).index_fill_(0, places, -torch.inf)
    return scores_SV


def penalise(
    scores_SV: Tensor, rows_R4: Tensor, ids_E: Tensor, counts_E: Tensor, values_R3: Tensor, drawn_ids: Tensor,
    launch: Launcher = run,
) -> None:  # fmt: skip
    """Repetition (Keskar et al. 2019), presence and frequency penalties, in place, as `PenaltyRows` says."""
    launch(
        penalise_kernel,
        (len(rows_R4),),
        scores=scores_SV,
        rows=rows_R4,
        ids=ids_E,
        counts=counts_E,
        values=values_R3,
        drawn=drawn_ids,
        VOCAB=scores_SV.shape[1],
        TILE=TILE,
        LARGEST=LARGEST_LOGIT,
        num_warps=4,
    )
