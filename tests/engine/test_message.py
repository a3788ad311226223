"""Messages: views of one memory, words of any length that fits, and any change on the way is seen."""

from __future__ import annotations

import pytest
import torch

from pearl.engine.weights.buckets import Bucket, plan_buckets
from pearl.engine.weights.message import HEADER_BYTES, REFUSAL_BYTES, Message

(BUCKET,) = plan_buckets({"a": (3, 5), "b": (40, 4)}, 2, 1024)
(TINY,) = plan_buckets({"a": (2,)}, 4, 64)


def filled() -> Message:
    message = Message(torch.zeros(4096, dtype=torch.uint8), BUCKET, torch.bfloat16)
    for _, rows, _ in message.rows:
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)))
    message.seal(7)
    return message


def test_all_are_views_of_the_same_memory() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    message = Message(memory, BUCKET, torch.bfloat16)
    assert message.whole.nbytes == Message.size(BUCKET) == HEADER_BYTES + max(BUCKET.nbytes, REFUSAL_BYTES)
    assert [(name, tuple(rows.shape), start) for name, rows, start in message.rows] == [("a", (3, 5), 0), ("b", (40, 4), 0)]
    for (_, rows, _), piece in zip(message.rows, BUCKET.pieces, strict=True):
        assert rows.data_ptr() == memory.data_ptr() + HEADER_BYTES + piece.offset
    message.rows[0][1].fill_(1.0)
    assert float(message.data.sum()) == 15.0


@pytest.mark.parametrize("position", [0, 7, 8, 15, 16, 23, 40, HEADER_BYTES, 200, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_any_changed_bit_is_seen(position: int, bit: int) -> None:
    message = filled()
    assert message.take(7)[0] is None
    message.whole[position] ^= 1 << bit
    with pytest.raises(ValueError, match="the checksum differs"):
        message.take(7)[0]


def test_another_version_is_named() -> None:
    with pytest.raises(ValueError, match="version 7 came"):
        filled().take(8)


@pytest.mark.parametrize(("bucket", "dtype"), [(BUCKET, torch.bfloat16), (TINY, torch.float32)])
@pytest.mark.parametrize("words", ["w", "ä gone", "x" * REFUSAL_BYTES])
def test_words_travel_in_a_bucket_of_any_size(bucket: Bucket, dtype: torch.dtype, words: str) -> None:
    message = Message(torch.zeros(4096, dtype=torch.uint8), bucket, dtype)
    message.refuse(3, words.encode())
    assert message.take(3)[0] == words
    message.seal(4)
    assert message.take(4)[0] is None
