"""Time as a value: the live system reads `WallClock`, tests and the simulator move `VirtualClock`.

Planners take `now` as a parameter and never see either; only drivers hold a Clock.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start, never going back."""

    def now(self) -> float: ...


class WallClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that only moves when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves forward; a negative amount raises ValueError."""
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: a clock cannot go back, must be >= 0")
        self._now += seconds
