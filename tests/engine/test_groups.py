"""Where processes outside of any WORLD meet, and what becomes of those that wait in vain."""

from __future__ import annotations

import gc
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch

from pearl.engine.comm import groups
from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator
from pearl.engine.comm.groups import connect, join_store, last_words, leave_word, meet, open_store

CPU = torch.device("cpu")


def test_a_rank_that_does_not_come_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 1, 2 of 3 did not come within 0.4 s"):
        meet(open_store(5.0), 0, 3, 0.4)
    assert 0.3 < time.monotonic() - start < 3


def test_who_is_missing_is_told_meanwhile() -> None:
    store = open_store(5.0)
    store.set("here/2", "")

    def watch(missing: list[int]) -> None:
        assert missing == [1, 3]
        raise RuntimeError("that is enough")

    with pytest.raises(RuntimeError, match="that is enough"):
        meet(store, 0, 4, 60.0, watch)


def test_many_instances_at_the_same_time_find_their_own_ranks() -> None:
    """No port is looked for before it is taken, so none can be taken by somebody else in between."""
    sums: dict[int, list[float]] = {number: [] for number in range(8)}
    ports: list[int] = []

    def member(number: int, rank: int, store) -> None:
        meet(store, rank, 2, 20.0)
        comm = connect(store, rank, 2, CPU, 20.0)
        total = torch.tensor([float(number + rank)])
        comm.all_reduce_sum(total)
        sums[number].append(total.item())

    def first(number: int) -> None:
        store = open_store(20.0)
        ports.append(store.port)
        other = threading.Thread(target=lambda: member(number, 1, join_store(store.port, 20.0)))
        other.start()
        member(number, 0, store)
        other.join()

    threads = [threading.Thread(target=first, args=(number,)) for number in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(ports)) == 8
    assert sums == {number: [2.0 * number + 1] * 2 for number in sums}


@pytest.mark.parametrize("patient", [True, False])
def test_only_who_is_patient_waits_longer_than_the_groups_timeout(patient: bool) -> None:
    store, late = open_store(20.0), threading.Event()
    groups: list[GroupCommunicator] = []
    said: list[str] = []

    def member(rank: int) -> None:
        comm = connect(join_store(store.port, 20.0), rank, 2, CPU, 20.0)
        groups.append(comm)
        comm.group.set_timeout(timedelta(seconds=0.4))
        told = torch.full((3,), 1.0 - rank)
        try:
            if rank == 0:
                late.wait(1.0)
            comm.broadcast(told, 0, patient=patient)
            said.append(str(told.tolist()))
        except CollectiveError as error:
            said.append(str(error))
            late.set()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(said) == 2 and all((words == "[1.0, 1.0, 1.0]") is patient for words in said)


def test_members_that_cannot_connect_say_so() -> None:
    with pytest.raises(CollectiveError, match="rank 0 could not connect to all 2 ranks within 0.3 s"):
        connect(open_store(20.0), 0, 2, CPU, 0.3)


def test_who_left_a_word_is_heard_when_it_is_gone() -> None:
    store = open_store(5.0)
    other = join_store(store.port, 5.0)
    leave_word(other, 2, "it was too much")
    assert last_words(store, 4) == {2: "it was too much"}
    del store
    gc.collect()
    leave_word(other, 1, "nobody is there")


def test_a_store_that_does_not_answer_at_first_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first client that connects is taken, and never served: as torch's server does at times."""
    monkeypatch.setattr(groups, "JOIN_TRY_S", 0.3)
    store, silent = open_store(20.0), socket.create_server(("127.0.0.1", 0))
    given, connect_to = iter([silent.getsockname()[1], store.port]), groups._connect_to
    monkeypatch.setattr(groups, "_connect_to", lambda port, *rest: connect_to(next(given), *rest))
    start = time.monotonic()
    other = join_store(store.port, 5.0)
    assert 0.25 < time.monotonic() - start < 4
    store.set("a", "b")
    assert other.get("a") == b"b"


def test_a_store_that_never_answers_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "JOIN_TRY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        start = time.monotonic()
        words = f"the store at port {port} of this machine did not answer any of 3 tries within 0.5 s"
        with pytest.raises(TimeoutError, match=words):
            join_store(port, 0.5)
        assert time.monotonic() - start < 3
