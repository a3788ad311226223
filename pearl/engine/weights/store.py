"""The engine's weights by version: staged as a second copy and committed between two steps, or written straight in place.

Owns the version number and the staged copy; knows tensor names only through `param_specs` and does not know where tensors
come from. Every rank of a tensor-parallel instance takes the whole tensors and keeps its regions of them.
Invariants: the live parameters hold one whole version, or the version is -1 and nothing may be served; they never move in
memory, so whatever was captured over their addresses stays valid; no value that is not finite is ever written to them.

The first version needs no copy, since nothing is served before it: it is staged in the live parameters themselves. The memory
of a copy is kept for the next one: who was updated once will be again, and fresh pages cost more than the copy itself. A
failure gives it back.

Parameters that the kernels keep packed have two memories there (`interface.PackedWeights`): what is staged is packed at once,
beside the version that is served, and a commit has them change places. Their plain memory is never written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PackedWeights
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import Box, ParamSpec, Part, Shard, all_parts, param_specs
from pearl.engine.weights import sealing
from pearl.engine.weights.arrivals import Arrivals, Expected, NamedRows
from pearl.engine.weights.checkpoint import hf_tensors, listed

PACKED_AT_ONCE = 1 << 19
"""Elements that are converted and looked at at a time, before they are packed: so many are still in a cache then."""


@dataclass(slots=True, kw_only=True)
class Bundle:
    """Adopted tensors and their ranges of rows; of those that live plain their memory, and where that is to go; of the others
    what says where to pack them. It holds the tuple, whose identity is then its alone."""

    tensors: tuple[NamedRows, ...]
    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    packing: object = None
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


class WeightStore:
    """Live parameters `params` (ParamSpec name -> tensor) of the model, or of one `shard` of it. Not thread-safe.

    `packed` keeps some of them in an order of its own; None: all are plain.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        shard: Shard | None = None,
        *,
        packed: PackedWeights | None = None,
    ) -> None:
        specs = param_specs(config, shard)
        wrong = [spec.name for spec in specs if spec.name not in params or tuple(params[spec.name].shape) != spec.shape]
        if wrong:
            raise ValueError(f"params: missing or mis-shaped: {listed(wrong)}")
        self._config, self._params, self._packed = config, params, packed
        self._dtype = next(iter(params.values())).dtype
        self._whole = shard is None or shard.size == 1
        self._expected = Expected.of(config)
        self._places = {part.hf_name: (spec, part) for spec in specs for part in all_parts(spec)}
        self._version = -1
        self._arrivals: Arrivals | None = None
        self._in_place = self._adopts = self._beside = False
        """How the present version comes: into what is live; as memory that is adopted; packed beside what is served."""
        self._staged: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._adopts_memory = self._whole and all(value.device.type == "cpu" for value in params.values())
        self._adopted: list[Bundle] = []
        self._last_adopted: list[Bundle] = []
        self._bundles: dict[int, Bundle] = {}
        """What was adopted for the last two versions (a sender may use two memories in turn), by the identity of the tuple."""
        self._doubles: dict[str, Tensor] = {}
        """Tensors beside the model's own, held back for a comparison."""

    @property
    def version(self) -> int:
        """The version that the live weights are, -1 if they are none."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether a whole version is in, so that the weights may be served."""
        return self._version >= 0

    @property
    def staged_version(self) -> int | None:
        """The version being staged, None if none is."""
        return None if self._arrivals is None else self._arrivals.version

    @torch.no_grad()
    def stage(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None:
        """Adds (Hugging Face name, tensor) pairs to the copy of `version`: in any order, in one call or in many.

        A tensor may also come as (name, some rows, number of the first), its rows in ascending order. With `adopt` the given
        memory itself is the staged copy: of the live dtype, known to be finite, and left alone until commit or discard (it is
        copied all the same by a shard and on a GPU). ValueError names what is unknown, doubled, mis-shaped
        or not floating point, of a sequence all at once, and the first tensor that is (unless adopted) not finite after the
        conversion to the live dtype; then all that was staged is discarded. A live version is not touched.
        A tuple that is adopted again (the same object, its memory refilled) has passed the checks, and costs next to nothing.
        """
        arrivals = self._open(version)
        adopt = adopt and self._adopts_memory
        if self._arrivals is None:
            self._adopts, self._in_place, self._beside = adopt, not self.ready and not adopt, self.ready
        elif adopt != self._adopts:
            raise ValueError(f"adopt={adopt}: version {version} is being staged with adopt={self._adopts}")
        self._arrivals = arrivals
        try:
            if adopt:
                self._adopt_all(tensors, arrivals)
            else:
                if isinstance(tensors, Sequence):
                    arrivals.check(tensors)
                self._take_all(tensors, arrivals)
        except BaseException:
            self.discard()
            raise

    @torch.no_grad()
    def commit(self) -> None:
        """Makes the staged version live, if `check` has nothing against it."""
        version = self.check()
        self._write_adopted()
        for name, staged in self._staged.items():
            self._make_live(name, staged)
        if self._packed is not None:
            self._packed.serve(spare=self._beside)
        kept, in_place = self._staged, self._in_place
        self._bundles = {id(bundle.tensors): bundle for bundle in (*self._last_adopted, *self._adopted)}
        self._last_adopted = self._adopted
        self._version = version
        if in_place:
            self.discard()
        else:
            self._forget_staged()
            self._spare = kept

    def check(self) -> int:
        """The staged version, which could be committed. ValueError lists the tensors that have not arrived (they may still be
        staged), or names one that differs from what it is tied to; then all that was staged is discarded."""
        if self._arrivals is None:
            raise ValueError("commit: nothing is staged")
        if missing := self._arrivals.missing():
            raise ValueError(missing)
        version = self._arrivals.version
        if different := self._different_double():
            self.discard()
            raise ValueError(f"version {version}: {different}, but the model ties them")
        return version

    @torch.no_grad()
    def stream(self, tensors: Iterable[NamedRows], version: int) -> None:
        """Writes `version` in place, without a copy, as tensors come; the owner sees to it that nothing is served meanwhile.

        ValueError as in `stage`, and for what is missing at the end. All of a sequence but its values is checked before the
        first byte changes, each tensor's values before its own bytes do. After a failure that comes later the store has no
        version (-1, not ready) until a whole one has been streamed or staged.
        """
        arrivals = self._open(version)
        if self._arrivals is not None:
            raise ValueError(f"version={version}: version {self.staged_version} is being staged; commit or discard it first")
        if isinstance(tensors, Sequence):
            arrivals.check(tensors, whole=True)
        self._arrivals, self._in_place, self._adopts, self._beside = arrivals, True, False, False
        try:
            self._take_all(tensors, arrivals)
            self.commit()
        except BaseException:
            self.discard()
            raise

    @torch.no_grad()
    def declare(self, version: int) -> None:
        """What the owner has written to the live parameters, all of them, is `version`."""
        self._open(version)
        if self._packed is not None:
            self._packed.load(release=True)
        self._version = version

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The live weights under their Hugging Face names: views, or a tensor of its own of what is packed, made when it is its
        turn. ValueError for a shard."""
        if not self._whole:
            raise ValueError("hf_tensors: a shard cannot be seen under Hugging Face names")
        return hf_tensors(self._config, self._params) if self._packed is None else self._read(self._packed)

    def discard(self) -> None:
        """Forgets what is staged and frees its memory."""
        self._forget_staged()
        self._spare = {}
        if self._packed is not None:
            self._packed.forget()

    def drop(self) -> None:
        """Forgets the live version too: nothing may be served before another one is in."""
        self.discard()
        self._version = -1

    def _forget_staged(self) -> None:
        self._staged, self._adopted, self._doubles = {}, [], {}
        self._arrivals = None

    def _open(self, version: int) -> Arrivals:
        if type(version) is not int:
            raise ValueError(f"version={version!r}: must be an integer")
        if version <= self._version:
            raise ValueError(f"version={version}: must be greater than the present version {self._version}")
        if self.staged_version not in (None, version):
            raise ValueError(f"version={version}: version {self.staged_version} is being staged; commit or discard it first")
        return self._arrivals or Arrivals(self._expected, version)

    def _take_all(self, tensors: Iterable[NamedRows], arrivals: Arrivals) -> None:
        for name, tensor, *start in tensors:
            rows = arrivals.take(name, tensor, *start)
            if rows is not None:
                self._take(name, tensor, rows)

    def _take(self, name: str, tensor: Tensor, rows: tuple[int, int]) -> None:
        """Puts the tensor's rows (their first number, and that after the last) where they belong, if they do here."""
        own = self._expected.doubles.get(name, name)
        spec, part = self._places.get(own, (None, None))
        piece = None if part is None else part.within(*rows)
        source = None if piece is None else tensor[piece.source_index(rows[0])]
        # In place nothing of a tensor may be written before all of it is known to be finite; else one pass finds out.
        if self._in_place or source is None or source.numel() < tensor.numel():
            self._refuse(name, tensor, unless=sealing.finite(tensor, self._dtype))
        if self._in_place:
            self._version = -1
        if spec is None or piece is None or source is None:
            return
        finite, double = True, own != name
        if self._packed is not None and spec.name in self._packed.names and not double:
            finite = self._pack(spec.name, piece.target, source)
        if self._is_plain(spec.name) or double:
            memory = self._memory_of_double(name, spec) if double else self._memory_of(spec)
            finite = sealing.copy([memory[piece.target_index]], [source]) and finite
        self._refuse(name, tensor, unless=finite)

    def _refuse(self, name: str, tensor: Tensor, *, unless: bool) -> None:
        """ValueError saying how many values are not finite, unless all are."""
        if not unless:
            parts = tensor.split(max(1, PACKED_AT_ONCE * tensor.shape[0] // tensor.numel()))
            count = sum(int((~torch.isfinite(part.to(self._dtype))).sum()) for part in parts)
            raise ValueError(f"{name}: {count} of {tensor.numel()} values are not finite in {self._dtype}")

    def _is_plain(self, name: str) -> bool:
        """Whether the parameter's own memory is read."""
        return self._packed is None or name not in self._packed.names or name in self._packed.plain_too

    def _pack(self, name: str, box: Box, source: Tensor) -> bool:
        """Packs a region of a parameter, a part at a time; whether all of it is finite (in place that is known)."""
        assert self._packed is not None
        axis, finite = len(box) - source.ndim, True
        count = max(1, PACKED_AT_ONCE * source.shape[0] // source.numel())
        low = box[axis][0]
        for rows in source.split(count):
            ready = rows
            if rows.dtype is not self._dtype or rows.stride(-1) != 1:
                ready = torch.empty(rows.shape, dtype=self._dtype)
                finite = sealing.copy([ready], [rows]) and finite
            elif not self._in_place:
                finite = sealing.finite(rows, self._dtype) and finite
            place = (*box[:axis], (low, low + len(rows)), *box[axis + 1 :])
            self._packed.write(self._packed.plan([(name, place, ready)]), spare=self._beside)
            low += len(rows)
        return finite

    def _read(self, packed: PackedWeights) -> Iterator[tuple[str, Tensor]]:
        for spec in param_specs(self._config):
            value = self._params[spec.name].detach()
            for part in spec.parts:
                plain = self._is_plain(spec.name)
                yield part.hf_name, value[part.target_index] if plain else packed.read(spec.name, part.target)

    def _adopt_all(self, tensors: Iterable[NamedRows], arrivals: Arrivals) -> None:
        bundle = self._bundles.get(id(tensors))
        if bundle is None or not arrivals.repeat(bundle.rows):
            bundle = self._bundle(tensors if isinstance(tensors, tuple) else tuple(tensors), arrivals)
        self._adopted.append(bundle)
        if self._packed is not None:
            self._packed.write(bundle.packing, spare=self._beside)

    def _bundle(self, tensors: tuple[NamedRows, ...], arrivals: Arrivals) -> Bundle:
        arrivals.check(tensors)
        bundle, pieces = Bundle(tensors=tensors), []
        for name, tensor, *start in tensors:
            spec, part = self._adoptable(name, tensor)
            first, last = arrivals.take(name, tensor, *start) or (0, 0)
            piece = part.within(first, last)
            assert piece is not None
            bundle.rows[name] = (bundle.rows.get(name, (first, last))[0], last)
            if self._is_plain(spec.name):
                bundle.targets.append(self._params[spec.name][piece.target_index])
                bundle.sources.append(tensor)
            if self._packed is not None and spec.name in self._packed.names:
                pieces.append((spec.name, piece.target, tensor))
        if self._packed is not None:
            bundle.packing = self._packed.plan(pieces)
        return bundle

    def _adoptable(self, name: str, tensor: Tensor) -> tuple[ParamSpec, Part]:
        """Where a tensor belongs; ValueError if it cannot be adopted."""
        if name not in self._places:
            raise ValueError(f"{name}: the model has no such tensor")
        spec, part = self._places[name]
        live = self._params[spec.name]
        if tensor.dtype is not live.dtype or tensor.device != live.device:
            raise ValueError(f"{name}: adopt=True takes {live.dtype} on {live.device}, not {tensor.dtype} on {tensor.device}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: adopt=True takes rows without gaps, not strides {tensor.stride()}")
        return spec, part

    def _write_adopted(self) -> None:
        """Copies the given memory to where the plain parameters live, in one call."""
        targets = [target for bundle in self._adopted for target in bundle.targets]
        if targets:
            torch._foreach_copy_(targets, [source for bundle in self._adopted for source in bundle.sources])

    def _make_live(self, name: str, staged: Tensor) -> None:
        live = self._params[name]
        if staged is not live:
            live.copy_(staged)

    def _different_double(self) -> str | None:
        for name, double in self._doubles.items():
            own = self._expected.doubles[name]
            if not torch.equal(double, self._staged[self._places[own][0].name]):
                return f"{name} differs from {own}"
        return None

    def _memory_of(self, spec: ParamSpec) -> Tensor:
        """The memory that a parameter is staged in."""
        if spec.name not in self._staged:
            live = self._params[spec.name]
            spare = self._spare.pop(spec.name, None)
            self._staged[spec.name] = live if self._in_place else torch.empty_like(live) if spare is None else spare
        return self._staged[spec.name]

    def _memory_of_double(self, name: str, spec: ParamSpec) -> Tensor:
        self._doubles[name] = torch.empty_like(self._params[spec.name])
        return self._doubles[name]
