"""Who takes a weight version from whom, when many want it and few have it. Pure, torch-free.

Owns the decision alone; it knows neither memory nor groups nor time. Invariants: sources and receivers form trees rooted at
those that have the version; nobody has more children at a time than it may; a receiver gets a source only once it is
initialised, so it never takes a version that is old by then; of receivers on one node one takes it over the network, the
others from that node's snapshot.

What costs nothing comes first: the snapshot of the same node, then external workers that have the version or will have it,
then nodes that train. A training node is thereby asked by one receiver, whatever the number of joiners, and again only when
all that had the version from it are gone. When somebody dies, plan again: what is under way between the living stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NO_SOURCE = "nobody has a version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A place for weights: one node's snapshot, or a worker that has none beside it.

    `version`: what it has, -1 for nothing. `bandwidth`: of its link, in any unit that is the same for all. `trains`: its node
    trains, and should be left alone. `initialised`: it could use a version now. `children`: the most receivers at a time.
    """

    name: str
    node: str
    version: int = -1
    trains: bool = False
    initialised: bool = True
    bandwidth: float = 1.0
    children: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`receiver` asks `sources` in this order; the first is its place in the tree, at `depth` (1: its source has it now)."""

    receiver: str
    sources: tuple[str, ...]
    depth: int
    local: bool
    """Whether the source is on the same node, so that nothing goes over the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutPlan:
    """A decision. `waiting`: who gets nothing yet, and why."""

    version: int
    assignments: tuple[Assignment, ...]
    waiting: dict[str, str]

    def children(self, name: str) -> tuple[str, ...]:
        """Those whose first source is `name`."""
        return tuple(a.receiver for a in self.assignments if a.sources[0] == name)


def plan_fanout(members: Iterable[Member], under_way: Mapping[str, str] | None = None, *, spares: int = 2) -> FanoutPlan:
    """Gives every initialised member that has not the newest version somebody to take it from.

    `members`: all that live. `under_way`: receiver -> source of transfers that have begun; those between living members go
    on. `spares`: how many further sources a receiver is given, of those that have the version now. ValueError for a name that
    comes twice and for `children` below 1.
    """
    table = _checked(members)
    version = max((member.version for member in table.values()), default=-1)
    if version < 0:
        return FanoutPlan(version=version, assignments=(), waiting=dict.fromkeys(table, NO_SOURCE))
    tree = _Tree(table.values(), version)
    waiting = {m.name: "is not initialised" for m in table.values() if m.version < version and not m.initialised}
    due = {m.name: m for m in table.values() if m.version < version and m.initialised}
    parents = {child: parent for child, parent in (under_way or {}).items() if child in due and parent in table}
    while begun := [child for child, parent in parents.items() if parent in tree.depth]:
        for child in begun:
            tree.add(due.pop(child), parents.pop(child))
    # Fast links first: they pass it on to the rest.
    for member in sorted(due.values(), key=lambda m: (m.trains, -m.bandwidth, m.name)):
        tree.add(member, tree.source_of(member))
    return FanoutPlan(version=version, assignments=tree.assignments(spares), waiting=waiting)


class _Tree:
    """Those that have the version or are to have it. `depth`: 0 for who has it now."""

    def __init__(self, members: Iterable[Member], version: int) -> None:
        self._members = {member.name: member for member in members}
        self._holders = [member for member in self._members.values() if member.version == version]
        self.depth = {member.name: 0 for member in self._holders}
        self._children = dict.fromkeys(self._members, 0)
        self._source: dict[str, str] = {}

    def add(self, member: Member, source: str) -> None:
        self._source[member.name] = source
        self.depth[member.name] = self.depth[source] + 1
        if not self._local(member, source):
            self._children[source] += 1

    def source_of(self, member: Member) -> str:
        """The best place for one more; a place is always found, since every member that is added brings new ones."""
        here = [name for name in self.depth if self._local(member, name)]
        if here:
            return min(here, key=lambda name: (self.depth[name], name))
        free = [name for name in self.depth if self._children[name] < self._members[name].children]
        return min(free, key=self._cost)

    def assignments(self, spares: int) -> tuple[Assignment, ...]:
        found = []
        for name, source in self._source.items():
            member = self._members[name]
            others = sorted((h.name for h in self._holders if h.name != source), key=self._cost)
            local = self._local(member, source)
            sources = (source, *others[:spares])
            found.append(Assignment(receiver=name, sources=sources, depth=self.depth[name], local=local))
        return tuple(sorted(found, key=lambda a: (a.depth, a.receiver)))

    def _cost(self, name: str) -> tuple[bool, int, int, float, str]:
        member = self._members[name]
        return member.trains, self.depth[name], self._children[name], -member.bandwidth, name

    def _local(self, member: Member, source: str) -> bool:
        return self._members[source].node == member.node


def _checked(members: Iterable[Member]) -> dict[str, Member]:
    table: dict[str, Member] = {}
    for member in members:
        if member.name in table:
            raise ValueError(f"members: {member.name!r} comes twice")
        if member.children < 1:
            raise ValueError(f"{member.name}: children={member.children}, must be >= 1")
        table[member.name] = member
    return table
