"""Systems to compare: each is a choice of settings of the same scheduler, router and engine, never other code.

Owns the names, what each may do, and how that becomes SimSettings. Everything that is not the point of a comparison (work,
costs, batch semantics, staleness) is the same for all; the fixed systems differ in how many GPUs they have.

ROLL, ROLL-Large and RLBoost+ are what arXiv 2609.35158 compares with, asynchronous and colocated: ROLL with the reserved GPUs
alone, ROLL-Large with as many fixed ones as a segment has on average, RLBoost+ with PEARL's external GPUs (whose requests are
drained and go on elsewhere as PEARL's do), without splitting and without borrowing. `PAPER` is PEARL as that paper describes
it, deciding by its closed forms, `OURS` has all of EXTENSIONS on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pearl.sched.cost_profile import ChangeCost
from pearl.sched.settings import BorrowSettings, ExpandSettings, PdSettings, SchedulerSettings
from pearl.sched.sim.plans import EngineSizes, Hardware, SimSettings
from pearl.sched.sim.presets.fitted import Fitted
from pearl.sched.sim.presets.qwen3 import Preset
from pearl.sched.sim.workload import TaskFamily, workload_of
from pearl.sched.workload import Workload

BELIEVED_SEED = 2**31
"""Of the trajectories whose statistics every scheduler is told beforehand; none of them is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`external`: the segment's GPUs may join. `fixed_workers`: those there are instead of the reserved ones, if given.
    `rebuilds`: a change of role captures graphs anew. `eviction`: what its engines' caches give up, as in EngineSizes."""

    name: str
    scheduler: SchedulerSettings
    external: bool = True
    fixed_workers: int | None = None
    rebuilds: bool = False
    eviction: Literal["lru", "keep"] = "lru"

    def settings(self, preset: Preset, fitted: Fitted, *, hardware: Hardware, batch: int = 64, **more: Any) -> SimSettings:
        """One run of this system; `more` are fields of SimSettings (seed, when it ends, semantics)."""
        costs = fitted.costs(preset.costs)
        if self.rebuilds:
            costs = replace(costs, switch=ChangeCost(fixed_s=preset.rebuild_s))
        if self.fixed_workers is not None:
            hardware = replace(hardware, reserved_workers=self.fixed_workers)
        barrier = more.get("semantics", "barrier") == "barrier"
        values: dict[str, Any] = dict(
            costs=costs,
            workload=believed(fitted.family(preset.family), fitted, batch, barrier=barrier),
            hardware=hardware,
            scheduler=self.scheduler,
            batch=batch,
            train_s_per_token=preset.train_s_per_token,
            publish_s=preset.publish_s,
            overhead_s=fitted.overhead_s,
            miss_share=fitted.miss_share,
        )
        values |= more
        values["engine"] = replace(values.get("engine", EngineSizes()), eviction=self.eviction)
        return SimSettings(**values)


def believed(family: TaskFamily, fitted: Fitted, batch: int, *, barrier: bool) -> Workload:
    """What every scheduler is told of the work before it measures: the statistics of other trajectories of its kind."""
    plans = [plan for number in range(32) for plan in family.group(number, 8, seed=BELIEVED_SEED)]
    told = workload_of(plans, batch, overhead_s=fitted.overhead_s, miss_share=fitted.miss_share)
    return replace(told, barrier=barrier)


def _colocated(borrow: str = "none", expand: str = "never") -> SchedulerSettings:
    settings = SchedulerSettings(pd=PdSettings(mode="mixed"), expand=ExpandSettings(external=expand), tail_share=0.0)
    return replace(settings, borrow=BorrowSettings(workers=borrow))


