"""When a trajectory group may start and when a batch is complete: the staleness bound as counting.

Owns the rule, not the counts: the live controller and the simulator ask the same object with their own numbers. Pure.

One batch trained is one weight version. Group k (0-based, in starting order, dropped groups not counted) belongs to batch
k // groups_per_batch. If it may start only when that batch is at most `max_staleness` ahead of the one being collected, its
oldest token is at most `max_staleness` versions old when its batch is trained, provided batches are taken in order; what
comes late all the same is caught by `too_stale` at consumption. `max_staleness = 0` is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`groups_per_batch` groups make a batch; `max_staleness` counts weight versions.

    With `barrier` no group of a batch starts before the batch before it is complete; else as early as staleness allows.
    """

    groups_per_batch: int
    max_staleness: int = 0
    barrier: bool = False

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1 or self.max_staleness < 0:
            raise ValueError(
                f"groups_per_batch={self.groups_per_batch}, max_staleness={self.max_staleness}: must be >= 1 and >= 0"
            )

    def may_start(
        self,
        *,
        started: int,
        trained_batches: int,
        dropped: int = 0,
        total_batches: int | None = None,
        collected_batches: int | None = None,
    ) -> int:
        """How many more groups may start now.

        `started` counts all groups ever started, `dropped` those of them that will never be trained: each is replaced.
        With `total_batches` no group is started that no batch of the job would take. `collected_batches` (trained ones
        included; by default no others) are complete, for `barrier`.
        """
        batches = trained_batches + self.max_staleness + 1
        if self.barrier:
            batches = min(batches, (trained_batches if collected_batches is None else collected_batches) + 1)
        if total_batches is not None:
            batches = min(batches, total_batches)
        return max(0, batches * self.groups_per_batch - (started - dropped))

    def too_stale(self, *, oldest_version: int, weight_version: int) -> bool:
        """A trajectory with a token of `oldest_version` must not be trained from `weight_version`."""
        return is_stale(oldest_version, weight_version, self.max_staleness)


def is_stale(oldest_version: int, weight_version: int, max_staleness: int) -> bool:
    """More than `max_staleness` versions lie between sampling and consumption; -1 (nothing sampled) is never stale."""
    return oldest_version >= 0 and weight_version - oldest_version > max_staleness
