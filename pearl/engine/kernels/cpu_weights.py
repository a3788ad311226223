"""A model's matrices in the order that the CPU kernels read, for the version that is served and for the one to come.

Owns the memory of both, and which of them is served; the order itself is csrc/cpu's, and which Hugging Face tensor goes where
is the store's. Invariants: rows are packed straight from where they are given, once; what is served does not change while the
next version is packed beside it; the plain parameters' memory is not needed for any of it, and is never touched but by `load`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pearl.engine.models.params import Box

Rows = tuple[str, int, int, int, int, int, int]
"""A parameter's name, number of the expert, first row, rows, columns; address, elements from one row to the next."""


class CpuWeights:
    """Implements `interface.PackedWeights`. `memory` gives zeros at a page's beginning, touched as they are written."""

    def __init__(
        self,
        cpu: Any,
        native: Any,
        parameters: dict[str, Tensor],
        memory: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> None:
        self._cpu, self._native, self._parameters = cpu, native, parameters
        self._bytes = -(-native.packed_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memory((2 * self._bytes,), torch.uint8)
        self._served, self._in_spare = 0, False
        self.names = frozenset(native.packed_names)
        self.plain_too = self.names & {"embed.weight"}

    def plan(self, pieces: Iterable[tuple[str, Box, Tensor]]) -> Any:
        return self._native.packing([rows for piece in pieces for rows in _rows(*piece)])

    def write(self, plan: Any, *, spare: bool) -> None:
        self._cpu.set_threads(torch.get_num_threads())
        self._in_spare |= spare
        self._native.pack(plan, self._address(spare), self._bytes)

    def serve(self, *, spare: bool) -> None:
        self._served ^= spare
        self._native.use(self._address(False), self._bytes)

    def forget(self) -> None:
        if self._in_spare:
            self._cpu.give_back(self._address(True), self._bytes)
        self._in_spare = False

    def load(self, *, release: bool) -> None:
        self._cpu.set_threads(torch.get_num_threads())
        self._native.load(self._address(False), self._bytes, release)

    def read(self, name: str, box: Box) -> Tensor:
        tensor = torch.empty([high - low for low, high in box[-2:]], dtype=self._parameters[name].dtype)
        [rows] = _rows(name, box, tensor)
        self._native.unpack(rows, self._address(False), self._bytes)
        return tensor

    def _address(self, spare: bool) -> int:
        return self._memory.data_ptr() + (self._served ^ spare) * self._bytes


def _rows(name: str, box: Box, tensor: Tensor) -> Iterator[Rows]:
    """The rows of a region of a parameter, one matrix after the other where it spans several experts."""
    *lead, (row, end), (_, columns) = box
    first, last = lead[0] if lead else (0, 1)
    for expert, matrix in zip(range(first, last), tensor if tensor.ndim == 3 else (tensor,), strict=True):
        yield name, expert, row, end - row, columns, matrix.data_ptr(), matrix.stride(0)
