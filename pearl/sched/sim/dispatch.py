"""Requests between trajectories and workers: placed by the real router, handed over by the real cores' offers.

Owns where each request is, and transfers of KV on their way. It carries out and decides nothing: who gets a request is the
router's choice, whether there is room the target core's. Invariants: a trajectory has at most one request, in one place; no
token that was drawn is lost; every transfer ends, and both ends hear of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from pearl.engine.moving import Export
from pearl.engine.request import Request, RequestStatus, RequestUpdate, SchedulerOutput
from pearl.engine.steady import SteadyCore
from pearl.engine.token_runs import TokenRuns
from pearl.engine.travel import SAME
from pearl.sched.router import Router
from pearl.sched.sim.agenda import Agenda
from pearl.sched.sim.episode import Episode
from pearl.sched.sim.network import Flow, Network
from pearl.sched.sim.plans import SimSettings
from pearl.sched.sim.pricing import StepPrice
from pearl.sched.sim.recorder import Recorder
from pearl.sched.sim.worker import SimWorker


@dataclass(slots=True, eq=False)
class Transfer:
    """An offer of a request, and its way. `core`: the source's at the time. `target`: where it is offered or accepted.

    `given`: the target has the request, and its KV is coming. `fixed`: the router said where to, nobody else is asked.
    """

    transfer_id: str
    episode: Episode
    source: SimWorker
    core: SteadyCore
    export: Export
    fixed: bool = False
    target: SimWorker | None = None
    taker: SteadyCore | None = None
    given: bool = False
    refused: set[str] = field(default_factory=set)
    flow: Flow | None = None


class Dispatcher:
    """`turn_over` is called with each episode whose turn's tokens are complete."""

    def __init__(self, settings: SimSettings, agenda: Agenda, router: Router, network: Network, recorder: Recorder) -> None:
        self._settings, self._agenda, self._router = settings, agenda, router
        self._network, self._recorder = network, recorder
        self.workers: dict[str, SimWorker] = {}
        self.live: dict[str, Episode] = {}
        """All trajectories under way, by session; `rollout.py` enters and removes them."""
        self.turn_over: Callable[[Episode], None] = lambda episode: None
        self.counts: Counter[str] = Counter()
        self.waiting: dict[str, Episode] = {}
        """Requests that nobody could be asked to take yet."""
        self.closed = 0
        """Groups of workers that are being admitted: new requests wait."""
        self.transfers: dict[str, Transfer] = {}
        self._episodes: dict[str, Episode] = {}
        self._chance = random.Random(f"transfers {settings.seed}")

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, episode: Episode) -> None:
        """The episode's next request, or what is left of the last one, goes to whom the router says; waits for one."""
        worker = None if self.closed else self._router.place(episode.name, len(episode.ids))
        if worker is None:
            episode.waiting = True
            self.waiting[episode.name] = episode
            return
        episode.waiting = False
        request = episode.next_request(self._agenda.now, self._router.most_computed(episode.name))
        self._episodes[request.request_id] = episode
        self._recorder.placed(self.workers[worker].role, episode)
        self.workers[worker].post(lambda core: core.add_request(request))

    def retry(self) -> None:
        """Places what waits, as far as that is possible now."""
        if self.closed or not self._router.loads:
            return
        waiting, self.waiting = self.waiting, {}
        for episode in waiting.values():
            self.submit(episode)

    def requeue(self, sessions: tuple[str, ...]) -> None:
        """Their worker is gone: they go on elsewhere, from their last token."""
        for name in sessions:
            self._resubmit(self._find(name))

    def _resubmit(self, episode: Episode) -> None:
        self._episodes.pop(episode.request_id, None)
        self.counts["resubmitted"] += 1
        episode.request_id, episode.again = "", True
        self.submit(episode)

    def forget(self, episode: Episode) -> None:
        """The trajectory is over, or starts anew; it has no request."""
        self._router.forget(episode.name)

    def _find(self, session: str) -> Episode:
        return self.live[session]

    # ------------------------------------------------------------------------------------------------ what workers say

    def stepped(self, worker: SimWorker, output: SchedulerOutput, cost: StepPrice, updates: list[RequestUpdate]) -> None:
        drawn, prompts, episodes = 0, 0, self._episodes
        for update in updates:
            episode, count = episodes[update.request_id], len(update.token_ids)
            if count:
                prompts += episode.prompted
                episode.draw(count, update.weight_versions[0])
                drawn += count
        self._recorder.stepped(worker.name, cost, output.num_steps, len(output.preempted), drawn, prompts)
        for update in updates:
            if update.completion is not None:
                self._completed(episodes[update.request_id], update)
        core = worker.core
        self._router.on_load(worker.name, len(core.scheduler.waiting), len(core.scheduler.running), worker.free_blocks)

    def _completed(self, episode: Episode, update: RequestUpdate) -> None:
        completion = update.completion
        assert completion is not None
        if completion.finish_reason == "abort":
            self._returned(episode)
            return
        if completion.finish_reason != "length":
            raise RuntimeError(f"request {update.request_id!r} ended with {completion.finish_reason}: {completion.error}")
        del self._episodes[update.request_id]
        self._recorder.request_over(completion.num_cached_tokens, episode)
        self._router.done(episode.name, len(episode.ids))
        self.turn_over(episode)

    def _returned(self, episode: Episode) -> None:
        """A decode worker gives the request back: it has lost its prefix. It is placed again, by who computes prompts."""
        del self._episodes[episode.request_id]
        self.counts["returned"] += 1
        self._router.gave_back(episode.name)
        episode.request_id, episode.again = "", True
        self._agenda.after(self._settings.overhead_s, lambda: self.submit(episode))

    def offered(self, worker: SimWorker, export: Export) -> None:
        """A request that does not stay where it is: offered to whom the router chooses."""
        episode = self._episodes[export.request.request_id]
        transfer = Transfer(export.transfer_id, episode, worker, worker.core, export)
        self.transfers[export.transfer_id] = transfer
        self._offer(transfer, self._router.taker(episode.name, worker.name))

    # ------------------------------------------------------------------------------------------------ hand-overs

    def move(self, session: str, source: str, target: str) -> None:
        """The router's wish: this running request goes on elsewhere with its KV."""
        worker, episode = self.workers.get(source), self.live.get(session)
        if worker is None or not worker.serving or episode is None:
            self._router.move_failed(session)
            return
        worker.post(lambda core: self._export(worker, episode, target))

    def _export(self, worker: SimWorker, episode: Episode, target: str) -> None:
        request = worker.core.requests.get(episode.request_id)
        if request is None or request.status not in (RequestStatus.RUNNING, RequestStatus.WAITING):
            self._router.move_failed(episode.name)
            return
        export = worker.core.offer(request, self._agenda.now)
        export.taken = True
        transfer = Transfer(export.transfer_id, episode, worker, worker.core, export, fixed=True)
        self.transfers[export.transfer_id] = transfer
        self._offer(transfer, target)

    def _offer(self, transfer: Transfer, name: str | None) -> None:
        worker = None if name is None else self.workers.get(name)
        if name is not None and (worker is None or not worker.serving or worker is transfer.source):
            transfer.refused.add(name)
            self._next_taker(transfer)
        elif worker is None:
            self._keep(transfer)
        else:
            transfer.target = worker
            worker.post(lambda core: self._take_over(transfer, worker, core))

    def _next_taker(self, transfer: Transfer) -> None:
        taker = self._router.taker(transfer.episode.name, transfer.source.name, transfer.refused)
        self._offer(transfer, None if transfer.fixed else taker)

    def _keep(self, transfer: Transfer) -> None:
        """Nobody takes it: it goes on where it is."""
        del self.transfers[transfer.transfer_id]
        self.counts["refused_handoffs"] += 1
        self._router.handed_over(transfer.episode.name, transfer.source.name)
        self._answer(transfer, ok=False)

    def _answer(self, transfer: Transfer, ok: bool, arrived: bool = True) -> None:
        if transfer.source.core is transfer.core:
            transfer.source.post(lambda core: core.finish_export(transfer.transfer_id, ok, arrived))

    def _take_over(self, transfer: Transfer, worker: SimWorker, core: SteadyCore) -> None:
        """Between two steps of the target: it takes the request in, if it has room."""
        if self.transfers.get(transfer.transfer_id) is not transfer or transfer.given:
            return
        if transfer.export.transfer_id not in transfer.core.exports:  # lapsed, or its request has ended
            del self.transfers[transfer.transfer_id]
            if transfer.episode.request_id == transfer.export.request.request_id:  # else its session has gone on since
                self._router.handed_over(transfer.episode.name, transfer.source.name)
            return
        export, now = transfer.export, self._agenda.now
        arrival = core.take_in(
            moved(export.request, now),
            transfer_id=transfer.transfer_id,
            num_tokens=export.num_tokens,
            version=export.weight_version,
            reservation_id=None,
            expires=now + self._settings.engine.transfer_deadline_s,
        )
        if arrival is None:
            transfer.refused.add(worker.name)
            self._next_taker(transfer)
            return
        transfer.given, transfer.taker = True, core
        self._router.handed_over(transfer.episode.name, worker.name)
        self._answer(transfer, ok=True, arrived=False)
        held = arrival.num_held if self._settings.transfer == "append" else 0
        tokens = max(0, export.num_tokens - held)
        transfer.source.charge(self._settings.costs.hand_over.give_s)
        worker.charge(float(self._settings.costs.taking_s(tokens)))
        self._send(transfer, worker, tokens)

    def _send(self, transfer: Transfer, worker: SimWorker, tokens: int) -> None:
        self.counts["transfers"] += 1
        self.counts["transferred_tokens"] += tokens
        costs, faults = self._settings.costs, self._settings.faults
        fails = faults.transfer > 0 and self._chance.random() < faults.transfer
        if costs.hand_over.copies:
            self._agenda.after(costs.transfer_base_s, lambda: self._over(transfer, ok=not fails))
            return
        num_bytes = tokens * costs.kv_bytes_per_token
        transfer.flow = flow = self._network.send(
            transfer.source.name,
            worker.name,
            num_bytes,
            done=lambda: self._over(transfer, ok=True),
            failed=lambda: self._over(transfer, ok=False),
        )
        if fails:
            self._agenda.after(num_bytes / costs.transfer_bytes_per_s / 2, lambda: self._network.fail(flow))

    def _over(self, transfer: Transfer, ok: bool) -> None:
        """All of the KV is there, or will never be: then it is computed again from the tokens."""
        self.transfers.pop(transfer.transfer_id, None)
        self.counts["failed_transfers"] += not ok
        self._answer(transfer, ok=True)
        worker, core = transfer.target, transfer.taker
        assert worker is not None
        if worker.core is core:
            worker.post(lambda core: arrive(core, transfer.transfer_id, ok))

    # ------------------------------------------------------------------------------------------------ workers that stop

    def interrupt(self, worker: SimWorker) -> None:
        """Between two steps of a worker that stops serving: all of its requests go on elsewhere, from their last token."""
        stopped = [self._find(name) for name in self._router.drain(worker.name)]
        worker.sleep()
        self.lose_transfers(worker)
        self.counts["interrupted"] += len(stopped)
        for episode in stopped:
            self._router.done(episode.name)
        for episode in stopped:
            self._resubmit(episode)

    def lose_transfers(self, worker: SimWorker) -> None:
        """This worker sends and takes in nothing any more."""
        self._network.lose(worker.name)
        for transfer in [one for one in self.transfers.values() if not one.given]:
            if transfer.source is worker:
                del self.transfers[transfer.transfer_id]
            elif transfer.target is worker:
                transfer.refused.add(worker.name)
                self._next_taker(transfer)


def moved(request: Request, now: float) -> Request:
    """The request as another engine gets it (`engine.travel`), without making its runs of tokens a list."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in SAME}
    ids = cast(TokenRuns, request.token_ids).copy()
    return Request(
        request_id=request.request_id,
        token_ids=cast(Any, ids),
        block_hashes=request.block_hashes,
        logprobs=list(request.logprobs),
        weight_versions=list(request.weight_versions),
        arrival=now,
        **fields,
    )


def arrive(core: SteadyCore, transfer_id: str, ok: bool) -> None:
    """The end of a transfer at its target, if that has not given it up meanwhile."""
    arrival = core.arrivals.get(transfer_id)
    if arrival is None:
        return
    if not arrival.live:
        core.release_arrival(transfer_id)
    elif ok:
        core.arrived(transfer_id)
    else:
        core.give_up(transfer_id)
        core.release_arrival(transfer_id)
