"""What of a plan may be read while its source is written: each byte once, none too early, all in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.migration.pieces import Unfolding, pieces
from pearl.engine.migration.planner import CopyPart, CopyPlan, plan_copy
from pearl.engine.migration.transport import ALL, Progress
from pearl.kv_transfer import KVLayout

LAYERS, SIZE = 3, 4
LAYOUT = KVLayout(dtype="float32", block_size=SIZE, num_layers=LAYERS, num_kv_heads=2, head_dim=8, order="plain")


def cells(parts: list[CopyPart]) -> list[tuple[int, int, int]]:
    """(layer, source block, destination block) of every copy."""
    return [
        (layer, *pair)
        for part in parts
        for layer in range(*part.layers)
        for pair in zip(part.source_blocks, part.destination_blocks, strict=True)
    ]


def plan_of(num_tokens: int, held: int = 0, layers: tuple[int, int] | None = None) -> CopyPlan:
    return plan_copy(
        LAYOUT, range(100, 140), LAYOUT, range(200, 240), first_token=held * SIZE, num_tokens=num_tokens, layers=layers
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 40),
    held=st.integers(0, 5),
    chunks=st.lists(st.integers(1, 15), max_size=12),
    looks=st.lists(st.integers(0, LAYERS), min_size=1, max_size=40),
)
def test_each_block_comes_once_and_only_when_it_is_written(num_tokens, held, chunks, looks) -> None:
    """A prompt is written in chunks, layer by layer; the reader looks now and then."""
    plan = plan_of(num_tokens, held)
    unfolding, came, written, looks = Unfolding(plan, LAYOUT, num_tokens), [], 0, iter(looks)
    for chunk in [*chunks, num_tokens]:
        after = min(num_tokens, written + chunk)
        for layers in range(LAYERS + 1):
            if next(looks, 0) % 2:
                continue
            ready = cells(unfolding.ready(Progress(written, after, layers)))
            for layer, source, _ in ready:
                there = after if layer < layers else written
                assert (source - 99) * SIZE <= there or there == num_tokens
            came += ready
        written = after
    came += cells(unfolding.ready(Progress(num_tokens, num_tokens, 0)))
    assert unfolding.whole
    assert sorted(came) == sorted(cells(list(plan.parts)))
    assert unfolding.ready(Progress(ALL, ALL, 0)) == []


def test_layers_that_have_equally_much_go_together() -> None:
    unfolding = Unfolding(plan_of(14), LAYOUT, 14)
    assert unfolding.ready(Progress(3, 3, 0)) == []
    [part] = unfolding.ready(Progress(9, 14, 0))
    assert (part.layers, part.source_blocks, part.destination_blocks) == ((0, 3), (100, 101), (200, 201))
    first = unfolding.ready(Progress(9, 13, 2))
    assert [(part.layers, part.source_blocks) for part in first] == [((0, 2), (102,))]
    assert not unfolding.whole
    last = unfolding.ready(Progress(14, 14, 0))
    assert [(part.layers, part.source_blocks) for part in last] == [((0, 2), (103,)), ((2, 3), (102, 103))]
    assert unfolding.whole


def test_progress_that_seems_to_fall_back_takes_nothing_back() -> None:
    """Between two steps the word of the layers is another step's already: what was there is there."""
    unfolding = Unfolding(plan_of(8), LAYOUT, 8)
    assert len(cells(unfolding.ready(Progress(4, 8, 2)))) == 3 + 2
    assert unfolding.ready(Progress(4, 4, 0)) == []
    assert cells(unfolding.ready(Progress(8, 8, 0))) == [(2, 101, 201)]


def test_some_layers_and_nothing_at_all() -> None:
    assert Unfolding(CopyPlan(parts=(), num_bytes=0), LAYOUT, 9).whole
    unfolding = Unfolding(plan_of(8, layers=(1, 2)), LAYOUT, 8)
    assert cells(unfolding.ready(Progress(0, 8, 2))) == [(1, 100, 200), (1, 101, 201)] and unfolding.whole


def test_what_is_ready_is_cut_into_pieces_of_bounded_size() -> None:
    block = 2 * 2 * SIZE * 8 * 4
    ready = Unfolding(plan_of(40), LAYOUT, 40).ready(Progress(ALL, ALL, 0))
    cut = list(pieces(CopyPlan(parts=tuple(ready), num_bytes=0), LAYOUT, 3 * block))
    assert sorted(cells(cut)) == sorted(cells(ready))
    assert all(len(part.source_blocks) * (part.layers[1] - part.layers[0]) <= 3 for part in cut)
