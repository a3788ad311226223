"""The part of Engine that says which weights it serves, and whether it has its memory at all: versions in, sleep and wake.

Owns the order in which store, core and memory change at an update, at sleep and at wake; how tensors are checked and copied
is the store's, what requests do the core's. Invariant: a step runs only on one whole version, and on KV that was computed
since memory was last taken; whatever is refused is refused with ValueError before anything has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

from pearl.engine.arena import Arena
from pearl.engine.assembly import Parts
from pearl.engine.core import EngineCore, UpdateMode
from pearl.engine.request import RequestUpdate
from pearl.engine.weights.store import NamedRows, WeightStore

UPDATE_MODES = ("keep", "recompute", "abort")
UPDATE_WAYS = ("staged", "streaming")
SLEEP_WEIGHTS = ("keep", "drop")


class ServedWeights:
    """Mixed into Engine, which sets `_core`, `_store` and `_pending`, calls `_own_memory`, and has `_outward`."""

    _core: EngineCore
    _store: WeightStore
    _pending: list[RequestUpdate]

    def _own_memory(self, parts: Parts, kv_fill: float | None) -> None:
        self._weight_memory, self._kv_memory = parts.weight_memory, parts.kv_memory
        self._kv_pool, self._kv_fill = parts.runner.kv_pool, kv_fill

    def _outward(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        raise NotImplementedError

    def _settle_steps(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ versions

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; -1 while no whole version is in."""
        return self._store.version

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        mode: UpdateMode = "keep",
        way: Literal["staged", "streaming"] = "staged",
    ) -> None:
        """Takes a whole set of weights under Hugging Face names as `version`, between two steps.

        `mode` says what running requests do: keep their KV, recompute it, or end as aborted. ValueError names what is wrong.
        "staged": everything is checked (names, shapes, finiteness) in a second copy before the first live byte changes.
        "streaming": in place, tensor after tensor, without a second copy. If that fails once live bytes have changed, no whole
        version is in: running requests give way (their KV is of weights that are gone), and `step` raises until an update of
        either way has brought one; then they are computed again and go on, or end if its mode is "abort".
        """
        _check_choice("way", way, UPDATE_WAYS)
        _check_choice("mode", mode, UPDATE_MODES)
        self._check_awake()
        self._check_nothing_staged(f"version={version}")
        self._settle_steps()
        if way == "streaming":
            self._stream(tensors, version, mode)
            return
        try:
            self.stage_weights(tensors, version)
            self.commit_weights(version, mode)
        except BaseException:
            self.discard_weights()
            raise

    def _stream(self, tensors: Iterable[tuple[str, Tensor]], version: int, mode: UpdateMode) -> None:
        try:
            self._store.stream(tensors, version)
        except BaseException:
            if not self._store.ready:
                self._core.lose_kv()
            raise
        self._serve(version, mode)

    def stage_weights(self, tensors: Iterable[NamedRows], version: int, *, adopt: bool = False) -> None:
        """Adds tensors to the second copy, which is to become `version`; may be called many times, between any steps.

        Requests go on under the present version. A tensor is whole, or comes as (name, rows, number of the first row) in
        ascending order. With `adopt` nothing is copied: the given memory, known to be finite, is the second copy until
        commit or discard. ValueError as for `update_weights`; then nothing is staged any more.
        """
        self._check_awake()
        self._store.stage(tensors, version, adopt=adopt)

    def commit_weights(self, version: int, mode: UpdateMode = "keep") -> None:
        """Makes the staged `version` the one that is served; the copy in place is all that a running request waits for.

        ValueError if another version (or none) is staged, or lists the tensors that have not come; they may still be staged.
        """
        _check_choice("mode", mode, UPDATE_MODES)
        if self._store.staged_version != version:
            raise ValueError(f"version={version}: {self._store.staged_version} is staged")
        self._settle_steps()
        self._store.commit()
        self._serve(version, mode)

    def discard_weights(self) -> None:
        """Forgets what is staged; the version that is served stays."""
        self._store.discard()

    def drop_weights(self) -> None:
        """Forgets the version in place: running requests give way, and a step raises until a whole version is in again."""
        self._settle_steps()
        self._store.drop()
        self._core.lose_kv()

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the weights in use under their Hugging Face names. ValueError for one rank of several: it has parts."""
        return self._store.hf_tensors()

    def _serve(self, version: int, mode: UpdateMode) -> None:
        self._pending.extend(self._outward(self._core.set_weight_version(version, mode)))

    # ------------------------------------------------------------------------------------------------ memory

    @property
    def asleep(self) -> bool:
        return self._core.asleep

    def sleep(self, weights: Literal["keep", "drop"] = "keep") -> None:
        """Gives the KV pool's memory back, and with "drop" that of the weights too, until `wake`.

        Running requests give way and are computed again after `wake`, tokens kept; the prefix cache is emptied. Asleep, `step`
        delivers what is pending and runs nothing; requests are taken in and aborted; bringing weights is refused. ValueError
        if the engine is asleep already, a version is being staged, a lease holds blocks, or the device cannot give back.
        """
        _check_choice("weights", weights, SLEEP_WEIGHTS)
        self._check_awake()
        self._check_nothing_staged("sleep")
        leaving: list[Arena] = [self._kv_memory] + ([self._weight_memory] if weights == "drop" else [])
        for memory in leaving:
            memory.check_returnable()
        self._settle_steps()
        self._core.sleep()
        self._store.discard()  # and with it the memory kept for the next second copy
        if weights == "drop":
            self._store.drop()
        for memory in leaving:
            memory.give_back()

    def wake(self) -> None:
        """Takes the memory again. After `sleep("drop")` a step raises until a whole version is in. ValueError if awake.

        RuntimeError if somebody else has the memory of a GPU now: the engine sleeps on, without any.
        """
        if not self._core.asleep:
            raise ValueError("wake: the engine is awake")
        self._kv_memory.take()
        try:
            self._weight_memory.take()
        except RuntimeError:
            self._kv_memory.give_back()
            raise
        if self._kv_fill is not None:
            self._kv_pool.fill_(self._kv_fill)
        self._core.wake()

    def _check_awake(self) -> None:
        if self._core.asleep:
            raise ValueError("the engine is asleep: wake it first")

    def _check_nothing_staged(self, what: str) -> None:
        staged = self._store.staged_version
        if staged is not None:
            raise ValueError(f"{what}: version {staged} is being staged; commit or discard it first")


def _check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{field}={value!r}: must be one of {', '.join(valid)}")
