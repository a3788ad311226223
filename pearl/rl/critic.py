"""The critic, which says what the rest of a trajectory is worth: a model begun as a copy of the policy, or a head on it.

Owns the value model and the head, their passes and their loss. It does not know advantages, optimizers or when it is asked.
Invariant: the value of a row is that of the state in which the row's token is sampled; a fresh critic says 0 everywhere.

Shapes: N trained tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pearl.engine.models.decoder import Decoder
from pearl.engine.models.layers import add_parameter, parameter
from pearl.rl.micro_batch import MicroBatch
from pearl.rl.sharding import own_rows
from pearl.rl.trained_decoder import TrainedDecoder

CRITIC_SUMS = ("loss", "returns", "returns_squared", "errors_squared")
"""What an update's metrics are made of; the errors are those of the values before the step."""


class Critic(TrainedDecoder):
    """A decoder whose output matrix has one row. Made like a Decoder, with the same arguments."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._modules.pop("lm_head", None)
        _add_head(self)

    def head_weight(self) -> Tensor:
        return parameter(self, "value_head")

    def values(self, batch: MicroBatch) -> Tensor:
        """The values [N] of the batch's rows, in fp32 at least."""
        return self.run(batch, _values)

    def learn(self, batch: MicroBatch, trained: int) -> Tensor:
        """Adds the batch's share of the gradient for an update of `trained` tokens; its CRITIC_SUMS."""
        loss, sums = value_loss(self.values(batch), batch, trained)
        loss.backward()
        return sums

    @torch.no_grad()
    def begin(self, policy: Decoder) -> None:
        """Takes over the policy's trunk (which is cut over ranks alike) and forgets what it knew of values."""
        theirs = dict(policy.named_parameters())
        for name, ours in self.named_parameters():
            rows = own_rows(ours)[1]
            if name.startswith("value_head."):
                rows.zero_()
            else:
                rows.copy_(own_rows(theirs[name])[1])


class ActorCritic(TrainedDecoder):
    """A policy with a value head beside its own, which sees the same hidden states. The head is in no folder of the policy."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _add_head(self)

    def values_of(self, hidden_ND: Tensor) -> Tensor:
        """The values [N] of rows of hidden states; to be called inside a pass."""
        return _values(hidden_ND, parameter(self, "value_head"))

    @torch.no_grad()
    def begin(self) -> None:
        """Forgets what it knew of values."""
        own_rows(parameter(self, "value_head"))[1].zero_()


def _add_head(decoder: Decoder) -> None:
    add_parameter(decoder, "value_head.weight", nn.Parameter(torch.zeros_like(parameter(decoder, "norm")).unsqueeze(0)))


def _values(hidden_ND: Tensor, weight_1D: Tensor) -> Tensor:
    wide = torch.promote_types(weight_1D.dtype, torch.float32)
    return (hidden_ND.to(wide) @ weight_1D.to(wide).T).squeeze(1)


def value_loss(values_N: Tensor, batch: MicroBatch, trained: int) -> tuple[Tensor, Tensor]:
    """Half the squared error, as a share of the mean over the update's `trained` tokens; and the batch's CRITIC_SUMS."""
    assert batch.returns_N is not None and batch.values_N is not None
    loss = 0.5 * (values_N - batch.returns_N).square().sum() / trained
    returns_N, errors_N = batch.returns_N.double(), (batch.returns_N - batch.values_N).double()
    sums = (loss.detach().double(), returns_N.sum(), returns_N.square().sum(), errors_N.square().sum())
    return loss, torch.stack(sums)


def joint_loss(
    loss: Tensor, values_N: Tensor | None, batch: MicroBatch, trained: int, coef: float | None
) -> tuple[Tensor, Tensor]:
    """A policy's loss and that of its value head, if it has one, times `coef`; and the head's CRITIC_SUMS.

    Without `coef` (nothing is to be learned of values) its gradient is zero: ranks run the same collectives in any case.
    """
    if values_N is None or coef is None:
        return loss if values_N is None else loss + 0.0 * values_N.sum(), loss.new_zeros(len(CRITIC_SUMS), dtype=torch.float64)
    of_values, sums = value_loss(values_N, batch, trained)
    return loss + coef * of_values, sums


def critic_metrics(sums: list[float], trained: int) -> dict[str, float]:
    """`value_loss` of an update, and the share of the returns' variance that the values explained before the step."""
    loss, first, second, squares = sums
    variance = second - first * first / trained
    explained = 1.0 - squares / variance if variance > 1e-12 * second else 0.0
    return {"value_loss": loss, "explained_variance": explained}
