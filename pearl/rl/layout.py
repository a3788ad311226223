"""Which rank of a job does what. Pure.

Training ranks come first: 0 .. T-1. The others serve. A job of one rank takes turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """`world` ranks, the first `train_ranks` of which train."""

    world: int
    train_ranks: int

    @classmethod
    def of(cls, config: Config, world: int) -> JobLayout:
        """The layout of a resolved Config."""
        if config.cluster.train_ranks is None:
            raise ValueError("cluster.train_ranks=None: the configuration must be resolved first")
        return cls(world=world, train_ranks=config.cluster.train_ranks)

    @property
    def takes_turns(self) -> bool:
        return self.world == 1

    @property
    def training(self) -> range:
        return range(self.train_ranks)

    @property
    def serving(self) -> range:
        return range(1) if self.takes_turns else range(self.train_ranks, self.world)

    @property
    def publish_members(self) -> tuple[int, ...]:
        """Rank 0 sends, the serving ranks receive."""
        return tuple(sorted({0, *self.serving}))

    def roles(self, rank: int) -> list[str]:
        """What a rank does: "train", "serve" or both."""
        return [name for name, ranks in (("train", self.training), ("serve", self.serving)) if rank in ranks]
