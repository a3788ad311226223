"""Which launches are compiled ahead of time: every operation at the sizes of models that are run on GPUs, and at odd ones.

Owns the list and what is demanded of each entry. Sizes are those of the models' config.json; tensors are torch's meta tensors,
so a pool of any size costs nothing. Invariant: launches come from the same functions that serve, with a recorder as launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PackedBatch, PagedBatch
from pearl.engine.kernels.triton import elementwise, moe, norm_rope, penalties, sampling
from pearl.engine.kernels.triton.attention_plan import paged_attention, varlen_attention
from pearl.engine.kernels.triton.launch import Launcher
from pearl.engine.kernels.triton.token_logprobs import token_logprobs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY_CHIP, HOPPER = (80, 90, 100), (90,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A use of one operation. `hot`: no spills. `wide`: at least this share of its read instructions are of 16 bytes (the
    others read tables, lengths and weights that all rows share). `matrix`: products on tensor cores, by warp group from
    Hopper on. `core`: the chips for which the tests that run always compile it."""

    name: str
    use: Callable[[Launcher], None]
    hot: bool = True
    wide: float = 0.35
    matrix: bool = False
    core: tuple[int, ...] = ()


def entries() -> list[Entry]:
    """All of them, in the order of the report."""
    return [*_attention(), *_rows(), *_experts(), *_ends()]


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _paged(
    heads: int, kv_heads: int, dim: int, *, decodes: int = 0, chunks: tuple[int, int] = (0, 0), context: int, page: int = 16,
    window: int = 0, dtype: torch.dtype = BF16,
) -> Callable[[Launcher], None]:  # fmt: skip
    """Attention of decode rows and of `chunks` = (how many, queries of each)."""
    count, queries = chunks
    tokens, sequences = decodes + count * queries, decodes + count

    def use(launch: Launcher) -> None:
        batch = PagedBatch(
            positions_T=_meta(tokens, dtype=torch.int64),
            slot_mapping_T=_meta(tokens, dtype=torch.int64),
            query_starts_S1=_meta(sequences + 1, dtype=torch.int32),
            context_lens_S=_meta(sequences, dtype=torch.int32),
            block_tables_SN=_meta(sequences, -(-context // page), dtype=torch.int32),
            num_decodes=decodes,
            max_query_len=max(queries, 1),
            max_context_len=context,
        )
        pool = _meta(2, 1 << 16, kv_heads, page, dim, dtype=dtype)
        paged_attention(_meta(tokens, heads, dim, dtype=dtype), pool, batch, dim**-0.5, window, launch)

    return use


def _attention() -> list[Entry]:
    def packed(launch: Launcher) -> None:
        k = _meta(4096, 8, 128)
        batch = PackedBatch(positions_T=_meta(4096, dtype=torch.int64), lengths=(2048, 2048))
        varlen_attention(_meta(4096, 32, 128), k, k, batch, 0.1, 0, launch)

    def decode(*sizes: int, **options) -> Callable[[Launcher], None]:
        return _paged(*sizes, decodes=64, context=8192, **options)

    def chunk(*sizes: int, **options) -> Callable[[Launcher], None]:
        return _paged(*sizes, chunks=(4, 2048), context=8192, **options)

    short = _paged(32, 8, 128, chunks=(1, 64), context=32768)
    return [
        Entry(name="decode 32/8 heads of 128 (Qwen3-8B)", use=decode(32, 8, 128), core=EVERY_CHIP),
        Entry(name="decode 32/4 heads of 128 (Qwen3-30B-A3B)", use=decode(32, 4, 128)),
        Entry(name="decode 9/3 heads of 64 (SmolLM2-135M)", use=decode(9, 3, 64)),
        Entry(name="decode 32/8 heads of 128, fp16", use=decode(32, 8, 128, dtype=FP16)),
        Entry(name="decode 32/8 heads of 128, window 4096", use=decode(32, 8, 128, window=4096)),
        Entry(name="decode 32/8 heads of 128, pages of 256", use=decode(32, 8, 128, page=256)),
        Entry(name="decode 12/4 heads of 80", use=decode(12, 4, 80)),
        Entry(name="decode 12/2 heads of 96", use=decode(12, 2, 96)),
        Entry(name="decode 16/8 heads of 256", use=decode(16, 8, 256)),
        Entry(name="decode 8/4 heads of 128, fp32", use=decode(8, 4, 128, dtype=FP32), hot=False),
        Entry(name="chunk 32/8 heads of 128 (Qwen3-8B)", use=chunk(32, 8, 128), matrix=True, core=EVERY_CHIP),
        Entry(name="chunk 32/4 heads of 128 (Qwen3-30B-A3B)", use=chunk(32, 4, 128), matrix=True),
        Entry(name="chunk 9/3 heads of 64 (SmolLM2-135M)", use=chunk(9, 3, 64), matrix=True),
        Entry(name="chunk 32/8 heads of 128, fp16", use=chunk(32, 8, 128, dtype=FP16), matrix=True),
        Entry(name="chunk 32/8 heads of 128, window 4096", use=chunk(32, 8, 128, window=4096), matrix=True),
        Entry(name="chunk 32/8 heads of 128, 64 queries on 32768 keys", use=short, matrix=True),
        Entry(name="chunk 12/4 heads of 80", use=chunk(12, 4, 80), matrix=True),
        Entry(name="chunk 12/2 heads of 96", use=chunk(12, 2, 96), matrix=True),
        Entry(name="chunk 16/8 heads of 256", use=chunk(16, 8, 256), matrix=True),
        Entry(name="chunk 8/4 heads of 128, fp32", use=chunk(8, 4, 128, dtype=FP32), hot=False),
        Entry(name="packed 32/8 heads of 128, no cache", use=packed, matrix=True),
    ]


def _rows() -> list[Entry]:
    def norm(dim: int, add: bool) -> Callable[[Launcher], None]:
        def use(launch: Launcher) -> None:
            x, weight = _meta(64, dim), _meta(dim)
            if add:
                norm_rope.add_rms_norm(x, x, weight, 1e-6, launch)
            else:
                norm_rope.rms_norm(x, weight, 1e-6, launch)

        return use

    def rope(heads: int, kv_heads: int, dim: int, normed: bool) -> Callable[[Launcher], None]:
        def use(launch: Launcher) -> None:
            table, weight = _meta(64, dim, dtype=FP32), _meta(dim) if normed else None
            q, k = _meta(64, heads, dim), _meta(64, kv_heads, dim)
            norm_rope.qk_norm_rope(q, k, table, table, weight, weight, 1e-6, launch)

        return use

    def store(kv_heads: int, dim: int) -> Callable[[Launcher], None]:
        def use(launch: Launcher) -> None:
            k, pool = _meta(64, kv_heads, dim), _meta(2, 1 << 16, kv_heads, 16, dim)
            elementwise.store_kv(k, k, pool, _meta(64, dtype=torch.int64), launch)

        return use

    def activate(launch: Launcher) -> None:
        elementwise.silu_and_mul(_meta(64, 2 * 12288), launch)

    return [
        Entry(name="norm of 4096", use=norm(4096, False)),
        Entry(name="add and norm of 4096", use=norm(4096, True), core=HOPPER),
        Entry(name="add and norm of 576", use=norm(576, True)),
        Entry(name="norm and rope 32/8 heads of 128", use=rope(32, 8, 128, True), wide=0.25, core=HOPPER),
        Entry(name="rope 9/3 heads of 64", use=rope(9, 3, 64, False), wide=0.25),
        Entry(name="rope 12/4 heads of 80", use=rope(12, 4, 80, False), wide=0.25),
        Entry(name="store keys and values 8 heads of 128", use=store(8, 128), core=HOPPER),
        Entry(name="store keys and values 4 heads of 80", use=store(4, 80)),
        Entry(name="silu and multiply 12288", use=activate, core=HOPPER),
    ]


def _experts() -> list[Entry]:
    def use(tokens: int, dtype: torch.dtype = BF16) -> Callable[[Launcher], None]:
        def of(launch: Launcher) -> None:
            x, router = _meta(tokens, 2048, dtype=dtype), _meta(128, 2048, dtype=dtype)
            gate_up, down = _meta(128, 2 * 768, 2048, dtype=dtype), _meta(128, 2048, 768, dtype=dtype)
            moe.moe(x, router, gate_up, down, top_k=8, normalise=True, launch=launch)

        return of

    return [
        Entry(name="8 of 128 experts, 64 tokens (Qwen3-30B-A3B)", use=use(64)),
        Entry(name="8 of 128 experts, 8192 tokens", use=use(8192), matrix=True, core=EVERY_CHIP),
        Entry(name="8 of 128 experts, 64 tokens, fp32", use=use(64, FP32), hot=False),
    ]


def _ends() -> list[Entry]:
    def draw(vocab: int) -> Callable[[Launcher], None]:
        def use(launch: Launcher) -> None:
            scores, table = _meta(64, vocab, dtype=FP32), _meta(64, sampling.COLUMNS, dtype=torch.float64)
            sampling.sample(scores, scores, table, launch)
            rows, index, drawn = _meta(64, 4, dtype=torch.int32), _meta(4096, dtype=torch.int32), _meta(64, dtype=torch.int64)
            penalties.penalise(scores, rows, index, index, _meta(64, 3, dtype=FP32), drawn, launch)

        return use

    def logprobs(dim: int, vocab: int, dtype: torch.dtype) -> Callable[[Launcher], None]:
        def use(launch: Launcher) -> None:
            hidden, head = (_meta(rows, dim, dtype=dtype).requires_grad_() for rows in (8192, vocab))
            found, entropy = token_logprobs(hidden, head, _meta(8192, dtype=torch.int64), 1.0, launch)
            (found.sum() + entropy.sum()).backward()

        return use

    return [
        Entry(name="sample of 151936", use=draw(151936), core=HOPPER),
        Entry(name="log-probs of 151936, hidden 4096", use=logprobs(4096, 151936, BF16), wide=0.3, matrix=True, core=HOPPER),
        Entry(name="log-probs of 49152, hidden 576", use=logprobs(576, 49152, BF16), wide=0.3, matrix=True),
        Entry(name="log-probs of 49152, hidden 576, fp32", use=logprobs(576, 49152, FP32), wide=0.25, hot=False),
    ]
