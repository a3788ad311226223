"""Random paged attention problems in the layouts of the CPU kernels, and what is asked of every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pearl import _C
from pearl.engine.kernels.interface import PagedBatch
from pearl.engine.kernels.reference import ReferenceKernels

TILE = 16
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@contextmanager
def machine(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """The CPU kernels on another instruction set, or another number of threads."""
    before_isa, before_threads = _C.cpu.isa(), _C.cpu.threads()
    if isa is not None:
        _C.cpu.use_isa(isa)
    if threads is not None:
        _C.cpu.set_threads(threads)
    try:
        yield
    finally:
        _C.cpu.use_isa(before_isa)
        _C.cpu.set_threads(before_threads)


def laid_out(plain_2NG__: Tensor) -> Tensor:
    """The pool [2, N, G, block_size, dim] in the kernels' order, written from the description in csrc/cpu/attention.h."""
    _, blocks, kv_heads, block_size, dim = plain_2NG__.shape
    if block_size % TILE:
        return plain_2NG__.clone()
    tiles = plain_2NG__.view(2, blocks, kv_heads, block_size // TILE, TILE, dim)
    if plain_2NG__.dtype == torch.bfloat16:
        keys = tiles[0].unflatten(-1, (dim // 2, 2)).transpose(-3, -2)
        values = tiles[1].unflatten(-2, (TILE // 2, 2)).transpose(-2, -1)
    else:
        keys, values = tiles[0].transpose(-2, -1), tiles[1]
    return torch.stack([x.reshape(plain_2NG__.shape[1:]) for x in (keys, values)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Sequences in a pool whose other slots hold `poison`, and the queries of one step."""

    q_THB: Tensor
    clean: Tensor           # plain order, zeros elsewhere
    pool: Tensor            # the kernels' order, poison elsewhere
    batch: PagedBatch
    scale: float
    window: int

    def cpu(self) -> Tensor:
        """What the CPU kernels make of it."""
        tokens, heads, _ = self.q_THB.shape
        out = torch.full_like(self.q_THB, float("nan"))
        tables = self.batch.block_tables_SN
        _C.cpu.paged_attention(
            q=self.q_THB.data_ptr(),
            tokens=tokens,
            heads=heads,
            pool=pool_of(self.pool),
            query_starts=self.batch.query_starts_S1.data_ptr(),
            context_lens=self.batch.context_lens_S.data_ptr(),
            block_tables=tables.data_ptr(),
            table_stride=tables.shape[1],
            sequences=len(tables),
            scale=self.scale,
            window=self.window,
            out=out.data_ptr(),
        )
        return out

    def exact(self) -> Tensor:
        """What the reference makes of the same numbers in float64."""
        return ReferenceKernels().paged_attention(self.q_THB.double(), self.clean.double(), self.batch, self.scale, self.window)


def pool_of(kv_2NG__: Tensor) -> _C.cpu.KvPool:
    _, blocks, kv_heads, block_size, dim = kv_2NG__.shape
    return _C.cpu.KvPool(kv_2NG__.data_ptr(), blocks, kv_heads, block_size, dim, NAMES[kv_2NG__.dtype])


def make_problem(
    contexts: list[int],
    queries: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    seed: int = 0,
    poison: float = float("nan"),
) -> Problem:
    """Sequences of `contexts` tokens, the last `queries` of each of which ask; scores are several units apart.

    Slots that no query sees hold `poison`: behind the context, before the window, in blocks of nobody.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-context // block_size) for context in contexts]
    blocks = sum(needed) + 2
    dealt = rng.permutation(blocks)
    plain = torch.full((2, blocks, heads[1], block_size, dim), poison, dtype=dtype)
    tables = torch.zeros(len(contexts), max([*needed, 1]) + 1, dtype=torch.int32)
    start = 0
    for s, (context, count) in enumerate(zip(contexts, needed, strict=True)):
        own = torch.from_numpy(dealt[start : start + count])
        start += count
        tables[s, :count] = own
        numbers = rng.standard_normal((2, context, heads[1], dim)).astype(np.float32)
        first_seen = max(0, context - queries[s] + 1 - window) if window > 0 else 0
        at = torch.arange(first_seen, context)
        seen = torch.from_numpy(numbers[:, first_seen:]).to(dtype)
        plain[:, own[at // block_size], :, at % block_size] = seen.transpose(0, 1)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = rng.standard_normal((int(starts[-1]), heads[0], dim)).astype(np.float32)
    batch = PagedBatch(
        positions_T=torch.zeros(0, dtype=torch.int64),
        slot_mapping_T=torch.zeros(0, dtype=torch.int64),
        query_starts_S1=torch.from_numpy(starts),
        context_lens_S=torch.tensor(contexts, dtype=torch.int32),
        block_tables_SN=tables,
        num_decodes=next((i for i, count in enumerate(queries) if count != 1), len(queries)),
        max_query_len=max([*queries, 0]),
        max_context_len=max([*contexts, 0]),
    )
    return Problem(
        q_THB=torch.from_numpy(q).to(dtype),
        clean=torch.nan_to_num(plain, nan=0.0),
        pool=laid_out(plain),
        batch=batch,
        scale=2.0 * dim**-0.5,
        window=window,
    )


def rows_of(problem: Problem, sequences: list[int]) -> Problem:
    """The same problem for some of its sequences alone, in another order."""
    starts, batch = problem.batch.query_starts_S1.tolist(), problem.batch
    spans = [range(starts[s], starts[s + 1]) for s in sequences]
    lengths = [len(span) for span in spans]
    return replace(
        problem,
        q_THB=problem.q_THB[[row for span in spans for row in span]].contiguous(),
        batch=replace(
            batch,
            query_starts_S1=torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32),
            context_lens_S=batch.context_lens_S[sequences].contiguous(),
            block_tables_SN=batch.block_tables_SN[sequences].contiguous(),
            num_decodes=0,
        ),
    )
