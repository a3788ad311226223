"""Which serving worker gets a request: the one that holds the session's KV, or the least loaded that its role allows.

Owns a few numbers per worker and which session sits where. It does not know tokens, sockets or clocks, and sends nothing.
Invariant: a session has at most one request in flight, and `in_flight` of a worker is the number of its sessions that do.

Where there are prefill workers, new prompts and long appends go to them, and each with a credit on the decode worker that is
to go on with it; short appends stay with the decode worker that holds the KV. Mixed workers beside them take whole sessions. A
decode worker that has lost the KV gives the append back, and it goes to a prefill worker.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

from pearl.protocol import Role
from pearl.sched.standing import Rank, Standing, names

NOBODY = ""
"""Holds the KV of sessions of which nobody has any; no worker's name."""


@dataclass(slots=True, kw_only=True)
class WorkerLoad:
    """What the router knows of a worker: its own count of requests and tokens placed there, and the last report.

    `capacity` is relative: twice the capacity takes twice the sessions. `promised` sessions are with a prefill worker
    and will come here, with `reserved` tokens. A draining worker gets nothing new, nor does one that is held for a moment.
    """

    in_flight: int = 0
    prompt_tokens: int = 0
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    role: Role = Role.MIXED
    capacity: float = 1.0
    reserved: int = 0
    promised: int = 0
    draining: bool = False
    held: bool = False
    reported: bool = False
    slot: int = 0

    @property
    def takes(self) -> bool:
        """Whether it gets requests."""
        return not self.draining and not self.held


