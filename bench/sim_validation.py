"""Claim: the simulator's makespan of a small workload is within 10 % of what real engines take for it.

The same trajectories, router and routing are played twice. For real: engines of the quickstart's model in this process, each
step computed and its processor time measured; an engine's clock advances by its own steps, so several engines run side by side
on paper as they would on several machines, and environments wait on the same clock. Simulated: with the cost profile that
`pearl.rl.measure_costs` measures right before and after, in processor time too. Several rounds, both sides interleaved;
`value` is the median over rounds of the worst case's |simulated / real - 1|.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.engine import Engine
from pearl.protocol import Role, SamplingParams
from pearl.rl.measure_costs import fresh_model
from pearl.sched.router import Router
from pearl.sched.sim.plans import TrajectoryPlan
from pearl.sched.sim.workload import FROZEN_LAKE, LogNormal

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


def engine_of(role: Role) -> Engine:
    config = EngineConfig(
        model=MODEL,
        dtype="float32",
        load_format="dummy",
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS,
        max_num_seqs=SEQUENCES,
        max_batch_tokens=STEP_TOKENS,
        max_model_len=LONGEST,
        role=role,
    )
    return Engine(config, text=False)


@dataclass(slots=True)
class Playing:
    """A trajectory under way."""

    plan: TrajectoryPlan
    ids: list[int]
    turn: int = 0


class RealRun:
    """Real engines behind a real router on one clock that moves by what their steps took."""

    def __init__(self, roles: list[Role]) -> None:
        self.engines = {f"w{number}": engine_of(role) for number, role in enumerate(roles)}
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


def plans_of(count: int) -> list[TrajectoryPlan]:
    return [plan for number in range(count // 4) for plan in WORK.group(number, 4, seed=7)]
