"""Moves the bytes of KV blocks: out of a paged pool into one flat buffer, back again, and from pool to pool.

Owns the choice between `pearl._C` and plain torch; both give the same bytes and refuse the same calls. It does not know whose
the blocks are (leases: the block manager) nor which blocks should move (the planner).
Invariant: everything is checked before the first byte is written.

A pool is kv[layer, 2, block, ...]: what follows the block axis is contiguous and opaque, so any layout inside a block is
served. A part of a pool is one too: `pool[2:4, :, :, 1:3]` are two heads of every block in two layers. A buffer is
[layer, 2, n, ...], contiguous, with the blocks in the order of the ids.

CUDA pools go through the kernels of `pearl._C` on torch's current stream, asynchronously, where they were built. They were
compiled and linked but not yet run on a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

Ids = Sequence[int] | Tensor
"""Block ids: whole numbers in 0 .. num_blocks-1."""


def backend(device: torch.device | str = "cpu") -> str:
    """What moves blocks on this device and why: "pearl._C", or "torch" with the reason in parentheses."""
    module, reason = native(torch.device(device).type)
    return f"torch ({reason})" if module is None else "pearl._C"


def gather_blocks(pool: Tensor, block_ids: Ids, out: Tensor | None = None) -> Tensor:
    """Copies blocks into `out`, or a new buffer, [layer, 2, len(block_ids), ...]. The same id may come twice.

    A buffer that is kept and passed again saves the first touch of its pages, which costs more than the copy.
    """
    ids = _as_list("block_ids", block_ids)
    _check_pool("pool", pool)
    shape = _buffer_shape(pool, len(ids))
    if out is None:
        out = pool.new_empty(shape)
    _check_buffer("out", out, pool, shape)
    module, _ = native(pool.device.type)
    if module is None:
        _check_ids("source", ids, pool)
        _check_disjoint(pool, ids, out, list(range(len(ids))))
        torch.index_select(pool, 2, _index(ids, pool), out=out)
    elif pool.is_cuda:
        module.gather_blocks_cuda(_describe(module, pool), ids, out.data_ptr(), out.nbytes, *_queue(pool))
    else:
        module.gather_blocks(_describe(module, pool), ids, out.data_ptr(), out.nbytes, torch.get_num_threads())
    return out


def scatter_blocks(pool: Tensor, block_ids: Ids, buffer: Tensor) -> None:
    """Writes the blocks of `buffer` [layer, 2, len(block_ids), ...] into the pool. ValueError if an id comes twice."""
    ids = _as_list("block_ids", block_ids)
    _check_pool("pool", pool)
    _check_buffer("buffer", buffer, pool, _buffer_shape(pool, len(ids)))
    module, _ = native(pool.device.type)
    if module is None:
        _check_ids("destination", ids, pool)
        _check_written_once(ids)
        _check_disjoint(buffer, list(range(len(ids))), pool, ids)
        pool.index_copy_(2, _index(ids, pool), buffer)
    elif pool.is_cuda:
        module.scatter_blocks_cuda(_describe(module, pool), ids, buffer.data_ptr(), buffer.nbytes, *_queue(pool))
    else:
        module.scatter_blocks(_describe(module, pool), ids, buffer.data_ptr(), buffer.nbytes, torch.get_num_threads())


def copy_blocks(src_pool: Tensor, dst_pool: Tensor, src_ids: Ids, dst_ids: Ids) -> None:
    """Copies block src_ids[i] of one pool to block dst_ids[i] of another, or of the same one.

    ValueError if a destination comes twice, or if a block is both read and written.
    """
    src_list, dst_list = _as_list("src_ids", src_ids), _as_list("dst_ids", dst_ids)
    _check_pool("src_pool", src_pool)
    _check_pool("dst_pool", dst_pool)
    if len(src_list) != len(dst_list):
        raise ValueError(f"{len(src_list)} source ids, {len(dst_list)} destination ids: must be as many")
    if _kind(src_pool) != _kind(dst_pool):
        raise ValueError(f"src_pool is {_kind(src_pool)}, dst_pool {_kind(dst_pool)}: must differ in the number of blocks only")
    module, _ = native(src_pool.device.type)
    if module is None:
        _check_ids("source", src_list, src_pool)
        _check_ids("destination", dst_list, dst_pool)
        _check_written_once(dst_list)
        _check_disjoint(src_pool, src_list, dst_pool, dst_list)
        dst_pool.index_copy_(2, _index(dst_list, dst_pool), src_pool.index_select(2, _index(src_list, src_pool)))
        return
    copy_from(module, _describe(module, src_pool), dst_pool, src_list, dst_list)


def copy_from(module: ModuleType, src: object, dst_pool: Tensor, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    """`copy_blocks` from a `BlockPool` of `module` (`native`), which may be memory that torch does not know.

    The destination's device must be able to read it. ValueError as above, and if the geometries differ.
    """
    dst = _describe(module, dst_pool)
    if dst_pool.is_cuda:
        module.copy_blocks_cuda(src, src_ids, dst, dst_ids, *_queue(dst_pool))
    else:
        module.copy_blocks(src, src_ids, dst, dst_ids, torch.get_num_threads())


@functools.cache
def native(device_type: str) -> tuple[ModuleType | None, str]:
    """(`pearl._C` if it serves this kind of device, else None; why not)."""
    try:
        module = importlib.import_module("pearl._C")
    except ImportError as error:
        return None, f"pearl._C is not built or cannot be loaded: {error}"
    if device_type == "cpu":
        return module, ""
    if device_type == "cuda":
        return (module, "") if module.has_cuda else (None, "pearl._C was built without nvcc")
    return None, f"pearl._C does not serve {device_type} memory"


def _as_list(name: str, ids: Ids) -> list[int]:
    numbers = ids.tolist() if isinstance(ids, Tensor) else [*ids]
    if {*map(type, numbers)} <= {int}:
        return numbers
    for index, number in enumerate(numbers):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            raise ValueError(f"{name}[{index}]={number!r}: must be a whole number")
    return numbers


def _check_pool(name: str, pool: Tensor) -> None:
    """A pool must have one distance between rows (layer and key/value axes that fold into one) and one between blocks."""
    if pool.dim() < 4 or pool.shape[1] != 2 or 0 in pool.shape[:2] + pool.shape[3:]:
        raise ValueError(f"{name}.shape={tuple(pool.shape)}: must be [layer, 2, block, ...], none but block zero")
    size, step = pool.shape[3:].numel(), _block_step(pool)
    inner = pool.shape[2] == 0 or (pool[0, 0, 0].is_contiguous() and step >= size)
    outer = pool.shape[0] == 1 or pool.stride(0) == 2 * pool.stride(1)
    if not (inner and outer and pool.stride(1) >= (pool.shape[2] - 1) * step + size):
        raise ValueError(f"{name} has strides {pool.stride()} for shape {tuple(pool.shape)}: whole blocks must lie in rows")


def _block_step(pool: Tensor) -> int:
    """Elements from one block to the next."""
    return pool.stride(2) if pool.shape[2] > 1 else pool.shape[3:].numel()


def _check_buffer(name: str, buffer: Tensor, pool: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(buffer.shape) != shape or not buffer.is_contiguous():
        layout = "contiguous" if buffer.is_contiguous() else "strided"
        raise ValueError(f"{name} is {layout} with shape {tuple(buffer.shape)}: must be contiguous with shape {shape}")
    if buffer.dtype != pool.dtype or buffer.device != pool.device:
        raise ValueError(f"{name} is {buffer.dtype} on {buffer.device}: the pool is {pool.dtype} on {pool.device}")


def _check_ids(side: str, ids: list[int], pool: Tensor) -> None:
    for index, number in enumerate(ids):
        if not 0 <= number < pool.shape[2]:
            valid = f"0..{pool.shape[2] - 1}"
            raise ValueError(f"{side} ids[{index}]={number}: outside the pool of {pool.shape[2]} blocks, valid are {valid}")


def _check_written_once(ids: list[int]) -> None:
    seen: dict[int, int] = {}
    for index, number in enumerate(ids):
        if number in seen:
            raise ValueError(f"destination ids [{seen[number]}] and [{index}] are both block {number}: written once only")
        seen[number] = index


def _check_disjoint(src: Tensor, src_ids: list[int], dst: Tensor, dst_ids: list[int]) -> None:
    """No byte both read and written. Pieces have one size, so if any two meet, two neighbours in address order do."""
    if src.untyped_storage().data_ptr() != dst.untyped_storage().data_ptr():
        return
    starts = np.concatenate([_starts(src, src_ids), _starts(dst, dst_ids)])
    written = np.arange(len(starts)) >= len(starts) - len(dst_ids) * dst.shape[0] * 2
    order = np.argsort(starts, kind="stable")
    close = np.diff(starts[order]) < src.shape[3:].numel() * src.element_size()
    if np.any(close & (written[order][1:] != written[order][:-1])):
        raise ValueError(f"source blocks {src_ids} and destination blocks {dst_ids} overlap in memory")


def _starts(pool: Tensor, ids: list[int]) -> np.ndarray:
    rows = np.arange(pool.shape[0] * 2, dtype=np.int64)[:, None] * pool.stride(1)
    blocks = np.asarray(ids, dtype=np.int64)[None, :] * _block_step(pool)
    return (pool.data_ptr() + (rows + blocks) * pool.element_size()).reshape(-1)


def _kind(pool: Tensor) -> tuple[object, ...]:
    return (pool.shape[0], *pool.shape[3:], pool.dtype, pool.device)


def _buffer_shape(pool: Tensor, count: int) -> tuple[int, ...]:
    return (*pool.shape[:2], count, *pool.shape[3:])


def _index(ids: list[int], pool: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=pool.device)


def _describe(module: ModuleType, pool: Tensor) -> object:
    """The pool as pearl._C sees it; the bytes it may touch are those that torch's storage really has from there on."""
    size = pool.element_size()
    return module.BlockPool(
        address=pool.data_ptr(),
        bytes=pool.untyped_storage().nbytes() - pool.storage_offset() * size,
        rows=pool.shape[0] * 2,
        row_stride=pool.stride(1) * size,
        num_blocks=pool.shape[2],
        block_stride=_block_step(pool) * size,
        block_bytes=pool.shape[3:].numel() * size,
    )


def _queue(pool: Tensor) -> tuple[int, int]:
    return pool.device.index, torch.cuda.current_stream(pool.device).cuda_stream
