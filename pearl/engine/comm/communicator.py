"""Communicators: the few collectives that the system uses, over a group that is passed in.

Owns the calling of collectives. It does not know who is in a group or why, and never looks at an ambient (default) group.
Invariant: every member of a group makes the same calls in the same order; results are the same on every member.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Communicator(Protocol):
    """Members of one group. Collectives work in place, and have been carried out (or enqueued, on a GPU) on return."""

    @property
    def rank(self) -> int:
        """This member's number, 0 <= rank < size."""

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces `tensor` by the sum over all members."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Replaces `tensor` by that of member `src`."""

    def barrier(self, timeout: float) -> None:
        """Returns when all members have called it; an error after `timeout` seconds."""


class SingleCommunicator:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """The sum over one member is what is there."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """ValueError unless `src` is 0, the only member."""
        _check_member(src, self.size)

    def barrier(self, timeout: float) -> None:
        """Nobody to wait for."""


class GroupCommunicator:
    """Collectives over an explicit torch.distributed process group; `src` is a rank inside that group.

    The group's own methods are called, since the functions of torch.distributed refuse groups outside of WORLD.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum over the members, in place. Raises RuntimeError when a member is lost or the group's timeout passes."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copies member `src`'s tensor, in place. ValueError for a member that is not in the group."""
        _check_member(src, self.size)
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def barrier(self, timeout: float) -> None:
        """Waits for all members, at most `timeout` seconds (RuntimeError after that)."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout)
        self._group.barrier(options).wait()


def _check_member(src: int, size: int) -> None:
    if not 0 <= src < size:
        raise ValueError(f"src={src}: must be a rank of this group, 0 to {size - 1}")
