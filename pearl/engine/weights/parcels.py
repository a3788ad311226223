"""What one member sends another, cut into messages of bounded size in an order that all agree on. Pure, torch-free.

Owns the cutting and the order of messages. It does not know how it was decided who sends what. Invariants: sender and receiver
of a link make the same parcels from the same moves; parcels have one order over the whole job (`key`), so members that take
theirs in this order, few at a time, never wait for each other in a circle: the first parcel that is not through is the
first of both its sender and its receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from pearl.engine.models.params import Box
from pearl.engine.weights.buckets import ALIGNMENT, Bucket, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The region `source` of the sender's tensor of parameter `name` becomes the region `target` of the receiver's."""

    name: str
    source: Box
    target: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.target)

    def source_index(self) -> tuple[slice, ...]:
        return tuple(slice(*side) for side in self.source)

    def target_index(self) -> tuple[slice, ...]:
        return tuple(slice(*side) for side in self.target)

    def within(self, box: Box) -> Move:
        """The part of it that lies at `box`, counted from its own corner."""
        return Move(name=self.name, source=_inside(self.source, box), target=_inside(self.target, box))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One message: its moves, and where their numbers lie in it (`bucket`, without gaps). Members are numbers in the job."""

    sender: int
    receiver: int
    key: tuple[int, int, int]
    moves: tuple[Move, ...]
    bucket: Bucket

    @property
    def payload(self) -> int:
        """Bytes of numbers."""
        return self.bucket.pieces[-1].offset + self.bucket.pieces[-1].nbytes


def parcels_of(
    moves: Iterable[Move], sender: int, receiver: int, turn: tuple[int, int], itemsize: int, bucket_bytes: int
) -> Iterator[Parcel]:
    """The parcels of one link. `turn` tells links apart: parcels go in the order of (number on the link, turn)."""
    pieces: list[Piece] = []
    taken: list[Move] = []
    filled = number = 0
    for move in moves:
        for part, shape in _cut(move, bucket_bytes // itemsize):
            nbytes = prod(shape) * itemsize
            if filled + nbytes > bucket_bytes:
                yield _parcel(sender, receiver, (number, *turn), taken, pieces)
                pieces, taken, filled, number = [], [], 0, number + 1
            pieces.append(Piece(hf_name=part.name, start=part.target[0][0], shape=shape, offset=filled, nbytes=nbytes))
            taken.append(part)
            filled += nbytes
    if taken:
        yield _parcel(sender, receiver, (number, *turn), taken, pieces)


def _parcel(sender: int, receiver: int, key: tuple[int, int, int], moves: list[Move], pieces: list[Piece]) -> Parcel:
    filled = pieces[-1].offset + pieces[-1].nbytes
    bucket = Bucket(pieces=tuple(pieces), nbytes=-(-filled // ALIGNMENT) * ALIGNMENT)
    return Parcel(sender=sender, receiver=receiver, key=key, moves=tuple(moves), bucket=bucket)


def _cut(move: Move, most: int) -> Iterator[tuple[Move, tuple[int, ...]]]:
    """Parts of at most `most` elements each, and their shapes."""
    shape = move.shape
    if prod(shape) <= most:
        yield move, shape
    else:
        yield from ((part, part.shape) for part in (move.within(box) for box in _boxes(shape, most)))


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Ranges of rows, as many as fit; where not even one does, each row is cut likewise."""
    if prod(shape) <= most:
        yield tuple((0, size) for size in shape)
        return
    count, *others = shape
    step = most // prod(others)
    for start in range(0, count, max(1, step)):
        if step:
            yield ((start, min(start + step, count)), *((0, size) for size in others))
        else:
            yield from (((start, start + 1), *rest) for rest in _boxes(tuple(others), most))


def _inside(outer: Box, box: Box) -> Box:
    return tuple((first + low, first + high) for (first, _), (low, high) in zip(outer, box, strict=True))
