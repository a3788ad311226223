"""A whole job on a virtual clock: the real cluster scheduler, router, admission and engine cores, with priced steps.

Owns how the parts hang together, the ticks, and what comes out. It has no decision of its own: every event goes to the same
`ClusterScheduler.on_event` as in a live job, and what comes back is carried out by `fleet.py`. Invariant: equal inputs give
equal results, and `check` holds after every event.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.events import BatchProgress, ClusterEvent, StepMeasured, Tick, WeightsPublished, WorkerReport
from pearl.sched.profile import RuntimeProfile
from pearl.sched.router import Router
from pearl.sched.shape import Shape
from pearl.sched.sim import books
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.dispatch import Dispatcher
from pearl.sched.sim.fleet import Fleet, Node
from pearl.sched.sim.gpus import Gpus
from pearl.sched.sim.network import Network
from pearl.sched.sim.plans import Availability, SimSettings, TrajectoryPlan
from pearl.sched.sim.recorder import Recorder
from pearl.sched.sim.results import SimResult, StepRecord
from pearl.sched.sim.rollout import Batch, Rollout
from pearl.sched.sim.trainer import Trainer
from pearl.sched.sim.watch import BatchWatch, Watched

STALLED_S = 4 * 3600.0
"""Simulated seconds without a token, an answer or a trained step after which a run is given up."""


class Simulation:
    """`plans`: trajectories in the order in which they start, as many as the run may need. `run` it to its end, or `step`."""

    def __init__(
        self, settings: SimSettings, plans: Iterable[TrajectoryPlan], availability: Availability | None = None
    ) -> None:
        self.settings = settings
        self.agenda = Agenda()
        costs = settings.costs
        self.router = Router(block_size=settings.engine.block_size)
        barrier = settings.semantics == "barrier"
        eviction = settings.engine.eviction
        workload = replace(settings.workload, batch=settings.batch, barrier=barrier, eviction=eviction)
        self.scheduler = ClusterScheduler(settings.scheduler, RuntimeProfile(settings.believed or costs, workload), self.router)
        self.recorder = Recorder()
        network = Network(self.agenda, bytes_per_s=costs.transfer_bytes_per_s, base_s=costs.transfer_base_s)
        self.dispatcher = Dispatcher(settings, self.agenda, self.router, network, self.recorder)
        self.fleet = Fleet(settings, self.agenda, self.dispatcher, self.emit, self._epoch_of)
        self.rollout = Rollout(settings, self.agenda, self.dispatcher, iter(plans))
        self.trainer = Trainer(settings, self.agenda, self.emit, self.fleet.publish, self._step_over)
        self.steps: list[StepRecord] = []
        self.transitions: list[dict[str, Any]] = []
        self._events: deque[ClusterEvent] = deque()
        self._emitting = False
        self._over = False
        self.watch = BatchWatch(self.agenda, self._predict)
        self._watched: Watched | None = None
        """Of the batch that is trained."""
        self._progress: tuple[float, tuple[int, ...]] = (0.0, ())
        self.rollout.version = lambda: self.trainer.version
        self.rollout.progressed = self._progressed
        self.rollout.batch_opened = self.watch.opened
        self.fleet.may_train = self.trainer.may_begin
        self.gpus = Gpus(settings, availability or Availability(), self.agenda, self.fleet, self.emit)
        self.agenda.at(0.0, self._begin)

    # ------------------------------------------------------------------------------------------------ the run

    def run(self) -> SimResult:
        """To the end. RuntimeError if nothing at all happens for STALLED_S."""
        while self.step():
            pass
        return self.result()

    def step(self) -> bool:
        """The next event; False when the run is over."""
        until = self.settings.until_s
        if self._over or (until is not None and self.agenda.next_at() > until):
            return False
        return self.agenda.step()

    def result(self) -> SimResult:
        now = self.agenda.now
        self.recorder.close_interval(now, self.rollout.in_flight, self._kv_use())
        self.transitions += [decision.row() for decision in self.scheduler.log.take()]
        counts: Counter[str] = Counter()
        for part in (self.recorder, self.dispatcher, self.rollout, self.fleet):
            counts.update(part.counts)
        counts["router_moved"] = self.router.moved
        counts["dropped_trajectories"] = self.rollout.counts["stale"] + self.rollout.counts["failed"]
        counts["tokens_lost"] = books.tokens_lost(self.recorder, self.rollout)
        counts["stale_messages"] = self.scheduler.state.dropped.total()
        return SimResult(
            seconds=now,
            steps=tuple(self.steps),
            intervals=tuple(self.recorder.intervals),
            transitions=tuple(self.transitions),
            counts=dict(sorted(counts.items())),
            events=self.agenda.happened,
            trainer_waited_s=self.trainer.waited_s,
        )

    def emit(self, event: ClusterEvent) -> None:
        """Tells the scheduler, and has carried out what it answers; events that this causes come after."""
        self._events.append(event)
        if self._emitting:
            return
        self._emitting = True
        while self._events:
            commands = self.scheduler.on_event(self._events.popleft(), self.agenda.now)
            if commands:
                self.fleet.execute(commands)
        self._emitting = False

    def _begin(self) -> None:
        self.emit(WeightsPublished(version=0))
        self.fleet.found()
        self.rollout.start()
        self.emit(BatchProgress(unfinished=self.rollout.unfinished()))
        self._tick()

    def _epoch_of(self, worker: str) -> int:
        row = self.scheduler.state.workers.get(worker)
        return 0 if row is None else row.epoch

    # ------------------------------------------------------------------------------------------------ steps

    def _progressed(self) -> None:
        """A trajectory is complete."""
        self.watch.complete(self.rollout.collected)
        self.emit(BatchProgress(unfinished=self.rollout.unfinished()))
        self._train_next()
        self.rollout.start()

    def _train_next(self) -> None:
        if self.trainer.batch is not None:
            return
        batch = self.rollout.take()
        if batch is None:
            return
        watched = self._watched = self.watch.take(batch.number)
        telemetry = self.recorder.telemetry(batch.plans, self.settings.overhead_s)
        self.emit(StepMeasured(telemetry=telemetry, makespan_s=watched.makespan_s, ended=watched.ended_s))
        self.emit(BatchProgress(unfinished=self.rollout.unfinished()))
        self.trainer.train(batch)

    def _step_over(self, batch: Batch, trained_s: float) -> None:
        now, version = self.agenda.now, self.trainer.version
        generated, computed = self.recorder.step_tokens()
        watched = self._watched
        assert watched is not None
        ages = [version - 1 - episode.oldest for episode in batch.episodes]
        record = StepRecord(
            step=version,
            began_s=batch.began,
            collected_s=batch.ended,
            trained_s=trained_s,
            ended_s=now,
            generated=generated,
            computed=computed,
            trained_tokens=sum(plan.tokens for plan in batch.plans),
            trajectories=len(batch.episodes),
            makespan_s=watched.makespan_s,
            predicted_s=watched.predicted_s,
            shape=str(watched.shape),
            steady=watched.steady,
            workers=watched.workers,
            staleness_mean=sum(ages) / len(ages),
        )
        self.steps.append(record)
        self.rollout.trained_batches = version
        self._over = version == self.settings.max_steps
        self._train_next()
        self.rollout.start()

    def _predict(self) -> tuple[Shape, float | None]:
        """The present shape, and the makespan that the scheduler's predictor sees for it."""
        shape = self.scheduler.state.shape()
        makespan = self.scheduler.adviser().predictor.predict(shape).makespan_s
        return shape, makespan if makespan < float("inf") else None

    # ------------------------------------------------------------------------------------------------ ticks

    def _tick(self) -> None:
        """What the live service does about once a second: reports, the scheduler's tick, another try for what waits."""
        tick_s, serving = self.settings.tick_s, 0
        roles: dict[str, float] = {}
        for node in self.fleet.nodes.values():
            if node.worker.serving:
                serving += 1
                self._report(node)
                roles[node.worker.role] = roles.get(node.worker.role, 0) + 1
                for name, true in (("borrowed", node.borrowed), ("external", node.external)):
                    roles[name] = roles.get(name, 0) + true
            roles["changing"] = roles.get("changing", 0) + node.changing
        roles["training"] = self.settings.hardware.training_gpus * self.trainer.training
        self.emit(Tick())
        self.dispatcher.retry()
        self.recorder.sample(roles, self.rollout.in_flight, tick_s)
        self.watch.look(self.scheduler.state.shape(), serving, tick_s)
        self.transitions += [decision.row() for decision in self.scheduler.log.take()]
        self._close_interval()
        self._check_progress()
        self.agenda.after(tick_s, self._tick)

    def _report(self, node: Node) -> None:
        core = node.worker.core
        blocks, size = core.blocks, self.settings.engine.block_size
        self.emit(
            WorkerReport(
                worker=node.worker.name,
                epoch=node.epoch,
                running=len(core.scheduler.running),
                waiting=len(core.scheduler.waiting),
                kv_used=blocks.num_used * size,
                kv_total=blocks.num_slots,
                weight_version=core.weight_version,
            )
        )

    def _close_interval(self) -> None:
        if self.agenda.now - self.recorder.interval_from >= self.settings.interval_s - 1e-6:
            self.recorder.close_interval(self.agenda.now, self.rollout.in_flight, self._kv_use())

    def _kv_use(self) -> float:
        """Share of the serving pools that is in use."""
        pools = [node.worker.core.blocks for node in self.fleet.nodes.values() if node.worker.serving]
        return sum(pool.num_used for pool in pools) / max(1, sum(pool.num_blocks for pool in pools))

    def _check_progress(self) -> None:
        counts, now = self.recorder.counts, self.agenda.now
        state = (counts["generated"], counts["computed"], self.rollout.counts["complete"], self.trainer.version)
        if state != self._progress[1]:
            self._progress = (now, state)
        elif now - self._progress[0] > STALLED_S:
            waiting = f"{len(self.dispatcher.waiting)} of {self.rollout.in_flight} trajectories wait for a worker"
            raise RuntimeError(f"nothing has happened for {STALLED_S:.0f} s: {waiting}, shape {self.scheduler.state.shape()}")

    # ------------------------------------------------------------------------------------------------ the books

    def check(self) -> None:
        """RuntimeError if trajectories, tokens, requests, blocks or the table do not add up."""
        books.check_trajectories(self.recorder, self.rollout, self.dispatcher)
        books.check_requests(self.dispatcher, self.fleet, self.router)
        books.check_engines(self.fleet, self.scheduler)
