"""What the cluster scheduler tells its router: who serves, in which role, and for what share of the sessions.

Owns the shares of a hybrid's workers. It decides nothing: shares are a prediction's, roles the table's. Invariant: a worker is
entered once, however often it is told that it serves; only its role and share change then.
"""

from __future__ import annotations

from collections.abc import Iterable

from pearl.protocol import Role
from pearl.sched.events import WorkerRole
from pearl.sched.predictor import Prediction
from pearl.sched.router import Router
from pearl.sched.state import Worker


class Routing:
    """`serves` says that a worker does, `spread` how sessions are to be shared from now on."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._capacity: dict[WorkerRole, float] = {}

    def serves(self, worker: Worker) -> None:
        """The router gets to know a worker that serves, or its new role."""
        role, capacity = Role(str(worker.role)), self._capacity.get(worker.role, 1.0)
        if worker.name in self._router.loads:
            self._router.set_role(worker.name, role, capacity)
        else:
            self._router.add_worker(worker.name, role, capacity)

    def spread(self, prediction: Prediction, there: Iterable[Worker]) -> None:
        """In a hybrid: how many trajectories a decode worker is to have for each of a mixed one's. Who is `there` already
        may keep its role, and gets its share at once."""
        shape, share = prediction.shape, prediction.split_share
        if shape.mode == "hybrid" and 0 < share < 1:
            self._capacity = {WorkerRole.DECODE: share / shape.decode, WorkerRole.MIXED: (1 - share) / shape.mixed}
        else:
            self._capacity = {}
        for worker in there:
            self.serves(worker)
