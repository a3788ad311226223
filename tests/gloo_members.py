"""Members of a gloo group as threads of this process, without any default group. Fixtures only, no tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from pearl.engine.comm.communicator import GroupCommunicator


def run_members(size: int, work: Callable[[GroupCommunicator], object]) -> list:
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
