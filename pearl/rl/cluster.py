"""The cluster of a job as its controller has it: members, who serves in which role, and the trainer's claim on its ranks.

Owns the wiring: what happens to members becomes events of the scheduler (`sched/service.py`), its orders become messages to
members. It decides nothing and waits for nothing. Invariants: the router of the scheduler is the one that requests are placed
by; the loss of an external worker costs its requests no more than what was not sent yet, and never ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pearl import config as configuration
from pearl.config import Config
from pearl.engine.model_folder import descriptions
from pearl.engine.models.config import from_folder
from pearl.metrics.jsonl import JsonlWriter, read_jsonl
from pearl.protocol import (
    Done,
    Event,
    Failed,
    HandedOff,
    Join,
    Joined,
    Leave,
    Leaving,
    MemberOrder,
    Ready,
    Refused,
    Report,
    Stop,
    TakenOver,
    Tokens,
)  # fmt: skip
from pearl.rl.availability import Player
from pearl.rl.claim import TrainersClaim
from pearl.rl.cluster_view import cluster_metrics, decision_line, role_words
from pearl.rl.collector import Collector
from pearl.rl.failure import contained
from pearl.rl.followers import Followers
from pearl.rl.layout import JobLayout
from pearl.rl.members import Externals, Member, name_of, number_of
from pearl.rl.plausible import Failures, implausible
from pearl.rl.telemetry import TelemetryMeter
from pearl.rl.types import Group
from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.events import (
    ClusterEvent,
    StepMeasured,
    WeightsPublished,
    WorkerJoined,
    WorkerReclaimed,
    WorkerReport,
    WorkerRole,
    Zone,
)
from pearl.sched.first_guess import guess_costs, guess_workload
from pearl.sched.profile import RuntimeProfile
from pearl.sched.router import Router
from pearl.sched.service import ClusterService
from pearl.sched.settings import SchedulerSettings

WEIGHED = ("auto", "all_or_none")
"""Settings of `borrow.workers` with which lending is a matter of gain."""

MEASURE_EVERY_S = 1.0
"""How often at most the scheduler hears what a step was like."""


class ClusterDriver(Protocol):
    """What the cluster needs of the controller."""

    config: Config
    run: Path
    layout: JobLayout

    def next_number(self) -> int: ...
    def send(self, rank: int, message: Any) -> None: ...
    def notice(self, text: str) -> None: ...
    def fail(self, reason: str) -> None: ...


class Cluster:
    """Members and their orders. Times are of the controller's clock. `begin` comes once all ranks of WORLD are ready."""

    def __init__(self, driver: ClusterDriver, externals: Externals, router: Router, now: float) -> None:
        self.externals = externals
        self.router = router
        self.collector: Collector | None = None
        self.service: ClusterService | None = None
        self._driver, self._config = driver, driver.config
        self.claim = self._claim(False, now)
        path = driver.run / "transitions.jsonl"
        before = read_jsonl(path) if path.exists() else []
        self._decided = len(before)
        """Decisions of the same run, before it was resumed: numbers and times go on from there."""
        self._played_s = max((row["at"] + (row["seconds"] or 0.0) for row in before), default=0.0)
        self._log = JsonlWriter(path)
        self._ready: dict[int, Ready] = {}
        self._version = -1
        self._model_folder = ""
        self._model_files: dict[str, str] = {}
        self._vocab_size = self._max_model_len = 0
        self._failures = Failures()
        self.followers = Followers(externals, router, driver.next_number)
        self._telemetry = TelemetryMeter()
        self._ended = 0
        """Trajectories that had ended when the last step was measured."""
        self._measured = now
        self._player: Player | None = None
        self._seen, self._began = -1, now

    # ------------------------------------------------------------------------------------------------- the beginning

    def begin(self, collector: Collector, ready: dict[int, Ready], model_folder: Path, now: float) -> None:
        """All ranks of WORLD are there; none serves yet, none trains."""
        self.collector, self._ready, self._model_folder = collector, dict(ready), str(model_folder)
        self._vocab_size, self._model_files = from_folder(model_folder).vocab_size, descriptions(model_folder)
        layout, settings = self._driver.layout, SchedulerSettings.of(self._config)
        serving = [ready[rank] for rank in layout.serving]
        self._max_model_len = min(one.max_model_len for one in serving)
        costs = guess_costs(max(one.kv_tokens for one in serving))
        workload = guess_workload(self._config, self._max_model_len)
        scheduler = ClusterScheduler(settings, RuntimeProfile(costs, workload, guessed=True), self.router)
        self.service = ClusterService(scheduler, self, self._finished, now - self._played_s)
        self.service.finished = self._decided
        lends = any(one.lends for one in ready.values())
        self.claim = self._claim(lends, now)
        for rank in layout.training if lends else ():
            both: dict[str, Any] = {"gpus": frozenset([name_of(rank)]), "zone": Zone.OVERLAP, "active": False}
            self.feed(WorkerJoined(worker=f"trainer{rank}", role=WorkerRole.TRAINING, **both), now)
            if ready[rank].lends:
                self.feed(WorkerJoined(worker=name_of(rank), **both), now)
        role = WorkerRole(str(self._config.engine.role))
        for rank in layout.serving:
            gpus = frozenset([name_of(rank)])
            self.feed(WorkerJoined(worker=name_of(rank), gpus=gpus, role=role, kv_total=ready[rank].kv_tokens), now)

    def invited(self) -> None:
        """Workers may join: those of the trace begin to come."""
        if self._config.elastic.trace:
            self._player = Player(self._driver.run)

    def close(self) -> None:
        """Workers that were started here end."""
        if self._player is not None:
            self._player.close()

    def _claim(self, lends: bool, now: float) -> TrainersClaim:
        weighed, limit = self._config.borrow.workers in WEIGHED, self._config.sched.change_timeout_s
        return TrainersClaim(self.feed, lends=lends, weighed=weighed, deadline_s=limit, now=now)

    def feed(self, event: ClusterEvent, now: float) -> None:
        """Tells the scheduler, once there is one."""
        if self.service is not None:
            began = time.thread_time()
            self.service.feed(event, now)
            self.service.seconds += time.thread_time() - began

    def turn(self, now: float) -> None:
        """In every turn of the loop: who asks to join, who is silent, and the scheduler's own clock."""
        if self.service is None or self.collector is None:
            return
        self._telemetry.playing(self.collector.playing, now)
        joins, self.externals.joins = self.externals.joins, []
        for peer, join in joins:
            self._admit(peer, join, now)
        for number in self.externals.watch(now):
            self.gone(number, f"silent for elastic.silence_s={self._config.elastic.silence_s:g} s", now)
        for number in self.externals.stuck(now):
            self.gone(number, f"its engine said nothing for elastic.stuck_s={self._config.elastic.stuck_s:g} s", now)
        if self._player is not None and (ended := self._player.ended()):
            if self._config.elastic.trace_required:
                self._driver.fail(ended)
            self._driver.notice(f"{ended}; the job goes on without its workers")
        self.collector.expire(now)
        for worker, why in self.collector.unserved(now, self._config.rollout.request_timeout_s):
            self.gone(number_of(worker), why, now)
        self.claim.turn(now)
        self.service.tick(now)
        self.followers.turn(now)
        there = self.service.scheduler.state.workers
        for member in [one for one in self.externals.members.values() if one.name not in there]:
            self._forget(member, "left")

    # ------------------------------------------------------------------------------------------------- what members say

    def take(self, event: Event, now: float) -> None:
        """An event of any member, apart from those that only WORLD's ranks send."""
        name = name_of(event.rank)
        match event:
            case Tokens():
                self._telemetry.stepped(event, now)
                if self.collector is not None:
                    self.collector.on_tokens(name, event)
            case HandedOff():
                self._telemetry.handed_off(event, now)
                if self.collector is not None:
                    self.collector.on_handed_off(name, event)
            case TakenOver():
                if self.collector is not None:
                    self.collector.on_taken_over(name, event)
            case Report():
                self._reported(name, event, now)
            case Done() if self.service is not None:
                if not self.followers.answered(event.number, event.rank, event.error, now):
                    self.service.answered(event.number, name, error=event.error, now=now)
                if event.error:
                    print(f"{name}: {event.error}", flush=True)

    def take_external(self, event: Event, now: float) -> None:
        """An event of an external worker. Its failure is its own; what came along with it, but after it, counts no more."""
        if event.rank not in self.externals.members:
            return
        name = name_of(event.rank)
        newest, vocab_size = self.followers.announced, self._vocab_size
        wrong = implausible(event, vocab_size=vocab_size, newest=newest, max_model_len=self._max_model_len)
        if isinstance(event, Tokens | HandedOff) and self.collector is not None:
            wrong = wrong or self.collector.excess(name, event)
        if isinstance(event, Tokens):
            event, failed = self._failures.weigh(event)
            wrong = wrong or failed or self.externals.missed(event)
        if wrong:
            return self.gone(event.rank, wrong, now)
        match event:
            case Ready():
                self.externals.prepared(event.rank, event)
                self._ready[event.rank] = event
            case Leaving():
                self.feed(WorkerReclaimed(worker=name, deadline=now + event.notice_s), now)
            case Failed():
                print(f"external {event.rank}: {event.error}\n{event.traceback}", flush=True)
                self.gone(event.rank, event.error, now)
            case _:
                self.take(event, now)

    def blame(self, number: int, now: float, why: str) -> None:
        """A message of an external worker has led to an error of ours: it is let go, and counted."""
        self.externals.dropped["error"] += 1
        self.gone(number, why, now)

    def gone(self, number: int, reason: str, now: float) -> None:
        """An external worker is no longer there: what it had goes on elsewhere."""
        if (member := self.externals.members.get(number)) is None:
            return
        self.externals.send(number, Stop(number=self._driver.next_number(), reason=reason, exit_code=1))
        self.router.drain(member.name)
        self._forget(member, reason)
        if self.service is not None:
            self.service.gone(member.name, reason, now)

    def _forget(self, member: Member, reason: str) -> None:
        self.externals.forget(member.number)
        self._ready.pop(member.number, None)
        self.followers.forget(member.number)
        self._failures.forget(member.number)
        if self.collector is not None:
            self.collector.lost(member.name)
        self._driver.notice(f"worker {member.name} is gone: {reason}")

    def _admit(self, peer: str, join: Join, now: float) -> None:
        member = self.externals.admit(peer, join, now)
        with contained(partial(self.blame, member.number, now)):
            self._answer(member, join, now)

    def _answer(self, member: Member, join: Join, now: float) -> None:
        answer = Joined(
            rank=member.number, config=configuration.to_json(self._config), model_folder=self._model_folder,
            weight_version=self._version, pulls=self.pulls(), files=self._model_files,
        )  # fmt: skip
        if not self.externals.tell(member.peer, answer):
            self.externals.forget(member.number)
            return
        self.feed(
            WorkerJoined(worker=member.name, gpus=frozenset(member.gpus), external=True, prepared=False, active=False), now
        )
        if member.number in self.externals.members:  # it was not refused
            self._driver.notice(f"worker {member.name} joined from {join.host} (pid {join.pid})")

    def _reported(self, name: str, event: Report, now: float) -> None:
        if event.rank in self.externals.members:
            self.followers.heard(event.rank, event.weight_version)
        report = WorkerReport(
            worker=name, epoch=event.epoch, running=event.running, waiting=event.waiting, kv_used=event.kv_used,
            kv_total=event.kv_total, weight_version=event.weight_version,
        )  # fmt: skip
        self.feed(report, now)

    # ------------------------------------------------------------------------------------------------- what the run says

    def publishing(self, version: int, now: float) -> None:
        """A version is on its way to all ranks of WORLD: who has no part in publishing is told where it is to be had."""
        there = range(self._driver.layout.world)
        self.followers.announce(version, [self._ready[rank].pulls for rank in there if self._ready[rank].pulls], now)

    def published(self, version: int, now: float) -> None:
        """A version is with all ranks of WORLD."""
        self._version = version
        self.feed(WeightsPublished(version=version), now)
        self.followers.publish(version, now)
        self._failures.forget()

    def resumed(self) -> None:
        """What the collector has counted so far was measured in a job before this one."""
        if self.collector is not None:
            self._ended = self.collector.counts["trajectories"]

    def measured(self, batch: Sequence[Group], makespan_s: float | None, now: float) -> None:
        """A batch is complete. `makespan_s`: its rollout, None if that was not what the run waited for.

        Heard once a second at most: engine steps add up meanwhile, and one batch tells as much as another.
        """
        if self.collector is None or now - self._measured < MEASURE_EVERY_S:
            return
        self._measured = now
        before, self._ended = self._ended, self.collector.counts["trajectories"]
        telemetry = self._telemetry.finish(
            batch, self.collector.env_seconds, miss_share=self.collector.prefixes.take(),
            trajectories=self._ended - before, local_tokens=self.router.append_on_decode_tokens, now=now,
        )  # fmt: skip
        self.feed(StepMeasured(telemetry=telemetry, makespan_s=makespan_s), now)

    # ------------------------------------------------------------------------------------------------- for people

    def roles(self) -> dict[int, str]:
        """What each member is, in one or two words."""
        return role_words(self._driver.layout, self.externals.members, self.service)

    def changed(self) -> bool:
        """Whether any role may have changed since the last call."""
        seen, self._seen = self._seen, self.service.changes if self.service is not None else -1
        return seen != self._seen

    def metrics(self) -> dict[str, Any]:
        """The cluster's part of a step's row."""
        if self.service is None or self.collector is None:
            return {}
        return cluster_metrics(self.service, self.collector) | {
            "external_refused": sum(self.externals.dropped.values()),
            "external_failures": self._failures.count,
            "trace_ended": int(self._player is not None and self._player.over),
        }

    def _finished(self, row: dict[str, Any]) -> None:
        """A decision is done."""
        self._log.write(row)
        if line := decision_line(row):
            self._driver.notice(line)

    # ------------------------------------------------------------------------------------------------- the service's port

    def order(self, worker: str, make: Callable[[int], MemberOrder]) -> int:
        number = self._driver.next_number()
        order = make(number)
        rank = number_of(worker)
        if rank in self.externals.members:
            self.externals.send(rank, order)
        elif rank < self._driver.layout.world:
            if isinstance(order, Leave):
                self._driver.fail(f"rank {rank} does not carry out what it is told")
            self._driver.send(rank, order)
        return number

    def dismiss(self, worker: str, make: Callable[[int], MemberOrder], reason: str) -> None:
        self.order(worker, make)
        if (member := self.externals.members.get(number_of(worker))) is not None:
            self._forget(member, reason)

    def pulls(self) -> list[str]:
        return self.followers.sources(self._ready)

    def requeue(self, sessions: tuple[str, ...]) -> None:
        if self.collector is not None:
            self.collector.requeue(sessions)

    def move(self, session: str, source: str, target: str) -> None:
        if self.collector is not None:
            self.collector.move(session, source, target)

    def trainer_may_begin(self, step: int) -> None:
        self.claim.may_begin = step

    def refuse(self, worker: str, reason: str) -> None:
        number = number_of(worker)
        member = self.externals.members.get(number)
        if member is not None:
            self.externals.tell(member.peer, Refused(reason=reason))
            self.externals.forget(number)
            self._driver.notice(f"worker {worker} is refused: {reason}")
