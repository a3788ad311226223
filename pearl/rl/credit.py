"""Which token gets how much of the credit: the advantages of a step's rows, over micro-batches and ranks.

Owns what needs the policy's, reference's or critic's opinion of the tokens, or all of the step's tokens at once: KL in the
rewards, returns normalised over the batch, GAE. It does not know models or losses.
Invariant: advantages are those of the whole step, however its sequences are spread over micro-batches and ranks. All ranks
make the same calls.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pearl.engine.comm.communicator import Communicator
from pearl.rl.advantage import EPSILON, group_advantages, leave_one_out_advantages
from pearl.rl.algorithms import Algorithm
from pearl.rl.micro_batch import MicroBatch
from pearl.rl.returns import returns_to_go, token_gae, token_rewards, turn_gae
from pearl.rl.training_step import TrainingStep

Updates = list[list[MicroBatch]]
"""The micro-batches of this rank, by update."""


def sequence_advantages(rewards: list[float], groups: list[int], algorithm: Algorithm) -> list[float]:
    """What compares siblings: one advantage per sequence. Zeros for algorithms that look at tokens (`token_advantages`)."""
    if algorithm.advantage == "group":
        return group_advantages(rewards, groups, normalize_std=algorithm.options.normalize_std)
    siblings = leave_one_out_advantages(rewards, groups)  # checks the rewards in any case
    return siblings if algorithm.advantage == "rloo" else [0.0] * len(rewards)


def needs_scores(algorithm: Algorithm) -> bool:
    """Whether all rows need a pass before the first update: with KL in the rewards, and with a critic."""
    return algorithm.kl_in_reward or algorithm.has_critic


def assign(step: TrainingStep, updates: Updates, algorithm: Algorithm, comm: Communicator) -> Updates:
    """The micro-batches with advantages (and `returns_N` with a critic); `step.advantages` become the sequences' means."""
    if algorithm.advantage in ("group", "rloo"):
        return _penalised(step, updates, algorithm, comm) if algorithm.kl_in_reward else updates
    updates = [[_estimated(step, batch, algorithm) for batch in batches] for batches in updates]
    if algorithm.advantage == "global" or algorithm.options.normalize_std:
        updates = _normalized(updates, comm, step.sums.device, scale=algorithm.options.normalize_std)
    _mean_advantages(step, updates, comm)
    return updates


def _penalised(step: TrainingStep, updates: Updates, algorithm: Algorithm, comm: Communicator) -> Updates:
    """Sibling advantages of rewards less the KL of the whole sequence."""
    sequences = step.command.sequences
    penalties = torch.zeros(len(sequences), dtype=torch.float64, device=step.sums.device)
    for batch in (batch for batches in updates for batch in batches if batch.kl_N is not None):
        penalties.index_add_(0, batch.sequence_N, batch.kl_N.double())  # type: ignore[union-attr]
    comm.all_reduce_sum(penalties)
    rewards = [s.reward - algorithm.options.kl_coef * kl for s, kl in zip(sequences, penalties.tolist(), strict=True)]
    step.advantages = sequence_advantages(rewards, [s.group for s in sequences], algorithm)
    advantages = torch.tensor(step.advantages, dtype=torch.float64, device=penalties.device)
    return [[b.having(advantages_N=advantages[b.sequence_N].to(b.weights_N.dtype)) for b in batches] for batches in updates]


def _estimated(step: TrainingStep, batch: MicroBatch, algorithm: Algorithm) -> MicroBatch:
    """Advantages along each of the batch's sequences, not normalised."""
    if not batch.num_trained:
        return batch.having(returns_N=batch.advantages_N)
    options = algorithm.options
    kl = np.zeros(batch.num_trained) if batch.kl_N is None else options.kl_coef * batch.kl_N.double().cpu().numpy()
    values = np.zeros(batch.num_trained) if batch.values_N is None else batch.values_N.double().cpu().numpy()
    numbers, counts = torch.unique_consecutive(batch.sequence_N, return_counts=True)
    advantages, returns, start = [], [], 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        sequence, some = step.command.sequences[number], slice(start, start + count)
        rewards = token_rewards(sequence.turns, sequence.reward, kl[some])
        if algorithm.advantage == "global":
            pair = (returns_to_go(rewards),) * 2
        elif options.gae_level == "turn":
            pair = turn_gae(rewards, values[some], sequence.turns, options.gamma, options.gae_lambda)
        else:
            pair = token_gae(rewards, values[some], options.gamma, options.gae_lambda)
        advantages.append(pair[0])
        returns.append(pair[1])
        start += count
    return batch.having(advantages_N=_like(advantages, batch), returns_N=_like(returns, batch))


def _like(pieces: list[np.ndarray], batch: MicroBatch) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces)).to(batch.weights_N.device, batch.weights_N.dtype)


def _normalized(updates: Updates, comm: Communicator, device: torch.device, *, scale: bool) -> Updates:
    """(A - mean) / (std + EPSILON) over all tokens of the step (REINFORCE++, Hu 2025); zero where all are equal."""
    pieces = [batch.advantages_N.double() for batches in updates for batch in batches]
    own = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64, device=device)
    top, bottom = greatest(own, comm), -greatest(-own, comm)
    sums = torch.stack((own.sum(), own.new_tensor(float(len(own)))))
    comm.all_reduce_sum(sums)
    mean = sums[0] / sums[1].clamp(min=1.0)
    square = (own - mean).square().sum()
    comm.all_reduce_sum(square)
    std = (square / sums[1].clamp(min=1.0)).sqrt()
    divisor = std + EPSILON if scale else torch.ones_like(std)

    def normal(values_N: Tensor) -> Tensor:
        even = torch.zeros_like(values_N)
        return even if top <= bottom else ((values_N.double() - mean) / divisor).to(values_N.dtype)

    return [[batch.having(advantages_N=normal(batch.advantages_N)) for batch in batches] for batches in updates]


def greatest(values: Tensor, comm: Communicator) -> float:
    """The greatest of the values on all ranks, minus infinity if there are none (ranks know no other reduction than sums)."""
    slots = torch.zeros(comm.size, 2, dtype=torch.float64, device=values.device)
    if len(values):
        slots[comm.rank] = torch.stack((values.max().double(), torch.ones((), dtype=torch.float64, device=values.device)))
    comm.all_reduce_sum(slots)
    return max((value for value, there in slots.tolist() if there), default=float("-inf"))


def _mean_advantages(step: TrainingStep, updates: Updates, comm: Communicator) -> None:
    sums = torch.zeros(2, len(step.command.sequences), dtype=torch.float64, device=step.sums.device)
    for batch in (batch for batches in updates for batch in batches):
        sums[0].index_add_(0, batch.sequence_N, batch.advantages_N.double())
        sums[1].index_add_(0, batch.sequence_N, torch.ones_like(batch.advantages_N, dtype=torch.float64))
    comm.all_reduce_sum(sums)
    step.advantages = (sums[0] / sums[1].clamp(min=1.0)).tolist()
