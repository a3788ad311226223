"""What each rank is doing, as seen from the controller: busy shares for people, spans for the trace.

Owns this bookkeeping alone; nothing decides by it. A command counts as busy from when it was sent until it was done, an
engine's steps by the seconds that its rank reports. Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from pearl.metrics.trace import TraceWriter
from pearl.protocol import Status, Tokens, WorkerStatus

QUIET_COMMANDS = ("Serve",)
"""What only lets other work begin counts as none."""


class Activity:
    """`begin` and `end` bracket a command on a rank, `stepped` adds engine steps. Times are of the controller's clock."""

    def __init__(self, trace: Path | None, now: float) -> None:
        self._trace = TraceWriter(trace) if trace is not None else None
        self._commands: dict[int, tuple[str, float]] = {}
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._load: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._versions: defaultdict[int, int] = defaultdict(lambda: -1)
        self._roles: dict[int, tuple[str, float]] = {}
        self._since = now

    def begin(self, rank: int, command: str, now: float) -> None:
        if command not in QUIET_COMMANDS:
            self._commands[rank] = (command, now)

    def end(self, rank: int, now: float) -> None:
        command, began = self._commands.pop(rank, ("", now))
        if command:
            self._add(rank, "commands", command, began, now)

    def stepped(self, event: Tokens, now: float) -> None:
        """A serving rank tells of its engine's steps; their time counts as the last before now."""
        self._load[event.rank] = (event.running, event.waiting)
        versions = [update.weight_versions[-1] for update in event.updates if update.weight_versions]
        self._versions[event.rank] = max([self._versions[event.rank], *versions])
        self._add(event.rank, "engine", "engine steps", now - event.seconds, now)

    def note_roles(self, roles: dict[int, str], now: float) -> None:
        """Who is what from now on; the time in a role is a span."""
        for rank in self._roles.keys() | roles.keys():
            if self._roles.get(rank, ("", now))[0] != roles.get(rank, ""):
                self._end_role(rank, now)
                if rank in roles:
                    self._roles[rank] = roles[rank], now
                else:  # it never comes again
                    for known in (self._busy, self._load, self._versions):
                        known.pop(rank, None)

    def status(self, waiting_for: str, waited_s: float, queues: dict[str, int], roles: dict[int, str], now: float) -> Status:
        """Busy shares since the last call, and the rest of what a person wants to know."""
        span = max(now - self._since, 1e-6)
        for rank, (command, began) in list(self._commands.items()):
            self._add(rank, "commands", command, began, now)
            self._commands[rank] = (command, now)
        workers = {
            f"rank{rank}": WorkerStatus(
                role=role,
                busy_share=min(1.0, self._busy[rank] / span),
                running=self._load[rank][0],
                waiting=self._load[rank][1],
                weight_version=self._versions[rank],
            )
            for rank, role in roles.items()
        }
        self._busy.clear()
        self._since = now
        return Status(waiting_for=waiting_for, waited_s=waited_s, queues=queues, workers=workers)

    def close(self, now: float) -> None:
        for rank in list(self._roles):
            self._end_role(rank, now)
        if self._trace is not None:
            self._trace.close()

    def _end_role(self, rank: int, now: float) -> None:
        role, since = self._roles.pop(rank, ("", now))
        if role and self._trace is not None:
            self._trace.span(f"rank{rank}/role", role, since, now)

    def _add(self, rank: int, track: str, name: str, start: float, end: float) -> None:
        self._busy[rank] += max(0.0, end - max(start, self._since))
        if self._trace is not None:
            self._trace.span(f"rank{rank}/{track}", name, start, end)
