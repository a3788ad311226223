"""What trajectories look like: drawn from published statistics, or taken from a run's own record.

Owns the distributions and the plans made of them. It knows no cluster and no clock. Invariants: the same seed gives the same
plans, trajectory by trajectory (group g is the same however many are drawn); no plan is longer than the context limit; every
turn generates at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from pearl.metrics.jsonl import read_jsonl
from pearl.sched.sim.plans import TrajectoryPlan, TurnPlan
from pearl.sched.workload import QUANTILES, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Of this mean; `spread` is the standard deviation of the logarithm (0: constant). Cut to [`low`, `high`]."""

    mean: float
    spread: float = 0.0
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if not (self.mean >= 0 and self.spread >= 0 and self.low <= self.high):
            given = f"mean={self.mean}, spread={self.spread}, low={self.low}, high={self.high}"
            raise ValueError(f"{given}: must be >= 0, and low <= high")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.mean == 0:
            return np.zeros(count)
        drawn = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(drawn, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFamily:
    """A kind of task. Tokens and seconds; `turns` of a trajectory, `appended`, `generated` and `env_s` of a turn.

    `stall_share` of the turns take `stall_s` (from, to) more; `slow_share` of the resets take `slow_reset_s` (from, to).
    `slowness` spreads the environments' speed over trajectories: all turns of one are slower or faster by a factor of mean 1
    whose logarithm has this standard deviation. Trajectories of a group share their first prompt.
    """

    name: str
    turns: LogNormal
    first_prompt: tuple[int, int]
    appended: LogNormal
    generated: LogNormal
    env_s: LogNormal
    stall_share: float = 0.0
    stall_s: tuple[float, float] = (100.0, 300.0)
    slowness: float = 0.0
    reset_s: tuple[float, float] = (0.0, 0.0)
    slow_share: float = 0.0
    slow_reset_s: tuple[float, float] = (100.0, 400.0)
    context_limit: int = 32_768

    def group(self, number: int, size: int, seed: int) -> list[TrajectoryPlan]:
        """The `size` trajectories of group `number`."""
        rng = np.random.default_rng([seed, number])
        prompt = int(rng.integers(self.first_prompt[0], self.first_prompt[1] + 1))
        return [self._trajectory(number * size + member, number, prompt, rng) for member in range(size)]

    def groups(self, size: int, seed: int) -> Iterator[list[TrajectoryPlan]]:
        """Without end."""
        number = 0
        while True:
            yield self.group(number, size, seed)
            number += 1

    def _trajectory(self, trajectory: int, group: int, prompt: int, rng: np.random.Generator) -> TrajectoryPlan:
        count = max(1, round(float(self.turns.draw(rng, 1)[0])))
        appended = np.rint(self.appended.draw(rng, count)).astype(int)
        generated = np.maximum(1, np.rint(self.generated.draw(rng, count))).astype(int)
        pace = float(LogNormal(mean=1.0, spread=self.slowness).draw(rng, 1)[0])
        env_s = pace * self.env_s.draw(rng, count)
        env_s += np.where(rng.random(count) < self.stall_share, rng.uniform(*self.stall_s, count), 0.0)
        reset_s = float(rng.uniform(*(self.slow_reset_s if rng.random() < self.slow_share else self.reset_s)))
        turns, length = [], prompt
        for number, (more, new, seconds) in enumerate(zip(appended.tolist(), generated.tolist(), env_s.tolist(), strict=True)):
            more = more if number else 0  # the first turn answers the first prompt
            if length + more + new > self.context_limit:
                break
            length += more + new
            turns.append(TurnPlan(appended=more, generated=new, env_s=round(seconds, 3)))
        turns = turns or [TurnPlan(appended=0, generated=max(1, self.context_limit - prompt), env_s=0.0)]
        return TrajectoryPlan(trajectory=trajectory, group=group, first_prompt=prompt, turns=tuple(turns), reset_s=reset_s)


SOFTWARE = TaskFamily(
    # Turns, appends, generations: production traces of software engineering agents (60 turns planned, 608 and 148 tokens per
    # turn, 28.6 K tokens in all under a limit of 32 K, which most trajectories reach first); shapes of the tails: estimates
    # from open trajectories (64 turns on average). Environment: median 0.3-0.5 s, mean about 4 s, 1 % stalls of 100-300 s.
    name="software",
    turns=LogNormal(mean=45.0, spread=0.53, low=3.0, high=100.0),
    first_prompt=(3000, 5000),
    appended=LogNormal(mean=608.0, spread=1.0, low=16.0, high=8000.0),
    generated=LogNormal(mean=148.0, spread=0.8, low=8.0, high=4000.0),
    env_s=LogNormal(mean=2.0, spread=1.79, low=0.02, high=90.0),
    stall_share=0.01,
    reset_s=(5.0, 20.0),
    slow_share=0.02,
)
SEARCH = TaskFamily(
    # 3-10 turns; a few passages per answer and a search that takes a fraction of a second: estimates.
    name="search",
    turns=LogNormal(mean=5.0, spread=0.4, low=3.0, high=10.0),
    first_prompt=(200, 600),
    appended=LogNormal(mean=900.0, spread=0.5, low=100.0, high=4000.0),
    generated=LogNormal(mean=180.0, spread=0.7, low=16.0, high=2000.0),
    env_s=LogNormal(mean=0.6, spread=0.8, low=0.05, high=20.0),
    context_limit=16_384,
)
MATHS = TaskFamily(
    # Fewer than 5 turns, long generations between short results of a tool: estimates.
    name="maths",
    turns=LogNormal(mean=2.2, spread=0.5, low=1.0, high=4.0),
    first_prompt=(100, 500),
    appended=LogNormal(mean=120.0, spread=0.8, low=8.0, high=1000.0),
    generated=LogNormal(mean=1500.0, spread=0.8, low=64.0, high=12_000.0),
    env_s=LogNormal(mean=0.3, spread=1.0, low=0.01, high=30.0),
    context_limit=32_768,
)
FROZEN_LAKE = TaskFamily(
    # The board game of docs/environments.md: a picture of the board in, a move out, no time to speak of.
    name="frozenlake",
    turns=LogNormal(mean=7.0, spread=0.5, low=1.0, high=20.0),
    first_prompt=(120, 160),
    appended=LogNormal(mean=60.0, spread=0.1, low=40.0, high=90.0),
    generated=LogNormal(mean=24.0, spread=0.6, low=4.0, high=256.0),
    env_s=LogNormal(mean=0.001),
    context_limit=4096,
)
FAMILIES = {family.name: family for family in (SOFTWARE, SEARCH, MATHS, FROZEN_LAKE)}


def family_named(name: str) -> TaskFamily:
    """ValueError lists the names there are."""
    if name not in FAMILIES:
        raise ValueError(f"workload={name!r}: must be one of {', '.join(FAMILIES)}, or a trajectories.jsonl")
    return FAMILIES[name]


def replay(path: Path, *, env_s: float = 0.0) -> list[list[TrajectoryPlan]]:
    """The groups of a run's trajectories.jsonl, in the order in which their first member ended.

    Siblings are neighbours of one environment seed. How long environments took is not in the record: `env_s` per turn.
    Trajectories without a sampled token are left out. ValueError for a file without any other.
    """
    groups: list[list[TrajectoryPlan]] = []
    open_groups: dict[int, int] = {}
    count = 0
    for record in read_jsonl(path):
        spans = [(sampled, sum(1 for _ in run)) for sampled, run in groupby(record["loss_mask"])]
        if not any(sampled for sampled, _ in spans):
            continue
        seed = int(record["env_seed"])
        if seed not in open_groups:
            open_groups[seed] = len(groups)
            groups.append([])
        groups[open_groups[seed]].append(_recorded(count, open_groups[seed], spans, env_s))
        count += 1
    if not groups:
        raise ValueError(f"{path}: no trajectory with sampled tokens in it")
    return groups


def _recorded(trajectory: int, group: int, spans: list[tuple[int, int]], env_s: float) -> TrajectoryPlan:
    """`spans`: (sampled or not, tokens) in their order."""
    prompt, appended = 0, 0
    turns: list[TurnPlan] = []
    for sampled, tokens in spans:
        if not sampled and not turns:
            prompt = tokens
        elif not sampled:
            appended = tokens
        else:
            turns.append(TurnPlan(appended=appended, generated=tokens, env_s=env_s))
            appended = 0
    return TrajectoryPlan(trajectory=trajectory, group=group, first_prompt=prompt, turns=tuple(turns), reset_s=0.0)


def workload_of(plans: list[TrajectoryPlan], batch: float, **known: float) -> Workload:
    """What predictions need of these plans; `known` are other fields of Workload (overhead, misses, slots).

    `context` is the mean length over generated tokens, since a token is what takes a step.
    """
    if not plans:
        raise ValueError("plans=[]: at least one trajectory is needed")
    turns = [len(plan.turns) for plan in plans]
    total = sum(turns)
    contexts, generated, longest = 0.0, 0, 0
    for plan in plans:
        length = plan.first_prompt
        for turn in plan.turns:
            length += turn.appended
            contexts += turn.generated * (length + turn.generated / 2)
            length += turn.generated
            generated += turn.generated
        longest = max(longest, length)
    marks = np.maximum.accumulate(np.quantile(turns, QUANTILES) / (total / len(turns)))
    workload = Workload(
        batch=batch,
        turns=total / len(plans),
        appended=sum(turn.appended for plan in plans for turn in plan.turns) / total,
        generated=generated / total,
        first_prompt=sum(plan.first_prompt for plan in plans) / len(plans),
        context=contexts / generated,
        longest=float(longest),
        env_s=sum(plan.reset_s + sum(turn.env_s for turn in plan.turns) for plan in plans) / total,
        turn_quantiles=tuple(marks.tolist()),
    )
    return replace(workload, **known)  # type: ignore[arg-type]
