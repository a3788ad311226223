"""How the cluster gets from its present shape to another with the fewest changes.

Owns the choice of who joins, leaves and changes its role; the counts come from `planner.py`. Pure. The change counts are those
of PEARL (arXiv 2609.35158): D_worker = |W' \\ W| + |W \\ W'|, D_role = sum over roles of n_src - min(n_src, n_dst) over the
survivors. Keeping each role up to its target and filling deficits from joiners first reaches the minimum of both.

Among equals, who holds the least KV moves first, and workers that will be taken away again (borrowed, external) become
prefill workers, which hold no KV of running requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pearl.sched.events import WorkerRole, Zone
from pearl.sched.shape import Shape
from pearl.sched.state import Worker

SERVING_ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionPlan:
    """`join` and `leave` are names; `roles` has the new role of every joiner and of every survivor that changes its own.

    `borrow` and `give_back` are those of join and leave that are overlap workers. `moved_kv_tokens` is the KV of running
    requests that has to go elsewhere: of those that leave or become prefill workers.
    """

    join: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    roles: dict[str, WorkerRole]
    borrow: tuple[str, ...] = ()
    give_back: tuple[str, ...] = ()
    moved_kv_tokens: int = 0

    @property
    def workers_changed(self) -> int:
        """D_worker."""
        return len(self.join) + len(self.leave)

    @property
    def roles_changed(self) -> int:
        """D_role."""
        return len(self.roles) - len(self.join)


def plan_transition(
    serving: Iterable[Worker], target: Shape, *, joiners: Iterable[Worker] = (), must_leave: Iterable[str] = ()
) -> TransitionPlan:
    """The smallest plan from `serving` to `target` that takes all `joiners` and loses `must_leave`.

    If more would serve than `target` counts, further workers leave, first those in roles of which there are too many.
    ValueError if there are too few.
    """
    joiners, gone = list(joiners), set(must_leave)
    rows = [worker for worker in serving if worker.name not in gone]
    before = {worker.name: worker for worker in [*rows, *(worker for worker in serving if worker.name in gone)]}
    surplus = len(rows) + len(joiners) - target.total
    if surplus < 0:
        raise ValueError(f"target={target}: needs {target.total} workers, there are {len(rows) + len(joiners)}")
    wanted = {WorkerRole.MIXED: target.mixed, WorkerRole.PREFILL: target.prefill, WorkerRole.DECODE: target.decode}
    leaving = _leavers(rows, wanted, surplus)
    staying = [worker for worker in rows if worker.name not in {one.name for one in leaving}]
    free = sorted(joiners, key=lambda worker: (_stays(worker), worker.slot)) + _flippers(staying, wanted)
    roles = _fill(free, staying, wanted)
    leave = sorted({worker.name for worker in leaving} | (gone & set(before)), key=lambda name: before[name].slot)
    emptied = [before[name] for name in leave]
    emptied += [worker for worker in staying if roles.get(worker.name) is WorkerRole.PREFILL]
    return TransitionPlan(
        join=tuple(worker.name for worker in joiners),
        leave=tuple(leave),
        roles=roles,
        borrow=tuple(worker.name for worker in joiners if worker.zone is Zone.OVERLAP),
        give_back=tuple(name for name in leave if before[name].zone is Zone.OVERLAP),
        moved_kv_tokens=sum(worker.kv_used for worker in emptied),
    )


def change_counts(source: Shape, target: Shape) -> tuple[int, int]:
    """(D_worker, D_role) if all of the smaller side survive in the best roles."""
    pairs = ((source.mixed, target.mixed), (source.prefill, target.prefill), (source.decode, target.decode))
    kept = sum(min(pair) for pair in pairs)
    return abs(source.total - target.total), max(0, min(source.total, target.total) - kept)


def _stays(worker: Worker) -> int:
    """Rising with how long a worker is likely to stay."""
    return 0 if worker.zone is Zone.OVERLAP else 1 if worker.external else 2


def _by_kv(worker: Worker) -> tuple[int, int, int]:
    return worker.kv_used, worker.running + worker.waiting, worker.slot


def _leavers(rows: list[Worker], wanted: dict[WorkerRole, int], count: int) -> list[Worker]:
    """`count` workers; each from a role that has more than are wanted while there is one."""
    pools = {role: sorted((one for one in rows if one.next_role is role), key=_by_kv, reverse=True) for role in SERVING_ROLES}
    chosen: list[Worker] = []
    for _ in range(count):
        over = [role for role in SERVING_ROLES if len(pools[role]) > wanted[role]]
        some = over or [role for role in SERVING_ROLES if pools[role]]
        role = min(some, key=lambda one: (_stays(pools[one][-1]), _by_kv(pools[one][-1])))
        chosen.append(pools[role].pop())
    return chosen


def _flippers(staying: list[Worker], wanted: dict[WorkerRole, int]) -> list[Worker]:
    """Those of each role that are too many, the least loaded first."""
    spare: list[Worker] = []
    for role in SERVING_ROLES:
        there = sorted((worker for worker in staying if worker.next_role is role), key=_by_kv)
        spare += there[: max(0, len(there) - wanted[role])]
    return sorted(spare, key=_by_kv)


def _fill(free: list[Worker], staying: list[Worker], wanted: dict[WorkerRole, int]) -> dict[str, WorkerRole]:
    """Gives the workers without a place, in their order, to the roles that lack some: prefill, then decode, then mixed."""
    there = Counter(worker.next_role for worker in staying)
    lacking = [role for role in SERVING_ROLES for _ in range(wanted[role] - min(wanted[role], there[role]))]
    return {worker.name: role for worker, role in zip(free, lacking, strict=True)}
