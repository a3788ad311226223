"""What happens when: the virtual clock and the calls that wait for it.

Owns the order of events: by time, then by when they were entered. It knows nothing of what they do. Invariant: time never goes
back, and what was called off does not happen.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from pearl.clock import VirtualClock

Call = Callable[[], Any]


class Appointment:
    """One call to come; `cancel` calls it off."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Agenda:
    """`happened` counts the calls made."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.happened = 0
        self._heap: list[tuple[float, int, Appointment]] = []
        self._numbers = itertools.count()

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, time: float, call: Call) -> Appointment:
        """`call` at `time`, in seconds; what is past happens next."""
        entry = Appointment(call)
        heapq.heappush(self._heap, (time, next(self._numbers), entry))
        return entry

    def after(self, seconds: float, call: Call) -> Appointment:
        return self.at(self.clock.now() + seconds, call)

    def next_at(self) -> float:
        """When the next call is due; infinite if there is none."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> bool:
        """Makes the next call; False if there is none."""
        while self._heap:
            time, _, entry = heapq.heappop(self._heap)
            call = entry.call
            if call is not None:
                entry.call = None
                self.clock.advance(max(0.0, time - self.clock.now()))
                self.happened += 1
                call()
                return True
        return False
