"""The passes over the numbers of a message: put in or taken out, converted, added up, looked at for what is not finite.

Owns the choice between `pearl._C`, which does it all in one pass over memory, and plain torch, which takes a pass for each;
messages and verdicts are the same. It does not know what a message says. Invariant: nothing is written of a call that is
refused.

`pearl._C` serves memory of the CPU, rows that lie without gaps, and the conversions of `converts`; torch serves all else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

CHECKED_AT_ONCE = 1 << 22
"""Elements that torch converts at a time to see whether they stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a message says of itself, and whether that, and its numbers, are sound."""

    intact: bool
    version: int
    refusal_bytes: int
    finite: bool


class Memory(Protocol):
    """A message: `whole` (uint8), its `words` (int64), its tensors, which byte each begins at, and what lies between them."""

    whole: Tensor
    dtype: torch.dtype

    @property
    def words(self) -> Tensor: ...
    @property
    def parts(self) -> tuple[Tensor, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def gaps(self) -> tuple[tuple[int, int], ...]: ...


class Putting(Protocol):
    """Tensors on their way into a message, while both live: as often as wanted."""

    def put(self) -> tuple[int, bool]:
        """As `put`."""


def putting(message: Memory, sources: Sequence[Tensor], first: int) -> Putting | None:
    """What puts what `sources` hold at the time into the message, see `put`; None if `pearl._C` does not serve them."""
    whole = message.whole
    module = _serving(whole, message.dtype, sources)
    if module is None:
        return None
    kinds = _kind(module, sources[0].dtype), _kind(module, message.dtype)
    given, offsets = [_given(tensor) for tensor in sources], message.offsets[first : first + len(sources)]
    return module.putting(whole.data_ptr(), whole.nbytes, offsets, given, *kinds)


def put(message: Memory, sources: Sequence[Tensor], first: int) -> tuple[int | None, bool]:
    """Copies `sources` into the message's tensors from number `first` on, converted to its dtype.

    The sum of the 64-bit words that they are part of, modulo 2**64 (None if it was not added up on the way), and whether all
    of them are finite now.
    """
    native = putting(message, sources, first)
    if native is not None:
        total, finite = native.put()
        if finite:
            return total, True
    # What is not finite may have become something else on the way; torch converts it as everywhere.
    parts = list(message.parts[first : first + len(sources)])
    torch._foreach_copy_(parts, list(sources))
    return None, _all_finite(parts)


def seal(message: Memory, version: int, total: int | None) -> None:
    """Writes the header. `total`: the sum of what `put` gave for all of the message."""
    whole = message.whole
    module = native() if whole.device.type == "cpu" and total is not None else None
    if module is not None:
        module.seal_message(whole.data_ptr(), whole.nbytes, version, total, message.gaps)
        return
    words = message.words
    words[1], words[2] = version, 0
    words[0] = words[1:].sum()


def take(message: Memory, targets: Sequence[Tensor]) -> Verdict:
    """Reads a message and, unless it is a refusal, copies its tensors to `targets` (none: it is only looked at)."""
    whole = message.whole
    module = _serving(whole, message.dtype, targets)
    if module is not None and all(tensor.dtype is message.dtype for tensor in targets):
        given, kind = [_given(tensor) for tensor in targets], _kind(module, message.dtype)
        offsets = message.offsets if given else ()
        intact, version, refusal_bytes, finite = module.take_message(whole.data_ptr(), whole.nbytes, offsets, given, kind)
        return Verdict(intact=intact, version=version, refusal_bytes=refusal_bytes, finite=finite)
    checksum, version, refusal_bytes = message.words[:3].tolist()
    if targets and not refusal_bytes:
        torch._foreach_copy_(list(targets), list(message.parts))
    intact = int(message.words[1:].sum()) == checksum
    return Verdict(intact=intact, version=version, refusal_bytes=refusal_bytes, finite=_all_finite(message.parts))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Copies tensors, converted; whether all are finite then."""
    module = _serving(targets[0], targets[0].dtype, sources) if targets else None
    if module is not None and all(_plain(tensor) and tensor.dtype is targets[0].dtype for tensor in targets):
        kinds = _kind(module, sources[0].dtype), _kind(module, targets[0].dtype)
        if module.copy_tensors([_given(tensor) for tensor in targets], [_given(tensor) for tensor in sources], *kinds):
            return True
    torch._foreach_copy_(list(targets), list(sources))
    return _all_finite(targets)


def finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are finite once they are of `dtype`. One pass; what torch converts, it does a part at a time."""
    module = _serving(tensor, dtype, [tensor]) if tensor.numel() else None
    if module is not None:
        return module.look_at_tensors([_given(tensor)], _kind(module, tensor.dtype), _kind(module, dtype))
    rows = max(1, CHECKED_AT_ONCE * tensor.shape[0] // max(1, tensor.numel()))
    return all(_all_finite([part.to(dtype)]) for part in tensor.split(rows))


@functools.cache
def native() -> ModuleType | None:
    """`pearl._C`, None if it is not built (or was, before it had these passes)."""
    try:
        module = importlib.import_module("pearl._C")
    except ImportError:
        return None
    return module if hasattr(module, "putting") else None


def _serving(memory: Tensor, dtype: torch.dtype, tensors: Sequence[Tensor]) -> ModuleType | None:
    """`pearl._C` if it can copy between these, which are all of one dtype then, and such memory, of `dtype`."""
    module = native()
    if module is None or memory.device.type != "cpu" or not all(map(_plain, tensors)):
        return None
    kind = tensors[0].dtype if tensors else dtype
    if any(tensor.dtype is not kind for tensor in tensors):
        return None
    return module if _converts(module, kind, dtype) else None


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1) and tensor.numel() > 0


@functools.cache
def _kind(module: ModuleType, dtype: torch.dtype) -> Any:
    return getattr(module.Number, str(dtype).removeprefix("torch."), None)


@functools.cache
def _converts(module: ModuleType, source: torch.dtype, target: torch.dtype) -> bool:
    kinds = _kind(module, source), _kind(module, target)
    return None not in kinds and module.converts(*kinds)


def _given(tensor: Tensor) -> tuple[int, Sequence[int], Sequence[int]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    # Any NaN or infinity makes the sum one; the sum of finite values seldom is, and then every value is looked at.
    if bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors]).sum())):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
