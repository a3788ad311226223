"""Micro-batches: the sequences of one forward pass laid end to end, and the rows of it that are trained.

Owns the checks of a TrainStep's data and the way from lists to tensors. It does not know models, losses or optimizers.
Invariant: row `rows_N[n]` is the position that predicts `targets_N[n]`, the token after it in the same sequence, and there
is one entry for every token whose loss mask is 1 and none for any other. Tokens after a sequence's last trained one, and
that one itself, predict nothing that is trained and are left out of the forward pass. What sequences have in common at
their beginning is in it once (`shared_prefix.py`).

Shapes: T rows of the forward pass, C cells (tokens of the sequences; as many, unless some are shared), N trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pearl.protocol import PackingPlan, TrainSequence, TrainStep
from pearl.rl.shared_prefix import shared_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass; `behaviour_N` are the engine's log-probs of the targets.

    `lengths` are the sequences', in cells; `row_of_cell_C` and `cell_of_row_T` are None where each cell has its own row.
    `sequence_N`: the step's number of the sequence that the row belongs to, whose rows are consecutive; `weights_N`: what its
    loss is multiplied by (the aggregation over the update).
    `fresh_N`: the target's whole sequence was sampled by the version trained on (`all_fresh`: so it is for every row);
    `stale_N`: the target was not. `proximal_N`: log-probs under the weights the step began with, None while they are present.
    Of those weights too, where asked for: `kl_N`, the KL terms that go into rewards, and the critic's `values_N`; `returns_N`
    is what the critic is to learn.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    lengths: tuple[int, ...]
    rows_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    fresh_N: Tensor
    stale_N: Tensor
    all_fresh: bool
    row_of_cell_C: Tensor | None = None
    cell_of_row_T: Tensor | None = None
    proximal_N: Tensor | None = None
    kl_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None

    @property
    def num_trained(self) -> int:
        return len(self.rows_N)

    def having(self, **tensors: Tensor | None) -> MicroBatch:
        """The same with other tensors in the named fields."""
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """One sequence's share: what is fed, and its trained rows (counted from the sequence's start)."""

    ids: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    behaviour: np.ndarray
    versions: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A sequence with something to train: its number, its rows, and what is the same in all of them."""

    number: int
    rows: _Rows
    advantage: float
    weight: float


_NONE = np.zeros(0, dtype=np.int64)
_FILLER = _Rows(ids=np.zeros(1, dtype=np.int64), rows=_NONE, targets=_NONE, behaviour=_NONE, versions=_NONE)


def build(
    sequences: Sequence[TrainSequence],
    advantages: Sequence[float],
    *,
    weight_version: int,
    device: torch.device,
    weights: Sequence[float] | None = None,
    numbers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    never_empty: bool = False,
) -> MicroBatch:
    """Packs these sequences in the order given; sequences without a trained token take no room.

    `advantages` and `weights` (None: 1) are per sequence, as are the `numbers` that they go by (None: their places);
    `dtype` is that of what is not an integer.

    `never_empty` puts one untrained token where there is nothing to train, for ranks that must run the same passes as the
    others. (With no token at all, some parameters would get no gradient, and the ranks' collectives would differ in size.)
    """
    values = (numbers or range(len(sequences)), sequences, advantages, weights or [1.0] * len(sequences))
    every = (_Part(number=n, rows=_rows(s), advantage=a, weight=w) for n, s, a, w in zip(*values, strict=True))
    parts = [part for part in every if len(part.rows.rows)]
    if never_empty and not parts:
        parts = [_Part(number=0, rows=_FILLER, advantage=0.0, weight=0.0)]
    lengths = [len(part.rows.ids) for part in parts]
    starts = np.cumsum([0, *lengths])[:-1]
    ids = np.concatenate([part.rows.ids for part in parts] or [_NONE])
    positions = np.concatenate([np.arange(length) for length in lengths] or [_NONE])
    rows = np.concatenate([part.rows.rows + start for part, start in zip(parts, starts, strict=True)] or [_NONE])
    shared = shared_rows([part.rows.ids for part in parts])
    if shared is not None:
        ids, positions, rows = ids[shared.cell_of_row_T], positions[shared.cell_of_row_T], shared.row_of_cell_C[rows]
    stale = [part.rows.versions != weight_version for part in parts]

    def tensor(pieces: list[np.ndarray], kind: type, to: torch.dtype | None = None) -> Tensor:
        joined = np.concatenate(pieces) if pieces else np.zeros(0)
        return torch.from_numpy(joined.astype(kind)).to(device, to)

    def each(name: str) -> list[np.ndarray]:
        return [np.full(len(part.rows.rows), getattr(part, name)) for part in parts]

    return MicroBatch(
        input_ids_T=tensor([ids], np.int64),
        positions_T=tensor([positions], np.int64),
        lengths=tuple(lengths),
        rows_N=tensor([rows], np.int64),
        row_of_cell_C=None if shared is None else tensor([shared.row_of_cell_C], np.int64),
        cell_of_row_T=None if shared is None else tensor([shared.cell_of_row_T], np.int64),
        targets_N=tensor([part.rows.targets for part in parts], np.int64),
        behaviour_N=tensor([part.rows.behaviour for part in parts], np.float64, dtype),
        advantages_N=tensor(each("advantage"), np.float64, dtype),
        weights_N=tensor(each("weight"), np.float64, dtype),
        sequence_N=tensor(each("number"), np.int64),
        fresh_N=tensor([np.full(len(flags), not flags.any()) for flags in stale], np.bool_),
        stale_N=tensor(stale, np.bool_),
        all_fresh=not any(flags.any() for flags in stale),
    )


