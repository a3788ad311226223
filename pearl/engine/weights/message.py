"""The message that a bucket travels in: what it says of itself, and how its receiver knows that nothing changed on the way.

Owns the layout below. It does not know groups or the order of messages. Invariant: every message has room for a refusal, so a
sender can always say why no weights come.

    header    int64: the checksum of all that follows, the version, the length of a refusal (0: there is none)
    data      the bucket's tensors, or a refusal in words
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pearl.engine.weights import sealing
from pearl.engine.weights.buckets import Bucket

HEADER_BYTES = 64
REFUSAL_BYTES = 384
"""How much of a refusal travels."""


class Message:
    """The message of `bucket` at the beginning of `memory` (uint8); its numbers are of `dtype`.

    One is made for every message that passes, so views are made only when somebody looks at them.
    """

    def __init__(self, memory: Tensor, bucket: Bucket, dtype: torch.dtype) -> None:
        self.whole = memory[: Message.size(bucket)]
        self.bucket, self.dtype = bucket, dtype

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Bytes of a bucket's message."""
        return HEADER_BYTES + max(bucket.nbytes, REFUSAL_BYTES)

    @functools.cached_property
    def words(self) -> Tensor:
        """All of it, int64."""
        return self.whole.view(torch.int64)

    @functools.cached_property
    def data(self) -> Tensor:
        """All that follows the header."""
        return self.whole[HEADER_BYTES:].view(self.dtype)

    @functools.cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """The bucket's tensors."""
        data = self.whole[HEADER_BYTES:]
        return tuple(
            data[piece.offset : piece.offset + piece.nbytes].view(self.dtype).view(piece.shape) for piece in self.bucket.pieces
        )

    @functools.cached_property
    def rows(self) -> tuple[tuple[str, Tensor, int], ...]:
        """The same, as (Hugging Face name, rows, number of the first)."""
        return tuple((piece.hf_name, part, piece.start) for piece, part in zip(self.bucket.pieces, self.parts, strict=True))

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte that each tensor begins at."""
        return tuple(HEADER_BYTES + piece.offset for piece in self.bucket.pieces)

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Bytes (the first, that after the last) that no tensor has."""
        ends = (HEADER_BYTES, *(HEADER_BYTES + piece.offset + piece.nbytes for piece in self.bucket.pieces))
        return tuple(gap for gap in zip(ends, (*self.offsets, self.whole.nbytes), strict=True) if gap[0] < gap[1])

    def put(self, sources: Sequence[Tensor], first: int = 0) -> tuple[int | None, bool]:
        """Fills the rows from number `first` on with these tensors, converted: what they add to `seal`'s `total` (None: that
        is not known), and whether all of them are finite now."""
        return sealing.put(self, sources, first)

    def seal(self, version: int, total: int | None = None) -> None:
        """Writes the header. `total`: the sum of what `put` gave for all rows."""
        sealing.seal(self, version, total)

    def refuse(self, version: int, words: bytes) -> None:
        """Seals the message with a refusal (at most REFUSAL_BYTES are kept) in the place of its data."""
        words = words[:REFUSAL_BYTES]
        self.whole[HEADER_BYTES:][: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        self.words[1], self.words[2] = version, len(words)
        self.words[0] = self.words[1:].sum()

    def take(self, version: int, targets: Sequence[Tensor] = ()) -> tuple[str | None, bool]:
        """Why the sender has given up, None if it has not; and whether all numbers are finite.

        The rows are copied to `targets`, if there are any, unless it has given up. ValueError for a changed byte or another
        version; then what was copied is void.
        """
        verdict = sealing.take(self, targets)
        if not verdict.intact:
            raise ValueError("the checksum differs")
        if verdict.version != version:
            raise ValueError(f"version {verdict.version} came")
        if not verdict.refusal_bytes:
            return None, verdict.finite
        return bytes(self.whole[HEADER_BYTES:][: verdict.refusal_bytes].tolist()).decode(errors="replace"), True

    def not_finite(self) -> str | None:
        """The first tensor with a value that is not finite, in words."""
        return not_finite((name, part) for name, part, _ in self.rows)


def not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first of these tensors that has a value that is not finite, in words; None if there is none."""
    for name, tensor in named:
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            return f"{name}: {count} of {tensor.numel()} values are not finite in {tensor.dtype}"
    return None
