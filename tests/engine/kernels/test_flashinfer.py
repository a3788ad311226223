"""Attention through FlashInfer: page lists, what is planned and when, what is refused. Without a GPU a stand-in computes.

The stand-in follows FlashInfer's documentation of its two wrappers: compressed rows of pages in "HND", `window_left` keys
before the query's own, causal in the lower right corner.
"""

from __future__ import annotations

import dataclasses
import inspect
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import gap, paged

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels import flashinfer
from pearl.engine.kernels.flashinfer import FlashInferKernels, page_lists
from pearl.engine.kernels.triton import kernels as triton_kernels
from pearl.engine.models.config import ModelConfig


class Wrapper:
    """Both wrappers: the one for decode rows plans without query starts, each sequence having one query."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8
        self.plans = 0

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        starts, pointers, indices, last, heads, kv_heads, dim, size = self.lists
        assert q.shape[1:] == (heads, dim) and q.dtype == self.options["q_data_type"]
        for s, tail in enumerate(last.tolist()):
            own = indices[pointers[s] : pointers[s + 1]].long()
            k, v = (x[own].transpose(0, 1).reshape(kv_heads, -1, dim)[:, : (len(own) - 1) * size + tail] for x in pages)
            span = slice(int(starts[s]), int(starts[s + 1]))
            out[span] = self._attend(q[span].double(), k.double(), v.double()).to(q.dtype)

    def _attend(self, q_QHB: torch.Tensor, k_GLB: torch.Tensor, v_GLB: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q_QHB.shape[1] // len(x), 0) for x in (k_GLB, v_GLB))
        scores = torch.einsum("qhb,hlb->hql", q_QHB, k) * self.options["sm_scale"]
        last = torch.arange(len(q_QHB)) + k.shape[1] - len(q_QHB)
        behind = last[:, None] - torch.arange(k.shape[1])
        seen = behind >= 0
        if self.options["window_left"] >= 0:
            seen &= behind <= self.options["window_left"]
        return torch.einsum("hql,hlb->qhb", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


class Decode(Wrapper):
    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page_size, **options) -> None:
        self.plans += 1
        self.lists = (torch.arange(len(last) + 1), indptr, indices, last, heads, kv_heads, head_dim, page_size)
        self.options = options


class Chunks(Wrapper):
    def plan(self, starts, indptr, indices, last, heads, kv_heads, head_dim_qk, page_size, *, causal, **options) -> None:
        assert causal
        self.plans += 1
        self.lists = (starts, indptr, indices, last, heads, kv_heads, head_dim_qk, page_size)
        self.options = options


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FlashInferKernels:
    package = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Chunks)
    monkeypatch.setattr(flashinfer, "_package", lambda: package)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    return FlashInferKernels()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(contexts=st.lists(st.integers(1, 40), max_size=6), block_size=st.integers(1, 9), padding=st.integers(0, 3))
def test_page_lists(contexts: list[int], block_size: int, padding: int) -> None:
    """Walking the lists visits exactly the slots that the block tables name."""
    counts = [-(-context // block_size) for context in contexts]
    width = max([*counts, 1]) + padding
    tables = np.random.default_rng(0).integers(1, 1000, (len(contexts), width)).astype(np.int32)
    lists = page_lists(torch.tensor(contexts, dtype=torch.int32), torch.from_numpy(tables).view(-1, width), block_size)
    assert all(part.dtype == torch.int32 for part in lists)
    starts, pages, last = (part.tolist() for part in lists)
    assert len(starts) == len(contexts) + 1 and len(pages) == starts[-1] and len(last) == len(contexts)
    for s, context in enumerate(contexts):
        own = pages[starts[s] : starts[s + 1]]
        slots = [page * block_size + offset for page in own for offset in range(block_size)]
        slots = slots[: (len(own) - 1) * block_size + last[s]]
        assert slots == [int(tables[s, p // block_size]) * block_size + p % block_size for p in range(context)]


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(("contexts", "queries"), [([5, 9, 1], [1, 1, 1]), ([4, 8], [4, 3]), ([5, 1, 9, 30], [1, 1, 9, 6])])
def test_attention(kernels: FlashInferKernels, contexts: list[int], queries: list[int], window: int) -> None:
    problem = paged(contexts, queries, heads=(6, 2), block_size=4, window=window)
    found = kernels.paged_attention(problem.q_THB, problem.clean, problem.batch, problem.scale, window)
    assert gap(found, problem.expected()) < 1e-6


def test_three_chunks_give_what_one_gives(kernels: FlashInferKernels) -> None:
    """The last of them with one query, as a row of its own kind."""
    whole = paged([13], [13], heads=(6, 2), block_size=4)
    found = []
    for begin, end in ((0, 5), (5, 12), (12, 13)):
        batch = dataclasses.replace(
            whole.batch,
            query_starts_S1=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens_S=torch.tensor([end], dtype=torch.int32),
            num_decodes=int(end - begin == 1),
        )
        found.append(kernels.paged_attention(whole.q_THB[begin:end], whole.clean, batch, whole.scale))
    assert gap(torch.cat(found), whole.expected()) < 1e-6


def test_a_batch_is_planned_once(kernels: FlashInferKernels) -> None:
    problem, other = paged([5, 9], [1, 3]), paged([6, 9], [1, 3])
    for _ in range(3):
        kernels.paged_attention(problem.q_THB, problem.clean, problem.batch, problem.scale)
    decode, chunks = kernels._wrappers
    assert (decode.plans, chunks.plans) == (1, 1)
    found = kernels.paged_attention(other.q_THB, other.clean, other.batch, other.scale)
    assert (decode.plans, chunks.plans) == (2, 2)
    assert gap(found, other.expected()) < 1e-6
    equal = dataclasses.replace(other.batch)
    kernels.paged_attention(other.q_THB, other.clean, equal, other.scale)
    assert (decode.plans, chunks.plans) == (3, 3)


# ---------------------------------------------------------------------------------------------------- what is refused


def model(**fields) -> ModelConfig:
    sizes = dict(
        architecture="Qwen3ForCausalLM", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=64, max_position=64, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=False, qk_norm=True,
    )  # fmt: skip
    return ModelConfig(**(sizes | fields))


@pytest.mark.parametrize(
    ("dtype", "fields", "reason"),
    [
        (torch.float32, {}, "dtype=torch.float32: must be one of torch.bfloat16, torch.float16"),
        (torch.float16, {"head_dim": 80}, "head_dim=80: must be one of 64, 128, 256"),
        (torch.float16, {"windows": (0, 8)}, "windows=[0, 8]: all layers must have the same, since a plan is for one"),
        (torch.float16, {"windows": (8, 8)}, None),
        (torch.bfloat16, {}, None),
    ],
)
def test_refusals(dtype: torch.dtype, fields: dict, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
    assert flashinfer.unsupported(dtype, model(**fields)) == reason


def test_without_the_package_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(dtype=torch.bfloat16, model=model(), block_size=16)
    assert FlashInferKernels().refusal(device=torch.device("cpu"), **asked).startswith("device=cpu: ")
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_kernels.torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = FlashInferKernels().refusal(device=torch.device("cuda"), **asked)
    assert reason == "the package flashinfer-python is not installed (pip install 'pearl-rl[cuda]')"
    monkeypatch.setattr(triton_kernels.torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert FlashInferKernels().refusal(device=torch.device("cuda"), **asked) == "compute capability 7.5: must be 8.0 or later"


def test_the_stand_in_is_called_like_the_package() -> None:
    """Where the package is: its wrappers take the arguments that are passed here."""
    package = pytest.importorskip("flashinfer", reason="flashinfer-python is an extra (cuda)")
    options = dict(window_left=-1, sm_scale=1.0, q_data_type=torch.float16, kv_data_type=torch.float16)
    decode, chunks = package.BatchDecodeWithPagedKVCacheWrapper, package.BatchPrefillWithPagedKVCacheWrapper
    workspace = torch.empty(0)
    inspect.signature(decode).bind(workspace, kv_layout="HND", use_tensor_cores=True)
    inspect.signature(chunks).bind(workspace, kv_layout="HND")
    inspect.signature(decode.plan).bind(*[None] * 4, 4, 2, 64, 16, **options)
    inspect.signature(chunks.plan).bind(*[None] * 5, 4, 2, 64, 16, causal=True, **options)
    for wrapper in (decode, chunks):
        inspect.signature(wrapper.run).bind(None, None, (None, None), out=None)
