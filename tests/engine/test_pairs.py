"""Groups of two: made without a store, left without waiting, whatever the other member does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pearl.engine.comm import pairs
from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.comm.pairs import Address, Pair, form_pair

TIMEOUT_S = 2.0


def meet(*works: Callable[[Pair], object], generations: tuple[int, int] = (1, 1)) -> list:
    """What the two members' work returns, or the error each has had."""
    mail: list[queue.Queue[Address]] = [queue.Queue(), queue.Queue()]
    results: list = [None, None]

    def member(rank: int) -> None:
        def exchange(mine: Address) -> Address:
            mail[1 - rank].put(mine)
            return mail[rank].get(timeout=TIMEOUT_S)

        try:
            results[rank] = works[rank](form_pair(rank, generations[rank], exchange, TIMEOUT_S))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def reduced(pair: Pair) -> float:
    total = torch.tensor([pair.comm.rank + 1.0])
    pair.comm.all_reduce_sum(total)
    pair.close(settled=True)
    return total.item()


def test_two_members_exchange_addresses_and_numbers() -> None:
    assert meet(reduced, reduced) == [3.0, 3.0]


def test_another_generation_is_refused_on_both_sides() -> None:
    words = [str(error) for error in meet(reduced, reduced, generations=(4, 3))]
    assert words == ["generation 3 came, this is generation 4", "generation 4 came, this is generation 3"]


def test_a_member_that_never_connects_costs_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveError, match="connecting generation 9: "):
        form_pair(0, 9, lambda mine: replace(mine, key=mine.key.replace("/0", "/1")), 0.6)
    assert time.monotonic() - start < 3.0


def test_what_the_exchange_raises_comes_out_at_once() -> None:
    def exchange(mine: Address) -> Address:
        assert mine.generation == 5 and mine.value
        raise ConnectionError("the other is gone")

    start = time.monotonic()
    with pytest.raises(ConnectionError, match="the other is gone"):
        form_pair(1, 5, exchange, 30.0)
    assert time.monotonic() - start < 2.0


def test_a_group_is_left_at_once_in_the_middle_of_a_collective() -> None:
    left = threading.Event()

    def abandons(pair: Pair) -> float:
        pair.comm.broadcast_async(torch.zeros(1 << 20), 1)
        start = time.monotonic()
        pair.close(settled=False)
        seconds = time.monotonic() - start
        left.set()
        return seconds

    def waits(pair: Pair) -> bool:
        left.wait(5)
        pair.close(settled=True)
        return pair.comm is None

    before = len(pairs._left)
    seconds, closed = meet(abandons, waits)
    assert seconds < 0.5 and closed is True
    assert len(pairs._left) == before + 1  # kept until nothing can be under way any more
    kept_until, _ = pairs._left[-1]
    pairs._left[-1] = (kept_until - TIMEOUT_S - 2 * pairs.MARGIN_S, pairs._left[-1][1])
    time.sleep(TIMEOUT_S)
    meet(reduced, reduced)
    assert len(pairs._left) <= before
