"""What the tests of resharding share: random models and layouts, and what each member holds, sliced by hand. No tests."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from pearl.engine.comm.layout import Layout
from pearl.engine.models.config import Experts, ModelConfig
from pearl.engine.models.params import Shard, hf_shapes, param_specs


def model(**fields) -> ModelConfig:
    sizes = {"vocab_size": 19, "hidden_size": 6, "intermediate_size": 10, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    rest = {"head_dim": 2, "max_position": 16, "rope_theta": 1e4, "rms_eps": 1e-6, "tie_embeddings": False, "qk_norm": True}
    return ModelConfig(architecture="Qwen3ForCausalLM", **(sizes | rest | fields))


def some_experts(count: int, layers: tuple[int, ...] = (1,)) -> Experts:
    return Experts(count=count, top_k=1, intermediate_size=3, norm_topk_prob=True, layers=layers)


@st.composite
def models(draw) -> ModelConfig:
    """Heads that 1, 2 and 4 ranks can cut, also where there are fewer key-value heads than ranks; all else uneven."""
    count = draw(st.sampled_from([None, 4, 6]))
    biases = draw(st.booleans())
    return model(
        vocab_size=draw(st.integers(4, 23)),
        hidden_size=draw(st.integers(1, 7)),
        intermediate_size=draw(st.integers(4, 11)),
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        tie_embeddings=draw(st.booleans()),
        attention_bias=biases,
        output_bias=biases,
        experts=None if count is None else some_experts(count, draw(st.sampled_from([(1,), (0, 1)]))),
    )


@st.composite
def layouts(draw, config: ModelConfig, pool: int = 12) -> Layout:
    tp, fsdp, copies = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    while tp * fsdp * copies > pool:
        fsdp, copies = max(1, fsdp - 1), max(1, copies - 1)
    count = tp * fsdp * copies
    most = 1 if config.experts is None else config.experts.count
    degrees = [n for n in range(1, most + 1) if (tp * fsdp) % n == 0 or (n % (tp * fsdp) == 0 and count % n == 0)]
    members = draw(st.permutations(range(pool)))[:count]
    return Layout(members=tuple(members), fsdp=fsdp, tp=tp, ep=draw(st.sampled_from([None, *degrees])))


def numbered_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face tensors in which every number of the model is another one."""
    counter = itertools.count()
    return {
        name: torch.tensor([next(counter) for _ in range(int(np.prod(shape)))]).view(shape)
        for name, shape in hf_shapes(config).items()
    }


def local_tensors(config: ModelConfig, layout: Layout, member: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one member holds: its tensor-parallel (or expert-parallel) part of each parameter, then cut as FSDP2 cuts."""
    position = layout.members.index(member)
    found = {}
    whole = parameters(config, Shard(rank=0, size=1), tensors)
    dense = parameters(config, Shard(rank=position % layout.tp, size=layout.tp), tensors)
    for spec in param_specs(config):
        if spec.name.split(".")[-2:][0] == "experts" and layout.ep is not None:
            fsdp, cut = max(1, layout.fsdp * layout.tp // layout.ep), layout.ep
            count, rank = spec.shape[0], position % layout.ep
            part = whole[spec.name][rank * count // cut : (rank + 1) * count // cut]
        else:
            fsdp, cut = layout.fsdp, layout.tp
            part = dense[spec.name]
        chunks = part.chunk(fsdp)
        index = position // cut % fsdp
        found[spec.name] = chunks[index] if index < len(chunks) else part[:0]
    return found


def parameters(config: ModelConfig, shard: Shard, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of one tensor-parallel rank."""
    found = {}
    for spec in param_specs(config, shard):
        found[spec.name] = torch.full(spec.shape, -1, dtype=next(iter(tensors.values())).dtype)
        for part in spec.parts:
            found[spec.name][part.target_index] = tensors[part.hf_name][part.source_index()]
    return found
