"""The decoder: embedding, layers, final norm and head, in one definition for the trainer and the engine.

Owns the parameters (named exactly as `param_specs` says) and the rotary tables; does not know caches, batches or files: how a
layer attends is the `Attend` it is given, made by `paged_attend` or `varlen_attend`. Invariant: parameters are allocated once,
so their addresses never change (unless a trainer shards them). Shapes: T tokens, N chosen tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.engine.comm.communicator import Communicator
from pearl.engine.kernels.interface import Attend, Kernels, PackedBatch, PagedBatch, ServedModel
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.layers import DecoderLayer, add_parameter, parameter, wide_head
from pearl.engine.models.params import WHOLE, Shard, local_config, param_specs
from pearl.engine.models.rope import rope_tables

INIT_STD = 0.02


class Decoder(nn.Module):
    """A decoder in `dtype` on `device`. Parameters are zero until loaded or `init_weights` is called.

    With a `shard` of several it holds that rank's parameters, and `comm` is the group of the ranks: all of them make the same
    calls (for serving: there is no backward pass through the group), and what comes back is whole on each.

    `allocate=False` gives parameters shapes but no memory (torch's meta device), for whoever shards them first. `memory(shape,
    dtype)` gives zeros on `device` to place them in, instead of memory of torch's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        allocate: bool = True,
        memory: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
        shard: Shard | None = None,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.config, self.kernels, self.shard = config, kernels, shard or WHOLE
        self.comm = _group_of(self.shard, comm)
        self.embed = nn.Module()
        local = local_config(config, self.shard)
        self.layers = nn.ModuleList(
            DecoderLayer(local, kernels, index, self.shard, self.comm) for index in range(config.num_layers)
        )
        place = device if allocate else "meta"
        for spec in param_specs(config, self.shard):
            value = torch.zeros(spec.shape, dtype=dtype, device=place) if memory is None else memory(spec.shape, dtype)
            add_parameter(self, spec.name, nn.Parameter(value))
        # Plain attributes: neither `.to(dtype)` nor a state dict may touch them.
        self.rope_cos, self.rope_sin = rope_tables(config, device)

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, attend: Attend, *, logits_of_N: Tensor | None = None
    ) -> Tensor:
        """Final-normed hidden states [T, D]; or, with row numbers `logits_of_N`, the fp32 logits [N, V] of those rows.

        Positions are int64 in [0, max_position). A sharded decoder has its own parameters whole only inside this call.
        """
        cos_TB, sin_TB = self.rope_cos.index_select(0, positions_T), self.rope_sin.index_select(0, positions_T)
        delta_TD, residual_TD = None, self.embedded(input_ids_T)
        for layer in self.layers:
            delta_TD, residual_TD = layer(delta_TD, residual_TD, cos_TB, sin_TB, attend)
        x_TD, _ = self.kernels.add_rms_norm(delta_TD, residual_TD, parameter(self, "norm"), self.config.rms_eps)
        return x_TD if logits_of_N is None else self.logits(x_TD[logits_of_N])

    def logits(self, hidden_TD: Tensor, own_logits: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """fp32 logits [T, V] of final-normed hidden states, whole on every rank.

        `own_logits` gives those of this rank's part of the vocabulary, where kernels have the head in an order of their own.
        """
        logits_TV = (own_logits or self._own_logits)(hidden_TD)
        if self.comm is None:
            return logits_TV
        # Ranks have equally many entries, or one less: those are filled up for the exchange, and cut again.
        shares = [Shard(rank=rank, size=self.comm.size).share(self.config.vocab_size) for rank in range(self.comm.size)]
        widths = [last - first for first, last in shares]
        own_TV = F.pad(logits_TV, (0, max(widths) - logits_TV.shape[1])).contiguous()
        gathered = own_TV.new_empty(self.comm.size, *own_TV.shape)
        self.comm.all_gather(gathered, own_TV)
        return torch.cat([rows_TV[:, :width] for rows_TV, width in zip(gathered, widths, strict=True)], dim=1)

    def _own_logits(self, hidden_TD: Tensor) -> Tensor:
        return wide_head(hidden_TD, parameter(self, "embed" if self.config.tie_embeddings else "lm_head"))

    def served_model(self) -> ServedModel:
        """What kernels must know to run the steps of this decoder themselves."""
        experts = self.config.experts
        return ServedModel(
            config=local_config(self.config, self.shard),
            parameters=dict(self.named_parameters()),
            rope_cos=self.rope_cos,
            rope_sin=self.rope_sin,
            rank=self.shard.rank,
            first_expert=0 if experts is None else self.shard.share(experts.count)[0],
        )

    def embedded(self, input_ids_T: Tensor) -> Tensor:
        """Rows of the embedding; a rank has those of its part of the vocabulary, and zeros for the others' sum."""
        if self.comm is None:
            return F.embedding(input_ids_T, parameter(self, "embed"))
        first, last = self.shard.share(self.config.vocab_size)
        elsewhere_T = (input_ids_T < first) | (input_ids_T >= last)
        own_TD = F.embedding((input_ids_T - first).masked_fill(elsewhere_T, 0), parameter(self, "embed"))
        own_TD = own_TD.masked_fill(elsewhere_T[:, None], 0.0)
        self.comm.all_reduce_sum(own_TD)
        return own_TD

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Random weights, see `random_weights`; the same model on any number of ranks."""
        parameters = dict(self.named_parameters())
        tables = zip(param_specs(self.config), param_specs(self.config, self.shard), strict=True)
        for (name, value), (whole, own) in zip(random_weights(self.config, seed), tables, strict=True):
            tensors = {part.hf_name: value[part.target_index] for part in whole.parts}
            for part in own.parts:
                parameters[name][part.target_index] = tensors[part.hf_name][part.source_index()]


def _group_of(shard: Shard, comm: Communicator | None) -> Communicator | None:
    """The group to exchange with; None for a model that is not cut. ValueError if the group does not fit the shard."""
    if (shard.rank, shard.size) != ((comm.rank, comm.size) if comm is not None else (0, 1)):
        given = "none" if comm is None else f"rank {comm.rank} of {comm.size}"
        raise ValueError(f"comm={given}: must be the group of the shard's ranks, here rank {shard.rank} of {shard.size}")
    return comm if shard.size > 1 else None


def random_weights(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """fp32 values (normal, std 0.02; norms 1, biases 0) of all parameters, the same for a seed on every machine."""
    for index, spec in enumerate(param_specs(config)):
        if spec.init == "normal":
            # numpy's Philox stream is specified bit for bit; torch's normal_ depends on the vector width.
            draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
            value = torch.from_numpy(draw.standard_normal(spec.shape, dtype=np.float32)).mul_(INIT_STD)
        else:
            value = torch.full(spec.shape, 1.0 if spec.init == "ones" else 0.0)
        yield spec.name, value


def paged_attend(
    kernels: Kernels,
    kv_pool: Tensor,
    batch: PagedBatch,
    config: ModelConfig,
    written: Callable[[int], None] | None = None,
) -> Attend:
    """Attention over the paged pool kv[layer, 2, block, kv_head, ...]: this step's keys and values are stored first.

    `written` is told in how many layers they are.
    """
    scale = config.head_dim**-0.5

    def attend(layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor:
        kv_2NG__ = kv_pool[layer]
        kernels.store_kv(k_TGB, v_TGB, kv_2NG__, batch.slot_mapping_T)
        if written is not None:
            written(layer + 1)
        return kernels.paged_attention(q_THB, kv_2NG__, batch, scale, config.window(layer))

    return attend


def varlen_attend(kernels: Kernels, batch: PackedBatch, config: ModelConfig) -> Attend:
    """Attention inside each sequence of a packed batch, without a cache; what the trainer and `score` use."""
    scale = config.head_dim**-0.5

    def attend(layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor:
        return kernels.varlen_attention(q_THB, k_TGB, v_TGB, batch, scale, config.window(layer))

    return attend
