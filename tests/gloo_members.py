"""Members of a gloo group as threads of this process, without any default group. Fixtures only, no tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from pearl.engine.comm.communicator import GroupCommunicator

TIMEOUT_S = 20

_groups: list[tuple[float, list]] = []
"""(when none of their collectives can be under way any more, groups of tests that have ended).

A collective that was abandoned holds up the destructor of its group until its timeout, in whatever thread drops the last
reference to it; that must not be one of a later test.
"""


def run_members(size: int, work: Callable[[GroupCommunicator], object], *, leave: bool = False) -> list:
    """Results (or the exceptions) of `work` on each member of a fresh gloo group, which with `leave` it leaves at its end."""
    _groups[:] = [kept for kept in _groups if kept[0] > time.monotonic()]
    store, groups, results = dist.HashStore(), [], [None] * size

    def member(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore("test", store), rank, size, timedelta(seconds=TIMEOUT_S))
            groups.extend([] if leave else [group])
            results[rank] = work(GroupCommunicator(group))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    _groups.append((time.monotonic() + TIMEOUT_S + 1, groups))
    assert not dist.is_initialized()
    return results
