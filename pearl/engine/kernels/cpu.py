"""The CPU kernels of `pearl._C`: whole steps of a decoder in C++, and each operation by itself, on torch's CPU tensors.

Owns the way from tensors to addresses; the packed weights' memory is `cpu_weights.py`'s, the arithmetic is in csrc/cpu, where
the instruction set is chosen on the machine (PEARL_CPU_ISA names another one). Steps run on as many threads as torch has.
Invariants: a row's bits do not depend on the rest of the batch nor on the number of threads; a number of the pool that is no
key or value of a sequence reaches no result. Serving only: nothing here has a gradient (attention without a pool, which the
trainer needs, is the reference's). Shapes: T tokens, D hidden, E outputs, H query heads, G kv heads, B head_dim.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pearl.engine.kernels.cpu_weights import CpuWeights
from pearl.engine.kernels.interface import Drawn, DrawRows, LayerMark, PagedBatch, ServedDecoder, ServedModel
from pearl.engine.kernels.reference import ReferenceKernels
from pearl.engine.models.config import ModelConfig

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_HEAD_DIM = 256
ALIGNMENT = 64


def native_cpu() -> tuple[ModuleType | None, str]:
    """(`pearl._C.cpu`, or None; why not)."""
    try:
        module: Any = importlib.import_module("pearl._C")
        module.cpu.Packing, module.cpu.sample  # noqa: B018 (missing in older builds)
        module.cpu.isa()  # ValueError here, not in the middle of a start, if the environment asks for one that is not there
    except ImportError as error:
        return None, f"pearl._C is not built or cannot be loaded: {error}"
    except AttributeError:
        return None, "pearl._C has no CPU kernels: it was built from an older version, build it again"
    return module.cpu, ""


class CpuKernels(ReferenceKernels):
    """Implements `interface.Kernels` for CPU tensors in fp32 and bf16.

    Inside a (block, head) of the pool keys and values lie in tiles of 16 tokens, in an order that depends on the dtype alone
    (csrc/cpu/attention.h); plain where 16 does not divide the block size.
    """

    name = "cpu"
    kv_layout = "tiles16"
    row_invariant = True

    def refusal(self, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        if device.type != "cpu":
            return f"device={device}: they serve cpu"
        if dtype not in DTYPES:
            return f"dtype={dtype}: they compute in float32 and bfloat16"
        if model.head_dim > MAX_HEAD_DIM:
            return f"head_dim={model.head_dim}: they serve up to {MAX_HEAD_DIM}"
        if block_size < 1:
            return f"block_size={block_size}: must be >= 1"
        return native_cpu()[1] or None

    def serve(
        self, model: ServedModel, kv_pool: Tensor, memory: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> ServedDecoder:
        return CpuDecoder(_cpu(), model, kv_pool, memory)

    def draw(self, scores_SV: Tensor, logits_SV: Tensor, rows: DrawRows) -> Drawn:  # type: ignore[override]
        (scores, shape), (logits, _) = _tensor(scores_SV), _tensor(logits_SV)
        each = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
        return Drawn(*_cpu().sample(scores, logits, *shape, **each))

    # ------------------------------------------------------------------------------------------------ one by one

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """Packs the weight at every call: for looking at the operation by itself."""
        cpu, x_TD = _cpu(), x_TD.contiguous()
        weight, _memory = _packed(cpu, weight_ED)
        y_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0])
        bias = 0 if bias_E is None else bias_E.contiguous().data_ptr()
        cpu.gemm(x_TD.data_ptr(), len(x_TD), x_TD.shape[1], weight, y_TE.data_ptr(), y_TE.shape[1], bias=bias)
        return y_TE

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return _norm(x_TD, None, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TD = residual_TD.clone(memory_format=torch.contiguous_format)
        return _norm(x_TD, total_TD, weight_D, eps), total_TD

    def qk_norm_rope(
        self,
        q_THB: Tensor,
        k_TGB: Tensor,
        cos_TB: Tensor,
        sin_TB: Tensor,
        q_weight_B: Tensor | None,
        k_weight_B: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        tables = cos_TB.contiguous(), sin_TB.contiguous()
        return _norm_rope(q_THB, *tables, q_weight_B, eps), _norm_rope(k_TGB, *tables, k_weight_B, eps)

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        gate_up_TF2 = gate_up_TF2.contiguous()
        rows, size = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
        out_TF = gate_up_TF2.new_empty(rows, size)
        _cpu().silu_and_mul(rows, size, _dtype(gate_up_TF2), gate_up_TF2.data_ptr(), out_TF.data_ptr())
        return out_TF

    def moe(
        self,
        x_TD: Tensor,
        router_ED: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        *,
        top_k: int,
        normalise: bool,
        first: int = 0,
    ) -> Tensor:
        """Packs the weights at every call, as `linear`."""
        cpu, x_TD = _cpu(), x_TD.contiguous()
        router, _memory = _packed(cpu, router_ED)
        gate_up = [_packed(cpu, weight, halves=True) for weight in gate_up_EFD]
        down = [_packed(cpu, weight) for weight in down_EDF]
        y_TD = torch.empty_like(x_TD)
        experts = [weight for weight, _ in gate_up], [weight for weight, _ in down]
        cpu.moe(x_TD.data_ptr(), len(x_TD), router, *experts, first, top_k, normalise, y_TD.data_ptr())
        return y_TD

    def store_kv(self, k_TGB: Tensor, v_TGB: Tensor, kv_2NG__: Tensor, slot_mapping_T: Tensor) -> None:
        k_TGB, v_TGB, slots_T = k_TGB.contiguous(), v_TGB.contiguous(), slot_mapping_T.contiguous()
        _cpu().store_kv(_pool(kv_2NG__), len(k_TGB), k_TGB.data_ptr(), v_TGB.data_ptr(), slots_T.data_ptr())

    def paged_attention(
        self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0
    ) -> Tensor:
        q_THB, tables_SN = q_THB.contiguous(), batch.block_tables_SN.contiguous()
        o_THB = torch.empty_like(q_THB)
        _cpu().paged_attention(
            q=q_THB.data_ptr(),
            tokens=q_THB.shape[0],
            heads=q_THB.shape[1],
            pool=_pool(kv_2NG__),
            query_starts=batch.query_starts_S1.data_ptr(),
            context_lens=batch.context_lens_S.data_ptr(),
            block_tables=tables_SN.data_ptr(),
            table_stride=tables_SN.shape[1],
            sequences=tables_SN.shape[0],
            scale=scale,
            window=window,
            out=o_THB.data_ptr(),
        )
        return o_THB


def wide_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`x @ weight.T` of bf16 tensors, added up and given in fp32. Packs the weight at every call."""
    cpu, x_TD = _cpu(), x_TD.contiguous()
    cpu.set_threads(torch.get_num_threads())
    weight, _memory = _packed(cpu, weight_ED)
    y_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)
    cpu.gemm(x_TD.data_ptr(), len(x_TD), x_TD.shape[1], weight, y_TE.data_ptr(), y_TE.shape[1], epilogue="wide")
    return y_TE