ROLL = System(name="ROLL", scheduler=_colocated(), external=False)
RLBOOST = System(name="RLBoost+", scheduler=_colocated(expand="always"))
PAPER = System(
    name="PEARL (paper)",
    scheduler=SchedulerSettings(
        pd=PdSettings(predictor="paper", hybrid_margin=1.0, append_on_decode="0"),  # no hybrid is ever so much better
        borrow=BorrowSettings(workers="all_or_none"),
        expand=ExpandSettings(external="always"),
        tail_share=0.0,
    ),
    rebuilds=True,
)


def roll_large(workers: int) -> System:
    """ROLL with so many fixed workers."""
    return replace(ROLL, name="ROLL-Large", fixed_workers=workers)


def static(prefill: int, decode: int) -> System:
    """PEARL as in the paper, but for a ratio that never changes."""
    pd = replace(PAPER.scheduler.pd, mode="split", ratio=f"{prefill}:{decode}")
    return replace(PAPER, name=f"static {prefill}:{decode}", scheduler=replace(PAPER.scheduler, pd=pd), rebuilds=False)


STATIC_RATIOS = ((1, 3), (1, 2), (3, 5), (1, 1), (2, 1))
"""The oracle is the best of these on each segment, chosen afterwards."""


def _queues(system: System) -> System:
    pd = replace(system.scheduler.pd, predictor="full")
    return replace(system, scheduler=replace(system.scheduler, pd=pd))


def _hybrid(system: System) -> System:
    pd = replace(system.scheduler.pd, hybrid_margin=PdSettings().hybrid_margin)
    return replace(system, scheduler=replace(system.scheduler, pd=pd))


def _partial(system: System) -> System:
    return replace(system, scheduler=replace(system.scheduler, borrow=BorrowSettings()))


def _life(system: System) -> System:
    return replace(system, scheduler=replace(system.scheduler, expand=ExpandSettings()))


def _append(system: System) -> System:
    pd = replace(system.scheduler.pd, append_on_decode="auto")
    return replace(system, scheduler=replace(system.scheduler, pd=pd))


def _tail(system: System) -> System:
    return replace(system, scheduler=replace(system.scheduler, tail_share=SchedulerSettings().tail_share))


def _in_place(system: System) -> System:
    return replace(system, rebuilds=False)


def _keep(system: System) -> System:
    return replace(system, eviction="keep")


EXTENSIONS: dict[str, Callable[[System], System]] = {
    "queueing model": _queues,
    "hybrid pools": _hybrid,
    "partial borrowing": _partial,
    "expected life": _life,
    "appends on decode": _append,
    "tail re-balancing": _tail,
    "switch in place": _in_place,
    "thrash-resistant cache": _keep,
}


def with_extensions(names: tuple[str, ...], name: str) -> System:
    """PEARL as in the paper and these of EXTENSIONS. ValueError for one that is none."""
    system = replace(PAPER, name=name)
    for extension in names:
        if extension not in EXTENSIONS:
            raise ValueError(f"extension={extension!r}: must be one of {', '.join(EXTENSIONS)}")
        system = EXTENSIONS[extension](system)
    return system


OURS = with_extensions(tuple(EXTENSIONS), "PEARL (ours)")


def one_more() -> list[System]:
    """PEARL as in the paper with each extension by itself."""
    return [with_extensions((name,), f"paper + {name}") for name in EXTENSIONS]


def one_less() -> list[System]:
    """Ours without each extension."""
    return [with_extensions(tuple(one for one in EXTENSIONS if one != name), f"ours - {name}") for name in EXTENSIONS]


def system_named(name: str) -> System:
    """Of the command line: roll, rlboost, paper, ours, or a ratio such as 3:5. ValueError lists them."""
    known = {"roll": ROLL, "rlboost": RLBOOST, "paper": PAPER, "ours": OURS}
    if name in known:
        return known[name]
    parts = name.split(":")
    if len(parts) == 2 and all(part.isdecimal() and int(part) > 0 for part in parts):
        return static(int(parts[0]), int(parts[1]))
    raise ValueError(f"policy={name!r}: must be one of {', '.join(known)}, or a ratio such as 3:5")
