"""Which slices of weights move from whom to whom when a model goes from one layout to another. Pure, torch-free.

Owns the decision: who sends each piece to whoever wants it. It does not know memory, groups or time. Invariants: every number
that a member wants and does not hold comes to it once, nothing that it holds does; what several hold is sent by turns, so that
they send about as many bytes; the plan follows from its arguments alone, so all members make the same one without a word.

Layers are alike, so a plan is made per kind of parameter, and what one member has to do (`ReshardPlan.of`) is spelled out only
for who asks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pearl.engine.comm.layout import Cut, Layout, layout_cuts
from pearl.engine.models.config import DTYPE_BYTES, ModelConfig
from pearl.engine.models.params import Box
from pearl.engine.weights.buckets import ALIGNMENT
from pearl.engine.weights.overlap import C0, R0, R1, Overlap, overlap_of, side_of
from pearl.engine.weights.parcels import Move, Parcel, parcels_of

BUCKET_BYTES = 4 << 20
"""Small enough that what is under way stays in a processor's cache: filling, checking and sending then read memory once."""

NUMBER, KIND, PEER, ROWS, COLUMNS, SOURCE_ROW, SOURCE_COLUMN, TARGET_ROW, TARGET_COLUMN, FIRST_ROW, FIRST_COLUMN = range(11)
"""Columns of a table of moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """One member's part. `sends` and `receives` are in the order of the job (`Parcel.key`); `kept` never leaves the member."""

    member: int
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    kept: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReshardPlan:
    """A decision. `sent` and `received` are bytes of numbers per member, in the order of `members`."""

    config: ModelConfig
    source: Layout
    target: Layout
    dtype: str
    bucket_bytes: int
    members: tuple[int, ...]
    """All members of both layouts, in ascending order."""
    overlaps: tuple[Overlap, ...]
    quotas: tuple[dict[int, np.ndarray], ...]
    """For each kind: of pieces that several hold, how often each holder sends them."""
    sent: np.ndarray
    received: np.ndarray
    kept: np.ndarray
    """Bytes that members need not be sent, since they hold them."""

    @property
    def nbytes(self) -> int:
        """Bytes of numbers that leave a member."""
        return int(self.sent.sum())

    @property
    def fingerprint(self) -> int:
        """A number below 2**62 that differs between plans of other arguments."""
        arguments = (self.config, self.source, self.target, self.dtype, self.bucket_bytes)
        return int.from_bytes(hashlib.blake2b(repr(arguments).encode(), digest_size=8).digest(), "big") >> 2

    def of(self, member: int) -> MemberPlan:
        """What one member has to do. ValueError for a member of neither layout."""
        if member not in self.members:
            raise ValueError(f"member={member}: must be one of {self.members}")
        me = self.members.index(member)
        sending = [part for kind in range(len(self.overlaps)) for part in self._moves(kind, me, source=True)]
        receiving = [part for kind in range(len(self.overlaps)) for part in self._moves(kind, me, source=False)]
        sends = [parcel for peer, moves in self._links(sending) if peer != me for parcel in self._parcels(me, peer, moves)]
        received = {peer: [*self._parcels(peer, me, moves)] for peer, moves in self._links(receiving)}
        kept = received.pop(me, [])
        return MemberPlan(
            member=member,
            sends=tuple(sorted(sends, key=lambda parcel: parcel.key)),
            receives=tuple(sorted((p for parcels in received.values() for p in parcels), key=lambda parcel: parcel.key)),
            kept=tuple(kept),
        )

    def _moves(self, kind: int, me: int, *, source: bool) -> Iterator[np.ndarray]:
        """Tables of the moves that `me` sends (or keeps), or else receives."""
        overlap = self.overlaps[kind]
        side, box_of = (overlap.source, overlap.held) if source else (overlap.target, overlap.wanted)
        place = _places(side.members, len(self.members))
        if place[me] < 0:
            return
        mine = side.box_of[side.place_of == place[me]]
        places = [_places(s.members, len(self.members)) for s in (overlap.source, overlap.target)]
        for piece in np.flatnonzero(np.isin(box_of, mine)):
            senders, receivers = self._senders(kind, int(piece))
            instance, nth = np.nonzero(senders == me if source else np.broadcast_to(receivers == me, senders.shape))
            if len(instance):
                yield self._table(kind, int(piece), instance, senders[instance, nth], receivers[nth], places, source)

    def _senders(self, kind: int, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Who sends a piece of every parameter of its kind to whom: [parameters, receivers], and the receivers."""
        overlap = self.overlaps[kind]
        holders = overlap.source.holders(int(overlap.held[piece]))
        receivers = overlap.target.holders(int(overlap.wanted[piece]))
        senders = np.broadcast_to(receivers, (len(overlap.names), len(receivers))).copy()
        remote = ~np.isin(receivers, holders)
        if remote.any():
            quota = self.quotas[kind].get(piece)
            turns = holders[:1] if quota is None else holders[_by_turns(quota)]
            shape = (len(overlap.names), int(remote.sum()))
            senders[:, remote] = turns.reshape(shape) if quota is not None else np.broadcast_to(turns, shape)
        return senders, receivers

    def _table(
        self,
        kind: int,
        piece: int,
        instance: np.ndarray,
        senders: np.ndarray,
        receivers: np.ndarray,
        places: list[np.ndarray],
        source: bool,
    ) -> np.ndarray:
        """One line for each move of a piece."""
        overlap = self.overlaps[kind]
        box = overlap.boxes[piece]
        held, wanted = int(overlap.held[piece]), int(overlap.wanted[piece])
        table = np.empty((len(instance), 11), dtype=np.int64)
        table[:, NUMBER], table[:, KIND] = overlap.numbers[instance], kind
        table[:, PEER] = receivers if source else senders
        table[:, ROWS], table[:, COLUMNS] = box[R1] - box[R0], box[C0 + 1] - box[C0]
        rows, columns = overlap.source.origin(held, senders, places[0])
        table[:, SOURCE_ROW] = rows + (box[R0] - overlap.source.boxes[held, R0])
        table[:, SOURCE_COLUMN] = columns + (box[C0] - overlap.source.boxes[held, C0])
        rows, columns = overlap.target.origin(wanted, receivers, places[1])
        table[:, TARGET_ROW] = rows + (box[R0] - overlap.target.boxes[wanted, R0])
        table[:, TARGET_COLUMN] = columns + (box[C0] - overlap.target.boxes[wanted, C0])
        table[:, FIRST_ROW], table[:, FIRST_COLUMN] = box[R0], box[C0]
        return table

    def _links(self, tables: list[np.ndarray]) -> Iterator[tuple[int, list[Move]]]:
        """For each peer the moves between it and us, in the order of the parameters, rows and columns."""
        if not tables:
            return
        table = np.concatenate(tables)
        order = np.lexsort((table[:, FIRST_COLUMN], table[:, FIRST_ROW], table[:, NUMBER], table[:, PEER]))
        names = {int(n): name for o in self.overlaps for n, name in zip(o.numbers, o.names, strict=True)}
        for peer, lines in groupby(table[order].tolist(), key=lambda line: line[PEER]):
            yield peer, [_move(names[line[NUMBER]], self.overlaps[line[KIND]], line) for line in lines]

    def _parcels(self, sender: int, receiver: int, moves: list[Move]) -> Iterator[Parcel]:
        # Number by number the links take turns such that everybody sends to another one at a time.
        turn = ((receiver - sender) % len(self.members), sender)
        itemsize, numbers = DTYPE_BYTES[self.dtype], self.members
        yield from parcels_of(moves, numbers[sender], numbers[receiver], turn, itemsize, self.bucket_bytes)


@functools.lru_cache(maxsize=8)
def plan_reshard(
    config: ModelConfig, source: Layout, target: Layout, *, dtype: str = "bfloat16", bucket_bytes: int = BUCKET_BYTES
) -> ReshardPlan:
    """How a model goes from the members of one layout to those of another, in `dtype`, in messages of at most `bucket_bytes`.

    Members may be in both. The same object for the same arguments. ValueError names what cannot be cut, or is no such size.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    if type(bucket_bytes) is not int or bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: must be an integer >= {ALIGNMENT}")
    bucket_bytes -= bucket_bytes % ALIGNMENT
    itemsize = DTYPE_BYTES[dtype]
    members = tuple(sorted({*source.members, *target.members}))
    overlaps = _overlaps(config, source, target, members, bucket_bytes // itemsize)
    sent, received, kept = (np.zeros(len(members), dtype=np.int64) for _ in range(3))
    shared: list[tuple[int, int, int, int, np.ndarray]] = []
    for kind, overlap in enumerate(overlaps):
        shared += _count(kind, overlap, itemsize, sent, received, kept)
    return ReshardPlan(
        config=config,
        source=source,
        target=target,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        members=members,
        overlaps=overlaps,
        quotas=_shared_out(shared, sent, len(overlaps)),
        sent=sent,
        received=received,
        kept=kept,
    )


def _overlaps(config: ModelConfig, source: Layout, target: Layout, members: tuple[int, ...], most: int) -> tuple[Overlap, ...]:
    """One for each kind of parameter: those that are cut alike on either side."""
    index = {member: number for number, member in enumerate(members)}
    theirs = layout_cuts(config, target)
    kinds: dict[tuple[Cut, Cut], dict[str, int]] = {}
    for number, (name, cut) in enumerate(layout_cuts(config, source).items()):
        kinds.setdefault((cut, theirs[name]), {})[name] = number
    return tuple(
        overlap_of(cut, side_of(cut, source, index), side_of(other, target, index), names, most)
        for (cut, other), names in kinds.items()
    )


def _count(
    kind: int, overlap: Overlap, itemsize: int, sent: np.ndarray, received: np.ndarray, kept: np.ndarray
) -> list[tuple[int, int, int, int, np.ndarray]]:
    """Adds up what has no alternative: what members receive and keep, and send of what they alone hold.

    Returns the pieces that several hold: (bytes of one, kind, piece, how often it is sent, holders).
    """
    holds = overlap.source.holds(len(sent))[overlap.held]
    wants = overlap.target.holds(len(sent))[overlap.wanted]
    nbytes, times = overlap.sizes * itemsize, len(overlap.names)
    remote = wants & ~holds
    received += nbytes @ remote * times
    kept += nbytes @ (wants & holds) * times
    sendings = remote.sum(axis=1) * times
    alone = holds.sum(axis=1) == 1
    np.add.at(sent, holds[alone].argmax(axis=1), (nbytes * sendings)[alone])
    return [
        (int(nbytes[piece]), kind, int(piece), int(sendings[piece]), overlap.source.holders(int(overlap.held[piece])))
        for piece in np.flatnonzero(~alone & (sendings > 0))
    ]


def _shared_out(
    shared: list[tuple[int, int, int, int, np.ndarray]], sent: np.ndarray, kinds: int
) -> tuple[dict[int, np.ndarray], ...]:
    """Who sends the pieces that several hold how often: the largest first, each time to be sent by who has least to send."""
    quotas: tuple[dict[int, np.ndarray], ...] = tuple({} for _ in range(kinds))
    for nbytes, kind, piece, sendings, holders in sorted(shared, key=lambda item: (-item[0], item[1], item[2])):
        quota = _levelled(sent[holders], nbytes, sendings)
        sent[holders] += quota * nbytes
        quotas[kind][piece] = quota
    return quotas


def _levelled(loads: np.ndarray, unit: int, count: int) -> np.ndarray:
    """How many of `count` equal units each gets when one after the other goes to the least load (the first of equal ones)."""
    ordered = np.sort(loads)
    before = np.cumsum(ordered) - ordered
    # As water finds its level: those below it are the ones that get something.
    below = int(np.searchsorted(ordered * np.arange(len(loads)) - before, unit * count, side="left"))
    level = (unit * count + int(ordered[:below].sum())) // below
    quota = np.maximum(0, level - loads) // unit
    rest = count - int(quota.sum())
    quota[np.argsort(loads + quota * unit, kind="stable")[:rest]] += 1
    return quota


def _by_turns(quota: np.ndarray) -> np.ndarray:
    """Numbers of holders, each as often as its quota says, evenly mixed."""
    numbers = np.repeat(np.arange(len(quota)), quota)
    nth = np.arange(len(numbers)) - np.repeat(np.cumsum(quota) - quota, quota)
    return numbers[np.lexsort((numbers, (2 * nth + 1) / quota[numbers]))]


def _places(members: np.ndarray, count: int) -> np.ndarray:
    """Place in the copy of each of `count` members, -1 for those that hold nothing."""
    places = np.full(count, -1)
    places[members] = np.arange(members.shape[1])
    return places


def _move(name: str, overlap: Overlap, line: list[int]) -> Move:
    others = tuple((0, size) for size in overlap.inner)

    def box(row: int, column: int) -> Box:
        both = ((row, row + line[ROWS]), (column, column + line[COLUMNS]))
        return (*both[: overlap.axes], *others)

    return Move(name=name, source=box(line[SOURCE_ROW], line[SOURCE_COLUMN]), target=box(line[TARGET_ROW], line[TARGET_COLUMN]))
