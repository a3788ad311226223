"""Messages in a neighbour's memory: whose turn a slot is, who may look, and what becomes of those whose neighbour ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reshard_cases import local_tensors, model
from torch import Tensor

from pearl.engine import host_memory
from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator
from pearl.engine.comm.layout import Layout
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.exchange import Exchange
from pearl.engine.weights.neighbours import ADDRESS_BYTES, Neighbours, decoded
from pearl.engine.weights.reshard import plan_reshard


def pair(slots: int = 2, slot_bytes: int = 5000) -> tuple[Neighbours, Neighbours]:
    sender, receiver = Neighbours(slots, slot_bytes), Neighbours(slots, 0)
    assert receiver.attach(0, sender.publish())
    return sender, receiver


def test_a_message_is_read_where_it_lies_and_its_slot_is_let_go_by_the_receiver() -> None:
    sender, receiver = pair()
    expected = receiver.expect(0, 77)
    assert not expected.done()
    sender.slot(1)[:5000].fill_(9)
    given = sender.give(1, 77)
    other = sender.give(0, 78)
    assert expected.done() and not given.done()
    assert torch.equal(expected.memory[:5000], torch.full((5000,), 9, dtype=torch.uint8))
    expected.release()
    assert given.done() and not other.done()
    assert not receiver.expect(0, 79).done()


def test_a_receiver_cannot_change_what_lies_there() -> None:
    sender, receiver = pair()
    given, expected = sender.give(0, 1), receiver.expect(0, 1)
    assert expected.done() and not given.done()
    expected.memory.fill_(7)
    assert int(sender.slot(0).sum()) == 0


@pytest.mark.parametrize("address", [b"", b"nonsense", b"elsewhere 4096 1 1:1:pearl-messages-0"])
def test_an_address_that_cannot_be_looked_into_is_not_attached(address: bytes) -> None:
    assert not Neighbours(2, 0).attach(1, address)


def test_memory_of_who_has_gone_is_not_attached() -> None:
    sender = Neighbours(2, 100)
    address = sender.publish()
    assert 0 < len(address) <= ADDRESS_BYTES and decoded([[*address, 0, 0]]) == [address]
    del sender
    assert not Neighbours(2, 0).attach(1, address)


def test_a_node_without_memory_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100)
    assert Neighbours(2, 1 << 20).publish() == b""
    with pytest.raises(ValueError, match="slots=65: must be 1 to 64"):
        Neighbours(65, 1)


def test_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pair()
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------------ real processes

CONFIG = model()
PLAN = plan_reshard(CONFIG, Layout(members=(0,)), Layout(members=(1,)), dtype="float32", bucket_bytes=256)
TIMEOUT_S = 3.0


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(CONFIG).items()}


def member(rank: int, folder: str, pipe: Connection) -> None:
    """Says how the first exchange ended; the second begins when it is told to, and says how long it took to end."""
    torch.set_num_threads(1)
    comm = GroupCommunicator(dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", 2), rank, 2, timedelta(seconds=30)))
    exchange = Exchange(comm, PLAN, timeout_s=TIMEOUT_S)
    layouts = PLAN.source, PLAN.target
    source, target = (local_tensors(CONFIG, one, rank, whole()) if rank in one.members else {} for one in layouts)
    expected = {name: tensor.clone() for name, tensor in target.items()}
    for tensor in target.values():
        tensor.zero_()
    exchange.begin(1, source, target)
    exchange.wait(20.0)
    pipe.send((all(torch.equal(target[name], value) for name, value in expected.items()), len(exchange._near)))
    pipe.recv()
    exchange.begin(2, source, target)
    start = time.monotonic()
    try:
        exchange.wait(20.0)
        pipe.send("through")
    except CollectiveError as error:
        pipe.send((str(error), time.monotonic() - start))


@pytest.mark.parametrize("stays", [0, 1])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_a_neighbour_is_noticed(tmp_path: Path, stays: int, kind: signal.Signals) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    members = [context.Process(target=member, args=(rank, str(tmp_path), pipes[rank][1])) for rank in range(2)]
    for process in members:
        process.start()
    try:
        assert [here.recv() for here, _ in pipes] == [(True, 1)] * 2
        os.kill(members[1 - stays].pid, kind)
        pipes[stays][0].send("go")
        assert pipes[stays][0].poll(30)
        words, seconds = pipes[stays][0].recv()
    finally:
        for process in members:
            process.kill()
            process.join(10)
    if kind == signal.SIGKILL:
        assert words == f"member {1 - stays} has ended" and seconds < 10.0
    else:
        assert f"version 2: waited {TIMEOUT_S:g} s for message" in words and seconds < TIMEOUT_S + 10
