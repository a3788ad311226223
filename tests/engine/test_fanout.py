"""Who takes a version from whom: trees of bounded degree that leave training nodes alone, whoever dies meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.weights.fanout import NO_SOURCE, FanoutPlan, Member, plan_fanout

TRAINER = Member(name="trainer", node="t", version=7, trains=True)


def joiners(count: int, **fields) -> list[Member]:
    return [Member(name=f"j{number}", node=f"n{number}", **fields) for number in range(count)]


def sources(plan: FanoutPlan) -> dict[str, str]:
    return {a.receiver: a.sources[0] for a in plan.assignments}


def test_one_receiver_asks_the_trainers_node_and_the_rest_ask_each_other() -> None:
    plan = plan_fanout([TRAINER, *joiners(8)])
    assert plan.version == 7 and not plan.waiting
    assert plan.children("trainer") == ("j0",)
    tree = {"j1": "j0", "j2": "j0", "j3": "j1", "j4": "j2", "j5": "j1", "j6": "j2", "j7": "j3"}
    assert sources(plan) == {"j0": "trainer"} | tree
    assert max(a.depth for a in plan.assignments) == 4
    assert all("trainer" in a.sources for a in plan.assignments)  # what is left if a parent dies


def test_the_trainers_node_is_asked_by_nobody_when_an_external_worker_has_the_version() -> None:
    peer = Member(name="peer", node="p", version=7)
    plan = plan_fanout([TRAINER, peer, *joiners(5)])
    assert plan.children("trainer") == () and len(plan.children("peer")) == 2


def test_workers_of_one_node_take_it_over_the_network_once() -> None:
    here = [Member(name=f"w{number}", node="n") for number in range(6)]
    plan = plan_fanout([TRAINER, *here])
    assert [a.receiver for a in plan.assignments if not a.local] == ["w0"]
    assert all(a.sources[0] == "w0" and a.local for a in plan.assignments if a.receiver != "w0")
    borrowed = Member(name="borrowed", node="t")
    assert plan_fanout([TRAINER, borrowed]).assignments[0].local  # its own node's snapshot costs no network


def test_a_version_goes_to_nobody_before_it_is_initialised_and_then_it_is_the_newest() -> None:
    lazy = Member(name="lazy", node="l", initialised=False)
    old = Member(name="old", node="o", version=6)
    plan = plan_fanout([TRAINER, old, lazy])
    assert sources(plan) == {"old": "trainer"} and plan.waiting == {"lazy": "is not initialised"}
    later = [Member(name="trainer", node="t", version=8, trains=True), Member(name="old", node="o", version=7)]
    plan = plan_fanout([*later, Member(name="lazy", node="l")])
    assert plan.version == 8 and set(sources(plan)) == {"old", "lazy"} and not plan.waiting


def test_links_that_are_fast_come_first() -> None:
    members = [Member(name=name, node=name, bandwidth=speed) for name, speed in (("slow", 1.0), ("fast", 10.0), ("mid", 5.0))]
    tree = sources(plan_fanout([TRAINER, *members]))
    assert tree == {"fast": "trainer", "mid": "fast", "slow": "fast"}


def test_a_death_moves_only_those_that_it_concerns() -> None:
    members = joiners(7)
    before = sources(plan_fanout([TRAINER, *members]))
    assert [child for child, parent in before.items() if parent == "j1"] == ["j3", "j5"]
    after = plan_fanout([TRAINER, *(m for m in members if m.name != "j1")], before)
    kept = {child: parent for child, parent in before.items() if child in ("j0", "j2", "j4", "j6")}
    assert kept.items() <= sources(after).items() and set(sources(after)) == {"j0", "j2", "j3", "j4", "j5", "j6"}
    assert after.children("trainer") == ("j0",) and all(len(after.children(m.name)) <= 2 for m in members)


def test_when_the_one_that_had_it_from_the_trainer_is_gone_the_trainers_node_is_asked_again() -> None:
    members = joiners(3)
    before = sources(plan_fanout([TRAINER, *members]))
    after = plan_fanout([TRAINER, *members[1:]], before)
    assert after.children("trainer") == ("j1",) and after.children("j1") == ("j2",)


def test_nobody_has_anything() -> None:
    plan = plan_fanout(joiners(2))
    assert plan.version == -1 and not plan.assignments and plan.waiting == {"j0": NO_SOURCE, "j1": NO_SOURCE}


def test_members_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="'trainer' comes twice"):
        plan_fanout([TRAINER, TRAINER])
    with pytest.raises(ValueError, match="j0: children=0, must be >= 1"):
        plan_fanout([TRAINER, *joiners(1, children=0)])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Member], dict[str, str]]:
    count = draw(st.integers(1, 12))
    fields = st.tuples(
        st.integers(0, 5), st.integers(-1, 3), st.booleans(), st.booleans(), st.integers(1, 3), st.sampled_from([1.0, 2.0])
    )
    members = []
    for number in range(count):
        node, version, trains, ready, children, speed = draw(fields)
        members.append(
            Member(
                name=f"m{number}",
                node=f"n{node}",
                version=version,
                trains=trains,
                initialised=ready,
                children=children,
                bandwidth=speed,
            )
        )
    names = st.sampled_from([f"m{number}" for number in range(count + 1)])
    return members, draw(st.dictionaries(names, names, max_size=6))


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_every_plan_is_a_forest_that_keeps_the_limits(case: tuple[list[Member], dict[str, str]]) -> None:
    members, under_way = case
    plan = plan_fanout(members, under_way)
    table, tree = {m.name: m for m in members}, sources(plan)
    newest = max(m.version for m in members)
    if newest < 0:
        assert not tree
        return
    wanting = {m.name for m in members if m.version < newest and m.initialised}
    assert set(tree) == wanting and len(plan.assignments) == len(wanting)
    depth = {a.receiver: a.depth for a in plan.assignments}
    for assignment in plan.assignments:
        parent = assignment.sources[0]
        assert depth[assignment.receiver] == depth.get(parent, 0) + 1
        assert parent in wanting or table[parent].version == newest
        assert all(table[spare].version == newest for spare in assignment.sources[1:])
        assert len(set(assignment.sources)) == len(assignment.sources)
    for name, member in table.items():
        remote = [child for child in plan.children(name) if table[child].node != member.node]
        begun = [child for child in remote if under_way.get(child) == name]
        assert len(remote) <= max(member.children, len(begun))
