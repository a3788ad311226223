"""One simulated serving worker: the engine's real core, whose steps take what their price says.

Owns the core and when its steps begin and end. It decides nothing: what runs is the core's decision, what a role means the
core's too, and who comes here the router's. Invariants: the core is touched between two steps only, as by a real engine's one
thread (`post`); steps that have begun are finished, unless the worker dies; then the tokens of those that were through count.

A steady batch is not stepped token by token. Its run is entered as one, to its first end, and cut to the steps that have begun
when something comes up; only then the core hears of it (`SteadyCore.schedule(start, num_steps)`), so it sees what single
steps would have shown it. One thing differs from single steps: the router hears of free blocks when a run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pearl.engine.limits import CoreSettings
from pearl.engine.moving import Export
from pearl.engine.request import RequestUpdate, SampledToken, SchedulerOutput, StepResult
from pearl.engine.steady import SteadyCore, SteadyResult
from pearl.protocol import Role
from pearl.sched.cost_profile import CostProfile
from pearl.sched.sim.agenda import Agenda, Appointment
from pearl.sched.sim.pricing import StepPrice, price, steady_price, steady_s, steady_steps

Act = Callable[[SteadyCore], object]


class Listener(Protocol):
    """Who is told what a worker's steps gave."""

    def stepped(self, worker: SimWorker, output: SchedulerOutput, cost: StepPrice, updates: list[RequestUpdate]) -> None: ...

    def offered(self, worker: SimWorker, export: Export) -> None: ...


@dataclass(slots=True)
class _Run:
    """Steps under way since `start`: a single output, or `steps` steady ones of `batch` sequences and `tokens` in all."""

    start: float
    end: Appointment
    output: SchedulerOutput | None = None
    cost: StepPrice | None = None
    steps: int = 1
    batch: int = 0
    tokens: int = 0


