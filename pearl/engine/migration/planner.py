"""Which KV blocks move where: the copies that bring one request's KV from one pool to another.

Pure: owns the comparison of two pools and the plan; it knows no bytes, no leases and no clock. Invariant: a plan names every
destination block at most once per layer and head, and never one that the receiver held already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pearl.kv_transfer import KVLayout

Range = tuple[int, int]
"""[first, end) of layers or heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Block source_blocks[i] goes to destination_blocks[i], in these layers; heads are numbered inside each pool."""

    layers: Range
    source_heads: Range
    destination_heads: Range
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Carried out in any order; `num_bytes` is what moves."""

    parts: tuple[CopyPart, ...]
    num_bytes: int


def check_layouts(source: KVLayout, destination: KVLayout, *, heads_may_differ: bool = False) -> None:
    """ValueError naming the first field in which two pools differ, with both values."""
    for field in KVLayout.__struct_fields__:
        ours, theirs = getattr(destination, field), getattr(source, field)
        if ours != theirs and not (heads_may_differ and field == "num_kv_heads"):
            sides = f"{field}={theirs!r} at the source, {ours!r} at the destination"
            raise ValueError(f"{sides}: KV moves between equal layouts only")


def plan_sources(sources: Sequence[Range], wanted: Range, *, turn: int = 0) -> tuple[int, ...]:
    """Which ranks of a source, by number, together have the heads `wanted`, each head from one of them.

    `sources` are the heads that each rank has. Of those that have the same, number `turn` is taken (modulo how many they are),
    so that readers spread over them. ValueError for a head that nobody has.
    """
    chosen = []
    head = wanted[0]
    while head < wanted[1]:
        holders = [number for number, (first, end) in enumerate(sources) if first <= head < end]
        if not holders:
            raise ValueError(f"kv head {head}: none of {len(sources)} ranks has it, they have {list(sources)}")
        chosen.append(holders[turn % len(holders)])
        head = sources[chosen[-1]][1]
    return tuple(chosen)


def plan_copy(
    source: KVLayout,
    source_blocks: Sequence[int],
    destination: KVLayout,
    destination_blocks: Sequence[int],
    *,
    first_token: int = 0,
    num_tokens: int,
    layers: Range | None = None,
    source_heads: Range | None = None,
    destination_heads: Range | None = None,
) -> CopyPlan:
    """Copies of tokens [first_token, num_tokens): the blocks lists are both sides' whole tables, `first_token` is at a block's
    beginning (what comes before is there already).

    `source_heads` and `destination_heads` say which heads of the whole model each pool holds, for ranks that hold different
    shares; what both hold is copied. `layers` restricts the plan, so that layers can go one by one. ValueError for layouts
    that do not fit each other, tables that are too short, or a first token inside a block.
    """
    shares = source_heads is not None and destination_heads is not None
    check_layouts(source, destination, heads_may_differ=shares)
    size = source.block_size
    first, end = first_token // size, -(-num_tokens // size)
    if first_token % size or not first_token >= 0:
        raise ValueError(f"first_token={first_token}: must be a multiple of block_size={size}")
    for side, blocks in (("source", source_blocks), ("destination", destination_blocks)):
        if len(blocks) < end:
            raise ValueError(f"num_tokens={num_tokens}: the {side} has {len(blocks)} blocks of {size} tokens, must have {end}")
    held = (0, source.num_kv_heads)
    ours, theirs = _common(source_heads or held, destination_heads or held)
    chosen = layers or (0, source.num_layers)
    if first >= end or ours[0] >= ours[1] or chosen[0] >= chosen[1]:
        return CopyPlan(parts=(), num_bytes=0)
    part = CopyPart(
        layers=chosen,
        source_heads=ours,
        destination_heads=theirs,
        source_blocks=tuple(source_blocks[first:end]),
        destination_blocks=tuple(destination_blocks[first:end]),
    )
    return CopyPlan(parts=(part,), num_bytes=_bytes(part, source))


def _common(source: Range, destination: Range) -> tuple[Range, Range]:
    """The heads that both hold, numbered inside each."""
    first, end = max(source[0], destination[0]), min(source[1], destination[1])
    return (first - source[0], end - source[0]), (first - destination[0], end - destination[0])


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _bytes(part: CopyPart, layout: KVLayout) -> int:
    heads, layers = part.source_heads[1] - part.source_heads[0], part.layers[1] - part.layers[0]
    per_block = 2 * heads * layout.block_size * layout.head_dim * ITEM_BYTES[layout.dtype]
    return layers * per_block * len(part.source_blocks)
