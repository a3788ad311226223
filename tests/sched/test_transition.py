"""Plans are minimal: against brute force over who leaves and which role each survivor and joiner gets."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_cases import joined

from pearl.sched.events import WorkerReport, WorkerRole, Zone
from pearl.sched.shape import Shape
from pearl.sched.state import ClusterState, Worker
from pearl.sched.transition import SERVING_ROLES, change_counts, plan_transition

MIXED, PREFILL, DECODE = WorkerRole.MIXED, WorkerRole.PREFILL, WorkerRole.DECODE


def rows(*roles: WorkerRole, kv: tuple[int, ...] = (), first: int = 0, **options) -> list[Worker]:
    state = ClusterState()
    for number, role in enumerate(roles, first):
        state.apply(joined(f"w{number}", number, role=role, **options), 0.0)
        if kv:
            state.apply(WorkerReport(worker=f"w{number}", epoch=0, kv_used=kv[number - first]), 0.0)
    return list(state.workers.values())


def after(serving: list[Worker], plan) -> Shape:
    roles = {worker.name: worker.next_role for worker in serving if worker.name not in plan.leave} | plan.roles
    counts = {role: sum(one is role for one in roles.values()) for role in SERVING_ROLES}
    return Shape(mixed=counts[MIXED], prefill=counts[PREFILL], decode=counts[DECODE])


def least_changes(serving: list[Worker], joiners: int, target: Shape) -> int:
    """D_role by trying everything."""
    least, leavers = 99, len(serving) + joiners - target.total
    for left in combinations(range(len(serving)), leavers):
        staying = [worker.next_role for number, worker in enumerate(serving) if number not in left]
        for roles in product(SERVING_ROLES, repeat=len(staying)):
            room = [
                target.prefill - roles.count(PREFILL),
                target.decode - roles.count(DECODE),
                target.mixed - roles.count(MIXED),
            ]
            if min(room) >= 0:
                least = min(least, sum(old is not new for old, new in zip(staying, roles, strict=True)))
    return least


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_plan_has_fewer_changes(data) -> None:
    serving = rows(*data.draw(st.lists(st.sampled_from(SERVING_ROLES), max_size=5)))
    joiners = rows(*[MIXED] * data.draw(st.integers(0, 2)), first=10, active=False)
    total = data.draw(st.integers(len(joiners), len(serving) + len(joiners)))
    prefill = data.draw(st.integers(0, total))
    decode = data.draw(st.integers(0, total - prefill))
    target = Shape(mixed=total - prefill - decode, prefill=prefill, decode=decode)
    plan = plan_transition(serving, target, joiners=joiners)
    assert after(serving, plan) == target
    assert set(plan.join) == {worker.name for worker in joiners} <= set(plan.roles)
    assert plan.workers_changed == len(joiners) + len(serving) + len(joiners) - total
    assert plan.roles_changed == least_changes(serving, len(joiners), target)
    survivors = {worker.name: worker.next_role for worker in serving}
    assert all(survivors[name] is not role for name, role in plan.roles.items() if name in survivors)


def test_the_idle_flip_first_and_to_prefill() -> None:
    serving = rows(DECODE, DECODE, DECODE, DECODE, kv=(500, 20, 0, 300))
    plan = plan_transition(serving, Shape(mixed=1, prefill=1, decode=2))
    assert plan.roles == {"w2": PREFILL, "w1": MIXED} and plan.moved_kv_tokens == 0
    plan = plan_transition(serving, Shape(prefill=2, decode=2))
    assert plan.roles == {"w2": PREFILL, "w1": PREFILL} and plan.moved_kv_tokens == 20


def test_those_that_will_go_again_become_prefill_workers() -> None:
    serving = rows(MIXED, MIXED)
    trainers = rows(MIXED, first=5, zone=Zone.OVERLAP, active=False)
    external = rows(MIXED, first=3, external=True, active=False)
    plan = plan_transition(serving, Shape(mixed=2, prefill=1, decode=1), joiners=[*external, *trainers])
    assert plan.roles == {"w5": PREFILL, "w3": DECODE} and plan.borrow == ("w5",) and plan.roles_changed == 0


def test_leavers_come_from_roles_of_which_there_are_too_many() -> None:
    serving = rows(PREFILL, PREFILL, DECODE, DECODE, kv=(0, 0, 900, 100))
    plan = plan_transition(serving, Shape(prefill=2, decode=1))
    assert plan.leave == ("w3",) and not plan.roles and plan.moved_kv_tokens == 100
    plan = plan_transition(serving, Shape(prefill=1, decode=2), must_leave=["w2"])
    assert plan.leave == ("w2",) and plan.roles_changed == 1 and plan.moved_kv_tokens == 900
    with pytest.raises(ValueError, match="needs 4 workers, there are 3"):
        plan_transition(serving, Shape(mixed=4), must_leave=["w0"])


def test_change_counts() -> None:
    assert change_counts(Shape(mixed=4), Shape(prefill=2, decode=2)) == (0, 4)
    assert change_counts(Shape(prefill=2, decode=3), Shape(prefill=3, decode=5)) == (3, 0)
    assert change_counts(Shape(prefill=3, decode=5), Shape(prefill=4, decode=1)) == (3, 1)
