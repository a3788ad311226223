"""Where what some members hold of a parameter and what others want of it is the same. Pure, torch-free.

Owns the geometry: regions of one kind of parameter (all layers' are alike) under two layouts, intersected. It does not know
who sends what. Invariant: the pieces of a wanted region are that region, each number of it once; all holders of a piece hold
all of it.

Regions are counted along the first two axes of the whole parameter; the others are never cut (a vector has one column).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from pearl.engine.comm.layout import Cut, Layout

R0, R1, C0, C1 = range(4)
"""Columns of an array of boxes: the first row, the one after the last, and the same of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The different regions that the members of one layout hold, and who holds which.

    An entry is a region of one place of the copy (all copies are alike): `box_of` and `place_of` it, and the `row` and the
    `column` of the member's own tensor at which it begins. Entries are in the order of (box, place).
    """

    boxes: np.ndarray
    """[boxes, 4], in order."""
    box_of: np.ndarray
    place_of: np.ndarray
    row: np.ndarray
    column: np.ndarray
    members: np.ndarray
    """Indices of the members, [copies, places]."""

    def entries(self, box: int) -> slice:
        """The entries of one box."""
        return slice(*np.searchsorted(self.box_of, [box, box + 1]))

    def holders(self, box: int) -> np.ndarray:
        """Indices of the members that hold a box, in the order of the layout."""
        return self.members[:, self.place_of[self.entries(box)]].reshape(-1)

    def holds(self, count: int) -> np.ndarray:
        """Which of `count` members hold which boxes: bool [boxes, members]."""
        mask = np.zeros((len(self.boxes), count), dtype=bool)
        for copy in self.members:
            mask[self.box_of, copy[self.place_of]] = True
        return mask

    def origin(self, box: int, members: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and column at which the box begins in the tensors of these `members`, given the `place` of each index."""
        entries = self.entries(box)
        found = entries.start + np.searchsorted(self.place_of[entries], place[members])
        return self.row[found], self.column[found]


def side_of(cut: Cut, layout: Layout, index: dict[int, int]) -> Side:
    """The regions of a parameter under a layout. `index`: number of a member -> its index."""
    grid = layout.grid(experts=cut.experts)
    number = np.arange(grid.fsdp)
    boxes, places, rows, columns = [], [], [], []
    for rank, (regions, height) in enumerate(zip(cut.regions, cut.heights, strict=True)):
        share = -(-height // grid.fsdp)  # as Grid.rows, for all at once
        low, high = np.minimum(number * share, height), np.minimum((number + 1) * share, height)
        for region in regions:
            left, right = (*region.whole, (0, 1))[1]
            begin, end = np.maximum(low, region.local[0][0]), np.minimum(high, region.local[0][1])
            some = begin < end
            shift = region.whole[0][0] - region.local[0][0]
            wide = np.full(grid.fsdp, left), np.full(grid.fsdp, right)
            boxes.append(np.stack([begin + shift, end + shift, *wide], axis=1)[some])
            places.append((number * grid.cut + rank)[some])
            rows.append((begin - low)[some])
            columns.append(np.full(int(some.sum()), (*region.local, (0, 1))[1][0]))
    distinct, box_of = np.unique(np.concatenate(boxes), axis=0, return_inverse=True)
    box_of, place_of = box_of.reshape(-1), np.concatenate(places)
    order = np.lexsort((place_of, box_of))
    members = np.array([index[member] for member in layout.members]).reshape(-1, grid.size)
    return Side(
        boxes=distinct,
        box_of=box_of[order],
        place_of=place_of[order],
        row=np.concatenate(rows)[order],
        column=np.concatenate(columns)[order],
        members=members,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """The pieces of one kind of parameter: piece i is `boxes[i]`, inside box `held[i]` of `source`, `wanted[i]` of `target`."""

    names: tuple[str, ...]
    """The parameters of this kind."""
    numbers: np.ndarray
    """Their places among all parameters."""
    inner: tuple[int, ...]
    """Sizes of the axes that follow the first two."""
    axes: int
    source: Side
    target: Side
    boxes: np.ndarray
    held: np.ndarray
    wanted: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Elements of each piece."""
        return areas(self.boxes) * prod(self.inner)


def overlap_of(cut: Cut, source: Side, target: Side, numbered: dict[str, int], most: int) -> Overlap:
    """The intersections. What more than one member holds is cut into pieces of at most `most` elements, or of one row, so that
    they can share the sending. `numbered`: the parameters of this kind, and their places among all."""
    inner = cut.shape[2:]
    sliced, held = _sliced(source, max(1, most // prod(inner)))
    here, there = _meeting(sliced, target.boxes)
    low = np.maximum(sliced[here][:, [R0, C0]], target.boxes[there][:, [R0, C0]])
    high = np.minimum(sliced[here][:, [R1, C1]], target.boxes[there][:, [R1, C1]])
    boxes = np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=1)
    covered = np.bincount(there, weights=areas(boxes), minlength=len(target.boxes))
    if not np.array_equal(covered, areas(target.boxes)):
        raise AssertionError(f"{next(iter(numbered))}: the pieces are not what is wanted, once")
    return Overlap(
        names=tuple(numbered),
        numbers=np.array(list(numbered.values())),
        inner=inner,
        axes=len(cut.shape),
        source=source,
        target=target,
        boxes=boxes,
        held=held[here],
        wanted=there,
    )


def areas(boxes: np.ndarray) -> np.ndarray:
    """Rows times columns."""
    return (boxes[:, R1] - boxes[:, R0]) * (boxes[:, C1] - boxes[:, C0])


def _sliced(source: Side, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The boxes, those of several holders in slices of rows; and the box that each comes from."""
    boxes = source.boxes
    several = np.bincount(source.box_of, minlength=len(boxes)) * len(source.members) > 1
    rows = boxes[:, R1] - boxes[:, R0]
    parts = np.where(several, np.minimum(rows, -(-areas(boxes) // most)), 1)
    held = np.repeat(np.arange(len(boxes)), parts)
    nth = np.arange(len(held)) - np.repeat(np.cumsum(parts) - parts, parts)
    sliced = boxes[held]
    first, height = sliced[:, R0].copy(), rows[held]
    sliced[:, R0] = first + nth * height // parts[held]
    sliced[:, R1] = first + (nth + 1) * height // parts[held]
    return sliced, held


def _meeting(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of boxes that have something in common, in the order of the first, then of the second."""
    # Boxes are in the order of their first rows, so those that begin before the other ends are a prefix.
    ends = np.searchsorted(second[:, R0], first[:, R1])
    reach = np.maximum.accumulate(second[:, R1])
    begins = np.minimum(np.searchsorted(reach, first[:, R0], side="right"), ends)
    counts = ends - begins
    here = np.repeat(np.arange(len(first)), counts)
    there = np.arange(len(here)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(begins, counts)
    a, b = first[here], second[there]
    meet = (a[:, R0] < b[:, R1]) & (b[:, R0] < a[:, R1]) & (a[:, C0] < b[:, C1]) & (b[:, C0] < a[:, C1])
    return here[meet], there[meet]
