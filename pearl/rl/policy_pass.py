"""Passes over a micro-batch: from a batch and a decoder to the terms of its rows, and from those to the policy's loss.

Owns what a pass asks of policy and reference. It does not know updates, optimizers or timing.
Invariant: the reference sees no gradient. Passes are collectives where decoders are cut over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.config import Config
from pearl.rl.algorithms import Algorithm
from pearl.rl.critic import ActorCritic, Critic
from pearl.rl.loss import LossSums, PolicyRows, kl_terms, policy_loss
from pearl.rl.micro_batch import MicroBatch
from pearl.rl.sharding import whole
from pearl.rl.token_terms import Head, TokenTerms, token_terms
from pearl.rl.trained_decoder import TrainedDecoder


def terms_of(
    decoder: TrainedDecoder, batch: MicroBatch, config: Config, head: Head | None = None
) -> tuple[TokenTerms, Tensor | None]:
    """The terms of the trained rows only (the vocabulary is by far the widest thing in the model); an ActorCritic's values."""

    def then(hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        how = {"temperature": config.rollout.temperature, "rows": config.trainer.logits_rows, "narrow": decoder.narrow}
        terms = token_terms(hidden_ND, weight_VD, batch.targets_N, reference=head, **how)
        return (*terms, decoder.values_of(hidden_ND)) if isinstance(decoder, ActorCritic) else (*terms,)

    logprobs_N, entropy_N, kl_N, *values = decoder.run(batch, then)
    return TokenTerms(logprobs_N, entropy_N, kl_N), values[0] if values else None


@torch.no_grad()
def referred(reference: TrainedDecoder, batch: MicroBatch, config: Config) -> tuple[Head | None, Tensor]:
    """The reference's part in KL terms: what its distributions are made of if they are exact, or its log-probs."""
    if config.algorithm.kl_estimator != "exact":
        return None, terms_of(reference, batch, config)[0].logprobs_N
    hidden_ND = reference.run(batch, lambda hidden_ND, _: hidden_ND)
    return Head(hidden_ND, whole(reference.head_weight())), torch.zeros_like(batch.weights_N)


@torch.no_grad()
def scored(
    decoder: TrainedDecoder, reference: TrainedDecoder | None, critic: Critic | None, batch: MicroBatch, config: Config
) -> MicroBatch:
    """The batch with its log-probs under the present weights; with a `reference`, KL terms, with a critic or head, values."""
    head, reference_N = (None, None) if reference is None else referred(reference, batch, config)
    terms, values_N = terms_of(decoder, batch, config, head)
    kl_N = None if reference_N is None else kl_terms(terms, reference_N, config.algorithm.kl_estimator)
    values_N = values_N if critic is None else critic.values(batch)
    return batch.having(proximal_N=terms.logprobs_N, kl_N=kl_N, values_N=values_N)


def loss_of(
    terms: TokenTerms, batch: MicroBatch, algorithm: Algorithm, reference_N: Tensor | None, *, engine_ratio: bool
) -> LossSums:
    """The policy's loss; `engine_ratio`: the engine's log-probs are of the distribution that the trainer's are of."""
    corrected_N = None if batch.all_fresh else ~batch.fresh_N
    rows = PolicyRows(
        advantages_N=batch.advantages_N,
        weights_N=batch.weights_N,
        sequence_N=batch.sequence_N,
        behaviour_N=batch.behaviour_N if engine_ratio else None,
        proximal_N=batch.proximal_N,
        corrected_N=torch.ones_like(batch.fresh_N) if algorithm.options.importance_of == "all" else corrected_N,
        reference_N=reference_N,
    )
    result = policy_loss(terms, rows, algorithm)
    if batch.kl_N is not None:
        result.metrics["kl"] = batch.kl_N.sum().double()
    return result