class CpuDecoder:
    """Implements `interface.ServedDecoder`."""

    def __init__(
        self,
        cpu: ModuleType,
        model: ServedModel,
        kv_pool: Tensor,
        memory: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> None:
        self._cpu: Any = cpu
        self._held = model, kv_pool  # the addresses below are theirs
        config, parameters = model.config, model.parameters
        experts = config.experts
        head = parameters["embed.weight" if config.tie_embeddings else "lm_head.weight"]
        self._vocabulary, self._layers = head.shape[0], config.num_layers
        self._native = self._cpu.Decoder(
            dtype=_dtype(head),
            hidden=config.hidden_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocabulary=self._vocabulary,
            eps=config.rms_eps,
            windows=[config.window(layer) for layer in range(config.num_layers)],
            top_k=0 if experts is None else experts.top_k,
            normalise=experts is not None and experts.norm_topk_prob,
            first_expert=model.first_expert,
            adds_bias=model.rank == 0,
            parameters={name: _tensor(value) for name, value in parameters.items()},
            cos=_tensor(model.rope_cos),
            sin=_tensor(model.rope_sin),
            pool=_tensor(kv_pool),
        )
        self.weights = CpuWeights(cpu, self._native, dict(parameters), memory)

    def forward(
        self,
        embedded_TD: Tensor,
        batch: PagedBatch,
        add_up: Callable[[Tensor], None] | None = None,
        mark: LayerMark | None = None,
        last_rows: list[int] | None = None,
    ) -> Tensor:
        layer_word, layer_base = mark or (0, 0)
        self._cpu.set_threads(torch.get_num_threads())
        step = self._native.step(
            stream=_tensor(embedded_TD),
            positions=_tensor(batch.positions_T),
            slot_mapping=_tensor(batch.slot_mapping_T),
            query_starts=_tensor(batch.query_starts_S1),
            context_lens=_tensor(batch.context_lens_S),
            block_tables=_tensor(batch.block_tables_SN),
            layer_word=layer_word,
            layer_base=layer_base,
        )
        if add_up is None and last_rows is not None:
            hidden_RD = embedded_TD.new_empty(len(last_rows), embedded_TD.shape[1])
            self._native.forward_last(step, last_rows, _tensor(hidden_RD))
            return hidden_RD
        hidden_TD = torch.empty_like(embedded_TD)
        if add_up is None:
            self._native.forward(step, _tensor(hidden_TD))
            return hidden_TD
        partial_TD = torch.empty_like(embedded_TD)
        for half in range(2 * self._layers):
            self._native.half(step, half, _tensor(partial_TD))
            add_up(partial_TD)
        self._native.finish(step, _tensor(partial_TD), _tensor(hidden_TD))
        return hidden_TD if last_rows is None else hidden_TD[last_rows]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        self._cpu.set_threads(torch.get_num_threads())
        out_NV = hidden_ND.new_empty(hidden_ND.shape[0], self._vocabulary, dtype=torch.float32)
        self._native.logits(_tensor(hidden_ND), _tensor(out_NV))
        return out_NV

    def take_profile(self) -> dict[str, int]:
        """Nanoseconds per part of the steps since the last call; the first call begins to count."""
        return self._native.take_profile()


# ---------------------------------------------------------------------------------------------------- tensors to addresses


def _cpu() -> Any:
    module, reason = native_cpu()
    if module is None:
        raise ValueError(f"kernels='cpu': {reason}")
    return module


def _dtype(tensor: Tensor) -> str:
    name = DTYPES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"dtype={tensor.dtype}: the CPU kernels compute in float32 and bfloat16")
    return name


