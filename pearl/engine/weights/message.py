"""The message that a bucket travels in: what it says of itself, and how its receiver knows that nothing changed on the way.

Owns the layout below. It does not know groups or the order of messages. Invariant: every message has room for a refusal, so a
sender can always say why no weights come.

    header    int64: the checksum of all that follows, the version, the length of a refusal (0: there is none)
    data      the bucket's tensors, or a refusal in words
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.engine.weights.buckets import Bucket

HEADER_BYTES = 64
REFUSAL_BYTES = 384
"""How much of a refusal travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Views of the memory that one bucket travels in: `whole` (uint8), its `words` (int64), its `data` (the model's dtype)."""

    whole: Tensor
    words: Tensor
    data: Tensor
    rows: tuple[tuple[str, Tensor, int], ...]

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Bytes of a bucket's message."""
        return HEADER_BYTES + max(bucket.nbytes, REFUSAL_BYTES)

    @staticmethod
    def over(memory: Tensor, bucket: Bucket, dtype: torch.dtype) -> Message:
        """The message of `bucket` at the beginning of `memory` (uint8)."""
        whole = memory[: Message.size(bucket)]
        data = whole[HEADER_BYTES:]
        rows = [data[piece.offset : piece.offset + piece.nbytes].view(dtype).view(piece.shape) for piece in bucket.pieces]
        named = tuple((piece.hf_name, part, piece.start) for piece, part in zip(bucket.pieces, rows, strict=True))
        return Message(whole=whole, words=whole.view(torch.int64), data=data.view(dtype), rows=named)

    def checksum(self) -> Tensor:
        """The sum of all 64-bit words but the first, modulo 2**64: any one changed word changes it."""
        return self.words[1:].sum()

    def seal(self, version: int, refusal: bytes = b"") -> None:
        """Writes the header, and a refusal over the data."""
        if refusal:
            self.whole[HEADER_BYTES:][: len(refusal)] = torch.frombuffer(bytearray(refusal), dtype=torch.uint8)
        self.words[1], self.words[2] = version, len(refusal)
        self.words[0] = self.checksum()

    def refusal(self, version: int) -> str | None:
        """Why the sender has given up, None if it has not. ValueError for a changed byte or another version."""
        checksum, sent, length = self.words[:3].tolist()
        if int(self.checksum()) != checksum:
            raise ValueError("the checksum differs")
        if sent != version:
            raise ValueError(f"version {sent} came")
        return bytes(self.whole[HEADER_BYTES:][:length].tolist()).decode(errors="replace") if length else None
