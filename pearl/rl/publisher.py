"""Giving the trainer's weights to the engines: three kinds of ranks, one interface.

Owns one rank's part in a publication and its measurement. It does not know how weights travel or how an engine stages them,
nor when to publish. Invariants: an engine checks every tensor before the first byte of its weights changes; requests that run
go on; an engine on another rank takes the new version only once all of them have all of it.

    publisher.begin(version)                 # at once
    while publisher.poll() is None: ...      # e.g. one engine step
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from pearl.config import Config
from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.engine.models.config import ModelConfig
from pearl.engine.weights.store import NamedRows
from pearl.engine.weights.transfer import BUCKET_BYTES, WeightReceiver, WeightSender

Metrics = dict[str, float]
PAUSE_S = 0.001
"""How long `wait` leaves the processor to the transfer itself when there is nothing to do."""


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


class _Publisher:
    """One publication after another. Subclasses say in `poll` how one moves on."""

    version = -1
    waiting = False
    _began = 0.0

    def begin(self, version: int) -> None:
        """Starts giving the weights as `version`; returns without waiting for anybody."""
        self.version, self._began = version, time.perf_counter()

    def poll(self) -> Metrics | None:
        """Moves on without waiting for others, by at most one bucket; what was measured once this rank is through.

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
            if self.waiting:
                time.sleep(PAUSE_S)
        return metrics

    def _metrics(self, nbytes: int, commit_s: float) -> Metrics:
        return {"seconds": time.perf_counter() - self._began, "bytes": float(nbytes), "commit_s": commit_s}


class LocalPublisher(_Publisher):
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


class SendingPublisher(_Publisher):
    """A training rank. `comm` is the group of rank 0, who sends, and all that serve.

    The other training ranks have no `comm`: they go through the same tensors, since gathering one takes all training ranks.
    """

    def __init__(
        self, trainer: Source, comm: Communicator | None, *, timeout_s: float = 600.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`timeout_s`: the longest wait for any one message."""
        self._trainer = trainer
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._sender: WeightSender | None = None
        if comm is not None:
            dtype = getattr(torch, trainer.config.engine.dtype)
            options = {"bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
            self._sender = WeightSender(comm, trainer.model_config, dtype, **options)

    def begin(self, version: int) -> None:
        super().begin(version)
        self._tensors = self._trainer.named_hf_tensors()
        if self._sender is not None:
            self._sender.begin(self._tensors, version)

    def poll(self) -> Metrics | None:
        if self._sender is None:
            return self._metrics(0, 0.0) if next(self._tensors, None) is None else None
        through = self._sender.poll()
        self.waiting = self._sender.waiting
        return self._metrics(self._sender.nbytes, 0.0) if through else None


class ReceivingPublisher(_Publisher):
    """A rank that serves: stages one bucket per poll, and commits once all members have all buckets."""

    def __init__(
        self, engine: StagingTarget, comm: Communicator, *, timeout_s: float = 600.0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`timeout_s`: the longest wait for any one message."""
        self._engine = engine
        dtype = getattr(torch, engine.model_config.dtype)
        self._receiver = WeightReceiver(comm, engine.model_config, dtype, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    def begin(self, version: int) -> None:
        super().begin(version)
        self._receiver.begin(version, self._engine.weight_version)

    def poll(self) -> Metrics | None:
        try:
            return self._poll()
        except BaseException:
            self._engine.discard_weights()
            raise

    def _poll(self) -> Metrics | None:
        rows = self._receiver.poll()
        self.waiting = self._receiver.waiting
        if rows:
            try:
                self._engine.stage_weights(rows, self.version, adopt=True)
            except ValueError as error:  # all members are to hear of it before it is raised here
                self._receiver.refuse(error)
        if not self._receiver.finished:
            return None
        start = time.perf_counter()
        self._engine.commit_weights(self.version, mode="keep")
        return self._metrics(self._receiver.nbytes, time.perf_counter() - start)


def publish(trainer: Source, engine: Target, version: int) -> Metrics:
    """Makes the trainer's present weights the engine's weights of `version`, in this process, at once."""
    publisher = LocalPublisher(trainer, engine)
    publisher.begin(version)
    return publisher.poll()
