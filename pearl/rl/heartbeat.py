"""Who has been heard from lately: silence of a rank, measured in time in which we ourselves were running. Pure."""

from __future__ import annotations

LONGEST_GAP_S = 1.0
"""A pause of the watcher itself (Ctrl-Z, a suspended laptop) counts at most this much towards any deadline."""


class Heartbeat:
    """Says when a ping is due and which peers have been silent too long."""

    def __init__(self, *, every_s: float, silence_s: float, now: float) -> None:
        self.sequence = 0
        self._every_s = every_s
        self._silence_s = silence_s
        self._silence: dict[int, float] = {}
        self._limits: dict[int, float] = {}
        self._since_ping = every_s
        self._last = now

    def add(self, peer: int, silence_s: float | None = None) -> None:
        """Watches a peer from now on; `silence_s` is its own limit."""
        self._silence[peer] = 0.0
        self._limits[peer] = self._silence_s if silence_s is None else silence_s

    def remove(self, peer: int) -> None:
        """It is no longer watched."""
        self._silence.pop(peer, None)
        self._limits.pop(peer, None)

    def heard(self, peer: int) -> None:
        if peer in self._silence:
            self._silence[peer] = 0.0

    def advance(self, now: float) -> list[int]:
        """Moves time on; returns the peers whose silence has passed `silence_s`."""
        gap = min(max(0.0, now - self._last), LONGEST_GAP_S)
        self._last = now
        self._since_ping += gap
        for peer in self._silence:
            self._silence[peer] += gap
        return [peer for peer, silence in self._silence.items() if silence > self._limits[peer]]

    def ping_due(self) -> bool:
        """True once per `every_s`; counts the ping as sent."""
        if self._since_ping < self._every_s:
            return False
        self._since_ping = 0.0
        self.sequence += 1
        return True