def _rows(sequence: TrainSequence) -> _Rows:
    trained = np.flatnonzero(np.asarray(sequence.loss_mask))
    end = int(trained[-1]) if len(trained) else 0
    ids = np.asarray(sequence.token_ids, dtype=np.int64)
    return _Rows(
        ids=ids[:end],
        rows=trained - 1,
        targets=ids[trained],
        behaviour=np.asarray(sequence.logprobs, dtype=np.float64)[trained],
        versions=np.asarray(sequence.weight_versions, dtype=np.int64)[trained],
    )


def check(command: TrainStep, *, ranks: int, vocab_size: int, max_position: int) -> None:
    """ValueError, naming the sequence or update, for data or a plan that no forward pass could be right about."""
    if command.objective not in ("sft", "policy"):
        raise ValueError(f"step {command.step}: objective={command.objective!r}: must be sft or policy")
    for index, sequence in enumerate(command.sequences):
        problem = _problem(sequence, vocab_size, max_position, command.objective == "policy")
        if problem:
            raise ValueError(f"step {command.step}: sequences[{index}].{problem}")
    _check_plan(command.plan, len(command.sequences), ranks)


def _problem(sequence: TrainSequence, vocab_size: int, max_position: int, sampled: bool) -> str | None:
    size = len(sequence.token_ids)
    for name in ("loss_mask", "logprobs", "weight_versions"):
        if len(getattr(sequence, name)) != size:
            return f"{name} has {len(getattr(sequence, name))} entries: must have one per token, {size}"
    if size > max_position:
        return f"token_ids has {size} tokens: must be at most the model's max_position={max_position}"
    if size and not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < vocab_size:
        wrong = next(token for token in sequence.token_ids if not 0 <= token < vocab_size)
        return f"token_ids has {wrong}: must be in [0, {vocab_size})"
    if size and np.asarray(sequence.token_ids).dtype.kind not in "iu":
        return "token_ids has an entry that is not an integer"
    mask = set(sequence.loss_mask)
    if not mask <= {0, 1}:
        return f"loss_mask has {sorted(mask - {0, 1})[0]}: must be 0 or 1"
    if size and sequence.loss_mask[0]:
        return "loss_mask[0]=1: the first token has nothing before it that could predict it, must be 0"
    if sampled and not np.isfinite(sequence.logprobs).all():
        return "logprobs has an entry that is not finite"
    return _turns_problem(sequence)


def _turns_problem(sequence: TrainSequence) -> str | None:
    if not sequence.turns:
        return None
    sampled, trained = sum(count for count, _ in sequence.turns), sum(sequence.loss_mask)
    if sampled != trained or min(count for count, _ in sequence.turns) < 0:
        return f"turns has {sampled} sampled tokens: must have those of loss_mask, {trained}"
    return None if all(math.isfinite(reward) for _, reward in sequence.turns) else "turns has a reward that is not finite"


def _check_plan(plan: PackingPlan, sequences: int, ranks: int) -> None:
    seen: set[int] = set()
    for number, update in enumerate(plan.updates):
        if len(update) != ranks:
            raise ValueError(f"plan.updates[{number}] is for {len(update)} ranks: must be for {ranks}")
        if len({len(micro_batches) for micro_batches in update}) > 1:
            counts = [len(micro_batches) for micro_batches in update]
            raise ValueError(f"plan.updates[{number}] has {counts} micro-batches on its ranks: must be as many on each")
        for index in (index for micro_batches in update for batch in micro_batches for index in batch):
            if not 0 <= index < sequences:
                raise ValueError(f"plan.updates[{number}] has sequence {index}: must be in [0, {sequences})")
            if index in seen:
                raise ValueError(f"plan.updates[{number}] has sequence {index} again: must be trained on once")
            seen.add(index)
