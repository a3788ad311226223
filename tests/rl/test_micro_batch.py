"""What becomes a trained row: exactly the sampled ids, each predicted from the token before it in its own sequence."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pearl.protocol import PackingPlan, TrainSequence, TrainStep
from pearl.rl.micro_batch import MicroBatch, build, check


def sequence(ids: list[int], mask: list[int], **fields: Any) -> TrainSequence:
    logprobs = [-float(token) if on else 0.0 for token, on in zip(ids, mask, strict=True)]
    versions = [3 if on else -1 for on in mask]
    defaults = {"logprobs": logprobs, "weight_versions": versions, "reward": 0.0, "group": 0}
    return TrainSequence(token_ids=ids, loss_mask=mask, **(defaults | fields))


def packed(sequences: list[TrainSequence], advantages: list[float] | None = None) -> MicroBatch:
    values = [1.0] * len(sequences) if advantages is None else advantages
    return build(sequences, values, weight_version=3, device=torch.device("cpu"))


THREE_TURNS = sequence([10, 11, 12, 13, 14, 15, 16, 17, 18], [0, 0, 1, 1, 0, 1, 0, 1, 0])


def test_three_turns_train_the_sampled_ids_only():
    batch = packed([THREE_TURNS, sequence([20, 21], [0, 1])], [0.5, -2.0])
    # The first sequence is fed up to the token before its last trained one; the second needs its first token only.
    assert batch.input_ids_T.tolist() == [10, 11, 12, 13, 14, 15, 16, 20]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert batch.lengths == (7, 1)
    assert batch.rows_N.tolist() == [1, 2, 4, 6, 7]
    assert batch.targets_N.tolist() == [12, 13, 15, 17, 21]
    assert batch.behaviour_N.tolist() == [-12.0, -13.0, -15.0, -17.0, -21.0]
    assert batch.advantages_N.tolist() == [0.5, 0.5, 0.5, 0.5, -2.0]
    assert batch.num_trained == 5


def test_versions_mark_fresh_sequences_and_stale_tokens():
    mixed = sequence([1, 2, 3], [0, 1, 1], weight_versions=[-1, 2, 3])
    batch = packed([sequence([4, 5], [0, 1]), mixed])
    assert batch.fresh_N.tolist() == [True, False, False]
    assert batch.stale_N.tolist() == [False, True, False]


def test_nothing_trained_is_an_empty_batch():
    for sequences in ([], [sequence([1, 2, 3], [0, 0, 0])], [sequence([], [])]):
        batch = packed(sequences)
        assert batch.lengths == () and batch.num_trained == 0
        assert batch.rows_N.dtype == batch.input_ids_T.dtype == torch.int64


def test_random_sequences_against_a_loop():
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(30):
        size = int(rng.integers(1, 20))
        mask = rng.integers(0, 2, size).tolist()
        mask[0] = 0
        sequences.append(sequence(rng.integers(0, 99, size).tolist(), mask))
    batch = packed(sequences)
    expected = [(s.token_ids[: t], s.token_ids[t]) for s in sequences for t in range(len(s.token_ids)) if s.loss_mask[t]]
    ids, positions = batch.input_ids_T.tolist(), batch.positions_T.tolist()
    found = [
        (ids[row - positions[row] : row + 1], target)
        for row, target in zip(batch.rows_N.tolist(), batch.targets_N.tolist(), strict=True)
    ]
    assert found == expected
    assert sum(batch.lengths) == len(ids)


GOOD = sequence([1, 2, 3], [0, 1, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [0, 1]}, "loss_mask has 2 entries: must have one per token, 3"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries"),
        ({"weight_versions": []}, "weight_versions has 0 entries"),
        ({"token_ids": [1, 50, 3]}, r"token_ids has 50: must be in \[0, 50\)"),
        ({"token_ids": [1, -1, 3]}, "token_ids has -1"),
        ({"loss_mask": [0, 2, 1]}, "loss_mask has 2: must be 0 or 1"),
        ({"loss_mask": [1, 1, 1]}, r"loss_mask\[0\]=1"),
        ({"logprobs": [0.0, math.nan, -1.0]}, "logprobs has an entry that is not finite"),
    ],
)
def test_bad_data_is_named(fields: dict, message: str):
    bad = msgspec.structs.replace(GOOD, **fields)
    with pytest.raises(ValueError, match=rf"step 5: sequences\[1\]\.{message}"):
        check(step([GOOD, bad], [[[[0, 1]]]]), ranks=1, vocab_size=50, max_position=8)


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match="3 tokens: must be at most the model's max_position=2"):
        check(step([GOOD], [[[[0]]]]), ranks=1, vocab_size=50, max_position=2)


@pytest.mark.parametrize(
    ("updates", "ranks", "message"),
    [
        ([[[[0]], [[1]]]], 1, r"updates\[0\] is for 2 ranks: must be for 1"),
        ([[[[0], []], [[1]]]], 2, r"\[2, 1\] micro-batches"),
        ([[[[0]]], [[[2]]]], 1, r"updates\[1\] has sequence 2: must be in \[0, 2\)"),
        ([[[[0]]], [[[1, 0]]]], 1, r"updates\[1\] has sequence 0 again"),
    ],
)
def test_bad_plans_are_named(updates: list, ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        check(step([GOOD, GOOD], updates), ranks=ranks, vocab_size=50, max_position=8)


def test_proximal_logprobs_change_nothing_else():
    batch = packed([THREE_TURNS])
    other = batch.having(proximal_N=torch.zeros(4))
    assert batch.proximal_N is None and other.proximal_N.tolist() == [0.0] * 4
    assert other.behaviour_N is batch.behaviour_N and other.targets_N is batch.targets_N and other.lengths == batch.lengths


def test_all_fresh_needs_every_sequence():
    stale = sequence([30, 31, 32], [0, 1, 1], weight_versions=[-1, 2, 3])
    assert packed([THREE_TURNS]).all_fresh and packed([]).all_fresh
    assert not packed([THREE_TURNS, stale]).all_fresh
    # Versions of tokens that are not trained do not matter.
    assert packed([sequence([30, 31], [0, 1], weight_versions=[7, 3])]).all_fresh


@pytest.mark.parametrize("given", [[], [sequence([1, 2, 3], [0, 0, 0])]], ids=["none", "masked"])
def test_never_empty_feeds_one_untrained_token(given: list[TrainSequence]):
    batch = build(given, [0.0] * len(given), weight_version=3, device=torch.device("cpu"), never_empty=True)
    assert batch.lengths == (1,) and batch.input_ids_T.tolist() == [0] and batch.positions_T.tolist() == [0]
    assert batch.num_trained == 0 and batch.all_fresh
    assert packed(given, [0.0] * len(given)).lengths == ()


def step(sequences: list[TrainSequence], updates: list) -> TrainStep:
    plan = PackingPlan(updates=updates)
    return TrainStep(number=0, step=5, objective="policy", sequences=sequences, plan=plan, weight_version=3)
