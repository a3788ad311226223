"""Sequences of unequal length as few padded rectangles: which rows go together, and rows to rectangle and back.

Owns only index arithmetic, no attention. Invariant: in a rectangle at most about half of the cells are padding, whatever
the mix of lengths, and gradients of padding cells are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

MAX_CELLS = 1 << 17
"""Rows x length of one rectangle; bounds the memory of the padded copies (more rows make a further group)."""


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """Sequences of like length. `rows` are their numbers in order, None when the group is all sequences in their order.

    `starts` are the first packed token of each, `lengths` their lengths.
    """

    rows: Tensor | None
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    @torch.inference_mode(False)  # kept between calls, and autograd refuses to save tensors made in inference mode
    def _cells(self) -> tuple[Tensor, Tensor]:
        """(packed token of each cell [S, L] with padding pointing at the sequence's first token, is it real [S, L])."""
        start_S1 = torch.tensor(self.starts, device=self.device)[:, None]
        offset_L = torch.arange(self.longest, device=self.device)
        real_SL = offset_L < torch.tensor(self.lengths, device=self.device)[:, None]
        return torch.where(real_SL, start_S1 + offset_L, start_S1), real_SL

    @cached_property
    @torch.inference_mode(False)
    def token_of_cell(self) -> Tensor:
        return self._cells[0].flatten()

    @cached_property
    @torch.inference_mode(False)
    def cell_of_token(self) -> Tensor:
        """Flat cells that are real, in the group's order."""
        return self._cells[1].flatten().nonzero()[:, 0]

    @cached_property
    @torch.inference_mode(False)
    def tokens_T(self) -> Tensor:
        """Packed token numbers of the group, in the group's order."""
        return self.token_of_cell[self.cell_of_token]


@lru_cache(maxsize=16)
def length_groups(lengths: tuple[int, ...], device: torch.device, max_cells: int = MAX_CELLS) -> tuple[LengthGroup, ...]:
    """Splits sequences so that in each group the shortest is at least half the longest and rows x longest is bounded.

    Remembered by value: every layer of a step asks for the same lengths. Sequences of length 0 are in no group.
    """
    starts = tuple(accumulate(lengths, initial=0))[:-1]
    parts: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        longest = lengths[parts[-1][0]] if parts else 0
        if longest and 2 * lengths[row] >= longest and longest * (len(parts[-1]) + 1) <= max_cells:
            parts[-1].append(row)
        else:
            parts.append([row])
    if len(parts) == 1 and len(parts[0]) == len(lengths):
        return (LengthGroup(rows=None, starts=starts, lengths=lengths, device=device),)
    with torch.inference_mode(False):
        return tuple(
            LengthGroup(
                rows=torch.tensor(part, device=device),
                starts=tuple(starts[row] for row in part),
                lengths=tuple(lengths[row] for row in part),
                device=device,
            )
            for part in parts
        )


def pad_rows(x_THB: Tensor, group: LengthGroup) -> Tensor:
    """Packed tokens -> [S, L, H, B]; a padding cell repeats its sequence's first token and passes no gradient on."""
    out = _Pad.apply(x_THB, group.token_of_cell, group.cell_of_token, group.tokens_T)
    return out.view(len(group.lengths), group.longest, *x_THB.shape[1:])


def unpad_rows(x_SLHB: Tensor, group: LengthGroup) -> Tensor:
    """The real cells of a rectangle, end to end in the group's order."""
    return _Unpad.apply(x_SLHB.flatten(0, 1), group.cell_of_token)


class _Pad(torch.autograd.Function):
    """index_select whose backward is an index_copy: each token has one real cell, so nothing needs adding up."""

    @staticmethod
    def forward(ctx, x: Tensor, token_of_cell: Tensor, cell_of_token: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(cell_of_token, tokens)
        ctx.num_tokens = x.shape[0]
        return x.index_select(0, token_of_cell)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cell_of_token, tokens = ctx.saved_tensors
        out = grad.new_zeros((ctx.num_tokens, *grad.shape[1:]))
        return out.index_copy_(0, tokens, grad.index_select(0, cell_of_token)), None, None, None


class _Unpad(torch.autograd.Function):
    """index_select of distinct rows; backward is an index_copy into zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(cell_of_token)
        ctx.num_cells = x.shape[0]
        return x.index_select(0, cell_of_token)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (cell_of_token,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_cells, *grad.shape[1:])).index_copy_(0, cell_of_token, grad), None
