"""FlashInfer's paged attention (Ye et al. 2025) in place of our own; all other operations are the Triton kernels'.

Owns the plan of a step in FlashInfer's terms: page lists in compressed rows instead of block tables, made once per batch for
all layers. The package is imported when the first step is planned, never before: it takes seconds and needs a GPU. It compiles
its kernels for a model's sizes at their first use. Not run on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PagedBatch
from pearl.engine.kernels.triton.kernels import TritonKernels
from pearl.engine.kernels.triton.launch import Launcher, run
from pearl.engine.models.config import ModelConfig

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
"""Those that FlashInfer's own builds have."""
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends for partial results of split keys."""


class FlashInferKernels(TritonKernels):
    """Implements `interface.Kernels`; the pool is read as FlashInfer's "HND" pages, which is the plain layout."""

    name = "flashinfer"

    def __init__(self, launch: Launcher = run) -> None:
        super().__init__(launch)
        self._wrappers: tuple[Any, Any] | None = None
        self._planned: tuple[PagedBatch, float, int] | None = None

    def refusal(self, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        reason = super().refusal(device=device, dtype=dtype, model=model, block_size=block_size)
        return reason or unsupported(dtype, model)

    def paged_attention(
        self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0
    ) -> Tensor:
        decode, chunks = self._planned_wrappers(q_THB, kv_2NG__, batch, scale, window)
        out_THB = torch.empty_like(q_THB)
        pages = (kv_2NG__[0], kv_2NG__[1])
        first = batch.num_decodes
        if first:
            decode.run(q_THB[:first], pages, out=out_THB[:first])
        if first < len(batch.context_lens_S):
            chunks.run(q_THB[first:], pages, out=out_THB[first:])
        return out_THB

    def _planned_wrappers(
        self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int
    ) -> tuple[Any, Any]:
        """Wrappers with this batch's plan: made anew when another batch (a frozen value) comes."""
        if self._wrappers is None:
            self._wrappers = _make_wrappers(q_THB.device)
        before = self._planned
        if before is None or before[0] is not batch or before[1:] != (scale, window):
            self._planned = (batch, scale, window)
            _plan(self._wrappers, q_THB, kv_2NG__, batch, scale, window)
        return self._wrappers


def unsupported(dtype: torch.dtype, model: ModelConfig) -> str | None:
    """Why FlashInfer cannot serve this model here, whatever the GPU."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed (pip install 'pearl-rl[cuda]')"
    if dtype not in DTYPES:
        return f"dtype={dtype}: must be one of {', '.join(str(known) for known in DTYPES)}"
    if model.head_dim not in HEAD_DIMS:
        return f"head_dim={model.head_dim}: must be one of {', '.join(str(known) for known in HEAD_DIMS)}"
    windows = {model.window(layer) for layer in range(model.num_layers)}
    if len(windows) > 1:
        return f"windows={sorted(windows)}: all layers must have the same, since a plan is for one"
    return None


def page_lists(contexts_S: Tensor, tables_SN: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables as compressed rows, int32: (where each sequence's pages begin [S + 1], all pages, tokens in each last one).

    Contexts are at least 1. Padding of the tables is left out.
    """
    pages_S = (contexts_S + block_size - 1) // block_size
    starts_S1 = torch.zeros(len(contexts_S) + 1, dtype=torch.int32, device=contexts_S.device)
    starts_S1[1:] = pages_S.cumsum(0)
    used_SN = torch.arange(tables_SN.shape[1], device=tables_SN.device) < pages_S[:, None]
    return starts_S1, tables_SN[used_SN].int(), (contexts_S - (pages_S - 1) * block_size).int()


def _make_wrappers(device: torch.device) -> tuple[Any, Any]:
    """(decode, chunks). They run one after the other on one stream, so they share the workspace."""
    module = _package()
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # On tensor cores: the other decode kernels know groups of 1, 2, 4 and 8 query heads only.
    decode = module.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout="HND", use_tensor_cores=True)
    return decode, module.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")


def _package() -> ModuleType:
    import flashinfer

    return flashinfer


def _plan(wrappers: tuple[Any, Any], q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int) -> None:
    decode, chunks = wrappers
    heads, dim = q_THB.shape[1:]
    kv_heads, block_size = kv_2NG__.shape[2:4]
    # FlashInfer counts the keys before the query's own.
    options = dict(window_left=window - 1, sm_scale=scale, q_data_type=q_THB.dtype, kv_data_type=kv_2NG__.dtype)
    first = batch.num_decodes
    if first:
        lists = page_lists(batch.context_lens_S[:first], batch.block_tables_SN[:first], block_size)
        decode.plan(*lists, heads, kv_heads, dim, block_size, **options)
    if first < len(batch.context_lens_S):
        lists = page_lists(batch.context_lens_S[first:], batch.block_tables_SN[first:], block_size)
        starts = batch.query_starts_S1[first:] - first
        chunks.plan(starts, *lists, heads, kv_heads, dim, block_size, causal=True, **options)
