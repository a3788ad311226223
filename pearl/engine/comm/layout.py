"""Which member of a job holds which rows and columns of a model's parameters. Pure, torch-free.

Owns the arrangement of members and what follows from it; `models/params.py` says how tensor parallelism cuts a parameter, FSDP2
cuts what is left along dim 0. It does not know groups, memory or what moves where.
Invariants: the members of one copy of the model hold every number of every parameter; copies hold the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import WHOLE, Box, ParamSpec, Part, Range, Shard, param_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Members in the order [copy, fsdp, cut]: each parameter is cut `cut` ways, then the rows of what is left `fsdp` ways."""

    fsdp: int
    cut: int

    @property
    def size(self) -> int:
        """Members that hold one copy."""
        return self.fsdp * self.cut

    def place(self, position: int) -> tuple[int, int]:
        """(fsdp, cut) numbers of the member at this position."""
        return position // self.cut % self.fsdp, position % self.cut

    def rows(self, index: int, height: int) -> Range:
        """The rows of `height` that number `index` of `fsdp` holds: equal shares as FSDP2 makes them, the last ones smaller
        or empty (`torch.chunk`)."""
        share = -(-height // self.fsdp)
        return min(index * share, height), min((index + 1) * share, height)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`members` (numbers of ranks in the job) in the order [copy, fsdp, tp]; as many copies of the model as that makes.

    With `ep` the experts are dealt out over `ep` neighbours, whatever `tp` is: within a copy, whose other factor then cuts the
    experts' rows, or over several whole copies of all else (attention in parallel over data). None: as `tp` does.
    """

    members: tuple[int, ...]
    fsdp: int = 1
    tp: int = 1
    ep: int | None = None

    def __post_init__(self) -> None:
        for name in ("fsdp", "tp", "ep"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: must be an integer >= 1")
        count, unit = len(self.members), self.fsdp * self.tp
        if not count or len(set(self.members)) != count or any(type(m) is not int or m < 0 for m in self.members):
            raise ValueError(f"members={self.members}: must be different integers >= 0, at least one")
        if count % unit:
            raise ValueError(f"members: {count} of them, must be a multiple of fsdp={self.fsdp} x tp={self.tp}")
        if self.ep is not None and unit % self.ep and (self.ep % unit or count % self.ep):
            raise ValueError(
                f"ep={self.ep}: must divide fsdp={self.fsdp} x tp={self.tp}, or be a multiple that divides {count} members"
            )

    def grid(self, *, experts: bool = False) -> Grid:
        """How the members share the experts, or all else."""
        if experts and self.ep is not None:
            return Grid(fsdp=max(1, self.fsdp * self.tp // self.ep), cut=self.ep)
        return Grid(fsdp=self.fsdp, cut=self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What lies at `whole` of a whole parameter lies at `local` of a cut one. As many axes as the parameter has."""

    whole: Box
    local: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter of this whole `shape` is cut: `regions` and number of rows of each of the ranks that it is cut for.

    Regions of different ranks are the same or have nothing in common.
    """

    shape: tuple[int, ...]
    experts: bool
    regions: tuple[tuple[Region, ...], ...]
    heights: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def cuts(config: ModelConfig, tp: int, ep: int) -> dict[str, Cut]:
    """Parameter name -> its cut, in the order of `param_specs`: experts for `ep` ranks, all else for `tp`.

    ValueError names what cannot be cut for so many.
    """
    if config.experts is not None and config.experts.count < ep:
        raise ValueError(f"ep={ep}: must not exceed the number of experts, {config.experts.count}")
    tables = [param_specs(config, Shard(rank=rank, size=tp)) for rank in range(tp)]
    found = {}
    for index, spec in enumerate(param_specs(config)):
        if spec.stacked is not None:
            found[spec.name] = _experts_cut(spec, ep)
        else:
            found[spec.name] = _dense_cut(spec, [table[index] for table in tables])
    return found


def layout_cuts(config: ModelConfig, layout: Layout) -> dict[str, Cut]:
    """The cuts of every parameter under a layout, before FSDP cuts the rows of what each rank holds."""
    return cuts(config, layout.tp, layout.grid(experts=True).cut)


def held(config: ModelConfig, layout: Layout, member: int) -> tuple[ParamSpec, ...]:
    """The parameter table of one member: local shapes (perhaps without rows), and which region of which tensor lies where.

    ValueError for a member that is not in the layout.
    """
    if member not in layout.members:
        raise ValueError(f"member={member}: must be one of {layout.members}")
    position = layout.members.index(member)
    experts, dense = layout.grid(experts=True), layout.grid()
    table = param_specs(config, Shard(rank=dense.place(position)[1], size=dense.cut))
    whole = param_specs(config, WHOLE) if experts.cut != dense.cut else table
    specs = []
    for ours, full in zip(table, whole, strict=True):
        grid = dense if ours.stacked is None else experts
        index, cut = grid.place(position)
        if ours.stacked is not None and full is not ours:
            ours = _rows_of(full, Shard(rank=cut, size=grid.cut).share(full.shape[0]))
        specs.append(_rows_of(ours, grid.rows(index, ours.shape[0])))
    return tuple(specs)


def _rows_of(spec: ParamSpec, rows: Range) -> ParamSpec:
    """Some rows of a parameter as one of its own."""
    low, high = rows
    parts = [part for part in (_part_in(part, low, high) for part in spec.parts) if part is not None]
    stacked = spec.stacked and _part_in(spec.stacked, low, high)
    return dataclasses.replace(spec, shape=(high - low, *spec.shape[1:]), parts=tuple(parts), stacked=stacked)


def _part_in(part: Part, low: int, high: int) -> Part | None:
    """As much of a part as lies in rows `[low, high)` of its parameter, whose number 0 is then `low`."""
    first, last = part.target[0]
    start, stop = max(first, low), min(last, high)
    if start >= stop:
        return None
    source = part.source
    if len(part.target) == len(source):
        shift = source[0][0] - first
        source = ((start + shift, stop + shift), *source[1:])
    return Part(hf_name=part.hf_name, target=((start - low, stop - low), *part.target[1:]), source=source)


def _experts_cut(spec: ParamSpec, ep: int) -> Cut:
    shares = [Shard(rank=rank, size=ep).share(spec.shape[0]) for rank in range(ep)]
    others = tuple((0, size) for size in spec.shape[1:])
    regions = tuple((Region(whole=(share, *others), local=((0, share[1] - share[0]), *others)),) for share in shares)
    heights = tuple(high - low for low, high in shares)
    return Cut(shape=spec.shape, experts=True, regions=regions, heights=heights)


def _dense_cut(whole: ParamSpec, ranks: list[ParamSpec]) -> Cut:
    """From where its tensors lie in the whole parameter and in each rank's."""
    places = {part.hf_name: part for part in whole.parts}
    regions = [tuple(_region(places[part.hf_name], part) for part in spec.parts) for spec in ranks]
    if len(ranks) == 1:  # several ranks' regions stay apart, so that those that are replicated are the same on each
        regions = [_joined(regions[0])]
    return Cut(shape=whole.shape, experts=False, regions=tuple(regions), heights=tuple(spec.shape[0] for spec in ranks))


def _region(place: Part, part: Part) -> Region:
    shifts = [target[0] - source[0] for target, source in zip(place.target, place.source, strict=True)]
    whole = tuple((low + by, high + by) for (low, high), by in zip(part.source, shifts, strict=True))
    return Region(whole=whole, local=part.target)


def _joined(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Those that go on where the last one ends, in the whole parameter and here, become one."""
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else None
        if last is not None and _goes_on(last.whole, region.whole) and _goes_on(last.local, region.local):
            region = Region(whole=_from_to(last.whole, region.whole), local=_from_to(last.local, region.local))
            joined.pop()
        joined.append(region)
    return tuple(joined)


def _goes_on(first: Box, second: Box) -> bool:
    return first[0][1] == second[0][0] and first[1:] == second[1:]


def _from_to(first: Box, second: Box) -> Box:
    return ((first[0][0], second[0][1]), *first[1:])
