"""Giving the trainer's weights to an engine in the same process, by a direct copy.

Owns the call and its measurement. It does not know how an engine stages weights, nor when to publish.
Invariant: the engine checks every tensor before the first byte of its weights changes; requests that run go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Who has weights to give; a Trainer."""

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class Target(Protocol):
    """Who takes them; an Engine."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, mode: str = "keep") -> object: ...


def publish(trainer: Source, engine: Target, version: int) -> dict[str, float]:
    """Makes the trainer's present weights the engine's weights of `version`; returns `seconds` and `bytes`.

    Running requests are kept: their further tokens are of the new version, on the KV they have. What the engine refuses
    (a version that is not newer, a tensor that is not finite) is raised as it is, and it goes on serving what it had.
    """
    start = time.perf_counter()
    size = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal size
        for name, tensor in trainer.named_hf_tensors():
            size += tensor.numel() * tensor.element_size()
            yield name, tensor

    engine.update_weights(counted(), version=version, mode="keep")
    return {"seconds": time.perf_counter() - start, "bytes": float(size)}
