"""Which serving worker gets a request: the one that holds the session's KV, or the least loaded.

Owns a few numbers per worker and which session sits where. It does not know tokens, sockets or clocks, and sends nothing.
Invariant: a session has at most one request in flight, and `in_flight` of a worker is the number of its sessions that do.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class WorkerLoad:
    """What the router knows of a worker: its own count of requests and tokens placed there, and the last report."""

    in_flight: int = 0
    prompt_tokens: int = 0
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0


@dataclass(slots=True, kw_only=True)
class _Session:
    worker: str
    live: bool = True
    prompt_len: int = 0


@dataclass(slots=True, kw_only=True)
class Router:
    """Places requests on workers.

    A session leaves the worker that holds its KV only when that one is behind: its requests exceed the least loaded worker's
    by more than `slack` + 1 for every `tokens_per_request` prompt tokens that would have to be computed again, or it keeps
    requests waiting while the other has none and at least two fewer requests.
    """

    slack: int = 8
    tokens_per_request: int = 1024
    loads: dict[str, WorkerLoad] = field(default_factory=dict)
    moved: int = 0
    """Sessions placed away from their KV, for the record."""
    _sessions: dict[str, _Session] = field(default_factory=dict)

    def add_worker(self, worker: str) -> None:
        """A worker begins to serve; one that is known already starts afresh (ValueError if it still has requests)."""
        if worker in self.loads and self.loads[worker].in_flight:
            raise ValueError(f"worker={worker!r}: has {self.loads[worker].in_flight} requests in flight; lose it first")
        self.loads[worker] = WorkerLoad()

    def place(self, session_id: str, prompt_len: int) -> str | None:
        """The worker for this session's next request, which counts as in flight until `done`; None without workers.

        ValueError if the session has a request in flight already.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.live:
            raise ValueError(f"session_id={session_id!r}: has a request in flight on {session.worker!r}")
        if not self.loads:
            return None
        worker = self._choose(session, prompt_len)
        self.moved += session is not None and session.worker != worker
        self._sessions[session_id] = _Session(worker=worker, prompt_len=prompt_len)
        load = self.loads[worker]
        load.in_flight += 1
        load.prompt_tokens += prompt_len
        return worker

    def worker_of(self, session_id: str) -> str | None:
        """Where the session's request is in flight; None if there is none."""
        session = self._sessions.get(session_id)
        return session.worker if session is not None and session.live else None

    def done(self, session_id: str) -> None:
        """The session's request ended; its KV stays where it is. Unknown sessions are ignored."""
        session = self._sessions.get(session_id)
        if session is None or not session.live:
            return
        session.live = False
        load = self.loads[session.worker]
        load.in_flight -= 1
        load.prompt_tokens -= session.prompt_len

    def forget(self, session_id: str) -> None:
        """The session is over."""
        self.done(session_id)
        self._sessions.pop(session_id, None)

    def on_load(self, worker: str, waiting: int, running: int, free_blocks: int) -> None:
        """The worker's own numbers after a step; those of an unknown worker are ignored."""
        if worker in self.loads:
            load = self.loads[worker]
            load.waiting, load.running, load.free_blocks = waiting, running, free_blocks

    def lose_worker(self, worker: str) -> list[str]:
        """The worker is gone: returns the sessions whose requests must be placed again, in the order they were placed."""
        here = {name: session for name, session in self._sessions.items() if session.worker == worker}
        for name in here:
            del self._sessions[name]
        self.loads.pop(worker, None)
        return [name for name, session in here.items() if session.live]

    def _choose(self, session: _Session | None, prompt_len: int) -> str:
        names = list(self.loads)
        least = min(names, key=lambda name: self._rank_of(name, names))
        if session is None or session.worker not in self.loads:
            return least
        holder, other = self.loads[session.worker], self.loads[least]
        gap = holder.in_flight - other.in_flight
        crowded = holder.waiting > 0 and other.waiting == 0 and gap >= 2
        far_behind = gap > self.slack + prompt_len // self.tokens_per_request
        return least if crowded or far_behind else session.worker

    def _rank_of(self, name: str, names: list[str]) -> tuple[int, int, int, int]:
        load = self.loads[name]
        return load.in_flight, load.prompt_tokens, -load.free_blocks, names.index(name)
