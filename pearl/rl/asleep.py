"""Memory that is lent out: tensors whose bytes wait on the host while their device memory is somebody else's.

Owns the copies. It does not know what the tensors are. Invariant: after `wake` every tensor has the bits it had, and every
view of it is valid again (at what may be another address).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Asleep:
    """Takes the memory of these tensors away as it is made; `discarded` ones come back as zeros, without a copy.

    What fails gives back what was taken (of `discarded` ones zeros) and raises; RuntimeError if the host has too little room.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], discarded: Iterable[Tensor] = ()) -> None:
        self.freed_bytes = 0
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        try:
            for tensor in discarded:
                self._take(tensor, keep=False)
            for tensor in tensors:
                self._take(tensor, keep=True)
        except BaseException:  # the host may have no room for all of it; there is no other copy of what was taken so far
            self.wake()
            raise

    def _take(self, tensor: Tensor, *, keep: bool) -> None:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        size = storage.nbytes()
        if not size:  # taken already, as another tensor's memory, or a rank's empty share
            return
        copy = None
        if keep:
            copy = torch.UntypedStorage(size)
            copy.copy_(storage)
        self._held.append((storage, size, copy))
        storage.resize_(0)
        self.freed_bytes += size

    @torch.no_grad()
    def wake(self) -> None:
        """Gives the memory back; on a device that has not enough of it, torch's OutOfMemoryError, and it can be tried again."""
        while self._held:
            storage, size, copy = self._held[-1]
            storage.resize_(size)
            if copy is None:
                storage.fill_(0)
            else:
                storage.copy_(copy)
            self._held.pop()
