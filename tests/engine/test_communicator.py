"""Communicators over explicit groups: gloo members in threads of this process, no default group anywhere."""

from __future__ import annotations

import time

import pytest
import torch
from gloo_members import run_members

from pearl.engine.comm.communicator import CollectiveError, Communicator, SingleCommunicator


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
        with pytest.raises(CollectiveError, match=r"a barrier of 2 members, waited for 0\.3 s"):
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


def test_what_is_begun_goes_on_by_itself():
    """The receivers begin first and do something else; the two messages on their way do not mix."""

    def work(comm: Communicator) -> tuple[bool, list, list, list]:
        if comm.rank == 0:
            time.sleep(0.3)
        copies = [torch.full((2,), float(10 * comm.rank + n)) for n in range(2)]
        total = torch.tensor([comm.rank + 1])
        begun = [comm.broadcast_async(copy, 0) for copy in copies] + [comm.all_reduce_sum_async(total)]
        at_once = begun[0].done() and comm.rank > 0
        while not all(pending.done() for pending in begun):
            time.sleep(0.001)
        for pending in begun:
            pending.wait(1.0)
        return at_once, copies[0].tolist(), copies[1].tolist(), total.tolist()

    assert run_members(3, work) == [(False, [0.0, 0.0], [1.0, 1.0], [6])] * 3


def test_a_wait_says_what_it_was_for_and_can_be_taken_up_again():
    def work(comm: Communicator) -> str:
        tensor, said = torch.tensor([comm.rank]), ""
        if comm.rank == 0:
            time.sleep(0.6)
        pending = comm.broadcast_async(tensor, 0, "version 7, bucket 2")
        if comm.rank == 1:
            with pytest.raises(ValueError, match=r"timeout_s=0: must be > 0"):
                pending.wait(0)
            with pytest.raises(CollectiveError) as caught:
                pending.wait(0.1)
            said = str(caught.value)
        pending.wait(10.0)
        assert tensor.tolist() == [0]
        return said

    assert run_members(2, work) == ["", "version 7, bucket 2: not through within 0.1 s"]


def test_what_is_begun_fails_when_the_other_member_goes():
    def work(comm: Communicator) -> str:
        comm.barrier(10.0)
        if comm.rank == 1:
            return ""
        pending = comm.all_reduce_sum_async(torch.zeros(4), "the table")
        with pytest.raises(CollectiveError) as caught:
            for _ in range(2000):
                pending.done()
                time.sleep(0.005)
        return str(caught.value)

    assert str(run_members(2, work, leave=True)[0]).startswith("the table: failed: ")


def test_a_group_of_one_is_through_at_once():
    comm, tensor = SingleCommunicator(), torch.tensor([1.0, 2.0])
    for pending in (comm.broadcast_async(tensor, 0), comm.all_reduce_sum_async(tensor)):
        assert pending.done()
        pending.wait(0.001)
    assert tensor.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="src=1: must be a rank of this group, 0 to 0"):
        comm.broadcast_async(tensor, 1)
