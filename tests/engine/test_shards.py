"""The parameter tables of tensor-parallel ranks, and that a decoder cut over ranks computes what a whole one does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import hf_models
import pytest
import torch
from gloo_members import run_members
from torch import Tensor
from transformers import PreTrainedModel
from weight_cases import IDS, config_of, logits_of, new_decoder, one_by_one, tensors_of

from pearl.engine.comm.communicator import Communicator, SingleCommunicator
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.decoder import Decoder
from pearl.engine.models.params import Part, Shard, all_parts, hf_shapes, local_config, param_specs
from pearl.engine.weights.store import WeightStore

BIASES = {"attention_bias": True, "mlp_bias": True}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any], int]] = {
    "qwen3": (hf_models.dense, {}, 2),
    "qwen3 tied, 129 ids": (hf_models.dense, {"tie_word_embeddings": True, "vocab_size": 129}, 2),
    "qwen3, 130 ids over 4, kv heads twice": (hf_models.dense, {"vocab_size": 130}, 4),
    "qwen3 over 3": (hf_models.dense, SIX_HEADS, 3),
    "qwen3 over 3, one kv head": (hf_models.dense, {"num_attention_heads": 3, "num_key_value_heads": 1}, 3),
    "qwen3 over 3, mlp of 49": (hf_models.dense, {**SIX_HEADS, "intermediate_size": 49}, 3),
    "llama with biases": (hf_models.llama, BIASES, 2),
    "llama with biases over 4": (hf_models.llama, BIASES | {"tie_word_embeddings": True}, 4),
    "qwen2": (hf_models.qwen2, {}, 2),
    "mistral with a window": (hf_models.mistral, {"sliding_window": 5}, 2),
    "moe": (hf_models.moe, {}, 2),
    "moe, 5 experts over 3": (hf_models.moe, {**SIX_HEADS, "num_experts": 5, "norm_topk_prob": True}, 3),
    "moe, some layers dense": (hf_models.moe, {"mlp_only_layers": [0], "num_experts": 6}, 4),
}


def ranks(size: int) -> list[Shard]:
    return [Shard(rank=rank, size=size) for rank in range(size)]


def cells(part_box: tuple[tuple[int, int], ...]) -> int:
    return math.prod(high - low for low, high in part_box)


def sharded(config: ModelConfig, comm: Communicator) -> tuple[Decoder, WeightStore]:
    shard = Shard(rank=comm.rank, size=comm.size)
    decoder = Decoder(config, ReferenceKernels(), dtype=torch.float32, shard=shard, comm=comm)
    return decoder, WeightStore(config, dict(decoder.named_parameters()), shard)


def all_well(results: list) -> list:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# ---------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("case", CASES)
def test_the_tables_of_all_ranks_cover_every_tensor(case: str) -> None:
    build, overrides, size = CASES[case]
    config = config_of(build(**overrides))
    shapes = hf_shapes(config) | hf_shapes(config, stacked=True)
    seen = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for shard in ranks(size):
        for spec in param_specs(config, shard):
            for parts in (spec.parts, (spec.stacked,) if spec.stacked else ()):
                covered = torch.zeros(spec.shape, dtype=torch.int32)
                for part in parts:
                    assert covered[part.target_index].shape == seen[part.hf_name][part.source_index()].shape
                    covered[part.target_index] += 1
                    seen[part.hf_name][part.source_index()] += 1
                assert not parts or bool((covered == 1).all()), spec.name
            assert math.prod(spec.shape) == sum(cells(part.target) for part in spec.parts)
    names = {part.hf_name: spec.shard_axis for spec in param_specs(config) for part in all_parts(spec)}
    for name, times in seen.items():
        again = max(1, size // config.num_kv_heads) if name.split(".")[-2] in ("k_proj", "v_proj") else 1
        assert bool((times == (size if names[name] is None else again)).all()), name


def test_a_whole_models_table_is_that_of_one_rank_of_one() -> None:
    config = config_of(hf_models.moe())
    assert param_specs(config) == param_specs(config, Shard(rank=0, size=1))
    assert local_config(config, Shard(rank=0, size=1)) == config


@pytest.mark.parametrize("start, stop", [(0, 6), (0, 2), (3, 4), (4, 6), (5, 9), (0, 1)])
def test_rows_of_a_part(start: int, stop: int) -> None:
    """A tensor of 6 rows whose rows 1 to 4, columns 2 to 4, lie in one slice of a parameter."""
    part = Part(hf_name="x", target=((1, 2), (3, 7), (0, 3)), source=((1, 5), (2, 5)))
    tensor = torch.arange(60.0).view(6, 10)
    whole, some = torch.zeros(2, 8, 3), torch.zeros(2, 8, 3)
    whole[part.target_index] = tensor[part.source_index()]
    piece = part.within(start, stop)
    if piece is not None:
        some[piece.target_index] = tensor[start:stop][piece.source_index(start)]
    low, high = max(start, 1), min(stop, 5)
    assert (piece is None) == (low >= high)
    assert torch.equal(some[1, 2 + low : 2 + high], whole[1, 2 + low : 2 + high])
    assert int((some != 0).sum()) == 3 * max(0, high - low)


@pytest.mark.parametrize(
    ("overrides", "size", "words"),
    [
        ({}, 3, "num_heads=4: must be a multiple of tensor_parallel=3"),
        ({}, 8, "num_heads=4: must be a multiple of tensor_parallel=8"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, 3, "num_kv_heads=2: must be a multiple or a divisor of .*=3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "num_kv_heads=4: must be a multiple or a divisor of .*=6"),
        ({"intermediate_size": 3}, 4, "intermediate_size=3: must be at least tensor_parallel=4"),
        ({"vocab_size": 3}, 4, "vocab_size=3: must be at least tensor_parallel=4"),
        ({"num_experts": 3}, 4, "num_experts=3: must be at least tensor_parallel=4"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(overrides: dict[str, int], size: int, words: str) -> None:
    experts = overrides.pop("num_experts", None)
    config = config_of(hf_models.dense(**overrides) if experts is None else hf_models.moe(num_experts=experts))
    for call in (param_specs, local_config):
        with pytest.raises(ValueError, match=words):
            call(config, Shard(rank=0, size=size))


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank}"):
        Shard(rank=rank, size=size)


def test_a_group_that_does_not_fit_the_shard_is_refused() -> None:
    config = config_of(hf_models.dense())
    for comm in (None, SingleCommunicator()):
        with pytest.raises(ValueError, match="comm="):
            Decoder(config, ReferenceKernels(), dtype=torch.float32, shard=Shard(rank=0, size=2), comm=comm)
    assert Decoder(config, ReferenceKernels(), dtype=torch.float32, comm=SingleCommunicator()).comm is None


# ---------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("case", CASES)
def test_logits_over_ranks_equal_those_of_one(case: str) -> None:
    build, overrides, size = CASES[case]
    model = hf_models.randomise(build(**overrides))
    config, expected = config_of(model), hf_models.logits(model, IDS)
    whole = sum(math.prod(spec.shape) for spec in param_specs(config))

    def member(comm: Communicator) -> tuple[Tensor, int]:
        decoder, store = sharded(config, comm)
        store.stage(tensors_of(model), 0)
        store.commit()
        return logits_of(decoder), sum(value.numel() for value in decoder.parameters())

    results = all_well(run_members(size, member))
    for logits, held in results:
        assert logits.shape == (len(IDS), config.vocab_size) and logits.dtype == torch.float32
        assert float((logits - expected).abs().max()) < 1e-4
        assert torch.equal(logits, results[0][0])
        assert held < 0.8 * whole


def test_the_last_id_of_an_odd_vocabulary_can_win() -> None:
    model = hf_models.dense(vocab_size=129)
    with torch.no_grad():
        model.lm_head.weight[128] = 50 * hf_models_hidden(model)
    config = config_of(model)

    def member(comm: Communicator) -> list[int]:
        decoder, store = sharded(config, comm)
        store.stage(tensors_of(model), 0)
        store.commit()
        return logits_of(decoder).argmax(-1).tolist()

    for ids in all_well(run_members(2, member)):
        assert ids[-1] == 128 and max(ids) < 129


@torch.no_grad()
def hf_models_hidden(model: PreTrainedModel) -> Tensor:
    """The last token's final-normed hidden state."""
    return model.model(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state[0, -1]


def test_the_output_bias_is_added_once() -> None:
    """A self-check of the cases with biases: twice the bias would be seen."""
    model = hf_models.randomise(hf_models.llama(**BIASES))
    expected = hf_models.logits(model, IDS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias *= 2
    assert float((hf_models.logits(model, IDS) - expected).abs().max()) > 0.1


def test_random_weights_are_the_same_model_on_any_number_of_ranks() -> None:
    config = config_of(hf_models.moe(vocab_size=129, attention_bias=True))
    decoder, _ = new_decoder(config)
    decoder.init_weights(5)
    expected = logits_of(decoder)

    def member(comm: Communicator) -> Tensor:
        part, _ = sharded(config, comm)
        part.init_weights(5)
        return logits_of(part)

    for logits in all_well(run_members(2, member)):
        assert float((logits - expected).abs().max()) < 1e-5
    assert float(expected.std()) > 1e-3


def test_one_rank_of_one_is_the_whole_decoder() -> None:
    config = config_of(hf_models.dense())
    decoder, store = sharded(config, SingleCommunicator())
    store.stage(tensors_of(hf_models.dense()), 0)
    store.commit()
    assert float((logits_of(decoder) - hf_models.logits(hf_models.dense(), IDS)).abs().max()) < 1e-4


# ---------------------------------------------------------------------------------------------------- the store of a rank


def pieces(pairs: list[tuple[str, Tensor]], rows: int) -> Iterator[tuple[str, Tensor, int]]:
    for name, tensor in pairs:
        for start in range(0, len(tensor), rows):
            yield name, tensor[start : start + rows], start


@pytest.mark.parametrize("case", ["qwen3, 130 ids over 4, kv heads twice", "moe, 5 experts over 3", "llama with biases over 4"])
@pytest.mark.parametrize("way", ["rows", "adopted rows", "one by one", "streamed", "streamed rows"])
def test_every_way_in_fills_a_rank_the_same(case: str, way: str) -> None:
    build, overrides, size = CASES[case]
    model = hf_models.randomise(build(**overrides))
    config, stacked = config_of(model), tensors_of(model)
    single = one_by_one(stacked)
    for shard in ranks(size):
        specs = param_specs(config, shard)
        expected, found = ({spec.name: torch.zeros(spec.shape) for spec in specs} for _ in range(2))
        store = WeightStore(config, expected, shard)
        store.stage(stacked, 0)
        store.commit()
        store = WeightStore(config, found, shard)
        {
            "rows": lambda store=store: store.stage(pieces(single, 7), 0),
            "adopted rows": lambda store=store: store.stage(list(pieces(single, 7)), 0, adopt=True),
            "one by one": lambda store=store: store.stage(reversed(single), 0),
            "streamed": lambda store=store: store.stream(stacked, 0),
            "streamed rows": lambda store=store: store.stream(pieces(stacked, 3), 0),
        }[way]()
        if not store.ready:
            store.commit()
        assert store.version == 0
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
            assert float(value.abs().max()) > 0


def test_every_rank_refuses_a_value_that_only_one_would_hold() -> None:
    config = config_of(hf_models.dense())
    bad = {name: value.clone() for name, value in tensors_of(hf_models.dense())}
    bad["model.layers.1.mlp.down_proj.weight"][0, -1] = float("nan")
    for shard in ranks(2):
        params = {spec.name: torch.zeros(spec.shape) for spec in param_specs(config, shard)}
        store = WeightStore(config, params, shard)
        with pytest.raises(ValueError, match="down_proj.weight: 1 of 1536 values are not finite"):
            store.stage(bad.items(), 0)


def test_a_local_configuration_differs_in_heads_alone() -> None:
    config = config_of(hf_models.moe(num_attention_heads=8, num_key_value_heads=2, num_experts=8))
    for size, heads, kv_heads in ((2, 4, 1), (4, 2, 1), (8, 1, 1)):
        local = local_config(config, Shard(rank=size - 1, size=size))
        assert local == dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads)
