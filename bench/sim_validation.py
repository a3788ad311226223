"""Claim: the simulator's makespan of a small workload is within 10 % of what real engines take for it.

The same trajectories, router and routing are played twice. For real: engines of the quickstart's model in this process, each
step computed and its processor time measured; an engine's clock advances by its own steps, so several engines run side by side
on paper as they would on several machines, and environments wait on the same clock. Simulated: with the cost profile that
`pearl.rl.measure_costs` measures in between, on other work, in processor time too and with as many engines side by side.
`value` is the worst case's error, the median over rounds of simulated / real - 1.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.engine import Engine
from pearl.protocol import Role, SamplingParams
from pearl.rl.measure_costs import Grid, fresh_model, measure
from pearl.sched.cost_profile import CostProfile
from pearl.sched.router import Router
from pearl.sched.settings import BorrowSettings, ExpandSettings, PdSettings, SchedulerSettings
from pearl.sched.sim.plans import EngineSizes, Hardware, SimSettings, TrajectoryPlan
from pearl.sched.sim.simulator import Simulation
from pearl.sched.sim.workload import FROZEN_LAKE, LogNormal, workload_of

TARGET = 0.10
MODEL = fresh_model(ModelOptions())
BLOCKS, BLOCK_SIZE, SEQUENCES, STEP_TOKENS, LONGEST = 2048, 16, 64, 2048, 512
WORK = replace(
    FROZEN_LAKE,
    name="small",
    generated=LogNormal(mean=16.0, spread=0.6, low=2.0, high=64.0),
    env_s=LogNormal(mean=0.004, spread=1.0, low=0.0005, high=0.05),
    context_limit=400,
)


CONFIG = EngineConfig(
    model=MODEL,
    dtype="float32",
    load_format="dummy",
    block_size=BLOCK_SIZE,
    num_blocks=BLOCKS,
    max_num_seqs=SEQUENCES,
    max_batch_tokens=STEP_TOKENS,
    max_model_len=LONGEST,
)


@dataclass(slots=True)
class Playing:
    """A trajectory under way."""

    plan: TrajectoryPlan
    ids: list[int]
    turn: int = 0


class RealRun:
    """Real engines behind a real router on one clock that moves by what their steps took."""

    def __init__(self, roles: list[Role]) -> None:
        engines = (Engine(replace(CONFIG, role=role), text=False) for role in roles)
        self.engines = {f"w{number}": engine for number, engine in enumerate(engines)}
        self.router = Router(block_size=BLOCK_SIZE)
        for (name, engine), role in zip(self.engines.items(), roles, strict=True):
            self.router.add_worker(name, role)
            self.warm_up(engine)
        self.busy: set[str] = set()
        self.spent = dict.fromkeys(self.engines, 0.0)
        self.now, self.count, self.turns, self.steps = 0.0, 0, 0, 0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.playing: dict[str, Playing] = {}
        self.rng = np.random.default_rng(0)

    def warm_up(self, engine: Engine) -> None:
        for _ in range(8):
            engine.add_request([1] * 40, SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_unfinished():
            engine.step_updates()
        engine.reset_prefix_cache()

    def at(self, when: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.agenda, (when, self.count, what))

    def play(self, plans: list[TrajectoryPlan]) -> float:
        """Seconds until the last trajectory is over."""
        prompts: dict[int, list[int]] = {}
        for plan in plans:
            prompt = prompts.setdefault(plan.group, self.ids(plan.first_prompt))
            session = f"t{plan.trajectory}"
            self.playing[session] = Playing(plan=plan, ids=list(prompt))
            self.at(plan.reset_s, lambda session=session: self.submit(session))
        while self.playing:
            self.now, _, what = heapq.heappop(self.agenda)
            what()
        return self.now

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(8, MODEL.vocab_size, count).tolist()

    def submit(self, session: str) -> None:
        one = self.playing[session]
        turn = one.plan.turns[one.turn]
        one.ids += self.ids(turn.appended)
        worker = self.router.place(session, len(one.ids))
        assert worker is not None
        params = SamplingParams(max_tokens=turn.generated, ignore_eos=True)
        name = f"{session}.{one.turn}"
        self.charge(worker, lambda: self.engines[worker].add_request(one.ids, params, request_id=name, session_id=session))
        self.go_on(worker)

    def charge(self, worker: str, call: Callable[[], Any]) -> Any:
        """What a worker does between two steps makes its next step longer."""
        began = time.thread_time()
        result = call()
        self.spent[worker] += time.thread_time() - began
        return result

    def go_on(self, worker: str) -> None:
        """Begins the worker's next step, unless it is in one or has nothing to do; the step is over when it took its time."""
        engine = self.engines[worker]
        if worker in self.busy or not engine.has_unfinished():
            return
        self.busy.add(worker)
        began = time.thread_time()
        updates = engine.step_updates()
        took = time.thread_time() - began + self.spent[worker]
        self.spent[worker] = 0.0
        self.steps += 1
        self.at(self.now + took, lambda: self.stepped(worker, updates))

    def stepped(self, worker: str, updates: list[Any]) -> None:
        self.busy.discard(worker)
        for update in updates:
            session = update.request_id.split(".")[0]
            self.playing[session].ids += update.token_ids
            if update.completion is not None:
                self.finished(session)
        self.hand_over(worker)
        self.report(worker)
        self.go_on(worker)

    def finished(self, session: str) -> None:
        one = self.playing[session]
        self.router.done(session)
        self.turns += 1
        wait = one.plan.turns[one.turn].env_s
        one.turn += 1
        if one.turn == len(one.plan.turns):
            self.router.forget(session)
            self.at(self.now + wait, lambda: self.playing.pop(session))
        else:
            self.at(self.now + wait, lambda: self.submit(session))

    def hand_over(self, worker: str) -> None:
        """Finished prompts of a prefill worker go to where the router wants them decoded."""
        source = self.engines[worker]
        for transfer in source.take_handoffs():
            session = transfer.request_id.split(".")[0]
            target = self.router.decode_target(session) or worker
            taken = self.charge(target, lambda transfer=transfer, target=target: self.engines[target].import_kv(transfer))
            self.charge(worker, lambda transfer=transfer, taken=taken: source.finish_export(transfer.transfer_id, taken))
            if taken:
                self.router.handed_over(session, target)
                self.go_on(target)

    def report(self, worker: str) -> None:
        stats = self.engines[worker].stats()
        self.router.on_load(worker, stats.waiting, stats.running, stats.free_blocks + stats.cached_blocks)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