def _tensor(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """(address, shape) of contiguous memory."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: must be contiguous")
    return tensor.data_ptr(), tuple(tensor.shape)


def _packed(cpu: Any, weight_ED: Tensor, *, halves: bool = False) -> tuple[Any, Tensor]:
    """The packed matrix and the memory that it lies in."""
    weight_ED = weight_ED.contiguous()
    dtype, (rows, columns) = _dtype(weight_ED), weight_ED.shape
    nbytes = cpu.packed_bytes(rows, columns, dtype, halves)
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    address = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    return cpu.pack(weight_ED.data_ptr(), rows, columns, dtype, halves, address, nbytes), memory


def _norm(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    x_TD, weight_D = x_TD.contiguous(), weight_D.contiguous()
    rows, size = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    residual = 0 if residual_TD is None else residual_TD.data_ptr()
    _cpu().rms_norm(rows, size, _dtype(x_TD), x_TD.data_ptr(), residual, weight_D.data_ptr(), eps, out_TD.data_ptr())
    return out_TD


def _norm_rope(x_THB: Tensor, cos_TB: Tensor, sin_TB: Tensor, weight_B: Tensor | None, eps: float) -> Tensor:
    x_THB = x_THB.contiguous()
    tokens, heads, dim = x_THB.shape
    out_THB = torch.empty_like(x_THB)
    weight = 0 if weight_B is None else weight_B.data_ptr()
    tables = cos_TB.data_ptr(), sin_TB.data_ptr()
    _cpu().norm_rope(tokens, heads, dim, _dtype(x_THB), x_THB.data_ptr(), *tables, weight, eps, out_THB.data_ptr())
    return out_THB


def _pool(kv_2NG__: Tensor) -> Any:
    """One layer of the pool."""
    _, blocks, kv_heads, block_size, dim = kv_2NG__.shape
    address, _ = _tensor(kv_2NG__)
    return _cpu().KvPool(address, blocks, kv_heads, block_size, dim, _dtype(kv_2NG__))
