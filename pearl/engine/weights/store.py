"""The engine's weights by version: staged as a second copy and committed between two steps, or written straight in place.

Owns the version number and the staged copy; knows tensor names only through `param_specs` and does not know where tensors
come from. Every rank of a tensor-parallel instance takes the whole tensors and keeps its regions of them.
Invariants: the live parameters hold one whole version, or the version is -1 and nothing may be served; they never move in
memory, so whatever was captured over their addresses stays valid; no value that is not finite is ever written to them.

The first version needs no copy, since nothing is served before it: it is staged in the live parameters themselves. The memory
of a copy is kept for the next one: who was updated once will be again, and fresh pages cost more than the copy itself. A
failure gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import ParamSpec, Shard, all_parts, param_specs
from pearl.engine.weights.arrivals import Arrivals, Expected, NamedRows
from pearl.engine.weights.checkpoint import hf_tensors, listed

CHECKED_AT_ONCE = 1 << 22
"""Elements that are converted at a time to see whether they stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Adopted tensors, where each lives, and their ranges of rows. It holds the tuple, whose identity is then its alone."""

    tensors: tuple[NamedRows, ...]
    targets: list[Tensor] = field(default_factory=list)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)


class WeightStore:
    """Live parameters `params` (ParamSpec name -> tensor) of the model, or of one `shard` of it. Not thread-safe.

    `on_live(first)` is called whenever a new version is in them, before the version says so; `first`: none was before.
    `on_read` is called before live parameters are read: whoever took their memory away after `on_live` must fill it again.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        shard: Shard | None = None,
        *,
        on_live: Callable[[bool], None] | None = None,
        on_read: Callable[[], None] | None = None,
    ) -> None:
        specs = param_specs(config, shard)
        wrong = [spec.name for spec in specs if spec.name not in params or tuple(params[spec.name].shape) != spec.shape]
        if wrong:
            raise ValueError(f"params: missing or mis-shaped: {listed(wrong)}")
        self._config, self._params = config, params
        self._on_live, self._on_read, self._first = on_live, on_read, True
        self._whole = shard is None or shard.size == 1
        self._expected = Expected.of(config)
        self._places = {part.hf_name: (spec, part) for spec in specs for part in all_parts(spec)}
        self._version = -1
        self._arrivals: Arrivals | None = None
        self._in_place = self._adopts = False
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
            self._adopts, self._in_place = adopt, not self.ready and not adopt
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
        self._tell_live()
        kept = {} if self._in_place else self._staged
        self._bundles = {id(bundle.tensors): bundle for bundle in (*self._last_adopted, *self._adopted)}
        self._last_adopted = self._adopted
        self._version = version
        self.discard()
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
        self._arrivals, self._in_place, self._adopts = arrivals, True, False
        try:
            self._take_all(tensors, arrivals)
            self.commit()
        except BaseException:
            self.discard()
            raise

    @torch.no_grad()
    def declare(self, version: int) -> None:
        """What the owner has written to the live parameters is `version`."""
        self._open(version)
        self._tell_live()
        self._version = version

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the live weights under their Hugging Face names. ValueError for a shard."""
        if not self._whole:
            raise ValueError("hf_tensors: a shard cannot be seen under Hugging Face names")
        if self._on_read is not None:
            self._on_read()
        return hf_tensors(self._config, self._params)

    def discard(self) -> None:
        """Forgets what is staged and frees its memory."""
        self._staged, self._spare, self._adopted, self._doubles = {}, {}, [], {}
        self._arrivals = None

    def drop(self) -> None:
        """Forgets the live version too: nothing may be served before another one is in."""
        self.discard()
        self._version = -1

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
        _check_finite(name, tensor, next(iter(self._params.values())).dtype)
        if self._in_place:
            self._version = -1
        if spec is None or piece is None:
            return
        memory = self._memory_of(spec) if own == name else self._memory_of_double(name, spec)
        memory[piece.target_index].copy_(tensor[piece.source_index(rows[0])])

    def _adopt_all(self, tensors: Iterable[NamedRows], arrivals: Arrivals) -> None:
        bundle = self._bundles.get(id(tensors))
        if bundle is None or not arrivals.repeat(bundle.rows):
            bundle = self._bundle(tensors if isinstance(tensors, tuple) else tuple(tensors), arrivals)
        self._adopted.append(bundle)

    def _bundle(self, tensors: tuple[NamedRows, ...], arrivals: Arrivals) -> Bundle:
        arrivals.check(tensors)
        bundle = Bundle(tensors=tensors)
        for name, tensor, *start in tensors:
            if name not in self._places:
                raise ValueError(f"{name}: the model has no such tensor")
            spec, part = self._places[name]
            live = self._params[spec.name]
            if tensor.dtype is not live.dtype or tensor.device != live.device:
                raise ValueError(
                    f"{name}: adopt=True takes {live.dtype} on {live.device}, not {tensor.dtype} on {tensor.device}"
                )
            first, last = arrivals.take(name, tensor, *start) or (0, 0)
            piece = part.within(first, last)
            assert piece is not None
            bundle.rows[name] = (bundle.rows.get(name, (first, last))[0], last)
            bundle.targets.append(live[piece.target_index])
        return bundle

    def _write_adopted(self) -> None:
        """Copies the given memory to where the parameters live, in one call."""
        targets = [target for bundle in self._adopted for target in bundle.targets]
        if targets:
            torch._foreach_copy_(targets, [rows for bundle in self._adopted for _, rows, *_ in bundle.tensors])

    def _tell_live(self) -> None:
        if self._on_live is not None:
            self._on_live(self._first)
        self._first = False

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


def _check_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """ValueError unless all values are finite once they are of `dtype`."""
    rows = max(1, CHECKED_AT_ONCE * tensor.shape[0] // tensor.numel())
    if torch.promote_types(tensor.dtype, dtype) is dtype:
        dtype_seen, rows = tensor.dtype, tensor.shape[0]  # no finite value becomes infinite, so no conversion
    else:
        dtype_seen = dtype
    # The least and the greatest value carry any NaN or infinity: one pass, no mask.
    edges = [edge for part in tensor.split(rows) for edge in torch.aminmax(part.to(dtype_seen))]
    if not bool(torch.isfinite(torch.stack(edges)).all()):
        count = sum(int((~torch.isfinite(part.to(dtype))).sum()) for part in tensor.split(rows))
        raise ValueError(f"{name}: {count} of {tensor.numel()} values are not finite in {dtype}")
