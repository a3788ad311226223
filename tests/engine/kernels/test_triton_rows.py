"""The Triton kernels that work on rows: norms, rotary embedding, activation, storing keys and values."""

from __future__ import annotations

import sys

import pytest
import torch
from triton_cases import DEVICE, DTYPES, HALF, NAN, gap, normal

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels import registry
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.kernels.triton.kernels import TritonKernels, unsupported
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.rope import rope_tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets inf

KERNELS, REFERENCE = TritonKernels(), ReferenceKernels()
LAST_DIGIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


def model(**fields) -> ModelConfig:
    sizes = dict(
        architecture="Qwen3ForCausalLM", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=64, max_position=8192, rope_theta=1e6, rms_eps=EPS, tie_embeddings=False, qk_norm=True,
    )  # fmt: skip
    return ModelConfig(**(sizes | fields))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 7), (5, 576), (2, 4096), (0, 16)])
def test_norms(tokens: int, dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(tokens, dim, dtype=dtype, seed=seed) for seed in range(3))
    weight = normal(dim, dtype=dtype, seed=3)
    assert gap(KERNELS.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS)) <= LAST_DIGIT[dtype]
    found, expected = KERNELS.add_rms_norm(x, residual, weight, EPS), REFERENCE.add_rms_norm(x, residual, weight, EPS)
    assert gap(found[0], expected[0]) <= LAST_DIGIT[dtype]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", HALF)
def test_the_sum_is_rounded_before_it_is_normalised(dtype: torch.dtype) -> None:
    """A small eps beside numbers whose sum is not representable: normalising the unrounded sum gives other digits."""
    x, residual = normal(64, 32, dtype=dtype), normal(64, 32, dtype=dtype, seed=1, scale=1e-3)
    weight = torch.ones(32, dtype=dtype, device=DEVICE)
    norm, total = KERNELS.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(norm, REFERENCE.rms_norm(total, weight, EPS))
    unrounded = REFERENCE.rms_norm(x.float() + residual.float(), weight.float(), EPS).to(dtype)
    assert not torch.equal(norm, unrounded)


def test_norms_keep_nan_in_its_row() -> None:
    x, weight = normal(3, 20), normal(20, seed=1)
    x[1, 4] = NAN
    found = KERNELS.rms_norm(x, weight, EPS)
    assert bool(found[1].isnan().all())
    assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (17, 1)])
@pytest.mark.parametrize("dim", [2, 80, 96, 128])
def test_norm_and_rope(dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Positions up to the last one, whose angles half precision could not tell apart."""
    cos, sin = rope_tables(model(head_dim=dim), DEVICE)
    positions = torch.tensor([0, 1, 300, 8191], device=DEVICE)
    q, k = (normal(4, count, dim, dtype=dtype, seed=count) for count in heads)
    q_weight, k_weight = normal(dim, dtype=dtype, seed=5), normal(dim, dtype=dtype, seed=6)
    for weights in ((q_weight, k_weight), (None, None), (q_weight, None)):
        arguments = (q, k, cos[positions], sin[positions], *weights, EPS)
        for found, expected in zip(KERNELS.qk_norm_rope(*arguments), REFERENCE.qk_norm_rope(*arguments), strict=True):
            assert found.dtype == dtype
            assert gap(found, expected) <= LAST_DIGIT[dtype]


def test_rope_of_no_tokens() -> None:
    q, k, table = normal(0, 4, 16), normal(0, 2, 16), normal(0, 16)
    found = KERNELS.qk_norm_rope(q, k, table, table, None, None, EPS)
    assert [part.shape for part in found] == [q.shape, k.shape]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 70), (2, 2500), (0, 8)])
def test_silu_and_mul(tokens: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = normal(tokens, 2 * dim, dtype=dtype, scale=5)
    gate_up[:, 1 : dim // 2] = -90.0  # whose exp does not fit
    assert gap(KERNELS.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)) <= LAST_DIGIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "block_size", "dim"), [(1, 1, 2), (3, 5, 80), (2, 256, 16)])
def test_store_kv(kv_heads: int, block_size: int, dim: int, dtype: torch.dtype) -> None:
    """Exactly the slots that are named change, in whatever order they come."""
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(0))[:3].to(DEVICE)
    k, v = (normal(len(slots), kv_heads, dim, dtype=dtype, seed=seed) for seed in range(2))
    found, expected = (torch.full((2, 4, kv_heads, block_size, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    KERNELS.store_kv(k, v, found, slots)
    REFERENCE.store_kv(k, v, expected, slots)
    assert torch.equal(found, expected)
    KERNELS.store_kv(k[:0], v[:0], found, slots[:0])
    assert torch.equal(found, expected)


def test_slots_beyond_two_billion_elements() -> None:
    kv_heads, block_size, dim = 8, 16, 128
    blocks = (1 << 31) // (kv_heads * block_size * dim) + 2
    pool = torch.empty(2, blocks, kv_heads, block_size, dim, dtype=HALF[0], device=DEVICE)
    k, v = (normal(1, kv_heads, dim, dtype=HALF[0], seed=seed) for seed in range(2))
    KERNELS.store_kv(k, v, pool, torch.tensor([blocks * block_size - 3], device=DEVICE))
    assert torch.equal(pool[0, -1, :, -3], k[0])
    assert torch.equal(pool[1, -1, :, -3], v[0])


# ---------------------------------------------------------------------------------------------------- what is refused


def test_off_a_gpu_they_refuse() -> None:
    reason = KERNELS.refusal(device=torch.device("cpu"), dtype=torch.float32, model=model(), block_size=16)
    assert reason == "device=cpu: the Triton kernels need a CUDA device"


@pytest.mark.parametrize(
    ("dtype", "fields", "block_size", "reason"),
    [
        (torch.float64, {}, 16, "dtype=torch.float64: must be one of torch.bfloat16, torch.float16, torch.float32"),
        (torch.float32, {}, 0, "block_size=0: must be >= 1"),
        (torch.float32, {"head_dim": 288}, 16, "head_dim=288: must be even and at most 256"),
        (torch.float32, {"num_heads": 160}, 16, "160 query heads per kv head: at most 128"),
        (torch.float32, {"hidden_size": 65536}, 16, "hidden_size=65536: at most 32768"),
    ],
)
def test_what_they_are_not_made_for(dtype: torch.dtype, fields: dict, block_size: int, reason: str) -> None:
    assert unsupported(dtype, model(**fields), block_size) == reason
    assert unsupported(torch.float16, model(), 16) is None


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_the_registry_knows_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name they say why they cannot serve here, also where the package is missing."""
    chosen = dict(device=torch.device("cpu"), dtype=torch.float32, model=model(), block_size=16)
    with pytest.raises(ValueError, match=f"kernels='{name}': {name}: device=cpu: the Triton kernels need a CUDA device"):
        registry.choose(name, **chosen)
    monkeypatch.setitem(sys.modules, "pearl.engine.kernels.triton.kernels", None)
    monkeypatch.delitem(sys.modules, "pearl.engine.kernels.flashinfer", raising=False)
    with pytest.raises(ValueError, match=f"kernels='{name}': {name}: import of pearl.engine.kernels.triton.kernels halted"):
        registry.choose(name, **chosen)
