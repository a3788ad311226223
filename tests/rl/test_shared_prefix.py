"""Beginnings in common: one row for each distinct beginning, and the values and gradients of sequences by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from pearl.protocol import TrainSequence
from pearl.rl.shared_prefix import shared_rows
from pearl.rl.trainer import Trainer

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7)


@given(SEQUENCES)
def test_a_row_is_a_distinct_beginning(sequences: list[list[int]]) -> None:
    found = shared_rows([np.array(ids) for ids in sequences])
    beginnings = [tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))]
    if found is None:
        assert len(set(beginnings)) >= 0.95 * len(beginnings)
        return
    rows = found.row_of_cell_C.tolist()
    assert {(row, beginning) for row, beginning in zip(rows, beginnings, strict=True)} == {
        (row, beginnings[cell]) for row, cell in enumerate(found.cell_of_row_T.tolist())
    }
    assert len(set(rows)) == len(found.cell_of_row_T) == len(set(beginnings))


def test_what_is_worth_it() -> None:
    first, second = np.arange(100), np.arange(200, 300)
    assert shared_rows([]) is None and shared_rows([first, second]) is None
    assert shared_rows([first, np.concatenate([first[:5], second])]) is None
    found = shared_rows([first, second, first])
    assert found is not None and len(found.cell_of_row_T) == 200
    large = shared_rows([np.array([2**40, 1]), np.array([2**40, 256]), np.array([255])])
    assert large is not None and len(large.cell_of_row_T) == 4


def siblings(count: int) -> list[TrainSequence]:
    """Groups of four that begin alike, two of whose members are alike for longer, and one of which is another's beginning."""
    made = cases.sequences(count, longest=40)
    for index, sequence in enumerate(made):
        first = made[index - index % 4]
        same = min(len(first.token_ids), len(sequence.token_ids), 12 if index % 4 == 1 else 6)
        sequence.token_ids[:same] = first.token_ids[:same]
    return made


@pytest.mark.parametrize("layers", [None, 1])
def test_gradients_and_metrics_are_those_of_sequences_by_themselves(
    tmp_path: Path, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made, found = cases.folder(tmp_path / "model"), siblings(12), []
    options = cases.TrainerOptions(train_layers=layers)
    for apart in (False, True):
        trainer = Trainer(folder, cases.config(trainer=options), dtype=torch.float64)
        trainer.set_reference()
        rows: list[int] = []
        forward = trainer.decoder.embedded
        monkeypatch.setattr(trainer.decoder, "embedded", lambda ids, f=forward, r=rows: r.append(len(ids)) or f(ids))
        updates = [[[[index] for index in range(12)]]] if apart else None
        metrics = trainer.train_step(cases.command(made, updates))
        numbers = {name: value for name, value in metrics.items() if value is not None and not name.endswith("_s")}
        gradients = {name: p.grad.clone() for name, p in trainer.decoder.named_parameters() if p.requires_grad}
        found.append((gradients, numbers, sum(rows)))
    (ours, our_numbers, few), (theirs, their_numbers, many) = found
    assert few < 0.9 * many
    assert our_numbers == pytest.approx(their_numbers, rel=1e-6, abs=1e-12)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-12, rtol=1e-9)
