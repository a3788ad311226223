"""The scheduler of the cluster: events in, commands out. A live service and a simulator are two drivers of this one object.

Owns the table (`state`), the router's set of workers, what was decided (`log`) and when to decide; what to decide is
`proposal.py`. It knows no sockets and no clock. Invariants: what is urgent (GPUs that are wanted back, workers that are lost)
is never weighed and never waits for a transition under way; what is optional waits for it; every order to a worker raises its
epoch and belongs to a Decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pearl.sched.commands import (
    Admit,
    ClusterCommand,
    GiveBack,
    Leave,
    Member,
    MoveSession,
    Refuse,
    Requeue,
    TrainerMayBegin,
)
from pearl.sched.decision import Decision, DecisionLog
from pearl.sched.events import (
    Activity,
    BatchProgress,
    ClusterEvent,
    OrderDone,
    Ordered,
    StepMeasured,
    Tick,
    TrainingBegins,
    TrainingFinished,
    TrainingStarted,
    WorkerGone,
    WorkerJoined,
    WorkerReclaimed,
    WorkerReport,
    WorkerRole,
    Zone,
)
from pearl.sched.orders import Order, kind_of, word_order
from pearl.sched.policy import SwitchGate, Verdict, return_lead_s
from pearl.sched.predictor import Prediction, residual
from pearl.sched.profile import RuntimeProfile
from pearl.sched.proposal import Adviser, Proposal, Situation
from pearl.sched.router import Router
from pearl.sched.routing import Routing
from pearl.sched.settings import SchedulerSettings
from pearl.sched.shape_times import ShapeTimes
from pearl.sched.state import ClusterState, Worker


class ClusterScheduler:
    """`on_event` is all that a driver calls; it may read the rest."""

    def __init__(self, settings: SchedulerSettings, profile: RuntimeProfile, router: Router | None = None) -> None:
        self.settings, self.profile = settings, profile
        self.state = ClusterState()
        self.router = router or Router()
        self.log = DecisionLog()
        self.prediction: Prediction | None = None
        """Of the shape that was last chosen."""
        self.verdict = Verdict(act=False, reason="nothing was weighed yet")
        """The last one, also of what was not done."""
        self.batch = profile.workload().batch
        self._gate = SwitchGate(settings.pd)
        self._unfinished = self.batch
        self._due = math.inf
        self._recalled = False
        """Borrowed GPUs were called back since the trainer last finished: they are not borrowed again before it does."""
        self._considered_at = -math.inf
        self._waiting = ""
        """Why to consider again when the transition under way is over."""
        self._tries: dict[str, int] = {}
        self._failed_at: dict[str, float] = {}
        self._routing = Routing(self.router)
        self._shapes = ShapeTimes()
        self._adviser = Adviser(settings, profile, self.batch)

    def on_event(self, event: ClusterEvent, now: float) -> list[ClusterCommand]:
        """What is to be done about it, in this order. `now` in seconds, never going back."""
        commands = self._heard(event, now)
        if commands or not isinstance(event, WorkerReport | BatchProgress):  # there are very many of these
            self._shapes.note(self.state.shape(), now)
        return commands

    def _heard(self, event: ClusterEvent, now: float) -> list[ClusterCommand]:
        match event:
            case StepMeasured():
                self._learn(event, now)
                return self._later("step measured", now)  # the trainer may take its GPUs back this very moment
            case BatchProgress():
                return self._progress(event, now)
            case Tick():
                return self._tick(now)
        before = self.state.workers.get(getattr(event, "worker", ""))
        try:
            changed = self.state.apply(event, now)
        except ValueError as error:
            if not isinstance(event, WorkerJoined):
                raise
            return [Refuse(worker=event.worker, reason=str(error))]
        if not changed:
            return []
        match event:
            case WorkerJoined(worker=name):
                if self.state.workers[name].serves:
                    self._routing.serves(self.state.workers[name])
                    self._foresee()
                return self._later("worker joined", now)
            case OrderDone():
                assert before is not None
                return self._answered(before, event, now)
            case WorkerReclaimed():
                return self._leave([event.worker], "GPUs reclaimed", now) + self._later("GPUs reclaimed", now)
            case WorkerGone():
                assert before is not None
                return self._lost(event.worker, "" if before.leaving else event.reason or "gone", now)
            case TrainingBegins():
                commands = self._give_back("training begins", now) + self._let_train(now)
                return commands + self._later("training begins", now)
            case TrainingFinished():
                self._due, self._recalled = math.inf, False
                return self._consider("training finished", now)
        return []

    def adviser(self) -> Adviser:
        """Of what is known now; the same one while nothing is learned."""
        if not self._adviser.holds(self.settings):
            self._adviser = Adviser(self.settings, self.profile, self.batch)
        return self._adviser

    def _foresee(self) -> None:
        """Until the next decision: what decode workers append themselves in the split pool that is there."""
        shape = self.state.shape()
        if shape.prefill and shape.decode:
            prediction = self.adviser().predictor.predict(shape)
            self.router.append_on_decode_tokens = self.adviser().longest_append(prediction)

    def situation(self, now: float) -> Situation:
        """What a proposal is made for. Workers that failed an order lately, or are to go, are left out."""
        usable = [worker for worker in self.state.workers.values() if self._usable(worker, now)]
        lend = self.state.training == "idle" and not self._recalled and self._unfinished > 0
        lend = lend and self._due - now > self._lead_s() + self.profile.change_s("borrow", 1)
        late = now - self.settings.prepare_timeout_s
        preparing = {one.at for one in self.log.open.values() if one.kind == "expand" and one.at >= late}
        ready = [one for one in usable if one.zone is Zone.DEDICATED and one.prepared]
        return Situation(
            serving=list(self.state.serving()),
            joiners=[one for one in ready if one.ordered_at not in preparing],  # groups come together, but for stragglers
            lendable=[one for one in usable if one.lendable] if lend else [],
            shape=self.state.shape(),
            batch=self.batch,
            unfinished=self._unfinished,
        )

    def _usable(self, worker: Worker, now: float) -> bool:
        idle = worker.activity is Activity.INACTIVE and not worker.leaving and worker.role is not WorkerRole.TRAINING
        rested = now - self._failed_at.get(worker.name, -math.inf) >= self.settings.pd.cooldown_s
        return idle and rested and not self._expiring(worker, now)

    def _later(self, cause: str, now: float) -> list[ClusterCommand]:
        """Considers with the next tick, so that what comes together is weighed together; at once if nobody can serve."""
        if self.state.shape().mode == "broken":
            return self._consider(cause, now)
        self._waiting = self._waiting or cause
        return []

    def _consider(self, cause: str, now: float) -> list[ClusterCommand]:
        """Weighs everything that is optional, unless a transition is under way; what is broken does not wait for that."""
        shape = self.state.shape()
        moving = any(worker.activity is Activity.TRANSITIONING for worker in self.state.serving())
        if moving and shape.mode != "broken":
            self._waiting = self._waiting or cause
            return []
        self._waiting, self._considered_at = "", now
        situation = self.situation(now)
        if not situation.serving and not situation.joiners and not situation.lendable:
            return self._expand(cause, now)
        proposal = self.adviser().propose(situation, self._gate, now)
        self.verdict = proposal.verdict
        if proposal.target is not None:
            self.prediction = proposal.target.prediction
            self.router.append_on_decode_tokens = self.adviser().longest_append(self.prediction)
        commands = self._carry_out(proposal, situation, cause, now)
        return commands + self._expand(cause, now)

    def _carry_out(self, proposal: Proposal, situation: Situation, cause: str, now: float) -> list[ClusterCommand]:
        plan, target, verdict = proposal.plan, proposal.target, proposal.verdict
        if plan is None or target is None or not (plan.roles or plan.join):
            return []
        choice = {"switch": self.settings.pd.mode, "borrow": self.settings.borrow.workers}.get(proposal.kind, "")
        if choice in ("auto", "all_or_none") and not verdict.forced and not self.profile.measured:
            self.verdict = replace(verdict, act=False, reason="nothing was measured yet")
            return []
        cost = self.adviser().switch_cost_s(plan) + (verdict.cost_s if proposal.kind == "borrow" else 0.0)
        decision = Decision(
            number=self.log.next_number(),
            at=now,
            kind=proposal.kind,
            cause=cause,
            before=str(situation.shape),
            after=str(target.shape),
            predicted_s=(proposal.stay_s, target.prediction.makespan_s),
            gain_s=verdict.gain_s,
            cost_s=cost,
            threshold_s=verdict.threshold_s,
            forced=verdict.forced,
            workers_changed=plan.workers_changed, roles_changed=plan.roles_changed,
            moved_kv_tokens=plan.moved_kv_tokens, unsure=target.prediction.unsure,
        )  # fmt: skip
        if plan.roles_changed:
            self._gate.changed(target.shape, now)
        self.log.begin(decision, set(plan.roles))
        self._routing.spread(target.prediction, [one for one in self.state.serving() if one.was_active])
        orders = [self._order(name, role, True, decision.number, now) for name, role in plan.roles.items()]
        return self._commands(orders, decision.number)

    def _expand(self, cause: str, now: float) -> list[ClusterCommand]:
        """Has external workers prepared, in the background."""
        bare = [one for one in self.state.workers.values() if self._usable(one, now) and one.bare]
        if not bare:
            return []
        seen = self.state.departures, self.state.external_seconds
        count, verdict = self.adviser().expand(self.situation(now), bare, seen, now)
        self.verdict = verdict if not verdict.act else self.verdict
        if not count:
            return []
        names = [worker.name for worker in bare[:count]]
        cost = self.profile.change_s("prepare", count) + self.profile.change_s("finalise", count)
        number = self._begin("expand", cause, names, verdict.gain_s, cost, now, forced=verdict.forced)
        return self._commands((self._order(one.name, one.role, False, number, now) for one in bare[:count]), number)

    def _give_back(self, cause: str, now: float) -> list[ClusterCommand]:
        """Calls all borrowed GPUs back that have not been called yet."""
        borrowed = [one for one in self.state.workers.values() if one.zone is Zone.OVERLAP and one.serves and one.on_device]
        if not borrowed:
            return []
        self._recalled = True
        names = [worker.name for worker in borrowed]
        number = self._begin("give_back", cause, names, 0.0, self.profile.change_s("give_back", len(names)), now, forced=True)
        return self._commands((self._order(one.name, one.next_role, False, number, now) for one in borrowed), number)

    def _leave(self, names: Iterable[str], cause: str, now: float) -> list[ClusterCommand]:
        names = [name for name in names if not self.state.workers[name].leaving]
        if not names:
            return []
        number = self._begin("leave", cause, names, 0.0, 0.0, now, forced=True)
        rows = [self.state.workers[name] for name in names]
        return self._commands((self._order(one.name, one.next_role, False, number, now, leaving=True) for one in rows), number)

    def _begin(self, kind: str, cause: str, names: list[str], gain_s: float, cost_s: float, now: float, forced: bool) -> int:
        """A decision without a proposal: shapes and KV are what the table says."""
        gone = [self.state.workers[name] for name in names if self.state.workers[name].serves and kind != "expand"]
        decision = Decision(
            number=self.log.next_number(),
            at=now,
            kind=kind,
            cause=cause,
            before=str(self.state.shape()),
            after=str(self.state.shape(without=[worker.name for worker in gone])),
            predicted_s=(self.prediction.makespan_s if self.prediction else math.inf, math.inf),
            gain_s=gain_s, cost_s=cost_s, forced=forced,
            workers_changed=len(names), moved_kv_tokens=sum(worker.kv_used for worker in gone),
        )  # fmt: skip
        self.log.begin(decision, set(names))
        return decision.number

    def _order(self, name: str, role: WorkerRole, active: bool, number: int, now: float, leaving: bool = False) -> Order:
        """Enters the order in the table and words it. Who is to stop gets no new requests from here on."""
        was = self.state.workers[name]
        self.state.apply(Ordered(worker=name, role=role, active=active, leaving=leaving), now)
        order = word_order(self.state, was, role, active=active, leaving=leaving, decision=number, due=self._due)
        if isinstance(order, GiveBack | Leave):
            self.router.drain(name)
        return order

    def _commands(self, orders: Iterable[Order], number: int) -> list[ClusterCommand]:
        """New members are admitted together, after what the others have to do."""
        orders = list(orders)
        members = tuple(order for order in orders if isinstance(order, Member))
        commands: list[ClusterCommand] = [order for order in orders if not isinstance(order, Member)]
        if members:
            commands.append(Admit(decision=number, members=members, weight_version=self.state.weight_version))
        return commands

    def _answered(self, before: Worker, event: OrderDone, now: float) -> list[ClusterCommand]:
        """A worker did, or could not do, what it was told. After a failure nothing optional is tried before the next tick."""
        name, decision, commands = event.worker, self.log.of(event.worker), list[ClusterCommand]()
        self.log.answered(name, now, "" if event.ok else f"{name}: {event.error or 'failed'}")
        again = not (event.ok or before.leaving or before.next_active) and before.prepared  # its GPUs are wanted
        if not again:
            self._tries.pop(name, None)
        if event.ok and event.seconds > 0 and decision is not None and not before.leaving:
            kind = kind_of(before)
            changed = decision.roles_changed if kind == "switch" else decision.workers_changed
            self.profile.observe_change(kind, event.seconds, max(1, changed))
        worker = self.state.workers.get(name)
        if worker is not None and worker.serves:
            self._routing.serves(worker)
            commands += self._even_out() if event.ok and not before.was_active else []
        else:
            commands += self._requeue(name)
        if event.ok or before.leaving:
            return commands + self._let_train(now) + self._later("transition over", now)
        rested = now - self.settings.pd.cooldown_s
        self._failed_at = {one: at for one, at in self._failed_at.items() if at > rested} | {name: now}
        return commands + (self._again([name], now) if again else [])

    def _lost(self, name: str, reason: str, now: float) -> list[ClusterCommand]:
        """A worker is no longer there; `reason` is empty if that was ordered."""
        self._tries.pop(name, None)
        self.log.answered(name, now, f"{name}: {reason}" if reason else "")
        return self._requeue(name) + self._let_train(now) + self._later(f"{name} lost" if reason else f"{name} left", now)

    def _requeue(self, name: str) -> list[ClusterCommand]:
        sessions = self.router.lose_worker(name)
        return [Requeue(sessions=tuple(sessions))] if sessions else []

    def _let_train(self, now: float) -> list[ClusterCommand]:
        """The trainer may begin as soon as nobody has anything on its GPUs."""
        overlap = (one for one in self.state.workers.values() if one.zone is Zone.OVERLAP)
        busy = any(one.on_device for one in overlap if one.role is not WorkerRole.TRAINING)
        if self.state.training != "wanted" or busy:
            return []
        self.state.apply(TrainingStarted(), now)
        return [TrainerMayBegin(step=self.state.training_step)]

    def _tick(self, now: float) -> list[ClusterCommand]:
        rows = list(self.state.workers.values())
        late = [one.name for one in rows if one.activity is Activity.TRANSITIONING and now - one.ordered_at > self._limit(one)]
        commands = self._again(late, now)
        ends = [one.name for one in self.state.workers.values() if self._expiring(one, now)]
        commands += self._leave(ends, "GPUs reclaimed", now)
        commands += self._return_in_time(now)
        due = now - self._considered_at >= self.settings.consider_s
        return commands + (self._consider(self._waiting or "time passed", now) if due or commands or self._waiting else [])

    def _limit(self, worker: Worker) -> float:
        """Seconds for which an answer is waited for. Who is leaving has until its GPUs are taken."""
        limit = self.settings.change_timeout_s if worker.prepared else self.settings.prepare_timeout_s
        return max(limit, worker.deadline - worker.ordered_at) if worker.leaving and worker.deadline is not None else limit

    def _again(self, names: list[str], now: float) -> list[ClusterCommand]:
        """Repeats orders that were not carried out; who has had enough tries counts as lost and is told to leave."""
        commands: list[ClusterCommand] = []
        for name in names:
            worker = self.state.workers[name]
            self._tries[name] = self._tries.get(name, 1) + 1
            active = worker.next_active and worker.activity is Activity.TRANSITIONING
            if self._tries[name] <= self.settings.tries:
                decision = self.log.of(name)
                number = decision.number if decision else self._begin("again", f"{name} failed", [name], 0.0, 0.0, now, True)
                commands += self._commands([self._order(name, worker.next_role, active, number, now)], number)
            else:
                commands.append(Leave(decision=0, worker=name, epoch=worker.epoch + 1, deadline=now))
                self.state.apply(WorkerGone(worker=name), now)
                commands += self._lost(name, "does not answer", now)
        return commands

    def _expiring(self, worker: Worker, now: float) -> bool:
        return worker.deadline is not None and worker.deadline - now <= self.settings.change_timeout_s

    def _progress(self, event: BatchProgress, now: float) -> list[ClusterCommand]:
        self._unfinished = min(self.batch, max(0, event.unfinished))
        self._due = math.inf if event.due is None else event.due
        commands = self._return_in_time(now)
        if 0 < self._unfinished <= self.settings.tail_share * self.batch:
            commands += self._even_out()
        return commands

    def _even_out(self) -> list[ClusterCommand]:
        """Where no new sessions come that would do so by themselves: in the tail, and when somebody has joined in mid-batch."""
        return [MoveSession(session=one.session, source=one.source, target=one.target) for one in self.router.rebalance()]

    def _lead_s(self) -> float:
        """How long before the trainer needs them borrowed GPUs are called back."""
        borrowed = sum(one.zone is Zone.OVERLAP for one in self.state.serving()) or 1
        expected, cautious = (self.profile.change_s("give_back", borrowed, cautious=sure) for sure in (False, True))
        return return_lead_s(expected, cautious, self.settings.borrow)

    def _return_in_time(self, now: float) -> list[ClusterCommand]:
        wanted = self.state.training == "wanted" or self._due - now <= self._lead_s()
        commands = self._give_back("the trainer is due", now) if wanted else []
        return commands + self._later("the trainer is due", now) if commands else []

    def _learn(self, event: StepMeasured, now: float) -> None:
        if self.profile.measured and event.makespan_s is not None:  # what was predicted from guesses tells nothing
            ended = now if event.ended is None else event.ended
            spent = self._shapes.between(ended - event.makespan_s, ended)
            if (seen := residual(self.adviser().predictor, spent, event.makespan_s)) is not None:
                self.log.residuals.append(seen)
            known = residual(self.adviser().hindsight(event.telemetry), spent, event.makespan_s)
            if known is not None and self.settings.pd.predictor == "full":  # the other one is corrected by nothing
                self.profile.observe_residual(known.ratio, known.shape.prefill > 0, known.share)
        self.profile.observe(event.telemetry, self.prediction.lost_share if self.prediction is not None else 0.0)
