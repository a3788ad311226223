"""KV in messages over gloo: their checksums, and what is left behind. What holds for every sender is in `test_peer.py`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from migration_cases import Owner, layout, make_pool, offer, plan_of, wait

from pearl.engine.migration import gloo
from pearl.engine.migration.gloo import GlooTransport, Message
from pearl.engine.migration.peer_link import LinkError
from pearl.engine.migration.transport import Ticket, TransferError

Ends = tuple[GlooTransport, GlooTransport]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A source and a receiver in this process."""
    both = GlooTransport(timeout_s=5), GlooTransport(timeout_s=5)
    yield both
    for end in both:
        end.close()


def failure(ticket: Ticket, timeout_s: float) -> str:
    """The error that the ticket ends with in time."""
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        wait(ticket, timeout_s)
    assert time.monotonic() - start < timeout_s
    return str(caught.value)


def test_a_changed_byte_is_noticed() -> None:
    message = Message(torch.zeros(64 + 104, dtype=torch.uint8), 101)
    message.data.copy_(torch.arange(101, dtype=torch.uint8))
    message.seal(4)
    message.check(4)
    with pytest.raises(LinkError, match="piece 4: number 5 came"):
        message.check(3)
    for place in (8, 16, 64, 100, 164):
        message.whole[place] ^= 1
        with pytest.raises(LinkError, match="piece 5: the checksum differs"):
            message.check(4)
        message.whole[place] ^= 1


def test_damage_on_the_way_ends_the_transfer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], ends[0])
    seal = Message.seal

    def seal_and_damage(self: Message, number: int) -> None:
        seal(self, number)
        self.data[7] ^= 1

    monkeypatch.setattr(gloo.Message, "seal", seal_and_damage)
    assert "the checksum differs" in failure(ends[1].begin(plan_of(transfer, target, [0, 3]), transfer, target), 4)
    assert bool((target.tensor == 1).all())


def test_a_thousand_transfers_leave_nothing_behind() -> None:
    target, receiver = make_pool(layout(), 6, None), GlooTransport(timeout_s=10)

    def used() -> tuple[int, int, int]:
        memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), int(memory.split()[1])

    with Owner("gloo", layout(), 6, 1, [4, 1]) as owner:
        for turn in range(1000):
            wait(receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target))
            if turn == 200:
                before = used()
        after = used()
    assert after[0] == before[0] and after[1] <= before[1] + 3 and after[2] < before[2] + 8192
    deadline = time.monotonic() + 5
    while receiver._receivers and time.monotonic() < deadline:  # the owner is dead
        receiver.poll()
    assert not receiver._receivers
    assert len(os.listdir("/proc/self/fd")) <= before[0]