class SimWorker:
    """`serving`: its engine is awake. While `held` it makes no steps (a change is under way); the posted acts wait."""

    def __init__(self, name: str, costs: CostProfile, settings: CoreSettings, agenda: Agenda, listener: Listener) -> None:
        self.name, self.costs, self.settings = name, costs, settings
        self.core = SteadyCore(settings, name=name)
        self.serving = self.held = False
        self._agenda, self._listener = agenda, listener
        self._inbox: list[Act] = []
        self._deciding = False
        self._run: _Run | None = None
        self._alarm: Appointment | None = None
        self._owed = 0.0

    @property
    def role(self) -> Role:
        return self.core.scheduler.policy.role

    @property
    def has_post(self) -> bool:
        """Whether something waits for the end of the step under way."""
        return bool(self._inbox)

    @property
    def free_blocks(self) -> int:
        return self.core.blocks.num_available

    def wake(self, role: Role, version: int) -> None:
        """An empty engine serves, with these weights."""
        self.core = SteadyCore(self.settings, name=f"{self.name}@{self._agenda.now:.3f}")
        self.core.set_weight_version(version)
        self.core.switch_role(role, now=self._agenda.now)
        self.serving, self.held, self._owed = True, False, 0.0

    def sleep(self) -> None:
        """Between two steps, everything given away: nothing is left of its pool."""
        self.serving = self.held = False
        self._inbox.clear()

    def post(self, act: Act) -> None:
        """`act` gets the core as soon as no step is under way. Acts that come after the worker stopped serving are lost."""
        if not self.serving:
            return
        self._inbox.append(act)
        if self._run is None:
            self._go_on()
        elif self._run.batch:
            self._cut(self._run)

    def charge(self, seconds: float) -> None:
        """Its host spends so long between two steps: the next one is over so much later."""
        self._owed += seconds

    def hold(self, seconds: float, then: Callable[[], None]) -> None:
        """No step for so long (from between two steps on), then `then`, then it goes on. Void if it stops serving meanwhile."""
        self.held, core = True, self.core

        def release() -> None:
            if self.serving and self.core is core:
                self.held = False
                then()
                self._go_on()

        self._agenda.after(seconds, release)

    def die(self) -> None:
        """From one moment to the next. What it had drawn in steps that were through is told; nothing else is left."""
        run, self._run = self._run, None
        if run is not None:
            run.end.cancel()
            through = self._begun(run) - 1 if run.batch else 0
            if through:
                self._finish_steady(run, through)
        self.sleep()

    # ------------------------------------------------------------------------------------------------ steps

    def _go_on(self) -> None:
        """Between two steps: what was posted (also meanwhile), what is offered, then the next step, if there is any."""
        if self._deciding:
            return
        self._deciding = True
        while self._inbox and self.serving and not self.held:
            self._inbox.pop(0)(self.core)
            if not self._inbox and self.serving:
                self._hand_out()
        self._deciding = False
        if self.serving and not self.held and self._run is None:
            self._begin()

    def _begin(self) -> None:
        core, now = self.core, self._agenda.now
        if not core.scheduler.running and not core.scheduler.waiting:
            self._watch()
            return
        steps = core.steady_steps()
        if steps > 1 and not self._owed:
            self._begin_steady(steps)
            return
        output = core.schedule(now)
        if not output.requests:
            updates = core.finish(output, StepResult(sampled={}), now)
            if updates:  # requests that are given back
                self._listener.stepped(self, output, price(output, self.costs), updates)
            self._watch()
            return
        cost = price(output, self.costs)
        end = self._agenda.after(cost.seconds + self._owed, self._end)
        self._owed, self._run = 0.0, _Run(start=now, end=end, output=output, cost=cost)

    def _begin_steady(self, steps: int) -> None:
        now, running = self._agenda.now, self.core.scheduler.running.values()
        batch, tokens = len(running), sum(len(request.token_ids) for request in running)
        deadline = self.core.soonest_deadline()
        if deadline < float("inf"):
            steps = min(steps, steady_steps(self.costs, batch, tokens, max(0.0, deadline - now)))
        end = self._agenda.after(steady_s(self.costs, batch, tokens, steps), self._end)
        self._run = _Run(start=now, end=end, steps=steps, batch=batch, tokens=tokens)

    def _begun(self, run: _Run) -> int:
        return min(run.steps, steady_steps(self.costs, run.batch, run.tokens, max(0.0, self._agenda.now - run.start)))

    def _cut(self, run: _Run) -> None:
        begun = self._begun(run)
        if begun < run.steps:
            run.steps = begun
            run.end.cancel()
            run.end = self._agenda.at(run.start + steady_s(self.costs, run.batch, run.tokens, begun), self._end)

    def _end(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        if run.batch:
            self._finish_steady(run, run.steps)
        else:
            assert run.output is not None and run.cost is not None
            self._finish(run.output, run.cost)
        self._deciding = True  # what comes of an offer waits for the others: it may be that this worker stops
        self._hand_out()
        self._deciding = False
        self._go_on()

    def _finish_steady(self, run: _Run, steps: int) -> None:
        output = self.core.schedule(run.start, steps)
        self._finish(output, steady_price(self.costs, run.batch, run.tokens, steps))

    def _finish(self, output: SchedulerOutput, cost: StepPrice) -> None:
        updates = self.core.finish(output, self._result(output), self._agenda.now)
        self._listener.stepped(self, output, cost, updates)

    def _result(self, output: SchedulerOutput) -> StepResult:
        """Each request draws the token that its seed names."""
        requests, version = self.core.requests, self.core.weight_version
        drawn = {entry.request_id: requests[entry.request_id].seed for entry in output.requests if entry.samples}
        if output.num_steps > 1:
            return SteadyResult(sampled={}, token_ids=drawn, weight_version=version)
        tokens = {name: SampledToken(token_id=token_id, logprob=0.0) for name, token_id in drawn.items()}
        return StepResult(sampled=tokens, weight_version=version)

    def _hand_out(self) -> None:
        if self.core.exports:
            for export in self.core.take_offers():
                self._listener.offered(self, export)

    def _watch(self) -> None:
        """Nothing can run: wakes when the next offer, arrival or credit lapses, if nothing comes before."""
        deadline = self.core.soonest_deadline()
        if deadline < float("inf"):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._agenda.at(deadline, lambda: self.post(lambda core: core.expire(self._agenda.now)))
