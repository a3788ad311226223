"""Plans of copies between pools: each token once, and nothing that the receiver holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.migration.planner import check_layouts, plan_copy, plan_sources
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(heads=st.integers(1, 8), source=st.integers(1, 8), destination=st.integers(1, 8), turn=st.integers(0, 9))
def test_every_head_comes_from_one_rank_that_has_it(heads, source, destination, turn):
    """Heads are cut evenly, or had by several ranks where there are fewer of them."""

    def held(size):
        shares = [(rank * heads // size, (rank + 1) * heads // size) for rank in range(size)]
        return [(first, max(end, first + 1)) for first, end in shares]

    sources = held(source)
    for wanted in held(destination):
        taken = [
            head
            for number in plan_sources(sources, wanted, turn=turn)
            for head in range(max(sources[number][0], wanted[0]), min(sources[number][1], wanted[1]))
        ]
        assert taken == list(range(*wanted))


def test_ranks_that_have_the_same_heads_are_taken_in_turn_and_missing_ones_are_named():
    same = [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [plan_sources(same, (0, 2), turn=turn) for turn in range(3)] == [(0, 2), (1, 3), (0, 2)]
    assert plan_sources(same, (1, 1)) == ()
    with pytest.raises(ValueError, match="kv head 2: none of 4 ranks"):
        plan_sources(same, (1, 3))


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
