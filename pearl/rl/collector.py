"""Collects trajectories: drives rollouts between the environments and the serving workers until each has ended.

Owns the rollouts in flight. It does not decide when one may start (admission), what becomes of it (buffer) or where a
request runs (router), and knows ranks only as names to send to. Invariant: every trajectory that was started is in exactly
one of: waiting for its environment, waiting for a worker, or handed out ended. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pearl.protocol import Abort, NewRequest, Submit, Tokens, TokenUpdate
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.envs.pool import EnvironmentPool
from pearl.rl.rollout import Rollout, trajectory_of
from pearl.rl.types import Trajectory
from pearl.sched.router import Router


class Collector:
    """`new_rollout(trajectory, purpose)` makes one; `send(worker, message)` reaches a serving rank. `counts` only rise."""

    def __init__(
        self,
        new_rollout: Callable[[Trajectory, str], Rollout],
        *,
        pool: EnvironmentPool,
        router: Router,
        send: Callable[[str, Any], None],
    ) -> None:
        self.counts = {"generated_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "late_updates": 0}
        self.engine_seconds = 0.0
        self._new_rollout = new_rollout
        self._pool = pool
        self._router = router
        self._send = send
        self._rollouts: dict[str, Rollout] = {}
        self._ended: list[Trajectory] = []
        self._outgoing: dict[str, list[NewRequest]] = {}
        self._aborts: dict[str, list[str]] = {}

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
            self._on_update(update)

    def poll_environments(self, now: float) -> None:
        """Takes what the environments answered."""
        for outcome in self._pool.poll(now):
            self._on_outcome(outcome)

    def flush(self) -> None:
        """Sends what has gathered: one message of a kind per worker, one per environment process."""
        for worker, requests in self._outgoing.items():
            self._send(worker, Submit(requests=requests))
        for worker, request_ids in self._aborts.items():
            self._send(worker, Abort(request_ids=request_ids))
        self._outgoing, self._aborts = {}, {}
        self._pool.flush()

    def take_ended(self) -> list[Trajectory]:
        """The trajectories that ended since the last call, done or failed."""
        ended, self._ended = self._ended, []
        return ended

    def _on_update(self, update: TokenUpdate) -> None:
        rollout = self._rollouts.get(trajectory_of(update.request_id))
        if rollout is None or rollout.request_id != update.request_id:
            self.counts["late_updates"] += 1
            return
        action = rollout.on_update(update)
        if update.finish_reason is not None:
            self.counts["cached_tokens"] += update.num_cached_tokens
            self._router.done(rollout.trajectory.trajectory_id)
        if action is not None:
            self._pool.step(rollout.trajectory.trajectory_id, action)
        elif rollout.phase == "interrupted":
            self._ask(rollout.resume())
        elif rollout.finished:
            self._end(rollout, update.request_id)

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
        length = len(request.prompt_token_ids)
        worker = self._router.place(trajectory_of(request.request_id), length)
        if worker is None:
            raise RuntimeError(f"request {request.request_id}: no serving worker is left")
        self.counts["prompt_tokens"] += length
        self._outgoing.setdefault(worker, []).append(request)

    def _end(self, rollout: Rollout, request_id: str | None) -> None:
        """`request_id`: the last one asked for; a worker that is still at it (the environment failed meanwhile) lets it go."""
        name = rollout.trajectory.trajectory_id
        worker = self._router.worker_of(name)
        if worker is not None and request_id is not None:
            self._aborts.setdefault(worker, []).append(request_id)
        self._pool.discard(name)
        self._router.forget(name)
        del self._rollouts[name]
        self._ended.append(rollout.trajectory)
