"""All members come to the same conclusion, also when one of them has another experience."""

from __future__ import annotations

import pytest
from gloo_members import run_members

from pearl.engine.comm.agreement import PROBLEM_BYTES, agreed, check_same, gather_bytes, greatest, least
from pearl.engine.comm.communicator import CollectiveError, Communicator


def test_nobody_goes_on_when_one_has_failed() -> None:
    def work(comm: Communicator) -> None:
        with agreed(comm):
            if comm.rank == 1:
                raise OSError("the disk is full")

    zero, one, two = run_members(3, work)
    assert isinstance(one, OSError) and str(one) == "the disk is full"
    assert [str(error) for error in (zero, two)] == ["rank 1: the disk is full"] * 2
    assert isinstance(zero, ValueError) and isinstance(two, ValueError)


def test_all_go_on_when_all_have_done_well_and_errors_need_no_text() -> None:
    def work(comm: Communicator) -> str:
        with agreed(comm):
            pass
        with pytest.raises((KeyError, ValueError)) as caught, agreed(comm):
            if comm.rank == 0:
                raise ValueError()
        return str(caught.value)

    assert run_members(2, work) == ["", "rank 0: ValueError()"]


def test_a_long_story_is_cut_short_between_two_characters() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(ValueError) as caught, agreed(comm):
            if comm.rank == 0:
                raise ValueError("\u00e9" * PROBLEM_BYTES + "x")
        return str(caught.value)

    assert run_members(2, work)[1] == "rank 0: " + "\u00e9" * (PROBLEM_BYTES // 2)


def test_a_failed_collective_is_not_talked_about() -> None:
    def work(comm: Communicator) -> None:
        with agreed(comm):
            raise CollectiveError("gone")  # nobody waits for the others afterwards

    assert [type(error) for error in run_members(2, work)] == [CollectiveError] * 2


def test_the_least_of_a_number() -> None:
    assert run_members(3, lambda comm: least(comm, [7, 2**40, -5][comm.rank])) == [-5] * 3


def test_who_drew_differently_is_named_by_all() -> None:
    def work(comm: Communicator) -> None:
        check_same(comm, {"a": 1, "b": 2} if comm.rank else {"b": 2, "a": 1})
        check_same(comm, {"a": 1 + comm.rank // 2, "b": 2})

    errors = run_members(4, work)
    assert [type(error) for error in errors] == [RuntimeError] * 4
    assert {str(error) for error in errors} == {"rank 2, 3 of 4 drew other tokens than rank 0, of ['a', 'b']"}


def test_the_greatest_of_each_and_bytes_of_any_size_are_known_to_all() -> None:
    def work(comm: Communicator) -> tuple[list[int], list[bytes], list[bytes]]:
        values = greatest(comm, [comm.rank, 5, -comm.rank])
        return values, gather_bytes(comm, b"x" * (comm.rank * 3000)), gather_bytes(comm, b"")

    assert run_members(3, work) == [([2, 5, 0], [b"", b"x" * 3000, b"x" * 6000], [b""] * 3)] * 3
