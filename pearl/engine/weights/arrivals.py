"""What has come of one version: which rows of which Hugging Face tensors, and whether what comes next may.

Owns the bookkeeping and the checks that need no values: names, shapes, order of rows, dtypes, layouts, completeness. It does
not know where tensors go. Invariant: `take` changes nothing when it refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes, param_specs
from pearl.engine.weights.checkpoint import is_derived, listed

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

NamedRows = tuple[str, Tensor] | tuple[str, Tensor, int]
"""A tensor under its Hugging Face name; with a third entry: some of its rows, and the number of the first of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The tensors a model may come as. Experts come `single` (one tensor each) or `stacked`; other names are in both."""

    single: dict[str, tuple[int, ...]]
    stacked: dict[str, tuple[int, ...]]
    doubles: dict[str, str]
    """Name of a tensor that may come too -> of the one it must be equal to."""
    whole: dict[str, int]
    """How many rows each of `single` has: all that must have come."""

    @staticmethod
    def of(config: ModelConfig) -> Expected:
        doubles = {spec.also: spec.parts[0].hf_name for spec in param_specs(config) if spec.also is not None}
        single = hf_shapes(config)
        whole = {name: shape[0] for name, shape in single.items()}
        return Expected(single=single, stacked=hf_shapes(config, stacked=True), doubles=doubles, whole=whole)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor that may come, None if there is no such tensor."""
        name = self.doubles.get(name, name)
        return self.single.get(name, self.stacked.get(name))


class Arrivals:
    """The tensors of `version` that have come so far."""

    def __init__(self, expected: Expected, version: int) -> None:
        self.version = version
        self._expected = expected
        self._rows: dict[str, int] = {}
        self._form: str | None = None
        """The first name that only one of the two forms of experts has."""

    def take(self, name: str, tensor: Tensor, start: int | None = None) -> tuple[int, int] | None:
        """Notes a tensor, or rows `start` and following of it; the range of its rows. None: it is not needed.

        ValueError says what is wrong with it.
        """
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"tensors: has ({name!r}, {type(tensor).__name__}), must be pairs of a name and a torch.Tensor")
        shape = self._expected.shape(name)
        if shape is None or (name in self._expected.doubles and start is not None):
            if is_derived(name):
                return None
            raise ValueError(f"{name}: the model has no such tensor")
        form = self._form_with(name)
        first = self._first_row(name, tensor, shape, start)
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{name}: must be a dense tensor with data")
        self._form = form
        self._rows[name] = first + tensor.shape[0]
        return first, self._rows[name]

    def repeat(self, rows: Mapping[str, tuple[int, int]]) -> bool:
        """Notes ranges of rows that have passed all checks before, of the same memory; False if they are not due now."""
        if [self._rows.get(name, 0) for name in rows] != [first for first, _ in rows.values()]:
            return False
        if self._expected.single.keys() != self._expected.stacked.keys():
            for name in rows:
                self._form = self._form_with(name)
        self._rows.update((name, last) for name, (_, last) in rows.items())
        return True

    def check(self, pairs: Iterable[NamedRows], *, whole: bool = False) -> None:
        """One ValueError lists all that is wrong with these, were they to come next, and with `whole` what is then missing."""
        trial, problems = Arrivals(self._expected, self.version), []
        trial._rows, trial._form = dict(self._rows), self._form
        for name, tensor, *start in pairs:
            try:
                trial.take(name, tensor, *start)
            except ValueError as error:
                problems.append(str(error))
        if whole and (missing := trial.missing()):
            problems.append(missing)
        if problems:
            raise ValueError(listed(problems))

    def missing(self) -> str | None:
        """The tensors that have not come, in words; None if all have."""
        table = self._expected.stacked if self._form in self._expected.stacked else self._expected.single
        if self._rows == self._expected.whole:
            return None
        absent = [name for name, shape in table.items() if self._rows.get(name, 0) < shape[0]]
        if not absent:
            return None
        return f"version {self.version}: {len(absent)} of {len(table)} tensors are missing: {listed(absent)}"

    def _form_with(self, name: str) -> str | None:
        single, stacked = name in self._expected.single, name in self._expected.stacked
        if single == stacked:
            return self._form
        if self._form is not None and (self._form in self._expected.stacked) != stacked:
            raise ValueError(f"{name}: experts come stacked or one by one, not both ({self._form} came before)")
        return self._form or name

    def _first_row(self, name: str, tensor: Tensor, shape: tuple[int, ...], start: int | None) -> int:
        """The number of the first row that arrives: 0, or `start` if that is the one due."""
        due, present = self._rows.get(name, 0), tuple(tensor.shape)
        if start is None:
            if due:
                raise ValueError(f"{name}: arrived twice for version {self.version}")
            if present != shape:
                raise ValueError(f"{name}: shape {present}, must be {shape}")
            return 0
        if present[1:] != shape[1:] or not present or not 0 < present[0] <= shape[0] - due:
            raise ValueError(f"{name}: rows of shape {present}, must be 1 to {shape[0] - due} rows of {shape}")
        if start != due:
            raise ValueError(f"{name}: rows from {start!r} arrived, those from {due} are due")
        return due