@dataclass(slots=True, kw_only=True)
class _Session:
    name: str
    worker: str
    live: bool = True
    prompt_len: int = 0
    prefiller: str | None = None
    target: str | None = None
    moving_to: str | None = None
    appends: bool = False
    """Its request is with the decode worker that is to have its KV, though prefill workers could compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMove:
    """A running request that should go on elsewhere."""

    session: str
    source: str
    target: str


@dataclass(slots=True, kw_only=True)
class Router:
    """Places requests on workers.

    A session leaves the worker that holds its KV only when that one is behind: its requests exceed the least loaded worker's
    by more than `slack` + 1 for every `tokens_per_request` prompt tokens that would have to be computed again, or it keeps
    requests waiting while the other has none and at least two fewer requests. Appends of up to `append_on_decode_tokens` run
    where the KV is. `block_size` turns free blocks into tokens.
    """

    slack: int = 8
    tokens_per_request: int = 1024
    append_on_decode_tokens: int = 256
    block_size: int = 16
    loads: dict[str, WorkerLoad] = field(default_factory=dict)
    moved: int = 0
    """Sessions placed away from their KV, for the record."""
    without_credit: int = 0
    """Requests sent to prefill workers while no decode worker had room for them."""
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _live: dict[str, dict[str, _Session]] = field(default_factory=dict)
    """By worker: its sessions that have a request in flight."""
    _moving: dict[str, _Session] = field(default_factory=dict)
    """Those that are to go on elsewhere (`moving_to`)."""
    _slots: int = 0
    _standing: Standing = field(default_factory=Standing)

    def add_worker(self, worker: str, role: Role = Role.MIXED, capacity: float = 1.0) -> None:
        """A worker begins to serve; one that is known already starts afresh (ValueError if it still has requests)."""
        if worker in self.loads and self.loads[worker].in_flight:
            raise ValueError(f"worker={worker!r}: has {self.loads[worker].in_flight} requests in flight; lose it first")
        if worker in self.loads:
            self.lose_worker(worker)
        self.loads[worker] = WorkerLoad(role=role, capacity=capacity, slot=self._slots)
        self._live[worker] = {}
        self._slots += 1
        self._stand(worker)

    def set_role(self, worker: str, role: Role, capacity: float = 1.0) -> None:
        """The worker's role from now on; it keeps its sessions until they are handed over. Unknown workers are ignored."""
        if worker in self.loads:
            load = self.loads[worker]
            load.role, load.capacity, load.draining = role, capacity, False
            self._stand(worker)

    def drain(self, worker: str) -> list[str]:
        """The worker gets nothing new; returns the sessions whose requests are there. Unknown workers are ignored."""
        if worker in self.loads:
            self.loads[worker].draining = True
            self._stand(worker)
        return [name for name, session in self._sessions.items() if session.live and session.worker == worker]

    def hold(self, worker: str, held: bool) -> None:
        """The worker gets nothing new for as long as it is held; what it has goes on. Unknown workers are ignored."""
        if worker in self.loads:
            self.loads[worker].held = held
            self._stand(worker)

    @property
    def has_takers(self) -> bool:
        """Whether `place` finds a worker."""
        return self._standing.any()

    def place(self, session_id: str, prompt_len: int) -> str | None:
        """The worker for this session's next request, which counts as in flight until `done`; None without workers.

        If that is a prefill worker, `decode_target` says who is to go on. ValueError if the session has a request in flight
        already.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.live:
            raise ValueError(f"session_id={session_id!r}: has a request in flight on {session.worker!r}")
        if not self._standing.any():
            return None
        worker, target = self._choose(session, prompt_len)
        self.moved += session is not None and session.worker not in (NOBODY, target or worker)
        placed = _Session(name=session_id, worker=worker, prompt_len=prompt_len, target=target)
        alone = target is None and self._standing.holds(worker, Role.DECODE)
        placed.appends = alone and bool(self._standing.of(Role.PREFILL))
        placed.prefiller = worker if target is not None else session.prefiller if session is not None else None
        self._sessions[session_id] = placed
        self._count(placed, +1)
        return worker

    def most_computed(self, session_id: str) -> int | None:
        """How many tokens of the session's request its worker should compute at most: beyond that the prefix is gone for which
        the request was placed there, and it is better given back (`gave_back`). None: all that it takes.

        A block more than may be appended: what does not fill one is never cached.
        """
        session = self._sessions.get(session_id)
        appends = session is not None and session.live and session.appends
        return self.append_on_decode_tokens + self.block_size if appends else None

    def gave_back(self, session_id: str) -> None:
        """The session's request ended unbegun, since its worker has not got its KV any more: no decode worker has. Unknown
        sessions are ignored."""
        self.done(session_id)
        if session_id in self._sessions:
            self._sessions[session_id].worker = NOBODY

    def worker_of(self, session_id: str) -> str | None:
        """Where the session's request is in flight; None if there is none."""
        session = self._sessions.get(session_id)
        return session.worker if session is not None and session.live else None

    def decode_target(self, session_id: str) -> str | None:
        """The decode worker that is to go on with the session's request, which a prefill worker has; else None."""
        session = self._sessions.get(session_id)
        return session.target if session is not None and session.live else None

    def taker(self, session_id: str, source: str, refused: Collection[str] = ()) -> str | None:
        """The worker that is to go on with the session's request, which `source` has and offers; none of those that `refused`
        it. None: nobody else can."""
        session = self._sessions.get(session_id)
        if session is None or not session.live or session.worker != source:
            return None
        for planned in (session.moving_to, session.target):
            if planned in self.loads and self._decodes(self.loads[planned]) and planned != source and planned not in refused:
                return planned
        for role in (Role.DECODE, Role.MIXED):
            others = (name for name in names(self._standing.of(role)) if name != source and name not in refused)
            first = next(others, None)
            if first is not None:
                return next((name for name in chain((first,), others) if self._credit(name) >= session.prompt_len), first)
        return None

    def handed_over(self, session_id: str, worker: str) -> None:
        """The request and its KV are with `worker` now. Unknown sessions and workers are ignored."""
        session = self._sessions.get(session_id)
        if session is None or worker not in self.loads:
            return
        if session.live:
            self._count(session, -1)
        session.worker, session.target = worker, None
        self._stays(session)
        if session.live:
            self._count(session, +1)

    def move_failed(self, session_id: str) -> None:
        """A move that `rebalance` proposed did not come about; the request goes on where it was."""
        if session_id in self._sessions:
            self._stays(self._sessions[session_id])

    def done(self, session_id: str, tokens: int = 0) -> None:
        """The session's request ended; its KV, of `tokens` tokens if they are known, stays where it is. Unknown sessions are
        ignored."""
        session = self._sessions.get(session_id)
        if session is None or not session.live:
            return
        self._count(session, -1)
        session.prompt_len = max(session.prompt_len, tokens)
        session.live, session.target = False, None
        self._stays(session)

    def forget(self, session_id: str) -> None:
        """The session is over."""
        self.done(session_id)
        self._sessions.pop(session_id, None)

    def on_load(self, worker: str, waiting: int, running: int, free_blocks: int) -> None:
        """The worker's own numbers after a step; those of an unknown worker are ignored."""
        if worker in self.loads:
            load = self.loads[worker]
            load.waiting, load.running, load.free_blocks, load.reported = waiting, running, free_blocks, True
            self._stand(worker)

    def lose_worker(self, worker: str) -> list[str]:
        """The worker is gone: returns the sessions whose requests must be placed again, in the order they were placed."""
        here = {name: session for name, session in self._sessions.items() if session.worker == worker}
        for name, session in here.items():
            if session.live:
                self._count(session, -1)
            self._stays(session)
            del self._sessions[name]
        self.loads.pop(worker, None)
        self._live.pop(worker, None)
        self._standing.remove(worker)
        for session in self._sessions.values():
            session.target = None if session.target == worker else session.target
            session.prefiller = None if session.prefiller == worker else session.prefiller
        for session in [one for one in self._moving.values() if one.moving_to == worker]:
            self._stays(session)
        return [name for name, session in here.items() if session.live]

    def rebalance(self) -> list[SessionMove]:
        """Moves of running requests, shortest first, after which no decoding worker has two more than another.

        For the tail of a batch, when nothing new comes that would even things out. Each session moves at most once, and
        not again before `handed_over`, `move_failed` or `done`.
        """
        counts = {name: load.in_flight for name, load in self.loads.items() if self._decodes(load)}
        for session in self._moving.values():
            if session.live and session.worker in counts and session.moving_to in counts:
                counts[session.worker] -= 1
                counts[session.moving_to] += 1
        movable: dict[str, list[tuple[int, str]]] = {}
        """Of those workers that were the fullest so far: their sessions that stay, the shortest last."""
        moves: list[SessionMove] = []
        fullest = [(-count, self.loads[name].slot, name) for name, count in counts.items()]
        emptiest = [(count, self.loads[name].slot, name) for name, count in counts.items()]
        heapify(fullest)
        heapify(emptiest)
        while counts:
            while -fullest[0][0] != counts[fullest[0][2]]:  # told before a move
                heappop(fullest)
            while emptiest[0][0] != counts[emptiest[0][2]]:
                heappop(emptiest)
            source, target = fullest[0][2], emptiest[0][2]
            if counts[source] - counts[target] < 2:
                return moves
            if source not in movable:
                rows = [(one.prompt_len, one.name) for one in self._live[source].values() if one.moving_to is None]
                movable[source] = sorted(rows, reverse=True)
            if not movable[source]:
                return moves
            _, session_id = movable[source].pop()
            session = self._moving[session_id] = self._sessions[session_id]
            session.moving_to = target
            moves.append(SessionMove(session=session_id, source=source, target=target))
            counts[source] -= 1
            counts[target] += 1
            for name in (source, target):
                heappush(fullest, (-counts[name], self.loads[name].slot, name))
                heappush(emptiest, (counts[name], self.loads[name].slot, name))
        return moves

    def _stays(self, session: _Session) -> None:
        """It is not to go on elsewhere, or no longer."""
        session.moving_to = None
        self._moving.pop(session.name, None)

    def _decodes(self, load: WorkerLoad) -> bool:
        return load.role is not Role.PREFILL and load.takes

    def _count(self, session: _Session, sign: int) -> None:
        load = self.loads[session.worker]
        load.in_flight += sign
        load.prompt_tokens += sign * session.prompt_len
        if sign > 0:
            self._live[session.worker][session.name] = session
        else:
            del self._live[session.worker][session.name]
        self._stand(session.worker)
        if session.target is not None:
            self.loads[session.target].promised += sign
            self.loads[session.target].reserved += sign * session.prompt_len
            self._stand(session.target)

    def _choose(self, session: _Session | None, prompt_len: int) -> tuple[str, str | None]:
        """(worker, decode target or None)."""
        prefill, decode, whole = (self._standing.of(role) for role in (Role.PREFILL, Role.DECODE, Role.MIXED))
        if not prefill or not decode:  # nobody to split it with: whoever is there does all of it
            role = Role.MIXED if whole else Role.DECODE if decode else Role.PREFILL
            return self._affine(session, prompt_len, role), None
        if session is not None and self._standing.holds(session.worker, Role.MIXED):
            return self._affine(session, prompt_len, Role.MIXED), None
        if session is not None and session.worker in self.loads and self.loads[session.worker].takes:
            short = prompt_len - session.prompt_len <= self.append_on_decode_tokens
            decodes = self._standing.holds(session.worker, Role.DECODE)
            if decodes and short and not self._behind(session, prompt_len, self._least(decode)):
                return session.worker, None
        elif whole and self._crowding(self._least(whole)) <= self._crowding(self._least(decode)):
            return self._least(whole), None
        return self._prefiller(session, prompt_len), self._target(session, prompt_len)

    def _affine(self, session: _Session | None, prompt_len: int, role: Role) -> str:
        least = self._least(self._standing.of(role))
        if session is None or not self._standing.holds(session.worker, role) or self._behind(session, prompt_len, least):
            return least
        return session.worker

    def _behind(self, session: _Session, prompt_len: int, least: str) -> bool:
        """The worker that holds the session's KV has so much more to do than `least` that computing it again is better."""
        holder, other = self.loads[session.worker], self.loads[least]
        gap = holder.in_flight - other.in_flight
        crowded = holder.waiting > 0 and other.waiting == 0 and gap >= 2
        return crowded or gap > self.slack + prompt_len // self.tokens_per_request

    def _prefiller(self, session: _Session | None, prompt_len: int) -> str:
        """The one that has the session's prompt in its cache, unless it is far behind."""
        least = self._least(self._standing.of(Role.PREFILL))
        if session is None or session.prefiller is None or not self._standing.holds(session.prefiller, Role.PREFILL):
            return least
        gap = self.loads[session.prefiller].in_flight - self.loads[least].in_flight
        return least if gap > self.slack + prompt_len // self.tokens_per_request else session.prefiller

    def _target(self, session: _Session | None, prompt_len: int) -> str:
        """The holder of the KV if it has room, else the least loaded that has, else the least loaded."""
        rows = self._standing.of(Role.DECODE)
        if session is not None and self._standing.holds(session.worker, Role.DECODE):
            # what the holder has of the session already needs no room
            if self._credit(session.worker) >= prompt_len - session.prompt_len:
                if not self._behind(session, prompt_len, self._least(rows)):
                    return session.worker
        able = next((name for name in names(rows) if self._credit(name) >= prompt_len), None)
        self.without_credit += able is None
        return able or self._least(rows)

    def _credit(self, name: str) -> float:
        """Tokens for which there is room and which nobody was promised; unlimited while it has not reported."""
        load = self.loads[name]
        return load.free_blocks * self.block_size - load.reserved if load.reported else float("inf")

    def _crowding(self, name: str) -> float:
        load = self.loads[name]
        return (load.in_flight + load.promised) / load.capacity

    def _least(self, rows: Sequence[tuple[Rank, str]]) -> str:
        return rows[0][1]

    def _stand(self, name: str) -> None:
        """Something of this worker has changed."""
        load = self.loads.get(name)
        if load is None or not load.takes:
            self._standing.remove(name)
        else:
            self._standing.put(name, load.role, self._rank_of(name))

    def _rank_of(self, name: str) -> tuple[float, int, int, int]:
        load = self.loads[name]
        return self._crowding(name), load.prompt_tokens, -load.free_blocks, load.slot
