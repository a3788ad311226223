"""Weights that are packed as they come: every way in gives the same bits, what is served changes at a commit alone, and the
plain matrices take no memory."""

from __future__ import annotations

from pathlib import Path

import hf_models
import native_cases
import pytest
import torch
from decoder_cases import config_of
from engine_cases import make
from torch import Tensor
from weight_cases import one_by_one, tensors_of

from pearl.engine.arena import Arena
from pearl.engine.engine import Engine
from pearl.engine.kernels.cpu import CpuKernels
from pearl.engine.kernels.interface import PackedWeights
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.decoder import Decoder
from pearl.engine.models.params import Shard, local_config
from pearl.engine.weights.store import WeightStore
from pearl.protocol import SamplingParams

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 512}
CASES = {
    "tied": lambda: hf_models.dense(**WIDE, tie_word_embeddings=True),
    "untied": lambda: hf_models.llama(**WIDE, tie_word_embeddings=False),
    "experts": lambda: hf_models.moe(hidden_size=256, moe_intermediate_size=64),
}
each_case = pytest.mark.parametrize("case", CASES)


def tokens(engine: Engine) -> list[int]:
    engine.add_request(hf_models.prompt(9), SamplingParams(temperature=0.0, max_tokens=8))
    done = []
    while engine.has_unfinished():
        done += engine.step()
    return done[0].token_ids


def matrices(engine: Engine) -> list[Tensor]:
    return [value.detach() for name, value in engine._decoder.named_parameters() if value.ndim > 1 and "embed" not in name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_case
def test_what_is_packed_is_read_bit_for_bit_and_has_no_plain_memory(tmp_path: Path, case: str, dtype: str) -> None:
    folder = hf_models.save(CASES[case](), tmp_path / "model")
    plain = dict(make(folder, kernels="reference", dtype=dtype).named_hf_tensors())
    engine = make(folder, kernels="cpu", dtype=dtype)
    first = tokens(engine)
    assert {name for name, _ in engine.named_hf_tensors()} == set(plain)
    for name, tensor in engine.named_hf_tensors():
        assert torch.equal(tensor, plain[name]), name
    assert not any(matrix.any() for matrix in matrices(engine))
    assert tokens(engine) == first


def test_dummy_weights_are_packed_from_where_they_were_drawn(tmp_path: Path) -> None:
    """And their plain memory goes back, but for what shares a page with something else."""
    folder = hf_models.save(CASES["untied"](), tmp_path / "model")
    plain = dict(make(folder, kernels="reference", load_format="dummy").named_hf_tensors())
    engine = make(folder, kernels="cpu", load_format="dummy")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in engine.named_hf_tensors())
    assert all(not matrix.flatten()[4096:-4096].any() for matrix in matrices(engine))


# ---------------------------------------------------------------------------------------------------- the store


def empty(config: ModelConfig, dtype: torch.dtype, shard: Shard | None = None) -> tuple[WeightStore, PackedWeights, Decoder]:
    """A store over what the CPU kernels pack, of one rank of several if `shard` says so."""
    shard = shard or Shard(rank=0, size=1)
    comm = None if shard.size == 1 else Alone(shard)
    decoder = Decoder(config, CpuKernels(), dtype=dtype, shard=shard, comm=comm)  # type: ignore[arg-type]
    local = local_config(config, shard)
    pool = torch.zeros(config.num_layers, 2, 4, local.num_kv_heads, 16, config.head_dim, dtype=dtype)
    served = CpuKernels().serve(decoder.served_model(), pool, Arena(CPU).zeros)
    return WeightStore(config, dict(decoder.named_parameters()), shard, packed=served.weights), served.weights, decoder


class Alone:
    """A member of a group that nobody calls."""

    def __init__(self, shard: Shard) -> None:
        self.rank, self.size = shard.rank, shard.size


def pieces(pairs: list[tuple[str, Tensor]], rows: int) -> list[tuple[str, Tensor, int]]:
    """Every tensor in ranges of so many rows, which fit no panel."""
    return [(name, part, at * rows) for name, tensor in pairs for at, part in enumerate(tensor.split(rows))]


def everything(store: WeightStore, packed: PackedWeights, decoder: Decoder) -> dict[str, Tensor]:
    """All that a rank serves from, by parameter: plain, unless the kernels have it packed."""
    found = {name: value.detach().clone() for name, value in decoder.named_parameters() if name not in packed.names}
    for name in packed.names:
        shape = dict(decoder.named_parameters())[name].shape
        box = [tuple((0, size) for size in shape[-2:])]
        if len(shape) == 3:
            box = [((expert, expert + 1), *box[0]) for expert in range(shape[0])]
        found[name] = torch.stack([packed.read(name, one) for one in box]).view(shape)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["staged", "adopted", "adopted rows", "staged rows", "streamed", "declared"])
