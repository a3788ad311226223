"""Plans of copies between pools: each token once, and nothing that the receiver holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.migration.planner import check_layouts, plan_copy
from pearl.kv_transfer import KVLayout

LAYOUT = KVLayout(dtype="float32", block_size=4, num_layers=3, num_kv_heads=4, head_dim=8, order="plain")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(0, 40),
    held=st.integers(0, 11),
    layers=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    source_heads=st.none() | st.tuples(st.integers(0, 8), st.integers(1, 8)),
    destination_heads=st.none() | st.tuples(st.integers(0, 8), st.integers(1, 8)),
)
def test_each_block_layer_and_head_that_is_lacking_is_copied_once(num_tokens, held, layers, source_heads, destination_heads):
    shares = source_heads is not None and destination_heads is not None
    ours, theirs = ((first, first + count) for first, count in (source_heads or (0, 4), destination_heads or (0, 4)))
    source = msgspec.structs.replace(LAYOUT, num_kv_heads=ours[1] - ours[0] if shares else 4)
    destination = msgspec.structs.replace(LAYOUT, num_kv_heads=theirs[1] - theirs[0] if shares else 4)
    from_blocks, to_blocks = list(range(100, 111)), list(range(200, 211))
    plan = plan_copy(
        source, from_blocks, destination, to_blocks,
        first_token=held * 4, num_tokens=num_tokens, layers=layers,
        source_heads=ours if shares else None, destination_heads=theirs if shares else None,
    )  # fmt: skip
    if not shares:
        ours = theirs = (0, 4)
    copied = []
    for part in plan.parts:
        copied += [
            (layer, a, b, ours[0] + c, theirs[0] + d)
            for layer in range(*part.layers)
            for a, b in zip(part.source_blocks, part.destination_blocks, strict=True)
            for c, d in zip(range(*part.source_heads), range(*part.destination_heads), strict=True)
        ]
    common = range(max(ours[0], theirs[0]), min(ours[1], theirs[1]))
    wanted = [
        (layer, 100 + block, 200 + block, head, head)
        for layer in range(*(layers or (0, 3)))
        for block in range(held, -(-num_tokens // 4))
        for head in common
    ]
    assert sorted(copied) == sorted(wanted)
    assert plan.num_bytes == len(wanted) * 2 * 4 * 8 * 4


@pytest.mark.parametrize("field", KVLayout.__struct_fields__)
def test_pools_that_differ_are_refused_by_the_first_field(field):
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: value + "x" if isinstance(value, str) else value * 2})
    with pytest.raises(ValueError, match=f"^{field}={getattr(other, field)!r} at the source, {value!r} at the destination"):
        check_layouts(other, LAYOUT)
    if field == "num_kv_heads":
        check_layouts(other, LAYOUT, heads_may_differ=True)


def test_what_does_not_add_up_is_refused():
    for fields, message in (
        ({"first_token": 2, "num_tokens": 8}, "first_token=2.*block_size=4"),
        ({"first_token": -4, "num_tokens": 8}, "first_token=-4"),
        ({"num_tokens": 9}, "num_tokens=9: the source has 2 blocks of 4 tokens, must have 3"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_copy(LAYOUT, [1, 2], LAYOUT, [3, 4, 5], **fields)
    with pytest.raises(ValueError, match="the destination has 1 blocks"):
        plan_copy(LAYOUT, [1, 2], LAYOUT, [3], num_tokens=8)
