"""Giving the trainer's weights to the engines: several kinds of ranks, one interface.

Owns one rank's part in a publication and its measurement. It does not know how weights travel or how an engine stages them,
nor when to publish. Invariants: every tensor is checked before the first byte of an engine's weights changes; requests that
run go on; an engine takes a new version only once it has all of it. A rank that raises has no part in the next publication:
its job ends.

    publisher.begin(version)                 # at once
    while publisher.poll() is None: ...      # e.g. one engine step
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from torch import Tensor

from pearl.config import Config
from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.models.config import ModelConfig
from pearl.engine.weights.store import NamedRows

Metrics = dict[str, float]
PAUSE_S = 0.0002
"""How long at most `wait` leaves the processor to the transfer itself between two polls."""
PAUSE_SHARE = 0.1
"""Of the time that a publication has taken so far: a small model's is through before the longest pause is over."""
TENSORS_A_POLL = 16
"""How many tensors a training rank that does not send goes through at once."""


class Source(Protocol):
    """Who has weights to give; a Trainer. The tensors stay as they are until the publication is through."""

    model_config: ModelConfig
    config: Config

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class Target(Protocol):
    """Who takes them at once; an Engine."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, mode: str = "keep") -> object: ...


class StagingTarget(Protocol):
    """Who takes them bit by bit; an Engine."""

    model_config: ModelConfig

    @property
    def weight_version(self) -> int: ...
    def stage_weights(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None: ...
    def commit_weights(self, version: int, mode: str = "keep") -> None: ...
    def discard_weights(self) -> None: ...


class RankPublisher:
    """One publication after another. Subclasses say in `poll` how one moves on."""

    version = -1
    _began = 0.0

    def begin(self, version: int) -> None:
        """Starts giving the weights as `version`; returns without waiting for anybody."""
        self.version, self._began = version, time.perf_counter()

    def poll(self) -> Metrics | None:
        """Moves on without waiting for others, by a few buckets at most; what was measured once this rank is through.

        `seconds` since `begin`, `bytes` sent or taken, `commit_s` that running requests were held up. Raises what went wrong;
        then the engine serves what it served before.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> Metrics:
        """Polls until this rank is through; CollectiveError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (metrics := self.poll()) is None:
            if time.monotonic() > deadline:
                raise CollectiveError(f"publishing version {self.version}: not through within {timeout_s:g} s")
            time.sleep(min(PAUSE_S, PAUSE_SHARE * (time.perf_counter() - self._began)))
        return metrics

    def _metrics(self, nbytes: int, commit_s: float) -> Metrics:
        return {"seconds": time.perf_counter() - self._began, "bytes": float(nbytes), "commit_s": commit_s}


class LocalPublisher(RankPublisher):
    """Trainer and engine in one process: a direct copy, done by the first poll."""

    def __init__(self, trainer: Source, engine: Target) -> None:
        self._trainer, self._engine = trainer, engine

    def poll(self) -> Metrics:
        size = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal size
            for name, tensor in self._trainer.named_hf_tensors():
                size += tensor.nbytes
                yield name, tensor

        self._engine.update_weights(counted(), version=self.version, mode="keep")
        return self._metrics(size, time.perf_counter() - self._began)


class GatheringPublisher(RankPublisher):
    """A training rank that gives nothing itself: it goes through the same tensors, since gathering one takes all of them."""

    def __init__(self, trainer: Source) -> None:
        self._trainer = trainer
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())

    def begin(self, version: int) -> None:
        super().begin(version)
        self._tensors = self._trainer.named_hf_tensors()

    def poll(self) -> Metrics | None:
        taken = sum(1 for _ in islice(self._tensors, TENSORS_A_POLL))
        return self._metrics(0, 0.0) if taken < TENSORS_A_POLL else None
