"""Memory that is lent out comes back bit for bit, also when the host has too little room for all of it."""

from __future__ import annotations

import pytest
import torch

from pearl.rl.asleep import Asleep


def tensors() -> list[torch.Tensor]:
    return [torch.arange(4.0), torch.arange(5.0) + 10, torch.arange(6.0) + 20]


def test_tensors_come_back_as_they_were_and_discarded_ones_as_zeros() -> None:
    kept, wanted, gone = tensors(), tensors(), torch.ones(3)
    asleep = Asleep(kept, [gone])
    assert asleep.freed_bytes == 4 * (4 + 5 + 6 + 3)
    assert not any(one.untyped_storage().nbytes() for one in [*kept, gone])
    asleep.wake()
    assert all(torch.equal(one, other) for one, other in zip(kept, wanted, strict=True)) and not gone.any()


def test_without_room_for_the_last_copy_all_are_there_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, wanted, storage, room = tensors(), tensors(), torch.UntypedStorage, [2]

    def allocate(size: int) -> torch.UntypedStorage:
        room[0] -= 1
        if room[0] < 0:
            raise RuntimeError("cannot allocate memory")
        return storage(size)

    monkeypatch.setattr(torch, "UntypedStorage", allocate)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        Asleep(kept)
    assert all(torch.equal(one, other) for one, other in zip(kept, wanted, strict=True))
