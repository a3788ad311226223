"""The trainers' claim on their ranks: when they are wanted, and when others may use them.

Owns the sessions of training and how far the batch being collected is. It decides nothing: what it is told becomes events of
the cluster scheduler, which says when a session may begin. Invariant: nothing is trained in a session that may not begin yet,
and sessions are numbered in the order in which they are asked for. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable

from pearl.sched.events import BatchProgress, ClusterEvent, TrainingBegins, TrainingFinished

IDLE_S = 0.25
"""For so long trainers must have been idle before somebody thinks about lending their ranks, where that is weighed."""

PROGRESS_EVERY_S = 0.2
"""How often at most the scheduler hears how far the batch is."""


class TrainersClaim:
    """`feed` tells the scheduler. `lends`: somebody else may use the ranks at all; `weighed`: only where it pays.

    `may_begin` is the newest session that may begin. `deadline_s`: what a return is given.
    """

    def __init__(
        self, feed: Callable[[ClusterEvent, float], None], *, lends: bool, weighed: bool, deadline_s: float, now: float
    ) -> None:
        self.may_begin = -1
        self._feed, self._lends, self._weighed, self._deadline_s = feed, lends, weighed, deadline_s
        self._session, self._held = 0, False
        self._idle_since: float | None = None
        """When the ranks fell idle, until the scheduler is told."""
        self._unfinished, self._told = -1, now

    def begin(self, now: float) -> int:
        """The trainer wants its ranks: the number of its session, which may begin once `may_begin` has reached it."""
        if self._held:
            return self._session
        self._held = True
        if self._idle_since is not None:  # nobody else has been told that they were idle
            self._idle_since = None
            return self._session
        self._session += 1
        if self._lends:
            self._feed(TrainingBegins(step=self._session, deadline=now + self._deadline_s), now)
        else:
            self.may_begin = self._session
        return self._session

    def finish(self, unfinished: int, now: float) -> None:
        """The ranks idle until the next `begin`; so many trajectories of that batch are unfinished."""
        if not self._held:
            return
        self._held = False
        if not self._lends:
            return
        self._unfinished, self._idle_since = unfinished, now
        if not self._weighed:
            self._tell_idle(now)

    def progress(self, unfinished: int, now: float) -> None:
        """So many trajectories of the batch being collected are unfinished."""
        if unfinished != self._unfinished and now - self._told >= PROGRESS_EVERY_S:
            self._tell_progress(unfinished, now)

    def turn(self, now: float) -> None:
        """Time passes."""
        if self._idle_since is not None and now - self._idle_since >= IDLE_S:
            self._tell_idle(now)

    def _tell_idle(self, now: float) -> None:
        self._idle_since = None
        self._tell_progress(self._unfinished, now)
        self._feed(TrainingFinished(step=self._session), now)

    def _tell_progress(self, unfinished: int, now: float) -> None:
        self._unfinished, self._told = unfinished, now
        self._feed(BatchProgress(unfinished=unfinished), now)
