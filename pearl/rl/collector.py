"""Collects trajectories: drives rollouts between the environments and the serving workers until each has ended.

Owns the rollouts in flight. It does not decide when one may start (admission), what becomes of it (buffer) or where a
request runs (router), and knows ranks only as names to send to. Invariant: every trajectory that was started is in exactly
one of: waiting for its environment, waiting for a worker's answer, waiting for a worker, or handed out ended. A token counts
only if it comes from the worker that has the request. Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pearl.protocol import Abort, HandedOff, HandOver, NewRequest, Role, Submit, TakenOver, Tokens, TokenUpdate
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.envs.pool import EnvironmentPool
from pearl.rl.handoffs import HandOffs
from pearl.rl.heartbeat import LONGEST_GAP_S
from pearl.rl.rollout import Rollout, trajectory_of
from pearl.rl.types import Trajectory
from pearl.sched.found_prefixes import FoundPrefixes
from pearl.sched.router import Router

LOOK_EVERY_S = 1.0
UNSERVED = 0.75
"""A worker that does not serve a request for this share of what would end the job is named before."""


class Collector:
    """`new_rollout(trajectory, purpose)` makes one; `send(worker, message)` reaches a serving member. `counts` only rise.

    `ended_tokens`: sampled ones in trajectories that have ended. `late_updates`: of requests that nobody waits for any more, or
    that another worker has; `interrupted`: requests that ended unfinished, `requeued`: whose worker was lost,
    `returned`: that a decode worker gave back, since it had lost their prefix; all of them were placed again.
    """

    def __init__(
        self,
        new_rollout: Callable[[Trajectory, str], Rollout],
        *,
        pool: EnvironmentPool,
        router: Router,
        send: Callable[[str, Any], None],
        move_limit_s: float = 60.0,
    ) -> None:
        self.counts = {
            "generated_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "late_updates": 0, "late_tokens": 0,
            "interrupted": 0, "requeued": 0, "returned": 0, "ended_tokens": 0, "trajectories": 0,
        }  # fmt: skip
        self.engine_seconds = 0.0
        self.prefixes = FoundPrefixes()
        self._apart: set[str] = set()
        """Sessions whose prompt a worker computes that decodes nothing."""
        self._new_rollout = new_rollout
        self._pool = pool
        self._router = router
        self._send = send
        self.handoffs = HandOffs(router, send, self._has, move_limit_s)
        self._unplaced: list[NewRequest] = []
        self._rollouts: dict[str, Rollout] = {}
        self._ended: list[Trajectory] = []
        self._outgoing: dict[str, list[NewRequest]] = {}
        self._aborts: dict[str, list[str]] = {}
        self._waits: dict[str, tuple[str, int, float]] = {}
        """Session -> its open request, its tokens so far, and for how long it has been like that."""
        self._looked = -math.inf

    @property
    def env_seconds(self) -> float:
        """Time spent inside environments so far."""
        return self._pool.seconds

    @property
    def playing(self) -> int:
        """Trajectories in flight."""
        return len(self._rollouts)

    @property
    def at_engine(self) -> int:
        """Trajectories that wait for a worker's answer; the others wait for their environment."""
        return sum(rollout.request_id is not None for rollout in self._rollouts.values())

    @property
    def unplaced(self) -> int:
        """Requests that wait for any worker to serve."""
        return len(self._unplaced)

    def token_books(self) -> dict[str, int]:
        """What became of every sampled token that reached us: in an ended trajectory, in one under way (`playing_tokens`), late
        (of a request that nobody awaited any more), or lost, of which there must be none."""
        counts, playing = self.counts, sum(sum(one.trajectory.loss_mask) for one in self._rollouts.values())
        lost = counts["generated_tokens"] - counts["late_tokens"] - counts["ended_tokens"] - playing
        return {"playing_tokens": playing, "late_tokens": counts["late_tokens"], "lost_tokens": lost}

    def resumed(self, counts: Mapping[str, int]) -> None:
        """Goes on counting after a checkpoint: what was under way then has been settled, it is played again."""
        self.counts.update(counts)
        self.counts["ended_tokens"] = self.counts["generated_tokens"] - self.counts["late_tokens"]

    def start(self, trajectory_id: str, *, group_id: int, env_seed: int, purpose: str) -> None:
        """Begins an episode; `purpose` is "train" or "eval"."""
        trajectory = Trajectory(trajectory_id=trajectory_id, group_id=group_id, env_seed=env_seed)
        self._rollouts[trajectory_id] = self._new_rollout(trajectory, purpose)
        self._pool.reset(trajectory_id, env_seed)

    def on_tokens(self, worker: str, event: Tokens) -> None:
        """Takes what one engine step of a worker gave."""
        self.engine_seconds += event.seconds
        self._router.on_load(worker, waiting=event.waiting, running=event.running, free_blocks=event.free_blocks)
        for update in event.updates:
            self.counts["generated_tokens"] += len(update.token_ids)
            self._on_update(worker, update)

    def excess(self, worker: str, event: Tokens | HandedOff) -> str:
        """Why this cannot be what the worker was asked for; "" if it can. What is not awaited from it does not count anyway."""
        if isinstance(event, HandedOff):
            states = [one.state for one in event.transfers if self._has(worker, one.request_id)]
            wrong = (self._rollouts[trajectory_of(one.request_id)].mismatch(one) for one in states)
            return next(filter(None, wrong), "")
        sampled: Counter[str] = Counter()
        for update in event.updates:
            session = trajectory_of(update.request_id)
            rollout = self._rollouts.get(session)
            if rollout is None or self._router.worker_of(session) != worker:
                continue
            sampled[update.request_id] += len(update.token_ids)
            if why := rollout.excess(update.request_id, sampled[update.request_id], update.finish_reason):
                return why
        return ""

    def on_handed_off(self, worker: str, event: HandedOff) -> None:
        """A worker offers requests to others."""
        for transfer in event.transfers:
            self.handoffs.offered(worker, trajectory_of(transfer.request_id), transfer)

    def on_taken_over(self, worker: str, event: TakenOver) -> None:
        """A worker says whether it goes on with a request that was offered to it."""
        end = self.handoffs.answered(worker, event)
        if end is not None:
            self._end_of(end)

    def unserved(self, now: float, limit_s: float) -> list[tuple[str, str]]:
        """Workers with a request that has got no token for `UNSERVED` of `limit_s`, though nothing waits there or none of its
        requests has got any, and which request. Looks once a second; a pause of this process itself hardly counts."""
        limit_s *= UNSERVED
        if now - self._looked < LOOK_EVERY_S:
            return []
        passed = min(now - self._looked, LOOK_EVERY_S + LONGEST_GAP_S)
        self._looked, before, self._waits = now, self._waits, {}
        stand: dict[str, list[tuple[float, str]]] = {}
        for session, rollout in self._rollouts.items():
            worker = self._router.worker_of(session)
            if rollout.request_id is not None and worker in self._router.loads:
                state = rollout.request_id, len(rollout.trajectory.token_ids)
                *same, waited = before.get(session, ("", 0, 0.0))
                self._waits[session] = (*state, waited + passed if tuple(same) == state else 0.0)
                stand.setdefault(worker, []).append((self._waits[session][2], rollout.request_id))
        late = []
        for worker, waits in stand.items():
            (longest, request_id), shortest = max(waits), min(waits)[0]
            if longest > limit_s and (shortest > limit_s or not self._router.loads[worker].waiting):
                late.append((worker, f"request {request_id} has got no token there for {longest:.0f} s"))
        return late

    def move(self, session: str, source: str, target: str) -> None:
        """Has a running request handed over; the router has been told whereto."""
        rollout = self._rollouts.get(session)
        if rollout is None or rollout.request_id is None or self._router.worker_of(session) != source:
            self._router.move_failed(session)
            return
        self.handoffs.asked(session, rollout.request_id, source)
        self._send(source, HandOver(request_ids=[rollout.request_id]))

    def expire(self, now: float) -> None:
        """Time passes: what has been on its way between two workers for too long stays where it was."""
        for end in self.handoffs.expire(now):
            self._end_of(end)

    def lost(self, worker: str) -> None:
        """A worker is gone. Its requests are placed again by `requeue`; what was on its way to it stays where it was."""
        self._outgoing.pop(worker, None)
        self._aborts.pop(worker, None)
        for end in self.handoffs.lost(worker):
            self._end_of(end)

    def requeue(self, sessions: Iterable[str]) -> None:
        """The worker of these sessions' requests is gone: they are placed again, from their last token, if that was not all."""
        for session in sessions:
            rollout = self._rollouts.get(session)
            if rollout is not None and rollout.request_id is not None:
                self.counts["requeued"] += 1
                action = rollout.complete()
                if action is not None:
                    self._pool.step(session, action)
                else:
                    self._ask(rollout.resume())

    def poll_environments(self, now: float) -> None:
        """Takes what the environments answered."""
        for outcome in self._pool.poll(now):
            self._on_outcome(outcome)

    def flush(self) -> None:
        """Sends what has gathered: one message of a kind per worker, one per environment process."""
        if self._unplaced and self._router.has_takers:
            unplaced, self._unplaced = self._unplaced, []
            for request in unplaced:
                rollout = self._rollouts.get(trajectory_of(request.request_id))
                if rollout is not None and rollout.request_id == request.request_id:
                    self._ask(request)
        for worker, requests in self._outgoing.items():
            self._send(worker, Submit(requests=requests))
        for worker, request_ids in self._aborts.items():
            self._send(worker, Abort(request_ids=request_ids))
        self._outgoing, self._aborts = {}, {}
        self._pool.flush()

    def give_up(self, trajectory_id: str, why: str) -> None:
        """Ends a trajectory that nobody waits for any more, as failed; one that has ended is left as it is."""
        rollout = self._rollouts.get(trajectory_id)
        if rollout is not None:
            request_id = rollout.request_id
            rollout.fail(why)
            self._end(rollout, request_id)

    def take_ended(self) -> list[Trajectory]:
        """The trajectories that ended since the last call, done or failed."""
        ended, self._ended = self._ended, []
        return ended

    def _has(self, worker: str, request_id: str) -> bool:
        """Whether this request is awaited, and from this worker."""
        session = trajectory_of(request_id)
        rollout = self._rollouts.get(session)
        return rollout is not None and rollout.request_id == request_id and self._router.worker_of(session) == worker

    def _on_update(self, worker: str, update: TokenUpdate) -> None:
        session = trajectory_of(update.request_id)
        rollout = self._rollouts.get(session)
        if rollout is None or rollout.request_id != update.request_id or self._router.worker_of(session) != worker:
            self.counts["late_updates"] += 1
            self.counts["late_tokens"] += len(update.token_ids)
            if update.finish_reason is None:
                self._aborts.setdefault(worker, []).append(update.request_id)
        elif self.handoffs.heard(worker, update):
            self._count(session, rollout, update)

    def _end_of(self, end: TokenUpdate) -> None:
        """What a worker said at its end, some time ago, counts now."""
        session = trajectory_of(end.request_id)
        self._count(session, self._rollouts[session], end)

    def _count(self, session: str, rollout: Rollout, update: TokenUpdate) -> None:
        if update.finish_reason in ("stop", "length"):
            apart, cached = session in self._apart, update.num_cached_tokens
            self.prefixes.add(known=rollout.known, generated=rollout.generated, cached=cached, apart=apart)
        returned = update.finish_reason == "abort" and not update.token_ids and self._gives_back(session)
        action = rollout.on_update(update)
        if update.finish_reason is not None:
            self.counts["cached_tokens"] += update.num_cached_tokens
            self._router.done(session, len(rollout.trajectory.token_ids))
        if action is not None:
            self._pool.step(session, action)
        elif rollout.phase == "interrupted":
            self.counts["returned" if returned else "interrupted"] += 1
            if returned:
                self._router.gave_back(session)
            self._ask(rollout.resume())
        elif rollout.finished:
            self._end(rollout, update.request_id)

    def _most_computed(self, session: str) -> int | None:
        """As the router has it; but what was asked for before is not given back."""
        return self._router.most_computed(session) if self._rollouts[session].asked_once else None

    def _gives_back(self, session: str) -> bool:
        """Whether a worker that ends this request has given it back, and was not called back itself: then the router has been
        told to place nothing there."""
        load = self._router.loads.get(self._router.worker_of(session) or "")
        may = self._most_computed(session) is not None and load is not None and load.takes
        return may and not self._rollouts[session].begun

    def _on_outcome(self, outcome: EnvOutcome) -> None:
        rollout = self._rollouts.get(outcome.episode_id)
        if rollout is None:
            self.counts["late_updates"] += 1
            return
        request_id = rollout.request_id
        starting = rollout.phase == "new" and outcome.error is None
        request = rollout.start(outcome.observation) if starting else rollout.on_outcome(outcome)
        if request is not None:
            self._ask(request)
        elif rollout.finished:
            self._end(rollout, request_id)

    def _ask(self, request: NewRequest | None) -> None:
        if request is None:
            return
        length = request.prompt_len
        session = trajectory_of(request.request_id)
        worker = self._router.place(session, length)
        if worker is None:
            self._unplaced.append(request)
            return
        apart = self._router.loads[worker].role is Role.PREFILL
        (self._apart.add if apart else self._apart.discard)(session)
        if (most := self._most_computed(session)) is not None:
            request = msgspec.structs.replace(request, most_computed=most)
        self.counts["prompt_tokens"] += length
        self._outgoing.setdefault(worker, []).append(request)

    def _end(self, rollout: Rollout, request_id: str | None) -> None:
        """`request_id`: the last one asked for; a worker that is still at it (the environment failed meanwhile) lets it go."""
        name = rollout.trajectory.trajectory_id
        worker = self._router.worker_of(name)
        if request_id is not None:
            self.handoffs.ended(request_id)
        if worker is not None and request_id is not None:
            self._aborts.setdefault(worker, []).append(request_id)
        self._pool.discard(name)
        self._router.forget(name)
        self._apart.discard(name)
        del self._rollouts[name]
        self.counts["ended_tokens"] += sum(rollout.trajectory.loss_mask)
        self.counts["trajectories"] += 1
        self._ended.append(rollout.trajectory)
