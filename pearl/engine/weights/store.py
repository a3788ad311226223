"""The engine's weights by version: staged as a second copy, checked, then copied in place between two steps.

Owns the version number and the staged copy; knows tensor names only through `param_specs` and does not know where tensors
come from. Invariant: the live parameters always hold one whole version (or none, before the first commit) and never move in
memory, so whatever was captured over their addresses stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pearl.engine.kernels.interface import Kernels
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import ParamSpec, Part, param_specs
from pearl.engine.weights.checkpoint import EMBEDDING, HEAD, is_derived, listed

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightStore:
    """Live parameters `params` (ParamSpec name -> tensor) under a version. Not thread-safe."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], kernels: Kernels) -> None:
        specs = param_specs(config)
        wrong = [spec.name for spec in specs if spec.name not in params or tuple(params[spec.name].shape) != spec.shape]
        if wrong:
            raise ValueError(f"params: missing or mis-shaped: {listed(wrong)}")
        self._specs, self._params, self._kernels = specs, params, kernels
        self._parts: dict[str, tuple[ParamSpec, Part]] = {part.hf_name: (spec, part) for spec in specs for part in spec.parts}
        self._tied = config.tie_embeddings
        self._version = -1
        self._staged: dict[str, Tensor] = {}
        self._seen: set[str] = set()
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
    def stage(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Adds (Hugging Face name, tensor) pairs to the copy of `version`: in any order, in one call or in many.

        ValueError names the first tensor that is unknown, doubled, mis-shaped, not floating point or not finite (after the
        conversion to the live dtype); then all that was staged is discarded. The live weights are not touched.
        """
        self._open(version)
        try:
            for name, tensor in tensors:
                self._take(name, tensor)
        except BaseException:
            self.discard()
            raise

    @torch.no_grad()
    def commit(self) -> None:
        """Makes the staged version live. ValueError lists the tensors that have not arrived; they may still be staged."""
        version = self._staged_version
        if version is None:
            raise ValueError("commit: nothing is staged")
        missing = [name for name in self._parts if name not in self._seen]
        if missing:
            raise ValueError(f"version {version}: {len(missing)} of {len(self._parts)} tensors are missing: {listed(missing)}")
        if self._tied_head is not None and not torch.equal(self._tied_head, self._staged[self._parts[EMBEDDING][0].name]):
            self.discard()
            raise ValueError(f"version {version}: {HEAD} differs from {EMBEDDING}, but the model ties them")
        for spec in self._specs:
            self._params[spec.name].copy_(self._kernels.pack(self._staged[spec.name]))
        self._version = version
        self.discard()

    def discard(self) -> None:
        """Forgets what is staged and frees its memory."""
        self._staged, self._seen, self._tied_head, self._staged_version = {}, set(), None, None

    def _open(self, version: int) -> None:
        if version <= self._version:
            raise ValueError(f"version={version}: must be greater than the present version {self._version}")
        if self._staged_version not in (None, version):
            raise ValueError(f"version={version}: version {self._staged_version} is being staged; commit or discard it first")
        self._staged_version = version

    def _take(self, name: str, tensor: Tensor) -> None:
        if is_derived(name):
            return
        tied_head = self._tied and name == HEAD
        if not tied_head and name not in self._parts:
            raise ValueError(f"{name}: the model has no such tensor")
        if name in self._seen:
            raise ValueError(f"{name}: arrived twice for version {self._staged_version}")
        spec, part = self._parts[EMBEDDING if tied_head else name]
        if tuple(tensor.shape) != spec.part_shape(part):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {spec.part_shape(part)}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        live = self._params[spec.name]
        if tied_head:
            target = self._tied_head = torch.empty_like(live)
        else:
            if spec.name not in self._staged:
                self._staged[spec.name] = torch.empty_like(live)
            target = self._staged[spec.name][part.start : part.start + part.size]
        target.copy_(tensor)
        # The least and the greatest value carry any NaN or infinity: one pass, no mask.
        if not all(bool(torch.isfinite(edge)) for edge in torch.aminmax(target)):
            count = int((~torch.isfinite(target)).sum())
            raise ValueError(f"{name}: {count} of {target.numel()} values are not finite in {target.dtype}")
        self._seen.add(name)
