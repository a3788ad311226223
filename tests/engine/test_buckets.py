"""Cutting tensors into buckets: everything once, in order, within the size asked for."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.weights.buckets import ALIGNMENT, fingerprint, plan_buckets

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, itemsize=st.sampled_from([1, 2, 4, 8]), bucket_bytes=st.integers(700, 2000))
def test_every_row_travels_once_in_order_within_the_size(shapes: list[tuple], itemsize: int, bucket_bytes: int) -> None:
    named = {f"t{index}": shape for index, shape in enumerate(shapes)}
    buckets = plan_buckets(named, itemsize, bucket_bytes)
    rows: dict[str, int] = {}
    for bucket in buckets:
        end = 0
        assert 0 < bucket.nbytes <= bucket_bytes and bucket.nbytes % ALIGNMENT == 0
        for piece in bucket.pieces:
            assert piece.offset == end and piece.offset % ALIGNMENT == 0
            assert piece.nbytes == prod(piece.shape) * itemsize
            assert piece.shape[1:] == named[piece.hf_name][1:]
            assert piece.start == rows.get(piece.hf_name, 0)
            if prod(named[piece.hf_name]) * itemsize <= bucket_bytes - bucket_bytes % ALIGNMENT:
                assert piece.shape == named[piece.hf_name]
            rows[piece.hf_name] = piece.start + piece.shape[0]
            end = -(-(piece.offset + piece.nbytes) // ALIGNMENT) * ALIGNMENT
        assert end == bucket.nbytes
    assert list(rows.items()) == [(name, shape[0]) for name, shape in named.items()]


def test_a_large_tensor_is_cut_by_rows_and_small_ones_share() -> None:
    buckets = plan_buckets({"a": (2, 4), "big": (10, 8), "b": (4,), "c": (4,)}, 4, 128)
    assert [[(p.hf_name, p.start, p.shape, p.offset) for p in bucket.pieces] for bucket in buckets] == [
        [("a", 0, (2, 4), 0)],
        [("big", 0, (4, 8), 0)],
        [("big", 4, (4, 8), 0)],
        [("big", 8, (2, 8), 0), ("b", 0, (4,), 64), ("c", 0, (4,), 80)],
    ]
    assert [bucket.nbytes for bucket in buckets] == [32, 128, 128, 96]


def test_the_fingerprint_is_of_names_shapes_order_and_sizes() -> None:
    one = {"a": (2, 4), "b": (4, 2)}
    plans = [({"a": (2, 4), "b": (4, 2)}, 4), ({"b": (4, 2), "a": (2, 4)}, 4), ({"a": (2, 4), "c": (4, 2)}, 4)]
    plans += [({"a": (4, 2), "b": (4, 2)}, 4), (one, 2)]
    prints = [fingerprint(plan_buckets(shapes, itemsize, 64)) for shapes, itemsize in plans]
    assert prints[0] == fingerprint(plan_buckets(one, 4, 64))
    assert len(set(prints)) == len(prints) and all(0 <= number < 2**62 for number in prints)


@pytest.mark.parametrize(
    ("shapes", "itemsize", "bucket_bytes", "message"),
    [
        ({"a": (3, 100)}, 4, 320, r"bucket_bytes=320: a row of a has 400 bytes"),
        ({"a": (3, 0)}, 4, 320, r"a: shape \(3, 0\)"),
        ({"a": ()}, 4, 320, r"a: shape \(\)"),
        ({"a": (3,)}, 4, 8, r"bucket_bytes=8"),
    ],
)
def test_what_cannot_be_cut_is_named(shapes: dict, itemsize: int, bucket_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets(shapes, itemsize, bucket_bytes)
