"""Decoders of tiny models, and their logits step by step over a pool, whatever kernels run them. Fixtures only, no tests."""

from __future__ import annotations

from typing import Any

import hf_models
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pearl.engine.arena import Arena
from pearl.engine.comm.communicator import Communicator
from pearl.engine.kernels.interface import Kernels, PackedBatch, PagedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig, from_hf
from pearl.engine.models.decoder import Decoder, paged_attend, varlen_attend
from pearl.engine.models.params import Shard
from pearl.engine.weights.store import WeightStore

LENGTHS = (13, 1, 40, 8, 5)


def config_of(model: PreTrainedModel, **changes: Any) -> ModelConfig:
    return from_hf({**model.config.to_dict(), "architectures": [type(model).__name__], **changes})


def decoder_of(
    model: PreTrainedModel,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    comm: Communicator | None = None,
) -> Decoder:
    """With a `comm` of several members the part of one of them."""
    config = config or config_of(model)
    shard = None if comm is None else Shard(rank=comm.rank, size=comm.size)
    decoder = Decoder(config, ReferenceKernels(), dtype=dtype, shard=shard, comm=comm)
    store = WeightStore(config, dict(decoder.named_parameters()), shard)
    store.stage(model.state_dict().items(), 0)
    store.commit()
    return decoder


def packed_logits(decoder: Decoder, sequences: list[list[int]]) -> list[Tensor]:
    lengths = tuple(len(ids) for ids in sequences)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    batch = PackedBatch(positions_T=positions_T, lengths=lengths)
    attend = varlen_attend(decoder.kernels, batch, decoder.config)
    hidden_TD = decoder(torch.tensor(sum(sequences, [])), positions_T, attend)
    return list(decoder.logits(hidden_TD).split(lengths))


@torch.inference_mode()
def paged_logits(
    decoder: Decoder,
    sequences: list[list[int]],
    *,
    block_size: int,
    chunk: int,
    seed: int = 0,
    kernels: Kernels | None = None,
) -> list[Tensor]:
    """Steps of up to `chunk` tokens per sequence over a poisoned pool whose blocks are dealt out at random.

    `kernels` that run whole steps do so; the others, by default the decoder's own, operation by operation.
    """
    config, rng, kernels = decoder.served_model().config, np.random.default_rng(seed), kernels or decoder.kernels
    needed = [-(-len(ids) // block_size) for ids in sequences]
    shape = (config.num_layers, 2, sum(needed) + 3, config.num_kv_heads, block_size, config.head_dim)
    pool = torch.full(shape, float("nan"), dtype=next(decoder.parameters()).dtype)
    served = kernels.serve(decoder.served_model(), pool, Arena(torch.device("cpu")).zeros)
    if served is not None:
        served.weights.load(release=False)
    dealt = rng.permutation(shape[2])[: sum(needed)].tolist()
    tables = [[dealt.pop() for _ in range(n)] for n in needed]
    done, rows = [0] * len(sequences), [[] for _ in sequences]
    while any(d < len(ids) for d, ids in zip(done, sequences, strict=True)):
        spans = [(s, done[s], min(done[s] + chunk, len(ids))) for s, ids in enumerate(sequences) if done[s] < len(ids)]
        spans.sort(key=lambda span: span[2] - span[1] != 1)  # decode rows first
        batch = _batch(spans, tables, block_size)
        ids_T = torch.tensor([token for s, a, b in spans for token in sequences[s][a:b]])
        if served is None:
            logits = decoder.logits(decoder(ids_T, batch.positions_T, paged_attend(kernels, pool, batch, config)))
        else:
            add_up = None if decoder.comm is None else decoder.comm.all_reduce_sum
            logits = decoder.logits(served.forward(decoder.embedded(ids_T), batch, add_up), served.logits)
        for (s, _, b), part in zip(spans, logits.split([b - a for _, a, b in spans]), strict=True):
            rows[s].append(part)
            done[s] = b
    return [torch.cat(parts) for parts in rows]


def _batch(spans: list[tuple[int, int, int]], tables: list[list[int]], block_size: int) -> PagedBatch:
    width = max(map(len, tables))
    return PagedBatch(
        positions_T=torch.tensor([p for _, a, b in spans for p in range(a, b)]),
        slot_mapping_T=torch.tensor(
            [tables[s][p // block_size] * block_size + p % block_size for s, a, b in spans for p in range(a, b)]
        ),
        query_starts_S1=torch.tensor(np.cumsum([0, *(b - a for _, a, b in spans)]), dtype=torch.int32),
        context_lens_S=torch.tensor([b for _, _, b in spans], dtype=torch.int32),
        block_tables_SN=torch.tensor([tables[s] + [0] * (width - len(tables[s])) for s, _, _ in spans], dtype=torch.int32),
        num_decodes=sum(b - a == 1 for _, a, b in spans),
        max_query_len=max(b - a for _, a, b in spans),
        max_context_len=max(b for _, _, b in spans),
    )


def gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def sequences_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [hf_models.prompt(n, seed=n) for n in lengths]
