"""A whole version on its way into the messages of its buckets: tensors under Hugging Face names, in any order.

Owns what has come, and what may be known from the time before; it does not know who reads the messages, nor where they lie.
Invariant: a message is sealed only once all its rows have come and are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.engine.weights.arrivals import Arrivals, Expected
from pearl.engine.weights.message import Message, not_finite
from pearl.engine.weights.sealing import Putting, putting

Places = dict[str, list[tuple[int, int, Tensor, int]]]
"""For each tensor its pieces: number of the bucket, which of its rows, these rows, number of the first row."""


def places_in(messages: Iterable[Message]) -> Places:
    places: Places = {}
    for index, message in enumerate(messages):
        for number, (name, rows, start) in enumerate(message.rows):
            places.setdefault(name, []).append((index, number, rows, start))
    return places


class Refill(NamedTuple):
    """How a bucket was filled last, for as long as its tensors are the same: their `signature`, rows, and what puts them."""

    signature: list[object]
    rows: dict[str, tuple[int, int]]
    putting: Putting


class Filling:
    """Tensors, in any order, on their way into the `messages` of `version`, each of which is sealed when its last piece has
    come.

    `refills` is how these messages were filled before: a trainer's tensors lie where they lay, and names, shapes and dtypes
    that have passed all checks are not looked at one by one again.
    """

    def __init__(
        self, expected: Expected, places: Places, messages: Sequence[Message], version: int, refills: dict[int, Refill]
    ) -> None:
        self._messages, self._version = messages, version
        self._expected, self._places, self._refills = expected, places, refills
        self._arrivals = Arrivals(expected, version)
        self._doubles: list[tuple[str, Tensor]] = []
        self._due = [len(message.rows) for message in messages]
        self._totals: list[int | None] = [0] * len(messages)
        """What the rows that have come add to the checksum of each bucket; None if that is not known."""

    @torch.no_grad()
    def take_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Of a sequence whole buckets at once; of anything else each tensor before the next one is asked for."""
        coming = iter(tensors)
        for index, message in enumerate(self._messages if isinstance(tensors, Sequence) else ()):
            if not all(piece.shape == self._expected.single[piece.hf_name] for piece in message.bucket.pieces):
                break  # a tensor that several buckets share
            pairs = list(islice(coming, len(message.bucket.pieces)))
            signature = _signature(pairs)
            if self._refill(index, signature):
                continue
            for name, tensor in pairs:
                self._take_one(name, tensor)
            self._remember(index, signature, pairs)
        for name, tensor in coming:
            self._take_one(name, tensor)
        if missing := self._arrivals.missing():
            raise ValueError(missing)
        for name, tensor in self._doubles:
            own = self._expected.doubles[name]
            if not all(torch.equal(rows, tensor[at : at + len(rows)].to(rows)) for _, _, rows, at in self._places[own]):
                raise ValueError(f"{name}: differs from {own}, but the model ties them")

    def _refill(self, index: int, signature: list[object]) -> bool:
        """Fills a bucket as it was filled before; False if that cannot be, then nothing has come."""
        refill = self._refills.get(index)
        if refill is None or refill.signature != signature:
            return False
        total, finite = refill.putting.put()
        if not finite or not self._arrivals.repeat(refill.rows):
            return False
        self._due[index] = 0
        self._messages[index].seal(self._version, total)
        return True

    def _remember(self, index: int, signature: list[object], pairs: list[tuple[str, Tensor]]) -> None:
        """After a bucket was filled with these, which are its own and in its order, if they are."""
        message = self._messages[index]
        if [name for name, _ in pairs] != [piece.hf_name for piece in message.bucket.pieces]:
            return
        native = putting(message, [tensor for _, tensor in pairs], 0)
        if native is not None:
            rows = {name: (0, tensor.shape[0]) for name, tensor in pairs}
            self._refills[index] = Refill(signature=signature, rows=rows, putting=native)

    def _take_one(self, name: str, tensor: Tensor) -> None:
        if self._arrivals.take(name, tensor) is None:
            return
        if name in self._expected.doubles:
            self._doubles.append((name, tensor))
        elif name in self._places:
            self._take(name, tensor)
        else:
            raise ValueError(f"{name}: a snapshot takes experts one by one, not stacked")

    def _take(self, name: str, tensor: Tensor) -> None:
        for index, number, rows, start in self._places[name]:
            message, before = self._messages[index], self._totals[index]
            part = tensor if rows.shape == tensor.shape else tensor[start : start + rows.shape[0]]
            total, finite = message.put([part], number)
            if not finite:
                raise ValueError(not_finite([(name, rows)]))
            self._totals[index] = None if total is None or before is None else (before + total) % (1 << 64)
            self._due[index] -= 1
            if not self._due[index]:
                message.seal(self._version, self._totals[index])


def _signature(pairs: Iterable[tuple[str, Tensor]]) -> list[object]:
    """Equal for tensors of the same names that lie, live at the same time or not, in the same memory in the same way."""
    return [
        (name, tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided
        else None
        for name, tensor in pairs
    ]
