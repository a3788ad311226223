"""The CPU kernels behind the interface: operations and steps against the reference and transformers; equal bits; refusals.

The arithmetic of each operation is looked at on every instruction set in the test_cpu_* files beside this one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hf_models
import pytest
import torch
from cpu_problems import machine
from decoder_cases import config_of, decoder_of, gap, paged_logits, sequences_of
from gloo_members import run_members
from model_variants import VARIANTS
from torch import Tensor

from pearl import _C
from pearl.engine.arena import Arena
from pearl.engine.comm.communicator import Communicator
from pearl.engine.kernels import cpu
from pearl.engine.kernels.cpu import CpuKernels
from pearl.engine.kernels.interface import LayerMark, PagedBatch, ServedDecoder
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.decoder import Decoder

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
MODELS: dict[str, tuple[Any, dict[str, Any]]] = VARIANTS | {
    "moe": (hf_models.moe, {}),
    "moe-not-normalised": (hf_models.moe, {"norm_topk_prob": False, "num_experts": 5, "num_experts_per_tok": 3}),
    "moe-some-dense": (hf_models.moe, {"mlp_only_layers": [0], "num_experts": 6}),
    "head-64": (hf_models.dense, {"head_dim": 64}),
    "head-128": (hf_models.dense, {"head_dim": 128}),
    "odd-sizes": (hf_models.dense, {"hidden_size": 30, "intermediate_size": 51, "vocab_size": 131}),
}


def numbers(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------------------- operations


def operations(kernels: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every operation on the same numbers, and attention over a pool that the kernels have filled themselves."""
    x, weight, residual = numbers(7, 24, dtype=dtype), numbers(24, dtype=dtype, seed=1), numbers(7, 24, dtype=dtype, seed=2)
    q, k, v = (numbers(7, heads, 16, dtype=dtype, seed=3 + i) for i, heads in enumerate((4, 2, 2)))
    angle = numbers(7, 8, seed=6)
    cos, sin = (torch.cat((half, half), dim=-1) for half in (angle.cos(), angle.sin()))
    router, gate_up, down = (numbers(*shape, dtype=dtype, seed=7) for shape in ((5, 24), (5, 36, 24), (5, 24, 18)))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    q_rope, k_rope = kernels.qk_norm_rope(q, k, cos, sin, weight[:16], None, 1e-5)
    pool = torch.full((2, 3, 2, 16, 16), float("nan"), dtype=dtype)
    kernels.store_kv(k, v, pool, torch.arange(16, 23))
    batch = PagedBatch(
        positions_T=torch.arange(7),
        slot_mapping_T=torch.arange(16, 23),
        query_starts_S1=torch.tensor([0, 7], dtype=torch.int32),
        context_lens_S=torch.tensor([7], dtype=torch.int32),
        block_tables_SN=torch.tensor([[1, 0]], dtype=torch.int32),
        num_decodes=0,
        max_query_len=7,
        max_context_len=7,
    )
    return {
        "linear": kernels.linear(x, numbers(50, 24, dtype=dtype, seed=8), numbers(50, dtype=dtype, seed=9)),
        "rms_norm": kernels.rms_norm(x, weight, 1e-5),
        "add_rms_norm": normed,
        "stream": total,
        "q_rope": q_rope,
        "k_rope": k_rope,
        "silu_and_mul": kernels.silu_and_mul(x),
        "moe": kernels.moe(x, router, gate_up, down, top_k=2, normalise=True),
        "moe-part": kernels.moe(x, router, gate_up[2:4], down[2:4], top_k=2, normalise=False, first=2),
        "attention": kernels.paged_attention(q, pool, batch, 0.25),
        "window": kernels.paged_attention(q, pool, batch, 0.25, 3),
    }


def test_operations_equal_the_reference() -> None:
    ours, theirs = operations(CpuKernels(), FP32), operations(ReferenceKernels(), FP32)
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) < 2e-5 * max(1.0, float(value.abs().max())), name


def test_operations_in_bf16_are_as_exact_as_the_references() -> None:
    exact = operations(ReferenceKernels(), FP32)
    ours, theirs = operations(CpuKernels(), BF16), operations(ReferenceKernels(), BF16)
    for name, value in exact.items():
        assert ours[name].dtype == BF16
        errors = [float((kernels[name].float() - value).abs().mean()) for kernels in (ours, theirs)]
        assert errors[0] < 1.1 * errors[1] + 1e-3, (name, errors)


