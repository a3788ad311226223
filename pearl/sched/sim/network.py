"""KV on its way between workers: how long transfers take that share the bandwidth of their ends.

Owns the flows under way. Each worker sends and receives at most `bytes_per_s`; a flow gets the smaller of its equal shares at
both ends, anew whenever another one there begins or ends. It knows no requests. Invariant: a flow ends once: `done`, or
`failed` because an end was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pearl.sched.sim.agenda import Agenda, Appointment

Call = Callable[[], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    source: str
    target: str
    left: float
    """Bytes at `since`, at `rate` bytes per second from then on."""
    done: Call
    failed: Call
    rate: float = 0.0
    since: float = 0.0
    end: Appointment | None = None


class Network:
    """`base_s` passes before the first byte."""

    def __init__(self, agenda: Agenda, *, bytes_per_s: float, base_s: float) -> None:
        self._agenda, self._bytes_per_s, self._base_s = agenda, bytes_per_s, base_s
        self._out: dict[str, list[Flow]] = {}
        self._in: dict[str, list[Flow]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._out.values()))

    def send(self, source: str, target: str, num_bytes: float, *, done: Call, failed: Call) -> Flow:
        flow = Flow(source=source, target=target, left=num_bytes + self._base_s * self._bytes_per_s, done=done, failed=failed)
        flow.since = self._agenda.now
        self._out.setdefault(source, []).append(flow)
        self._in.setdefault(target, []).append(flow)
        self._share(flow)
        return flow

    def lose(self, worker: str) -> int:
        """All flows from and to this worker fail; returns how many."""
        lost = list(dict.fromkeys((*self._out.get(worker, ()), *self._in.get(worker, ()))))
        for flow in lost:
            self._remove(flow)
        for flow in lost:
            flow.failed()
        return len(lost)

    def fail(self, flow: Flow) -> None:
        """This one fails; nothing if it has ended."""
        if flow in self._out.get(flow.source, ()):
            self._remove(flow)
            flow.failed()

    def _finish(self, flow: Flow) -> None:
        self._remove(flow)
        flow.done()

    def _remove(self, flow: Flow) -> None:
        if flow.end is not None:
            flow.end.cancel()
        self._out[flow.source].remove(flow)
        self._in[flow.target].remove(flow)
        self._share(flow)

    def _share(self, changed: Flow) -> None:
        """New rates for those that have an end in common with `changed`."""
        now = self._agenda.now
        for flow in dict.fromkeys((*self._out[changed.source], *self._in[changed.target])):
            rate = self._bytes_per_s / max(len(self._out[flow.source]), len(self._in[flow.target]))
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.rate, flow.since = rate, now
            if flow.end is not None:
                flow.end.cancel()
            flow.end = self._agenda.after(max(0.0, flow.left) / rate, partial(self._finish, flow))