@pytest.mark.parametrize("isa", native_cases.ISAS)
def test_every_way_in_packs_the_same(isa: str, way: str, dtype: torch.dtype) -> None:
    """The first version, which nobody serves yet, and two later ones; the model's columns and rows fill no panel."""
    config = config_of(hf_models.moe(hidden_size=40, moe_intermediate_size=27))
    with native_cases.using(isa):
        store, packed, decoder = empty(config, dtype)
        for version in range(3):
            pairs = one_by_one(tensors_of(hf_models.moe(seed=version, hidden_size=40, moe_intermediate_size=27)))
            narrow = [(name, tensor.to(dtype)) for name, tensor in pairs]
            plain = Decoder(config, CpuKernels(), dtype=dtype)
            reference = WeightStore(config, dict(plain.named_parameters()))
            reference.stage(pairs, 0)
            reference.commit()
            if way == "streamed":
                store.stream(pairs, version)
            elif way == "declared":
                for name, value in decoder.named_parameters():
                    value.data.copy_(dict(plain.named_parameters())[name])
                store.declare(version)
            else:
                adopt = way.startswith("adopted")
                given = narrow if adopt else pairs
                store.stage(tuple(pieces(given, 13) if "rows" in way else given), version, adopt=adopt)
                store.commit()
            assert store.version == version
            for name, value in everything(store, packed, decoder).items():
                assert torch.equal(value, dict(plain.named_parameters())[name]), (version, name)


@pytest.mark.parametrize("rank", [0, 1])
@each_case
def test_a_rank_packs_its_regions(case: str, rank: int) -> None:
    config = config_of(CASES[case]())
    shard = Shard(rank=rank, size=2)
    store, packed, decoder = empty(config, torch.float32, shard)
    plain = Decoder(config, CpuKernels(), dtype=torch.float32, shard=shard, comm=Alone(shard))  # type: ignore[arg-type]
    for version in (0, 1):
        pairs = tensors_of(CASES[case]())
        for one, stacked in ((store, pairs), (WeightStore(config, dict(plain.named_parameters()), shard), one_by_one(pairs))):
            one.stage(stacked, version)
            one.commit()
        for name, value in everything(store, packed, decoder).items():
            assert torch.equal(value, dict(plain.named_parameters())[name]), name


def test_what_is_served_changes_at_the_commit_alone() -> None:
    config, model = config_of(CASES["tied"]()), CASES["tied"]
    store, packed, decoder = empty(config, torch.float32)
    pairs = tensors_of(model())
    store.stage(pairs, 0)
    store.commit()
    before = everything(store, packed, decoder)
    for adopt in (False, True):
        store.stage(tuple((name, tensor + 1.0) for name, tensor in pairs), 1, adopt=adopt)
        assert all(torch.equal(value, before[name]) for name, value in everything(store, packed, decoder).items())
        store.discard()
    bad = [(name, tensor.clone()) for name, tensor in pairs]
    bad[-1][1].flatten()[-1] = float("nan")
    with pytest.raises(ValueError, match=f"{bad[-1][0]}: 1 of .* values are not finite"):
        store.stage(bad, 1)
    assert all(torch.equal(value, before[name]) for name, value in everything(store, packed, decoder).items())
    store.stage([(name, tensor + 1.0) for name, tensor in pairs], 1)
    store.commit()
    assert not torch.equal(everything(store, packed, decoder)["layers.0.qkv.weight"], before["layers.0.qkv.weight"])


def test_adopted_memory_is_refilled_and_packed_again() -> None:
    """A tuple that is known is packed without a look at its names; what it holds now is what counts."""
    config = config_of(CASES["tied"]())
    store, _, _ = empty(config, torch.float32)
    given = tuple((name, tensor.clone()) for name, tensor in tensors_of(CASES["tied"]()))
    for version in range(4):
        for _, tensor in given:
            tensor.add_(0.5)
        store.stage(given, version, adopt=True)
        store.commit()
        assert all(torch.equal(tensor, dict(store.hf_tensors())[name]) for name, tensor in given)
    turned = tuple((name, tensor.T.contiguous().T if tensor.ndim == 2 else tensor) for name, tensor in given)
    with pytest.raises(ValueError, match="adopt=True takes rows without gaps"):
        store.stage(turned, 9, adopt=True)


def test_the_spare_memory_is_kept_for_the_next_version_and_given_back_when_told() -> None:
    config = config_of(CASES["tied"]())
    store, packed, _ = empty(config, torch.float32)
    spare = [packed._memory[: packed._bytes], packed._memory[packed._bytes :]]
    pairs = tensors_of(CASES["tied"]())
    store.stage(pairs, 0)
    store.commit()
    assert spare[0].any() and not spare[1].any()
    store.stage(pairs, 1)
    store.commit()
    assert torch.equal(*spare)
    store.discard()
    assert not spare[0].any() and spare[1].any()


def test_rows_that_are_not_there_are_refused() -> None:
    _, packed, _ = empty(config_of(CASES["experts"]()), torch.float32)
    rows = torch.zeros(4, 256)
    for name, box, words in (
        ("norm.weight", ((0, 4), (0, 256)), "norm.weight: is not packed"),
        ("layers.0.qkv.weight", ((10**6, 10**6 + 4), (0, 256)), "layers.0.qkv.weight: has no rows 1000000 to 1000003 of 256"),
        ("layers.0.o.weight", ((0, 4), (0, 255)), "layers.0.o.weight: has no rows"),
        ("layers.0.experts.down", ((99, 100), (0, 4), (0, 256)), r"layers.0.experts.down: has no rows .* \(expert 99\)"),
    ):
        with pytest.raises(ValueError, match=words):
            packed.plan([(name, box, rows)])
