"""How many workers of each kind serve: the value that planning is about.

Owns the counts and their names. Knows no worker by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Counts of mixed, prefill and decode workers."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        if min(self.mixed, self.prefill, self.decode) < 0:
            raise ValueError(f"mixed={self.mixed}, prefill={self.prefill}, decode={self.decode}: must all be >= 0")

    @property
    def total(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def mode(self) -> str:
        """ "mixed", "split", "hybrid", "broken" (prefill without decode or the reverse) or "empty"."""
        if not self.total:
            return "empty"
        if not self.prefill and not self.decode:
            return "mixed"
        if not self.prefill or not self.decode:
            return "broken"
        return "hybrid" if self.mixed else "split"

    def __str__(self) -> str:
        parts = ((self.mixed, "M"), (self.prefill, "P"), (self.decode, "D"))
        return "".join(f"{count}{letter}" for count, letter in parts if count) or "0"
