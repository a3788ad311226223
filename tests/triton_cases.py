"""Random problems for the Triton kernels, on a GPU where there is one and in Triton's interpreter elsewhere. No tests.

The interpreter takes bfloat16 for 16-bit integers, so it is left out there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pearl.engine.kernels.interface import PagedBatch
from pearl.engine.kernels.reference import ReferenceKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
DTYPES = [torch.float32, *HALF]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAN = float("nan")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    numbers = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(numbers).to(dtype).to(DEVICE)


def gap(found: Tensor, expected: Tensor) -> float:
    """The greatest difference relative to the greatest number; NaN anywhere gives NaN, which no limit admits."""
    assert found.shape == expected.shape
    assert found.is_contiguous()
    if not expected.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch.empty and its like give NaN (integers: the greatest), so that what nobody wrote is found out where it is read."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sequences in a pool whose slots hold `poison` wherever no query may look, and the queries of one step."""

    q_THB: Tensor
    pool: Tensor
    clean: Tensor
    batch: PagedBatch
    scale: float
    window: int

    def expected(self, rows: slice = slice(None)) -> Tensor:
        """The reference's answer to the same numbers in float64."""
        wide = ReferenceKernels().paged_attention(self.q_THB.double(), self.clean.double(), self.batch, self.scale, self.window)
        return wide[rows]


def paged(
    contexts: list[int],
    queries: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    poison: float = NAN,
    seed: int = 0,
) -> Problem:
    """Sequences of `contexts` tokens, the last `queries` of each of which ask; those with one query come first."""
    blocks = [-(-context // block_size) for context in contexts]
    free = np.random.default_rng(seed).permutation(sum(blocks) + 2).tolist()
    tables = [[free.pop() for _ in range(count)] for count in blocks]
    width = max(blocks) + 1
    numbers = normal(2, sum(contexts), heads[1], dim, dtype=dtype, seed=seed)
    pool = torch.full((2, sum(blocks) + 2, heads[1], block_size, dim), poison, dtype=dtype, device=DEVICE)
    positions, slots, start = [], [], 0
    for context, asking, table in zip(contexts, queries, tables, strict=True):
        places = [table[p // block_size] * block_size + p % block_size for p in range(context)]
        first_seen = max(0, context - asking + 1 - window) if window else 0
        for p in range(first_seen, context):
            pool[:, places[p] // block_size, :, places[p] % block_size] = numbers[:, start + p]
        positions += range(context - asking, context)
        slots += places[context - asking :]
        start += context
    batch = PagedBatch(
        positions_T=torch.tensor(positions, device=DEVICE),
        slot_mapping_T=torch.tensor(slots, device=DEVICE),
        query_starts_S1=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32, device=DEVICE),
        context_lens_S=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_tables_SN=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=DEVICE),
        num_decodes=next((s for s, count in enumerate(queries) if count != 1), len(queries)),
        max_query_len=max(queries),
        max_context_len=max(contexts),
    )
    return Problem(
        q_THB=normal(sum(queries), heads[0], dim, dtype=dtype, seed=seed + 1),
        pool=pool,
        clean=torch.nan_to_num(pool, nan=0.0, posinf=0.0, neginf=0.0),
        batch=batch,
        scale=2.0 * dim**-0.5,
        window=window,
    )
