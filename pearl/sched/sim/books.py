"""What must add up in a simulated run, whatever happens to its workers: trajectories, tokens, requests, blocks, the table.

Owns the sums; it changes nothing. For tests after every event, and for the results at the end. Errors say what does not add up.
"""

from __future__ import annotations

from pearl.engine.request import RequestStatus
from pearl.sched.cluster_scheduler import ClusterScheduler
from pearl.sched.router import Router
from pearl.sched.sim.dispatch import Dispatcher
from pearl.sched.sim.fleet import Fleet
from pearl.sched.sim.recorder import Recorder
from pearl.sched.sim.rollout import Rollout


def tokens_lost(recorder: Recorder, rollout: Rollout) -> int:
    """Tokens that were drawn and are in no trajectory, trained or dropped; 0 unless something is wrong."""
    held = sum(episode.generated for episode in rollout.episodes())
    counts = rollout.counts
    return recorder.counts["generated"] - held - counts["tokens_taken"] - counts["tokens_dropped"]


def check_trajectories(recorder: Recorder, rollout: Rollout, dispatcher: Dispatcher) -> None:
    """Each that was started is under way, complete, taken or dropped, and no token is missing."""
    counts = rollout.counts
    there = rollout.in_flight + rollout.held + counts["taken"] + counts["stale"] + counts["failed"]
    if counts["started"] != there:
        raise RuntimeError(f"{counts['started']} trajectories were started, {there} are in the books: {dict(counts)}")
    lost = tokens_lost(recorder, rollout)
    if lost:
        raise RuntimeError(f"{lost} tokens were drawn and are in no trajectory")
    for name, episode in dispatcher.live.items():
        if name != episode.name or len(episode.ids) != episode.length:
            raise RuntimeError(f"trajectory {name}: has {len(episode.ids)} tokens, its turns add up to {episode.length}")


def check_requests(dispatcher: Dispatcher, fleet: Fleet, router: Router) -> None:
    """Each trajectory has one request at most, at the worker that the router thinks of."""
    at_workers = 0
    for episode in dispatcher.live.values():
        worker, waits = router.worker_of(episode.name), dispatcher.waiting.get(episode.name) is episode
        if (worker is not None) != bool(episode.request_id) or waits != episode.waiting or (waits and worker is not None):
            state = f"request {episode.request_id!r}, waiting {episode.waiting} {waits}, at {worker}"
            raise RuntimeError(f"trajectory {episode.name}: is in no place or in two: {state}")
        if worker is None:
            continue
        at_workers += 1
        node = fleet.nodes.get(worker)
        if node is None or not node.worker.serving:
            raise RuntimeError(f"trajectory {episode.name}: its request is with {worker}, which does not serve")
        if episode.request_id not in node.worker.core.requests and not node.worker.has_post:
            raise RuntimeError(f"trajectory {episode.name}: {worker} does not know its request {episode.request_id}")
    counted = sum(load.in_flight for load in router.loads.values())
    if counted != at_workers:
        raise RuntimeError(f"the router counts {counted} requests, {at_workers} are with workers")
    _check_owners(dispatcher, fleet, router)


def _check_owners(dispatcher: Dispatcher, fleet: Fleet, router: Router) -> None:
    """No core steps a request that goes on elsewhere."""
    episodes = {episode.request_id: episode for episode in dispatcher.live.values() if episode.request_id}
    for name, node in fleet.nodes.items():
        for request in node.worker.core.requests.values() if node.worker.serving else ():
            if request.status in (RequestStatus.PARKED, RequestStatus.FINISHED):
                continue
            episode = episodes.get(request.request_id)
            if episode is None or router.worker_of(episode.name) != name:
                raise RuntimeError(f"{name}: steps request {request.request_id}, which is not its own")


def check_engines(fleet: Fleet, scheduler: ClusterScheduler) -> None:
    """Every core's own books, and the table."""
    for node in fleet.nodes.values():
        if node.worker.serving:
            node.worker.core.check_integrity()
    scheduler.state.check()
