"""Communicators over explicit groups: gloo members in threads of this process, no default group anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pearl.engine.comm.communicator import Communicator, GroupCommunicator, SingleCommunicator


def run_members(size: int, work: Callable[[Communicator], object]) -> list:
    """Results (or the exceptions) of `work` on each member of a fresh gloo group."""
    store, results = dist.HashStore(), [None] * size

    def member(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("test", store), rank, size, timedelta(seconds=20))
            results[rank] = work(GroupCommunicator(group))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not dist.is_initialized()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_and_broadcast(dtype: torch.dtype):
    def work(comm: Communicator) -> tuple[list, list, int]:
        total = torch.tensor([1.0, comm.rank], dtype=dtype)
        comm.all_reduce_sum(total)
        copy = torch.full((3,), float(comm.rank), dtype=dtype)
        comm.broadcast(copy, src=2)
        comm.barrier(10.0)
        return total.tolist(), copy.tolist(), comm.size

    assert run_members(3, work) == [([3.0, 3.0], [2.0, 2.0, 2.0], 3)] * 3


def test_barrier_waits_for_the_last():
    def work(comm: Communicator) -> float:
        if comm.rank == 1:
            time.sleep(0.3)
        start = time.monotonic()
        comm.barrier(10.0)
        return time.monotonic() - start

    early, late = run_members(2, work)
    assert early > 0.2 and late < 0.2


def test_barrier_gives_up_after_its_timeout():
    def work(comm: Communicator) -> float | None:
        if comm.rank == 1:
            time.sleep(1.5)
            return None
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            comm.barrier(0.3)
        return time.monotonic() - start

    waited = run_members(2, work)[0]
    assert isinstance(waited, float) and 0.2 < waited < 1.2


def test_unknown_source_is_named():
    def work(comm: Communicator) -> None:
        comm.broadcast(torch.zeros(1), src=2)

    for result in run_members(2, work):
        assert isinstance(result, ValueError) and str(result) == "src=2: must be a rank of this group, 0 to 1"
    with pytest.raises(ValueError, match="src=1: must be a rank of this group, 0 to 0"):
        SingleCommunicator().broadcast(torch.zeros(1), src=1)


def test_a_group_of_one_leaves_tensors_alone():
    comm, tensor = SingleCommunicator(), torch.tensor([1.0, 2.0])
    comm.all_reduce_sum(tensor)
    comm.broadcast(tensor, src=0)
    comm.barrier(0.001)
    assert tensor.tolist() == [1.0, 2.0] and (comm.rank, comm.size) == (0, 1)