# ---------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("variant", MODELS)
def test_steps_equal_transformers(variant: str) -> None:
    """Prompts in pieces beside decodes, in blocks that are whole tiles and in others."""
    build, overrides = MODELS[variant]
    model = hf_models.randomise(build(**overrides))
    sequences, decoder = sequences_of(), decoder_of(model)
    expected = [hf_models.logits(model, ids) for ids in sequences]
    for block_size, chunk in ((16, 7), (4, 64)):
        assert gap(paged_logits(decoder, sequences, block_size=block_size, chunk=chunk, kernels=CpuKernels()), expected) < 2e-4


@pytest.mark.parametrize("variant", ["dense", "llama-biases", "dense-window-mixed", "dense-head-80", "moe"])
def test_steps_in_bf16_are_no_farther_off_than_transformers(variant: str) -> None:
    build, overrides = MODELS[variant]
    model = hf_models.randomise(build(**overrides | {"initializer_range": 0.1}))
    sequences = sequences_of()
    exact = torch.cat([hf_models.logits(model, ids).log_softmax(-1) for ids in sequences])
    decoder, narrow = decoder_of(model, dtype=BF16), model.to(BF16)
    theirs = torch.cat([hf_models.logits(narrow, ids).log_softmax(-1) for ids in sequences])
    ours = torch.cat(paged_logits(decoder, sequences, block_size=16, chunk=9, kernels=CpuKernels())).log_softmax(-1)
    assert float((ours - exact).abs().mean()) <= float((theirs - exact).abs().mean())


CUTS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "qwen3": (hf_models.dense, {}, 2),
    "tied, 129 ids": (hf_models.dense, {"tie_word_embeddings": True, "vocab_size": 129}, 2),
    "kv heads twice": (hf_models.dense, {}, 4),
    "mlp of 49": (hf_models.dense, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 49}, 3),
    "biases": (hf_models.llama, {"attention_bias": True, "mlp_bias": True}, 2),
    "experts": (hf_models.moe, {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 5}, 3),
    "some layers dense": (hf_models.moe, {"mlp_only_layers": [0], "num_experts": 6}, 2),
}


@pytest.mark.parametrize("case", CUTS)
def test_half_layers_over_ranks_equal_transformers(case: str) -> None:
    build, overrides, size = CUTS[case]
    model = hf_models.randomise(build(**overrides))
    sequences = sequences_of((13, 5))
    expected = [hf_models.logits(model, ids) for ids in sequences]

    def member(comm: Communicator) -> float:
        ours = paged_logits(decoder_of(model, comm=comm), sequences, block_size=4, chunk=7, kernels=CpuKernels())
        return gap(ours, expected)

    for result in run_members(size, member):
        assert not isinstance(result, BaseException), result
        assert result < 2e-4


# ---------------------------------------------------------------------------------------------------- equal bits


