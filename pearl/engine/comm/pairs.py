"""Groups of two outside of any WORLD, each with a number of its own, for traffic with whoever may die, stall or lie.

Owns how the two members meet, and how a group is left. It does not know what they exchange. Invariants: a member that fails
costs its own group alone; addresses of another generation (the number of a group) are refused; no call here takes longer than
its timeout, whatever the other member does.

The two tell each other their addresses over a connection that they have already, and need no common store: a TCPStore's
client has no limit of its own while a stopped server owes it an answer.

A gloo group must not be given up while a collective is under way: its destructor waits for that collective until the group's
timeout, in whatever thread drops it. So a group that was left in the middle is kept until then, out of the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator
from pearl.engine.comm.groups import LOCAL, connect

CPU = torch.device("cpu")
SIZE = 2
POLL_S = 0.001
MARGIN_S = 1.0
"""How long after its timeout a collective that nobody waited for has certainly ended."""

_left: list[tuple[float, GroupCommunicator]] = []
"""(when none of its collectives can be under way any more, a group that was left in the middle)."""
_left_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where one member of a generation can be connected to: an entry of a store, as gloo writes it."""

    generation: int
    key: str
    value: bytes


class Pair:
    """One group of two: `comm`, None once it was left, and the `generation` it has."""

    def __init__(self, comm: GroupCommunicator, generation: int, timeout_s: float) -> None:
        self.comm: GroupCommunicator | None = comm
        self.generation = generation
        self._timeout_s = timeout_s

    def close(self, *, settled: bool) -> None:
        """Leaves the group; at once. `settled`: all collectives are through, so that its memory can go now."""
        comm, self.comm = self.comm, None
        now = time.monotonic()
        with _left_lock:
            if comm is not None and not settled:
                _left.append((now + self._timeout_s + MARGIN_S, comm))
            _left[:] = [entry for entry in _left if entry[0] > now]


def form_pair(
    rank: int, generation: int, exchange: Callable[[Address], Address], timeout_s: float, own_host: str = LOCAL
) -> Pair:
    """Member `rank` of the two; a collective in the group may take `timeout_s`, as may this.

    `exchange` gives the other member our address and returns its. `own_host`: what of this machine the other can reach.
    CollectiveError if the other does not come, or comes with another generation; what `exchange` raises.
    """
    start = time.monotonic()
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    joining = _Joining(lambda: Pair(connect(store, rank, SIZE, CPU, timeout_s, own_host), generation, timeout_s))
    try:
        while not (keys := store.list_keys()):
            if time.monotonic() - start > timeout_s or joining.failed:
                raise CollectiveError(f"generation {generation}: gloo has no address of this member")
            time.sleep(POLL_S)
        theirs = exchange(Address(generation=generation, key=keys[0], value=store.get(keys[0])))
        if theirs.generation != generation:
            raise CollectiveError(f"generation {theirs.generation} came, this is generation {generation}")
        store.set(theirs.key, theirs.value)
    except BaseException:
        joining.abandon()
        raise
    return joining.result(max(POLL_S, timeout_s - (time.monotonic() - start)), f"connecting generation {generation}")


class _Joining:
    """Connecting, in a thread of its own, which is left alone when it takes too long.

    gloo does not keep its limit while it connects to a member that has gone in between.
    """

    def __init__(self, work: Callable[[], Pair]) -> None:
        self._work = work
        self._lock, self._done = threading.Lock(), threading.Event()
        self._abandoned = False
        self._pair: Pair | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="pair").start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def result(self, timeout_s: float, what: str) -> Pair:
        """CollectiveError if it failed, or is not through within `timeout_s`."""
        if not self._done.wait(timeout_s):
            self.abandon()
            raise CollectiveError(f"{what}: not through within {timeout_s:.1f} s")
        if self._pair is None:
            raise CollectiveError(f"{what}: {self._error}") from self._error
        return self._pair

    def abandon(self) -> None:
        """Nobody will ask for the result."""
        with self._lock:
            self._abandoned = True
            if self._pair is not None:
                self._pair.close(settled=True)

    def _run(self) -> None:
        try:
            pair = self._work()
        except Exception as error:
            self._error = error
        else:
            with self._lock:
                self._pair = pair
                if self._abandoned:
                    pair.close(settled=True)
        self._done.set()
