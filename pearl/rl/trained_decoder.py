"""A decoder as the trainer runs it: what is made of hidden states is made inside its forward pass; layers frozen or recomputed.

Owns which parameters are trained and what is kept for the backward pass. It does not know losses, optimizers or ranks.
Invariant: the output matrix is read inside the forward pass only, where a decoder that is cut over ranks has it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.models.decoder import Decoder, varlen_attend
from pearl.engine.models.layers import parameter
from pearl.rl.micro_batch import MicroBatch
from pearl.rl.shared_prefix import shared_attend
from pearl.training_options import TrainerOptions, check_layers


class TrainedDecoder(Decoder):
    """A Decoder whose forward pass ends with what the caller makes of the hidden states; `narrow`: in bf16 up to there."""

    narrow = False

    def forward(  # type: ignore[override]
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attend: Any,
        *,
        logits_of_N: Tensor | None = None,
        then: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """`then(final-normed hidden states [T, D], output matrix [V, D])`, a tensor or a tuple of them; else a Decoder's."""
        with torch.autocast(input_ids_T.device.type, torch.bfloat16, enabled=self.narrow):
            hidden = super().forward(input_ids_T, positions_T, attend, logits_of_N=logits_of_N)
        return hidden if then is None else then(hidden, self.head_weight())

    def head_weight(self) -> Tensor:
        return parameter(self, "embed" if self.config.tie_embeddings else "lm_head")

    def run(self, batch: MicroBatch, then: Callable[[Tensor, Tensor], Any]) -> Any:
        """A pass over a micro-batch; `then` gets the trained rows' hidden states only."""
        cells_C, rows_T = batch.row_of_cell_C, batch.cell_of_row_T
        positions_C = batch.positions_T if cells_C is None else batch.positions_T[cells_C]
        attend = varlen_attend(self.kernels, PackedBatch(positions_T=positions_C, lengths=batch.lengths), self.config)
        if cells_C is not None and rows_T is not None:
            attend = shared_attend(attend, cells_C, rows_T)
        return self(batch.input_ids_T, batch.positions_T, attend, then=lambda h_TD, w_VD: then(h_TD[batch.rows_N], w_VD))


def prepare(decoder: TrainedDecoder, options: TrainerOptions) -> None:
    """Freezes what is not to be trained, makes layers compute again in the backward pass, or in bf16, as the options say.

    Comes before the decoder is cut over ranks. ValueError for more layers than there are.
    """
    decoder.narrow = options.compute_dtype == "bfloat16"
    count, last = len(decoder.layers), options.train_layers
    if last is not None:
        check_layers(options, count, "the model's num_layers")
        trained = ("norm.", "value_head.", *(f"layers.{index}." for index in range(count - last, count)))
        for name, weight in decoder.named_parameters():
            weight.requires_grad_(name.startswith(trained))
    if options.checkpoint_layers:
        for layer in decoder.layers[0 if last is None else count - last :]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