@pytest.mark.parametrize("isa", _C.cpu.supported_isas())
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_do_not_depend_on_company_pieces_or_threads(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in one piece, alone, on one thread; and token by token or in pieces, in company, on more threads."""
    model = hf_models.randomise(hf_models.moe(num_hidden_layers=2, mlp_only_layers=[0]))
    decoder, sequences = decoder_of(model, dtype=dtype), sequences_of((37, 1, 20, 8))
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    with machine(isa):
        alone = [paged_logits(decoder, [ids], block_size=16, chunk=64, kernels=CpuKernels())[0] for ids in sequences]
        assert float(alone[0].std()) > 0.1
        for threads[0], chunk in ((1, 1), (2, 5), (3, 64), (2, 1)):
            ours = paged_logits(decoder, sequences, block_size=16, chunk=chunk, seed=chunk, kernels=CpuKernels())
            assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True)), (threads, chunk)


@torch.inference_mode()
@pytest.mark.parametrize("isa", _C.cpu.supported_isas())
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_some_last_rows_alone_have_the_bits_of_all(isa: str, family: str) -> None:
    """Decode rows and prompts of a length each; any of them may be left out, one that has no token, or all."""
    model = hf_models.randomise(hf_models.dense() if family == "dense" else hf_models.moe())
    lengths, decoder = (1, 1, 7, 30, 1), decoder_of(model)
    tokens, starts = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    batch = PagedBatch(
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        slot_mapping_T=torch.cat([32 * s + torch.arange(n) for s, n in enumerate(lengths)]),
        query_starts_S1=starts.int(),
        context_lens_S=torch.tensor(lengths, dtype=torch.int32),
        block_tables_SN=torch.tensor([[2 * s, 2 * s + 1] for s in range(len(lengths))], dtype=torch.int32),
        num_decodes=0,
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
    ids = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(1))
    ends = (starts[1:] - 1).tolist()
    with machine(isa):
        served, pool = served_of(decoder, blocks=10)
        served.weights.load(release=False)
        every = served.forward(decoder.embedded(ids), batch)
        filled = pool.clone()
        for rows in (ends, ends[:2], ends[2:4], [ends[0], ends[3]], ends[-1:], []):
            pool.zero_()
            some = served.forward(decoder.embedded(ids), batch, last_rows=rows)
            assert torch.equal(some, every[rows]) and torch.equal(pool, filled)
        for rows in ([ends[2] - 1], [ends[1], ends[0]], [ends[0], ends[0]], [tokens], [-1]):
            with pytest.raises(ValueError, match="must be the last of a sequence, after the one before"):
                served.forward(decoder.embedded(ids), batch, last_rows=rows)
        parts = served.forward(decoder.embedded(ids), batch, lambda partial: None, last_rows=ends[1:3])
        assert torch.equal(parts, served.forward(decoder.embedded(ids), batch, lambda partial: None)[ends[1:3]])


# ---------------------------------------------------------------------------------------------------- weights and refusals


def served_of(decoder: Decoder, blocks: int = 4) -> tuple[ServedDecoder, Tensor]:
    config = decoder.config
    pool = torch.zeros(config.num_layers, 2, blocks, config.num_kv_heads, 16, config.head_dim)
    return CpuKernels().serve(decoder.served_model(), pool, Arena(CPU).zeros), pool


def step_of(tokens: int, **changes: Any) -> PagedBatch:
    batch = PagedBatch(
        positions_T=torch.arange(tokens),
        slot_mapping_T=torch.arange(tokens),
        query_starts_S1=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens_S=torch.tensor([tokens], dtype=torch.int32),
        block_tables_SN=torch.tensor([[0]], dtype=torch.int32),
        num_decodes=0,
        max_query_len=tokens,
        max_context_len=tokens,
    )
    return dataclasses.replace(batch, **changes)


@torch.inference_mode()
def test_new_weights_are_served_after_load_and_not_before() -> None:
    decoder, ids = decoder_of(hf_models.randomise(hf_models.dense())), torch.tensor([1, 2, 3])
    served, _ = served_of(decoder)
    with pytest.raises(ValueError, match="load: no weights have been packed yet"):
        served.forward(decoder.embedded(ids), step_of(3))
    served.weights.load(release=False)
    before = served.forward(decoder.embedded(ids), step_of(3))
    other = dict(decoder_of(hf_models.randomise(hf_models.dense(seed=1), 1)).named_parameters())
    for name, value in decoder.named_parameters():
        value.copy_(other[name])
    served.weights.load(release=False)
    after = served.forward(decoder.embedded(ids), step_of(3))
    again = served.forward(decoder.embedded(ids), step_of(3))
    assert not torch.equal(before, after) and torch.equal(after, again)


@torch.inference_mode()
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mark_says_how_many_layers_are_written(ranks: int) -> None:
    """Over ranks it is looked at between the halves: a layer counts from its attention on, when its keys are in the pool."""
    decoder = decoder_of(hf_models.dense(num_hidden_layers=3))
    served, pool = served_of(decoder)
    served.weights.load(release=False)
    word, seen = torch.tensor([-1]), []

    def look(partial_TD: Tensor) -> None:
        layers = int(word) - 700
        assert bool(pool[layers - 1, 0, 0].any()) and not bool(pool[layers:, 0, 0].any())
        seen.append(layers)

    embedded = decoder.embedded(torch.tensor([1, 2, 3]))
    served.forward(embedded, step_of(3), None if ranks == 1 else look, LayerMark(word.data_ptr(), 700))
    assert int(word) == 703
    assert seen == ([] if ranks == 1 else [1, 1, 2, 2, 3, 3])


@torch.inference_mode()
def test_an_empty_step_and_no_rows() -> None:
    decoder = decoder_of(hf_models.dense())
    served, _ = served_of(decoder)
    served.weights.load(release=False)
    empty = step_of(0, query_starts_S1=torch.zeros(1, dtype=torch.int32), context_lens_S=torch.zeros(0, dtype=torch.int32))
    empty = dataclasses.replace(empty, block_tables_SN=torch.zeros(0, 1, dtype=torch.int32))
    assert served.forward(torch.zeros(0, 32), empty).shape == (0, 32)
    assert served.logits(torch.zeros(0, 32)).shape == (0, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot_mapping_T": torch.tensor([0, 1, 64])}, "slot_mapping: 64 is not in the pool"),
        ({"slot_mapping_T": torch.tensor([-1, 1, 2])}, "slot_mapping: -1 is not in the pool"),
        ({"positions_T": torch.tensor([0, 1, 256])}, "positions: 256 must be below 256"),
        ({"block_tables_SN": torch.tensor([[4]], dtype=torch.int32)}, "block_tables: 4 is not in the pool"),
        ({"context_lens_S": torch.tensor([17], dtype=torch.int32)}, "context_lens: 17 does not fit"),
        ({"context_lens_S": torch.tensor([2], dtype=torch.int32)}, "context_lens: 2 does not fit"),
        ({"query_starts_S1": torch.tensor([0, 2], dtype=torch.int32)}, "query_starts: must begin with 0 and end with"),
        ({"query_starts_S1": torch.tensor([0, 1, 3], dtype=torch.int32)}, "query_starts: has another shape"),
        ({"block_tables_SN": torch.zeros(2, 2, dtype=torch.int32).T[:1]}, "strides .*: must be contiguous"),
    ],
)
@torch.inference_mode()
def test_a_step_that_names_what_is_not_there_is_refused(changes: dict[str, Tensor], words: str) -> None:
    decoder = decoder_of(hf_models.dense())
    served, pool = served_of(decoder)
    served.weights.load(release=False)
    before = pool.clone()
    with pytest.raises(ValueError, match=words):
        served.forward(torch.zeros(3, 32), step_of(3, **changes))
    assert torch.equal(pool, before)


def test_parameters_of_other_shapes_are_refused() -> None:
    model = decoder_of(hf_models.dense()).served_model()
    pool = torch.zeros(2, 2, 4, 2, 16, 16)
    for name, value, words in (
        ("norm.weight", torch.zeros(31), r"norm.weight: is \[31\], must be \[32\]"),
        ("layers.1.down.weight", torch.zeros(32, 47), r"layers.1.down.weight: is \[32, 47\], must be \[32, 48\]"),
        ("layers.0.qkv.bias", torch.zeros(5), r"layers.0.qkv.bias: is \[5\]"),
    ):
        wrong = dataclasses.replace(model, parameters={**model.parameters, name: value})
        with pytest.raises(ValueError, match=words):
            CpuKernels().serve(wrong, pool, Arena(CPU).zeros)
    missing = {name: value for name, value in model.parameters.items() if name != "layers.1.o.weight"}
    with pytest.raises(ValueError, match="layers.1.o.weight: is missing"):
        CpuKernels().serve(dataclasses.replace(model, parameters=missing), pool, Arena(CPU).zeros)
    with pytest.raises(ValueError, match="pool: must be"):
        CpuKernels().serve(model, pool[:, :, :, :1].contiguous(), Arena(CPU).zeros)


def test_what_they_do_not_serve_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = config_of(hf_models.dense())
    fits = {"device": CPU, "dtype": FP32, "model": model, "block_size": 16}
    kernels = CpuKernels()
    assert kernels.refusal(**fits) is None
    for change, words in (
        ({"device": torch.device("cuda")}, "device=cuda: they serve cpu"),
        ({"dtype": torch.float16}, "dtype=torch.float16: they compute in float32 and bfloat16"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"model": dataclasses.replace(model, head_dim=258)}, "head_dim=258: they serve up to 256"),
        ({"block_size": 0}, "block_size=0: must be >= 1"),
    ):
        assert words in kernels.refusal(**fits | change)
    monkeypatch.setattr(cpu.importlib, "import_module", lambda name: object())
    assert "built from an older version" in kernels.refusal(**fits)
    with pytest.raises(ValueError, match="kernels='cpu': pearl._C has no CPU kernels"):
        kernels.rms_norm(torch.zeros(1, 2), torch.zeros(2), 1e-5)
