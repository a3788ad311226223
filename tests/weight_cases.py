"""What the tests of the weight store and of checkpoint folders share: decoders to load into and to compare."""

from __future__ import annotations

from pathlib import Path

import hf_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pearl.engine.kernels.interface import PackedBatch
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig, from_folder, from_hf
from pearl.engine.models.decoder import Decoder, varlen_attend
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.checkpoint import read_folder
from pearl.engine.weights.store import WeightStore

IDS = hf_models.prompt(24)
Q, EMBEDDING, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


def new_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Decoder, WeightStore]:
    decoder = Decoder(config, ReferenceKernels(), dtype=dtype)
    return decoder, WeightStore(config, dict(decoder.named_parameters()))


def config_of(model: PreTrainedModel) -> ModelConfig:
    return from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})


def tensors_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The model's parameters as transformers holds them: with experts stacked."""
    shapes = hf_shapes(config_of(model), stacked=True)
    return [(name, value.clone()) for name, value in model.state_dict().items() if name in shapes]


def one_by_one(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The same with a tensor for each expert and projection, as transformers writes them to files."""
    single = []
    for name, tensor in pairs:
        layer, _, kind = name.rpartition(".experts.")
        if not layer:
            single.append((name, tensor))
            continue
        for expert, value in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), value.chunk(2), strict=True)
            named = halves if kind == "gate_up_proj" else [(kind, value)]
            single += [(f"{layer}.experts.{expert}.{projection}.weight", part.clone()) for projection, part in named]
    return single


@torch.no_grad()
def logits_of(decoder: Decoder) -> Tensor:
    batch = PackedBatch(positions_T=torch.arange(len(IDS)), lengths=(len(IDS),))
    return decoder.logits(decoder(torch.tensor(IDS), batch.positions_T, varlen_attend(decoder.kernels, batch, decoder.config)))


def is_model(decoder: Decoder, model: PreTrainedModel) -> bool:
    return float((logits_of(decoder) - hf_models.logits(model, IDS)).abs().max()) < 1e-4


def load(folder: Path) -> Decoder:
    config = from_folder(folder)
    decoder, store = new_decoder(config)
    store.stage(read_folder(folder, config), 0)
    store.commit()
    return decoder


def snapshot(decoder: Decoder) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in decoder.named_parameters()}


def unchanged(decoder: Decoder, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in decoder.named_parameters())
