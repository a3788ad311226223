"""`check_weights`: after a publication each rank says what its weights are, and whoever reads that can tell if they agree.

Owns the checksums and how they travel (as metrics of the Publish command, `trainer/NAME` and `engine/NAME`). It does not know
how weights are published. Invariant: two tensors of equal checksums have, but for a chance of 2**-64, equal bits in the
engines' dtype; each is read once, in slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pearl.engine.engine import Engine
from pearl.rl.publisher import Metrics, RankPublisher, Source

WORDS_AT_ONCE = 1 << 22
TRAINER, ENGINE = "trainer/", "engine/"


class CheckedPublisher(RankPublisher):
    """Publishes as `inner` does, and adds checksums of this rank's trainer and engine to what was measured."""

    def __init__(self, inner: RankPublisher, trainer: Source | None, engine: Engine | None, dtype: torch.dtype) -> None:
        self._inner, self._trainer, self._engine, self._dtype = inner, trainer, engine, dtype

    def begin(self, version: int) -> None:
        super().begin(version)
        self._inner.begin(version)

    def poll(self) -> Metrics | None:
        metrics = self._inner.poll()
        if metrics is None:
            return None
        sums: dict[str, int] = {}
        if self._trainer is not None:  # gathering takes all training ranks, each of which comes here after its part
            sums |= checksums(TRAINER, self._trainer.named_hf_tensors(), self._dtype)
        if self._engine is not None:
            sums |= checksums(ENGINE, self._engine.named_hf_tensors(), self._dtype)
        return metrics | sums


@torch.no_grad()
def checksums(prefix: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """prefix + name -> sum of all words of the tensor in `dtype`, each times its place, modulo 2**64."""
    return {prefix + name: _checksum(tensor, dtype) for name, tensor in tensors}


def _checksum(tensor: Tensor, dtype: torch.dtype) -> int:
    flat, total = tensor.detach().reshape(-1), torch.zeros((), dtype=torch.int64, device=tensor.device)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for start in range(0, flat.numel(), WORDS_AT_ONCE):
        words = flat[start : start + WORDS_AT_ONCE].to(dtype).view(kind).to(torch.int64)
        places = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
        total += (words * (2 * places + 1)).sum()  # odd factors lose nothing modulo 2**64
    return int(total)
