"""Which shapes a cluster has had, and for how long: what a measured makespan is to be compared with.

Owns the changes of shape, as far back as anybody asks. It predicts nothing and knows no workers. Invariant: what it says of a
period adds up to the part of it for which it was told.
"""

from __future__ import annotations

from collections import deque

from pearl.sched.shape import Shape

REMEMBERED = 1024
"""Changes; more than a batch has."""


class ShapeTimes:
    """`note` the present shape whenever it may have changed; `between` two moments."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, Shape]] = deque(maxlen=REMEMBERED)

    def note(self, shape: Shape, now: float) -> None:
        """It is like this from now on."""
        if not self._changes or self._changes[-1][1] != shape:
            self._changes.append((now, shape))

    def between(self, began: float, ended: float) -> dict[Shape, float]:
        """Seconds in each shape that there was, those in the order in which they came."""
        spent: dict[Shape, float] = {}
        ends = [at for at, _ in list(self._changes)[1:]] + [ended]
        for (at, shape), until in zip(self._changes, ends, strict=False):
            seconds = min(until, ended) - max(at, began)
            if seconds > 0:
                spent[shape] = spent.get(shape, 0.0) + seconds
        return spent
