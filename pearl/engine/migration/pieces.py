"""A copy plan cut into pieces of bounded size, and the parts of a pool that a piece is about.

Owns the cutting. It does not know how bytes travel. Invariants: the pieces of a plan are its parts, each byte once; sender
and receiver cut alike, for they have the plan and the layout's sizes in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from pearl.engine.migration.blocks import copy_blocks
from pearl.engine.migration.planner import ITEM_BYTES, CopyPart, CopyPlan, Range
from pearl.kv_transfer import KVLayout


def part_bytes(part: CopyPart, layout: KVLayout) -> int:
    """What a part moves."""
    return (part.layers[1] - part.layers[0]) * len(part.source_blocks) * _block_bytes(part, layout)


def pieces(plan: CopyPlan, layout: KVLayout, most_bytes: int) -> Iterator[CopyPart]:
    """The plan in pieces of at most `most_bytes`, or of one block in one layer where that is more."""
    for part in plan.parts:
        block_bytes = _block_bytes(part, layout)
        blocks = max(1, min(len(part.source_blocks), most_bytes // block_bytes))
        total, most = part.layers[1] - part.layers[0], max(1, most_bytes // (block_bytes * blocks))
        layers = -(-total // -(-total // most))  # as even as can be: a small rest is slow for its size
        for layer in range(*part.layers, layers):
            for first in range(0, len(part.source_blocks), blocks):
                yield dataclasses.replace(
                    part,
                    layers=(layer, min(layer + layers, part.layers[1])),
                    source_blocks=part.source_blocks[first : first + blocks],
                    destination_blocks=part.destination_blocks[first : first + blocks],
                )


def view(pool: Tensor, layers: Range, heads: Range) -> Tensor:
    """Some heads of every block in some layers, [layer, 2, block, kv_head, bytes of one head in the pool's dtype]."""
    return pool.flatten(4)[slice(*layers), :, :, slice(*heads)]


def copy_part(source: Tensor, destination: Tensor, part: CopyPart) -> None:
    """Carries out one part of a plan between two pools that this process can reach."""
    copy_blocks(
        view(source, part.layers, part.source_heads),
        view(destination, part.layers, part.destination_heads),
        part.source_blocks,
        part.destination_blocks,
    )


def _block_bytes(part: CopyPart, layout: KVLayout) -> int:
    """Of the keys and values of one block in one layer."""
    heads = part.source_heads[1] - part.source_heads[0]
    return 2 * heads * layout.block_size * layout.head_dim * ITEM_BYTES[layout.dtype]
