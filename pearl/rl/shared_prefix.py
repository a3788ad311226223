"""What sequences of a pass have in common at their beginning, computed once: siblings begin with the same prompt.

Owns which positions are the same, and attention over rows of which several sequences are made. It does not know models,
losses or plans. Invariant: two positions are one row only if their tokens, and all tokens before them in their sequences,
are the same; then everything a causal model computes at them is the same too, so that forward values are those of sequences
by themselves and gradients are their sums.

Shapes: T distinct rows, C cells (positions of all sequences, end to end), H heads, B head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pearl.engine.kernels.interface import Attend
from pearl.engine.kernels.reference import widened

WORTH_IT = 0.95
"""Where this share of the cells or more are rows of their own, gathering them costs what the others save."""


class SharedRows(NamedTuple):
    """`row_of_cell_C` says where each cell is computed, `cell_of_row_T` names one cell of each row."""

    row_of_cell_C: np.ndarray
    cell_of_row_T: np.ndarray


def shared_rows(sequences: Sequence[np.ndarray]) -> SharedRows | None:
    """The rows of sequences of token ids (none of them negative); None where too little is shared to be worth it."""
    starts = np.cumsum([0, *map(len, sequences)])
    row_of_cell = np.empty(starts[-1], dtype=np.int64)
    # In this order each sequence has its longest common beginning with the one before it.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">i8").tobytes())
    rows, before = 0, None
    for index in order:
        ids, start = sequences[index], starts[index]
        same = 0 if before is None else _common(sequences[before], ids)
        if before is not None:
            row_of_cell[start : start + same] = row_of_cell[starts[before] : starts[before] + same]
        row_of_cell[start + same : start + len(ids)] = np.arange(rows, rows + len(ids) - same)
        rows, before = rows + len(ids) - same, index
    if rows >= WORTH_IT * len(row_of_cell):
        return None
    cell_of_row = np.empty(rows, dtype=np.int64)
    cell_of_row[row_of_cell] = np.arange(len(row_of_cell))
    return SharedRows(row_of_cell, cell_of_row)


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """How many elements they have in common at the beginning."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size


def shared_attend(attend: Attend, row_of_cell_C: Tensor, cell_of_row_T: Tensor) -> Attend:
    """Attention of rows, by an `attend` that takes whole sequences. Gradients of a row's cells are added up in fp32."""

    def spread(x_THB: Tensor) -> Tensor:
        # An embedding, because its backward pass adds up on all threads, and on a GPU in an order that is always the same.
        return F.embedding(row_of_cell_C, widened(x_THB).flatten(1)).view(-1, *x_THB.shape[1:]).to(x_THB.dtype)

    def attend_rows(layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor:
        o_CHB = attend(layer, spread(q_THB), spread(k_TGB), spread(v_TGB))
        return o_CHB.index_select(0, cell_of_row_T)

    return attend_rows
