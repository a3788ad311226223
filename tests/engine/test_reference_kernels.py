"""The reference kernels against loops in float64, over poisoned pools; their gradients; grouping; the choice of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pearl.engine.kernels import decode_rows, registry
from pearl.engine.kernels.interface import PackedBatch, PagedBatch
from pearl.engine.kernels.padding import length_groups
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention_oracle(
    q_QHB: np.ndarray, k_LGB: np.ndarray, v_LGB: np.ndarray, scale: float, window: int = 0
) -> np.ndarray:
    """Query i of Q sees keys 0 .. L - Q + i, or the `window` last; head h reads kv head h // (H / G). Float64, one by one."""
    queries, heads, _ = q_QHB.shape
    group, first = heads // k_LGB.shape[1], len(k_LGB) - queries
    out = np.zeros_like(q_QHB)
    for i in range(queries):
        for h in range(heads):
            seen = slice(max(0, first + i + 1 - window) if window else 0, first + i + 1)
            keys, values = k_LGB[seen, h // group], v_LGB[seen, h // group]
            scores = keys @ q_QHB[i, h] * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values / weights.sum()
    return out


class Paged:
    """A random paged problem: sequences of `contexts` tokens, the last `queries` of which ask."""

    def __init__(
        self,
        contexts: list[int],
        queries: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        poison: float = float("nan"),
    ) -> None:
        rng = np.random.default_rng(seed)
        self.contexts, self.queries, self.scale = contexts, queries, dim**-0.5
        self.k, self.v = ([self._draw(rng, n, heads[1], dim, dtype) for n in contexts] for _ in range(2))
        self.q = self._draw(rng, sum(queries), heads[0], dim, dtype)
        needed = [-(-n // block_size) for n in contexts]
        self.pool = torch.full((2, sum(needed) + 2, heads[1], block_size, dim), poison, dtype=dtype)
        dealt = rng.permutation(sum(needed) + 2).tolist()
        self.tables = [[dealt.pop() for _ in range(n)] for n in needed]
        width = max(needed) + 1
        positions = [p for n, m in zip(contexts, queries, strict=True) for p in range(n - m, n)]
        slots = [torch.tensor([self.slot(s, p, block_size) for p in range(n)]) for s, n in enumerate(contexts)]
        ReferenceKernels().store_kv(torch.cat(self.k), torch.cat(self.v), self.pool, torch.cat(slots))
        self.batch = PagedBatch(
            positions_T=torch.tensor(positions),
            slot_mapping_T=torch.cat([x[n - m :] for x, n, m in zip(slots, contexts, queries, strict=True)]),
            query_starts_S1=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32),
            context_lens_S=torch.tensor(contexts, dtype=torch.int32),
            block_tables_SN=torch.tensor([t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32),
            num_decodes=next((i for i, m in enumerate(queries) if m != 1), len(queries)),
            max_query_len=max(queries),
            max_context_len=max(contexts),
        )

    @staticmethod
    def _draw(rng: np.random.Generator, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(rng.standard_normal((tokens, heads, dim))).to(dtype)

    def slot(self, s: int, position: int, block_size: int) -> int:
        return self.tables[s][position // block_size] * block_size + position % block_size

    def expected(self, window: int = 0) -> Tensor:
        parts = self.q.double().split(self.queries)
        rows = [
            attention_oracle(q.numpy(), k.double().numpy(), v.double().numpy(), self.scale, window)
            for q, k, v in zip(parts, self.k, self.v, strict=True)
        ]
        return torch.from_numpy(np.concatenate(rows))

    def gap(self, kernels: ReferenceKernels, window: int = 0) -> float:
        out = kernels.paged_attention(self.q, self.pool, self.batch, self.scale, window)
        assert out.dtype == self.q.dtype
        assert out.is_contiguous()
        return float((out.double() - self.expected(window)).abs().max())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    decodes=st.lists(st.integers(1, 70), max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=3),
    block_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    heads=st.sampled_from([(4, 2), (2, 2), (5, 1), (14, 2), (6, 3)]),
    dim=st.sampled_from([2, 16, 80]),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    window=st.sampled_from([0, 1, 2, 3, 4, 5, 17, 100]),
)
def test_paged_attention(decodes, chunks, block_size, heads, dim, poison, window) -> None:
    if not decodes and not chunks:
        decodes = [1]
    contexts = [*decodes, *(before + new for before, new in chunks)]
    queries = [1] * len(decodes) + [new for _, new in chunks]
    problem = Paged(contexts, queries, heads=heads, dim=dim, block_size=block_size, poison=poison)
    assert problem.gap(ReferenceKernels(), window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("block_size", "window"), [(4, 4), (3, 4), (4, 3), (1, 6), (16, 5)])
def test_what_left_the_window_is_not_read(block_size: int, window: int) -> None:
    """Keys and values before the window of the first query may be anything, also beside seen ones in a block."""
    problem = Paged([40, 9, 2, 30, 21], [1, 1, 1, 6, 5], block_size=block_size)
    for s, (context, queries) in enumerate(zip(problem.contexts, problem.queries, strict=True)):
        for position in range(max(0, context - queries + 1 - window)):
            slot = problem.slot(s, position, block_size)
            problem.pool[:, slot // block_size, :, slot % block_size] = float("nan")
    assert problem.gap(ReferenceKernels(), window) < TOLERANCE[torch.float32]


def test_one_batch_in_layers_of_several_windows() -> None:
    kernels, problem = ReferenceKernels(), Paged([30, 3, 60], [1, 1, 4])
    for window in (4, 0, 9, 4, 0):
        assert problem.gap(kernels, window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_paged_attention_accumulates_in_fp32(dtype: torch.dtype) -> None:
    problem = Paged([1, 300, 90, 17, 40], [1, 1, 1, 5, 40], block_size=16, dtype=dtype, seed=3)
    assert problem.gap(ReferenceKernels()) < TOLERANCE[dtype]


def test_the_oracle_tells_wrong_variants_apart() -> None:
    problem = Paged([20], [6])
    q, k, v = problem.q.double().numpy(), problem.k[0].double().numpy(), problem.v[0].double().numpy()
    right = attention_oracle(q, k, v, problem.scale)
    top_left = np.concatenate([attention_oracle(q[i : i + 1], k[: i + 1], v[: i + 1], problem.scale) for i in range(6)])
    tiled = attention_oracle(q[:, [0, 2, 1, 3]], k, v, problem.scale)[:, [0, 2, 1, 3]]
    assert np.abs(top_left - right).max() > 0.1
    windows = [attention_oracle(q, k, v, problem.scale, window) for window in (3, 4, 5, 0)]
    assert min(np.abs(a - b).max() for i, a in enumerate(windows) for b in windows[:i]) > 0.05
    assert np.abs(tiled - right).max() > 0.1


def test_a_nan_that_counts_is_not_hidden() -> None:
    problem = Paged([9, 9], [1, 1])
    problem.pool[1, problem.tables[0][1], 0, 2] = float("nan")
    out = ReferenceKernels().paged_attention(problem.q, problem.pool, problem.batch, problem.scale)
    assert bool(out[0, :2].isnan().all())
    assert bool(out[0, 2:].isfinite().all())
    assert bool(out[1].isfinite().all())


def test_a_block_that_another_row_poisoned_does_not_reach_a_padded_row() -> None:
    """Tables are padded with block 0, which may belong to a request whose numbers are NaN."""
    problem = Paged([9, 17, 16], [1, 1, 1], block_size=4)
    for s, table in enumerate(problem.tables):
        if 0 in table:
            problem.pool[:, 0] = float("nan")
            others = [row for row in range(3) if row != s]
            break
    else:
        problem.pool[:, 0] = float("nan")
        others = [0, 1, 2]
    out = ReferenceKernels().paged_attention(problem.q, problem.pool, problem.batch, problem.scale)
    expected = problem.expected()
    assert float((out.double() - expected)[others].abs().max()) < TOLERANCE[torch.float32]


def test_one_kernels_value_serves_many_batches_and_modes() -> None:
    kernels = ReferenceKernels()
    for seed, contexts in enumerate([[30, 3, 60], [5, 60, 61], [200, 1, 7], [4, 4, 4]]):
        problem = Paged(contexts, [1, 1, 1], seed=seed)
        with torch.inference_mode(seed % 2 == 0):
            assert problem.gap(kernels) < TOLERANCE[torch.float32]
            assert problem.gap(kernels) < TOLERANCE[torch.float32]


def test_many_rows_are_cut_into_bounded_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_rows, "MAX_ELEMENTS", 2 * 16 * 50)  # about 50 cells of 2 heads x 16
    problem = Paged([20, 22, 24, 26, 21, 60, 3], [1] * 7)
    assert len(decode_rows.plan_decode(problem.batch, problem.pool)) >= 4
    assert problem.gap(ReferenceKernels()) < TOLERANCE[torch.float32]


def test_store_kv_writes_only_its_slots_and_keeps_no_graph() -> None:
    pool = torch.full((2, 3, 2, 4, 8), float("nan"))
    k, v = (torch.randn(3, 2, 8, requires_grad=True) for _ in range(2))
    slots = torch.tensor([11, 0, 6])
    ReferenceKernels().store_kv(k, v, pool, slots)
    assert not pool.requires_grad
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[0, slot // 4, :, slot % 4], k[row])
        assert torch.equal(pool[1, slot // 4, :, slot % 4], v[row])
    assert int(pool.isfinite().sum()) == 2 * 3 * 2 * 8


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 200), max_size=30), max_cells=st.sampled_from([100, 1000, 1 << 17]))
def test_length_groups(lengths: list[int], max_cells: int) -> None:
    groups = length_groups(tuple(lengths), CPU, max_cells)
    tokens = [int(t) for group in groups for t in group.tokens_T]
    assert sorted(tokens) == list(range(sum(lengths)))
    for group in groups:
        cells = group.longest * len(group.lengths)
        assert cells <= 2 * sum(group.lengths)
        assert cells <= max_cells or len(group.lengths) == 1
        assert torch.equal(group.token_of_cell[group.cell_of_token], group.tokens_T)


@pytest.mark.parametrize("window", [0, 1, 4, 7, 50])
@pytest.mark.parametrize("lengths", [(7,), (3, 3, 3), (1, 40, 5, 6, 1, 22)])
def test_varlen_attention(lengths: tuple[int, ...], window: int) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(rng.standard_normal((sum(lengths), heads, 16))).float() for heads in (6, 2, 2))
    batch = PackedBatch(positions_T=torch.cat([torch.arange(n) for n in lengths]), lengths=lengths)
    out = ReferenceKernels().varlen_attention(q, k, v, batch, 0.25, window)
    parts = [x.double().split(lengths) for x in (q, k, v)]
    rows = [attention_oracle(*(x.numpy() for x in each), 0.25, window) for each in zip(*parts, strict=True)]
    expected = np.concatenate(rows)
    assert np.abs(out.double().numpy() - expected).max() < TOLERANCE[torch.float32]


def test_varlen_attention_checks_lengths_and_takes_nothing() -> None:
    kernels, x = ReferenceKernels(), torch.zeros(5, 2, 4)
    with pytest.raises(ValueError, match="lengths sum to 4: must be the number of tokens, 5"):
        kernels.varlen_attention(x, x, x, PackedBatch(positions_T=torch.arange(5), lengths=(4,)), 1.0)
    empty = PackedBatch(positions_T=torch.arange(0), lengths=())
    assert kernels.varlen_attention(x[:0], x[:0], x[:0], empty, 1.0).shape == (0, 2, 4)


def test_a_nan_stays_in_its_sequence() -> None:
    q = torch.randn(12, 2, 4, generator=torch.Generator().manual_seed(0))
    k = q.clone()
    k[0] = float("nan")  # the first token is also what padding cells repeat
    batch = PackedBatch(positions_T=torch.cat([torch.arange(n) for n in (5, 7)]), lengths=(5, 7))
    out = ReferenceKernels().varlen_attention(q, k, k, batch, 1.0)
    assert bool(out[:5].isnan().all())
    assert bool(out[5:].isfinite().all())


def _doubles(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def test_gradients_in_float64() -> None:
    kernels = ReferenceKernels()
    lengths = (2, 5, 1)
    batch = PackedBatch(positions_T=torch.tensor([0, 1, 0, 1, 2, 3, 4, 0]), lengths=lengths)
    angle = torch.randn(8, 2, dtype=torch.float64)
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
    check = torch.autograd.gradcheck
    for window in (0, 1, 3):
        assert check(
            lambda q, k, v, window=window: kernels.varlen_attention(q, k, v, batch, 0.5, window),
            (_doubles(8, 4, 2), _doubles(8, 2, 2), _doubles(8, 2, 2)),
        )
    assert check(lambda x, w: kernels.rms_norm(x, w, 1e-3), (_doubles(3, 6), _doubles(6)))
    assert check(lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-3), (_doubles(3, 6), _doubles(3, 6), _doubles(6)))
    assert check(
        lambda q, k, w, u: kernels.qk_norm_rope(q, k, cos, sin, w, u, 1e-3),
        (_doubles(8, 2, 4), _doubles(8, 1, 4), _doubles(4), _doubles(4)),
    )
    assert check(kernels.silu_and_mul, (_doubles(3, 8),))


def test_small_operations_against_their_formulae() -> None:
    kernels, rng = ReferenceKernels(), np.random.default_rng(2)
    x, r, w = (rng.standard_normal(shape) for shape in ((5, 8), (5, 8), (8,)))
    as_bf16 = [torch.from_numpy(a).bfloat16() for a in (x, r, w)]
    x, r, w = (a.double().numpy() for a in as_bf16)
    total = as_bf16[0] + as_bf16[1]
    t = total.double().numpy()
    normed, stream = kernels.add_rms_norm(*as_bf16, 0.1)
    assert torch.equal(stream, total)
    exact = t / np.sqrt((t**2).mean(-1, keepdims=True) + 0.1) * w
    assert np.abs(normed.double().numpy() - exact).max() <= np.abs(exact).max() * 2**-8  # one rounding to bf16
    gate, up = x[:, :4], x[:, 4:]
    exact = gate / (1 + np.exp(-gate)) * up
    assert np.abs(kernels.silu_and_mul(as_bf16[0]).double().numpy() - exact).max() <= np.abs(exact).max() * 2**-8


def _model() -> ModelConfig:
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    rest = dict(max_position=8, rope_theta=1e4, rms_eps=1e-6, tie_embeddings=True, qk_norm=True)
    return ModelConfig(architecture="Qwen3ForCausalLM", **sizes, **rest)


def test_choice_of_kernels() -> None:
    for name, dtype, chosen in (
        ("auto", torch.float32, "cpu"),
        ("auto", torch.float64, "reference"),
        ("cpu", torch.bfloat16, "cpu"),
        ("reference", torch.float32, "reference"),
    ):
        kernels, why = registry.choose(name, device=CPU, dtype=dtype, model=_model(), block_size=16)
        assert kernels.name == chosen
        assert chosen in why
        assert name in why
    with pytest.raises(ValueError, match="kernels='marlin': must be one of auto, cpu, triton, flashinfer, reference"):
        registry.choose("marlin", device=CPU, dtype=torch.float32, model=_model(), block_size=16)
    for name in ("auto", "reference"):
        with pytest.raises(ValueError, match="reference: dtype=torch.int8"):
            registry.choose(name, device=CPU, dtype=torch.int8, model=_model(), block_size=16)
        with pytest.raises(ValueError, match="reference: block_size=0"):
            registry.choose(name, device=CPU, dtype=torch.float32, model=_model(), block_size=0)


def test_auto_says_what_it_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(ReferenceKernels):
        name = "picky"

        def refusal(self, **_: object) -> str:
            return "only on Sundays"

    monkeypatch.setitem(registry.KERNELS, "picky", Picky)
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("picky", "reference"))
    kernels, why = registry.choose("auto", device=CPU, dtype=torch.float32, model=_model(), block_size=16)
    assert kernels.name == "reference"
    assert "picky: only on Sundays" in why


def test_auto_on_a_gpu_takes_triton_and_says_why_if_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here only what is chosen is looked at: Triton where it imports and serves, else the reference."""

    class Serving(ReferenceKernels):
        name = "triton"

    def missing() -> ReferenceKernels:
        raise ImportError("No module named 'triton'")

    gpu = torch.device("cuda", 0)
    for made, chosen, said in ((Serving, "triton", "triton (auto, cuda"), (missing, "reference", "No module named 'triton'")):
        monkeypatch.setitem(registry.KERNELS, "triton", made)
        kernels, why = registry.choose("auto", device=gpu, dtype=torch.bfloat16, model=_model(), block_size=16)
        assert (kernels.name, said in why) == (chosen, True)
