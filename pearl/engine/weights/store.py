"""The engine's weights by version: staged as a second copy, checked, then copied in place between two steps.

Owns the version number and the staged copy; knows tensor names only through `param_specs` and does not know where tensors
come from. Invariant: the live parameters always hold one whole version (or none, before the first commit) and never move in
memory, so whatever was captured over their addresses stays valid.

The memory of the copy is given back after the first version and after a failure, and kept from the second version on: who
was updated once will be again, and fresh pages cost more than the copy itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pearl.engine.kernels.interface import Kernels
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import ParamSpec, param_specs
from pearl.engine.weights.checkpoint import EMBEDDING, HEAD, is_derived, listed

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

NamedRows = tuple[str, Tensor] | tuple[str, Tensor, int]
"""A tensor under its Hugging Face name; with a third entry: some of its rows, and the number of the first of them."""


class WeightStore:
    """Live parameters `params` (ParamSpec name -> tensor) under a version. Not thread-safe."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], kernels: Kernels) -> None:
        specs = param_specs(config)
        wrong = [spec.name for spec in specs if spec.name not in params or tuple(params[spec.name].shape) != spec.shape]
        if wrong:
            raise ValueError(f"params: missing or mis-shaped: {listed(wrong)}")
        self._specs, self._params, self._kernels = specs, params, kernels
        self._parts = {part.hf_name: (spec, part, spec.part_shape(part)) for spec in specs for part in spec.parts}
        self._tied = config.tie_embeddings
        self._version = -1
        self._staged: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._adopted: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        """For each parameter: number of the first row, where the rows live, and the rows given."""
        self._adopts = False
        self._rows: dict[str, int] = {}
        self._tied_head: Tensor | None = None
        self._staged_version: int | None = None

    @property
    def version(self) -> int:
        """The version that the live weights are, -1 before the first commit."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether a whole version is in, so that the weights may be served."""
        return self._version >= 0

    @property
    def staged_version(self) -> int | None:
        """The version being staged, None if none is."""
        return self._staged_version

    @torch.no_grad()
    def stage(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None:
        """Adds (Hugging Face name, tensor) pairs to the copy of `version`: in any order, in one call or in many.

        A tensor may also come as (name, some rows, number of the first), its rows in ascending order. With `adopt` the given
        memory itself is the staged copy: of the live dtype and device, known to be finite, and left alone until commit or
        discard. ValueError names the first tensor that is unknown, doubled, mis-shaped, not floating point or (unless adopted)
        not finite after the conversion to the live dtype; then all that was staged is discarded. The live weights are not
        touched.
        """
        self._open(version, adopt)
        try:
            for name, tensor, *start in tensors:
                self._take(name, tensor, *start)
        except BaseException:
            self.discard()
            raise

    @torch.no_grad()
    def commit(self) -> None:
        """Makes the staged version live. ValueError lists the tensors that have not arrived; they may still be staged."""
        version = self._staged_version
        if version is None:
            raise ValueError("commit: nothing is staged")
        missing = [name for name, (_, part, _) in self._parts.items() if self._rows.get(name, 0) < part.size]
        if missing:
            raise ValueError(f"version {version}: {len(missing)} of {len(self._parts)} tensors are missing: {listed(missing)}")
        if self._tied_head is not None and not torch.equal(self._tied_head, self._staged[self._parts[EMBEDDING][0].name]):
            self.discard()
            raise ValueError(f"version {version}: {HEAD} differs from {EMBEDDING}, but the model ties them")
        if self._adopts:
            self._write_adopted()
        else:
            for name, staged in self._staged.items():
                self._params[name].copy_(self._kernels.pack(staged))
        kept = self._staged if self.ready else {}
        self._version = version
        self.discard()
        self._spare = kept

    def discard(self) -> None:
        """Forgets what is staged and frees its memory."""
        self._staged, self._spare, self._adopted, self._rows = {}, {}, {}, {}
        self._tied_head = self._staged_version = None

    def _write_adopted(self) -> None:
        """Copies the given memory to where the parameters live; all that needs no packing in one call."""
        targets, sources = [], []
        for name, pieces in self._adopted.items():
            if self._kernels.pack(pieces[0][2]) is pieces[0][2]:
                targets += [target for _, target, _ in pieces]
                sources += [rows for _, _, rows in pieces]
            else:
                in_order = sorted(pieces, key=lambda piece: piece[0])
                self._params[name].copy_(self._kernels.pack(torch.cat([rows for _, _, rows in in_order])))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _open(self, version: int, adopt: bool) -> None:
        if type(version) is not int:
            raise ValueError(f"version={version!r}: must be an integer")
        if version <= self._version:
            raise ValueError(f"version={version}: must be greater than the present version {self._version}")
        if self._staged_version not in (None, version):
            raise ValueError(f"version={version}: version {self._staged_version} is being staged; commit or discard it first")
        if self._staged_version is not None and adopt != self._adopts:
            raise ValueError(f"adopt={adopt}: version {version} is being staged with adopt={self._adopts}")
        self._staged_version, self._adopts = version, adopt

    def _take(self, name: str, tensor: Tensor, start: int | None = None) -> None:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"tensors: has ({name!r}, {type(tensor).__name__}), must be pairs of a name and a torch.Tensor")
        if name not in self._parts:
            if not is_derived(name):
                self._take_tied_head(name, tensor, start)
            return
        spec, part, shape = self._parts[name]
        first = self._check(name, tensor, shape, start)
        last = first + tensor.shape[0]
        if self._adopts:
            self._adopt(name, tensor, spec, part.start + first, part.start + last)
        else:
            self._copy(name, tensor, self._memory_of(spec)[part.start + first : part.start + last])
        self._rows[name] = last

    def _take_tied_head(self, name: str, tensor: Tensor, start: int | None) -> None:
        """The one tensor beside the model's own that may come: the head where it is tied, held back for a comparison."""
        if name != HEAD or not self._tied or self._adopts or start is not None:
            raise ValueError(f"{name}: the model has no such tensor")
        spec, _, shape = self._parts[EMBEDDING]
        self._rows[name] = self._check(name, tensor, shape) + len(tensor)
        self._tied_head = torch.empty_like(self._params[spec.name])
        self._copy(name, tensor, self._tied_head)

    def _adopt(self, name: str, rows: Tensor, spec: ParamSpec, first: int, last: int) -> None:
        live = self._params[spec.name]
        if rows.dtype is not live.dtype or rows.device != live.device:
            raise ValueError(f"{name}: adopt=True takes {live.dtype} on {live.device}, not {rows.dtype} on {rows.device}")
        target = live if last - first == spec.shape[0] else live[first:last]
        self._adopted.setdefault(spec.name, []).append((first, target, rows))

    def _copy(self, name: str, tensor: Tensor, target: Tensor) -> None:
        target.copy_(tensor)
        # The least and the greatest value carry any NaN or infinity: one pass, no mask.
        if not all(bool(torch.isfinite(edge)) for edge in torch.aminmax(target)):
            count = int((~torch.isfinite(target)).sum())
            raise ValueError(f"{name}: {count} of {target.numel()} values are not finite in {target.dtype}")

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], start: int | None = None) -> int:
        """The number of the first row that arrives, once shape, dtype and layout are found right."""
        first = self._check_rows(name, tensor, shape, start)
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{name}: must be a dense tensor with data")
        return first

    def _check_rows(self, name: str, tensor: Tensor, shape: tuple[int, ...], start: int | None) -> int:
        """The number of the first row that arrives: 0, or `start` if that is the one due."""
        due, present = self._rows.get(name, 0), tensor.shape
        if start is None:
            if due:
                raise ValueError(f"{name}: arrived twice for version {self._staged_version}")
            if present != shape:
                raise ValueError(f"{name}: shape {tuple(present)}, must be {shape}")
            return 0
        if present[1:] != shape[1:] or not present or not 0 < present[0] <= shape[0] - due:
            raise ValueError(f"{name}: rows of shape {tuple(present)}, must be 1 to {shape[0] - due} rows of {shape}")
        if start != due:
            raise ValueError(f"{name}: rows from {start!r} arrived, those from {due} are due")
        return due

    def _memory_of(self, spec: ParamSpec) -> Tensor:
        """The memory that a parameter is staged in."""
        if spec.name not in self._staged:
            spare = self._spare.pop(spec.name, None)
            self._staged[spec.name] = torch.empty_like(self._params[spec.name]) if spare is None else spare
        return self._staged[spec.name]