CASES = {"1 mixed": [Role.MIXED], "2 mixed": [Role.MIXED] * 2, "4 mixed": [Role.MIXED] * 4, "1P1D": [Role.PREFILL, Role.DECODE]}


def profile(engines: int, grid: Grid) -> CostProfile:
    """What serving costs right now, measured on other work than is played; engines of one case share a processor's caches."""
    return measure(CONFIG, "quickstart", "cpu", grid, time.thread_time, side_by_side=engines)[0]


def plans_of(count: int) -> list[TrajectoryPlan]:
    return [plan for number in range(count // 4) for plan in WORK.group(number, 4, seed=7)]


def real(roles: list[Role], plans: list[TrajectoryPlan]) -> float:
    run = RealRun(roles)
    seconds = run.play(plans)
    run.close()
    return seconds


def simulated(roles: list[Role], plans: list[TrajectoryPlan], costs: CostProfile) -> float:
    """The makespan of one synchronous step of the same work on the same pool."""
    mixed = roles[0] is Role.MIXED
    settings = SimSettings(
        costs=costs,
        workload=workload_of(plans, len(plans)),
        hardware=Hardware(training_gpus=1, reserved_workers=len(roles), tp=1),
        scheduler=SchedulerSettings(
            pd=PdSettings(mode="mixed" if mixed else "split"),
            borrow=BorrowSettings(workers="none"),
            expand=ExpandSettings(external="never"),
            tail_share=0.0,
        ),
        engine=EngineSizes(block_size=BLOCK_SIZE, max_num_seqs=SEQUENCES, max_batch_tokens=STEP_TOKENS, max_model_len=LONGEST),
        batch=len(plans),
        group=4,
        max_staleness=0,
        publish_s=0.0,
        max_steps=1,
    )
    return Simulation(settings, plans).run().steps[0].makespan_s


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_validation", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=64)
    options = parser.parse_args()
    plans, grid = plans_of(options.trajectories), Grid(steps=16)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, roles in CASES.items():
            before, costs, after = real(roles, plans), profile(len(roles), grid), real(roles, plans)
            found[name].append((statistics.fmean((before, after)), simulated(roles, plans, costs)))
    print(f"{'case':<10}{'real s':>10}{'simulated s':>13}{'error':>9}   medians of {options.rounds} rounds")
    errors = {}
    for name, pairs in found.items():
        errors[name] = statistics.median(told / took - 1 for took, told in pairs)
        seconds = [statistics.median(pair[side] for pair in pairs) for side in (0, 1)]
        print(f"{name:<10}{seconds[0]:>10.3f}{seconds[1]:>13.3f}{errors[name]:>+9.1%}")
    worst = max(abs(error) for error in errors.values())
    if options.json:
        result = {"bench": "sim_validation", "claim": "worst |simulated / real - 1| of four pools", "value": round(worst, 4)}
        print(json.dumps(result | {"target": TARGET, "ok": worst <= TARGET, "cases": errors}))


if __name__ == "__main__":
    main()
