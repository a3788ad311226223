"""The way to newer weights for a worker that has no part in publishing: pulls them beside the engine's steps.

Owns one thread that brings versions into the worker's own snapshot, and their loading between two steps. Whom to ask is told
with each order. Invariants: the engine is touched by the calling thread alone; what fails leaves engine and snapshot with what
they had; a version that has come once is not asked for again.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from pearl.engine.engine import Engine
from pearl.engine.weights.pull import Holder, fetch, load
from pearl.engine.weights.snapshot import Snapshot

TOTAL_TIMEOUT_S = 60.0
TIMEOUT_S = 10.0
PATIENCE_S = 20.0
"""For so long who serves already waits for one holder to have the version, or a slot, before it asks the next."""


def holders_of(pulls: list[str]) -> list[Holder]:
    """"host:port" -> whom to ask. What is none is left out: one worker's word must not cost another the others. ValueError if
    nothing is left."""
    parts = [(address, *address.rpartition(":")[::2]) for address in pulls]
    holders = [Holder(name=name, host=host, port=int(port)) for name, host, port in parts if host and port.isdecimal()]
    if pulls and not holders:
        raise ValueError(f"pulls={pulls}: must be host:port")
    return holders


class PullFetcher:
    """`waking.Fetcher` for an Engine; `name` is how the worker calls itself. `total_timeout_s` bounds each order.

    Who serves is told of a new version before its parent in the tree has it, and waits for that one (`patience_s` at most),
    lest all go to the trainers' machine. Who wakes is told of workers that have it, and takes it from the first with a slot.
    """

    def __init__(
        self, engine: Engine, snapshot: Snapshot, name: str, *, total_timeout_s: float = TOTAL_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self._engine, self._snapshot, self._name = engine, snapshot, name
        self._waits = {"total_timeout_s": total_timeout_s, "timeout_s": timeout_s}
        self._patience_s = patience_s
        self._reader = snapshot.reader()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._wanted = -1
        self._began = 0.0
        self._bytes = 0

    def begin(self, version: int, pulls: list[str]) -> None:
        """ValueError if there is nobody to ask. What an order before this one has begun is waited for in `poll`."""
        holders = holders_of(pulls)
        if not holders and self._newest() < version:
            raise ValueError(f"weight_version={version}: there is nobody to pull it from")
        self._wanted, self._holders, self._error = version, holders, None
        self._began, self._bytes = time.perf_counter(), 0

    def poll(self) -> dict[str, Any] | None:
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._newest() < self._wanted:
            patience_s = self._patience_s if self._engine.weight_version >= 0 else 0.0
            self._thread = threading.Thread(target=self._pull, args=(self._holders, patience_s), name="fetch", daemon=True)
            self._thread.start()
            return None
        start = time.perf_counter()
        if self._engine.weight_version < self._newest():
            load(self._engine, self._reader)
        now = time.perf_counter()
        return {"seconds": now - self._began, "commit_s": now - start, "bytes": float(self._bytes)}

    def cancel(self) -> None:
        """What is under way goes on into the snapshot, within its limits; nobody waits for it."""
        self._wanted, self._error = -1, None

    def _newest(self) -> int:
        return max(self._snapshot.versions, default=-1)

    def _pull(self, holders: list[Holder], patience_s: float) -> None:
        try:
            report = fetch(self._snapshot, holders, name=self._name, patience_s=patience_s, **self._waits)
            self._bytes += report.nbytes
        except (OSError, RuntimeError, ValueError) as error:
            if holders is self._holders:  # else nobody waits for it: the next order has its own
                self._error = error
