"""How a model's tensors are cut into buckets for a transfer. Pure, torch-free.

Owns the cutting alone; it knows neither tensors nor groups. Whoever has the same shapes, element size and bucket size gets the
same buckets, so sender and receivers need not tell each other. Invariants: the pieces, in order, are every row of every tensor
once, in the order of the shapes; no bucket is larger than asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ALIGNMENT = 16
"""Every piece, and the end of every bucket, lies at a multiple of this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows `[start, start + shape[0])` of the tensor `hf_name`, at byte `offset` of its bucket."""

    hf_name: str
    start: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What travels in one message: `nbytes` bytes, gaps between the pieces included."""

    pieces: tuple[Piece, ...]
    nbytes: int


def plan_buckets(shapes: Mapping[str, tuple[int, ...]], itemsize: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Packs tensors in the given order into buckets of at most `bucket_bytes`.

    A tensor that fits a bucket is never cut; a larger one is cut into ranges of rows, as many as fit a bucket each. ValueError
    for a tensor with a row that alone is larger than a bucket, and for one without elements.
    """
    if itemsize < 1 or bucket_bytes < ALIGNMENT:
        raise ValueError(f"itemsize={itemsize}, bucket_bytes={bucket_bytes}: must be >= 1 and >= {ALIGNMENT}")
    bucket_bytes -= bucket_bytes % ALIGNMENT
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for name, shape in shapes.items():
        rows, row_bytes = _rows(name, shape, itemsize)
        most = bucket_bytes // row_bytes
        if not most:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a row of {name} has {row_bytes} bytes, and rows are not cut")
        for start in range(0, rows, most):
            count = min(most, rows - start)
            if pieces and filled + count * row_bytes > bucket_bytes:
                buckets.append(Bucket(pieces=tuple(pieces), nbytes=filled))
                pieces, filled = [], 0
            nbytes = count * row_bytes
            pieces.append(Piece(hf_name=name, start=start, shape=(count, *shape[1:]), offset=filled, nbytes=nbytes))
            filled += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if pieces:
        buckets.append(Bucket(pieces=tuple(pieces), nbytes=filled))
    return tuple(buckets)


def fingerprint(buckets: tuple[Bucket, ...]) -> int:
    """A number below 2**62 that differs between plans of other names, shapes, order or sizes."""
    text = "\n".join(f"{p.hf_name} {p.start} {p.shape} {p.offset} {p.nbytes}" for bucket in buckets for p in bucket.pieces)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _rows(name: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Rows of a tensor and bytes of one."""
    if not shape or not prod(shape):
        raise ValueError(f"{name}: shape {shape} has no rows or no elements to send")
    return shape[0], prod(shape[1:]) * itemsize
