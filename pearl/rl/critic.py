"""The critic: a model of its own, begun as a copy of the policy, that says what the rest of a trajectory is worth.

Owns the value model, its passes and its loss. It does not know advantages, optimizers or when it is asked.
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
        like = parameter(self, "norm")
        add_parameter(self, "value_head.weight", nn.Parameter(torch.zeros_like(like).unsqueeze(0)))

    def head_weight(self) -> Tensor:
        return parameter(self, "value_head")

    def values(self, batch: MicroBatch) -> Tensor:
        """The values [N] of the batch's rows, in fp32 at least."""
        wide = torch.promote_types(parameter(self, "value_head").dtype, torch.float32)
        return self.run(batch, lambda hidden_ND, weight_1D: (hidden_ND.to(wide) @ weight_1D.to(wide).T).squeeze(1))

    def learn(self, batch: MicroBatch, trained: int) -> Tensor:
        """Adds the batch's share of the gradient for an update of `trained` tokens; its CRITIC_SUMS."""
        assert batch.returns_N is not None and batch.values_N is not None
        loss = value_loss(self.values(batch), batch.returns_N, trained)
        loss.backward()
        returns_N, errors_N = batch.returns_N.double(), (batch.returns_N - batch.values_N).double()
        return torch.stack((loss.detach().double(), returns_N.sum(), returns_N.square().sum(), errors_N.square().sum()))

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


def value_loss(values_N: Tensor, returns_N: Tensor, trained: int) -> Tensor:
    """Half the squared error, as a share of the mean over the update's `trained` tokens."""
    return 0.5 * (values_N - returns_N).square().sum() / trained


def critic_metrics(sums: list[float], trained: int) -> dict[str, float]:
    """`value_loss` of an update, and the share of the returns' variance that the values explained before the step."""
    loss, first, second, squares = sums
    variance = second - first * first / trained
    explained = 1.0 - squares / variance if variance > 1e-12 * second else 0.0
    return {"value_loss": loss, "explained_variance": explained}
