"""A copy plan cut into pieces of bounded size, as far as their KV is written, and the parts of a pool that a piece is about.

Owns the cutting. It does not know how bytes travel. Invariants: the pieces of a plan are its parts, each byte once; sender
and receiver cut alike, for they have the plan and the layout's sizes in common; nothing comes out of an `Unfolding` that the
progress it was shown does not cover.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from pearl.engine.migration.blocks import copy_blocks
from pearl.engine.migration.planner import ITEM_BYTES, CopyPart, CopyPlan, Range
from pearl.engine.migration.transport import Progress
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


class Unfolding:
    """A plan whose KV is still being written: gives out its parts as they become readable.

    Its blocks end with that of token `num_tokens` - 1. A block is readable when it is full, the last one when all are.
    """

    def __init__(self, plan: CopyPlan, layout: KVLayout, num_tokens: int) -> None:
        self._parts, self._block_size, self._num_tokens = plan.parts, layout.block_size, num_tokens
        self._given = [[0] * (part.layers[1] - part.layers[0]) for part in plan.parts]
        """By part and layer: how many of the part's blocks have been given out."""

    @property
    def whole(self) -> bool:
        """Whether all of the plan has been given out."""
        return all(min(given) == len(part.source_blocks) for part, given in zip(self._parts, self._given, strict=True))

    def ready(self, progress: Progress) -> list[CopyPart]:
        """What has become readable since the last call, layers with equally much of it side by side."""
        pairs = zip(self._parts, self._given, strict=True)
        return [piece for part, given in pairs for piece in self._more(part, given, progress)]

    def _more(self, part: CopyPart, given: list[int], progress: Progress) -> Iterator[CopyPart]:
        def blocks(layer: int) -> tuple[int, int]:
            tokens = progress.next_tokens if layer < progress.layers else progress.written
            return given[layer - part.layers[0]], max(given[layer - part.layers[0]], self._readable(part, tokens))

        for (first, end), layers in groupby(range(*part.layers), key=blocks):
            if first < end:
                together = list(layers)
                for layer in together:
                    given[layer - part.layers[0]] = end
                yield dataclasses.replace(
                    part,
                    layers=(together[0], together[-1] + 1),
                    source_blocks=part.source_blocks[first:end],
                    destination_blocks=part.destination_blocks[first:end],
                )

    def _readable(self, part: CopyPart, tokens: int) -> int:
        count = len(part.source_blocks)
        if tokens >= self._num_tokens:
            return count
        before = -(-self._num_tokens // self._block_size) - count
        return max(0, tokens // self._block_size - before)


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
