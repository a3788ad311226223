"""Communicators over explicit groups: gloo members in threads of this process, no default group anywhere."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_gathering_keeps_the_order_of_the_members(dtype: torch.dtype):
    def work(comm: Communicator) -> list:
        rows = torch.arange(12).view(3, 4).t().to(dtype) + 20 * comm.rank  # not contiguous
        output = torch.zeros((comm.size, 4, 3), dtype=dtype)
        comm.all_gather(output, rows)
        scalars = torch.zeros(comm.size, dtype=dtype)
        comm.all_gather(scalars, rows[1, 2])
        return [output.tolist(), scalars.tolist()]

    rows = torch.arange(12).view(3, 4).t()
    expected = [[(rows + 20 * rank).tolist() for rank in range(3)], [9, 29, 49]]
    assert run_members(3, work) == [expected] * 3


def test_gathering_refuses_an_output_of_another_layout():
    def work(comm: Communicator) -> list[str]:
        tensor, said = torch.zeros(2, 3), []
        wrong = [torch.zeros(comm.size, 3, 2), torch.zeros(comm.size, 2, 3, dtype=torch.float64)]
        for output in [*wrong, torch.zeros(comm.size, 3, 2).transpose(1, 2)]:
            with pytest.raises(ValueError, match=r"must be \(\d, 2, 3\), torch.float32, contiguous") as caught:
                comm.all_gather(output, tensor)
            said.append(str(caught.value))
        return said

    assert len(work(SingleCommunicator())) == 3
    assert [len(said) for said in run_members(2, work)] == [3, 3]


def test_gathering_in_a_group_of_one():
    tensor = torch.tensor([[1.0, 2.0]])
    output = torch.zeros(1, 1, 2)
    SingleCommunicator().all_gather(output, tensor)
    assert output.tolist() == [[[1.0, 2.0]]]


def test_gathering_names_itself_when_a_member_goes():
    def work(comm: Communicator) -> str:
        comm.barrier(10.0)
        if comm.rank == 1:
            return ""
        with pytest.raises(CollectiveError) as caught:
            comm.all_gather(torch.zeros(2, 4), torch.zeros(4))
        return str(caught.value)

    assert str(run_members(2, work, leave=True)[0]).startswith("a gathering of 16 bytes from 2 members: ")


def test_messages_to_one_member_overlap_and_are_told_apart():
    """Received in another order than they were sent; `done` turns true without a wait."""

    def work(comm: Communicator) -> list[float]:
        tensors = [torch.full((50_000,), float(tag)) for tag in range(3)]
        if comm.rank == 0:
            pending = [comm.send_async(tensors[tag], 1, tag=tag) for tag in range(3)]
        else:
            pending = [comm.recv_async(tensors[tag].zero_(), 0, tag=tag) for tag in (2, 0, 1)]
        deadline = time.monotonic() + 10.0
        while not all(item.done() for item in pending):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for item in pending:
            item.wait(1.0)
        return [float(tensor.mean()) for tensor in tensors]

    assert run_members(2, work) == [[0.0, 1.0, 2.0]] * 2


def test_a_message_that_does_not_come_is_named():
    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(1.0)
            comm.send_async(torch.ones(2), 0).wait(10.0)
            return ""
        pending = comm.recv_async(torch.zeros(2), 1, "the news")
        with pytest.raises(CollectiveError) as caught:
            pending.wait(0.2)
        pending.wait(10.0)
        return str(caught.value)

    assert run_members(2, work)[0] == "the news: not through within 0.2 s"


@pytest.mark.parametrize("member", [0, 2, -1])
def test_messages_go_to_another_member_of_the_group(member: int):
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send_async(torch.zeros(1), member)

    message = f"dst={member}: must be another rank of this group than 0, 0 to 1"
    assert str(run_members(2, work)[0]) == message
    with pytest.raises(ValueError, match=f"src={member}: must be another rank"):
        SingleCommunicator().recv_async(torch.zeros(1), member)


LEAVING = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from pearl.engine.comm.communicator import GroupCommunicator
rank = int(sys.argv[2])
comm = GroupCommunicator(dist.ProcessGroupGloo(dist.FileStore(sys.argv[1], 2), rank, 2, timedelta(seconds=20)))
comm.barrier(20.0)
pending = comm.recv_async(torch.zeros(10), 1 - rank)
raise SystemExit(3)
"""


def test_a_process_may_end_with_messages_under_way(tmp_path: Path):
    """With its own exit code, in time, though nobody ever sends what it waits for."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "store")]
    members = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for member in members:
        _, words = member.communicate(timeout=40)
        assert (member.returncode, words) == (3, "")
