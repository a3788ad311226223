"""Communicators: the few collectives that the system uses, over a group that is passed in.

Owns the calling of collectives. It does not know who is in a group or why, and never looks at an ambient (default) group.
Invariant: every member of a group makes the same calls in the same order; results are the same on every member.
"""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

SHORTEST_WAIT_S = 0.001
"""torch.distributed counts whole milliseconds, and takes 0 of them for no limit at all."""
FOR_EVER = timedelta(days=36500)


class CollectiveError(RuntimeError):
    """A collective failed or was not through in time; the message names it and, for a wait, the seconds."""


class Pending(Protocol):
    """A collective that was begun. Its tensor must be left alone until it is through."""

    def done(self) -> bool:
        """Whether it is through; never blocks. CollectiveError if it failed (a member was lost, the group's timeout)."""

    def wait(self, timeout_s: float) -> None:
        """Returns when it is through; CollectiveError if it failed or is not through within `timeout_s` seconds."""


class Communicator(Protocol):
    """Members of one group. Collectives work in place, and have been carried out (or enqueued, on a GPU) on return.

    Those called `_async` are begun only, and may overlap: they are through in any order. `what` names one in errors.
    """

    @property
    def rank(self) -> int:
        """This member's number, 0 <= rank < size."""

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replaces `tensor` by the sum over all members."""

    def all_reduce_sum_async(self, tensor: Tensor, what: str = "") -> Pending:
        """Begins to replace `tensor` by the sum over all members."""

    def broadcast(self, tensor: Tensor, src: int, *, patient: bool = False) -> None:
        """Replaces `tensor` by that of member `src`. `patient`: that may take as long as all members live."""

    def broadcast_async(self, tensor: Tensor, src: int, what: str = "") -> Pending:
        """Begins to replace `tensor` by that of member `src`."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Puts every member's `tensor` into `output` [size, *tensor.shape], contiguous, in the order of their ranks."""

    def send_async(self, tensor: Tensor, dst: int, what: str = "", *, tag: int = 0) -> Pending:
        """Begins to send a contiguous `tensor` to member `dst`, who receives it under the same `tag`."""

    def recv_async(self, tensor: Tensor, src: int, what: str = "", *, tag: int = 0) -> Pending:
        """Begins to replace a contiguous `tensor` by what member `src` sends under `tag`."""

    def barrier(self, timeout: float) -> None:
        """Returns when all members have called it; an error after `timeout` seconds."""


class SingleCommunicator:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """The sum over one member is what is there."""

    def all_reduce_sum_async(self, tensor: Tensor, what: str = "") -> Pending:
        """Through at once."""
        return _Through()

    def broadcast(self, tensor: Tensor, src: int, *, patient: bool = False) -> None:
        """ValueError unless `src` is 0, the only member."""
        _check_member(src, self.size)

    def broadcast_async(self, tensor: Tensor, src: int, what: str = "") -> Pending:
        """Through at once. ValueError unless `src` is 0."""
        _check_member(src, self.size)
        return _Through()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """A copy of `tensor` under a leading dimension of 1. ValueError for an `output` of another layout."""
        _check_gathered(output, tensor, self.size)
        output[0].copy_(tensor)

    def send_async(self, tensor: Tensor, dst: int, what: str = "", *, tag: int = 0) -> Pending:
        """ValueError: there is nobody else."""
        raise ValueError(_no_peer("dst", dst, self))

    def recv_async(self, tensor: Tensor, src: int, what: str = "", *, tag: int = 0) -> Pending:
        """ValueError: there is nobody else."""
        raise ValueError(_no_peer("src", src, self))

    def barrier(self, timeout: float) -> None:
        """Nobody to wait for."""


class GroupCommunicator:
    """Collectives over an explicit torch.distributed process group; `src` is a rank inside that group.

    The group's own methods are called, since the functions of torch.distributed refuse groups outside of WORLD. Without a
    deadline of its own a collective has the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum over the members, in place. CollectiveError when a member is lost or the group's timeout passes."""
        self.all_reduce_sum_async(tensor).wait(math.inf)

    def all_reduce_sum_async(self, tensor: Tensor, what: str = "") -> Pending:
        """Begins a sum over the members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        work = self.group.allreduce([tensor], options)
        return _Begun(work, tensor, what or f"a sum of {tensor.nbytes} bytes over {self.size} members")

    def broadcast(self, tensor: Tensor, src: int, *, patient: bool = False) -> None:
        """Copies member `src`'s tensor, in place. ValueError for a member that is not in the group."""
        self._broadcast(tensor, src, FOR_EVER if patient else None).wait(math.inf)

    def broadcast_async(self, tensor: Tensor, src: int, what: str = "") -> Pending:
        """Begins a copy of member `src`'s tensor, in place. ValueError for a member that is not in the group."""
        return self._broadcast(tensor, src, None, what)

    def _broadcast(self, tensor: Tensor, src: int, limit: timedelta | None, what: str = "") -> Pending:
        _check_member(src, self.size)
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        if limit is not None:
            options.timeout = limit
        work = self.group.broadcast([tensor], options)
        name = what or f"a broadcast of {tensor.nbytes} bytes from member {src} to {self.size - 1} others"
        return _Begun(work, tensor, name)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Every member's `tensor`, by rank, in `output`. ValueError for an `output` of another layout, CollectiveError."""
        _check_gathered(output, tensor, self.size)
        flat = tensor.contiguous().view(-1)
        work = self.group._allgather_base(output.view(-1), flat, AllgatherOptions())
        # The public functions refuse groups outside of WORLD; gloo wants both flat.
        _Begun(work, flat, f"a gathering of {tensor.nbytes} bytes from {self.size} members").wait(math.inf)

    def send_async(self, tensor: Tensor, dst: int, what: str = "", *, tag: int = 0) -> Pending:
        """Begins a message to member `dst`. ValueError for a member that is not another one of the group."""
        if not 0 <= dst < self.size or dst == self.rank:
            raise ValueError(_no_peer("dst", dst, self))
        work = self.group.send([tensor], dst, tag)
        return _message(work, tensor, what or f"a message of {tensor.nbytes} bytes from member {self.rank} to {dst}")

    def recv_async(self, tensor: Tensor, src: int, what: str = "", *, tag: int = 0) -> Pending:
        """Begins to take a message from member `src`. ValueError for a member that is not another one of the group."""
        if not 0 <= src < self.size or src == self.rank:
            raise ValueError(_no_peer("src", src, self))
        work = self.group.recv([tensor], src, tag)
        return _message(work, tensor, what or f"a message of {tensor.nbytes} bytes from member {src} to {self.rank}")

    def barrier(self, timeout: float) -> None:
        """Waits for all members, at most `timeout` seconds (CollectiveError after that)."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout)
        try:
            self.group.barrier(options).wait()
        except RuntimeError as error:
            raise CollectiveError(f"a barrier of {self.size} members, waited for {timeout:g} s: {error}") from error


class _Begun:
    """A torch.distributed work handle under a name. It keeps the tensor alive."""

    def __init__(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        self._work, self._tensor, self._what = work, tensor, what

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        self.wait(math.inf)  # raises what went wrong; on a GPU it orders the result before what this stream does next
        return True

    def wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        try:
            if math.isfinite(timeout_s):
                self._work.wait(timedelta(seconds=max(timeout_s, SHORTEST_WAIT_S)))
            else:
                self._work.wait()
        except RuntimeError as error:
            if self._work.is_completed():
                raise CollectiveError(f"{self._what}: failed: {error}") from error
            raise CollectiveError(f"{self._what}: not through within {timeout_s:g} s") from error


class _Attended:
    """A message over gloo, whose handle never says that it is through until it has been waited for: a thread does that."""

    def __init__(self, begun: _Begun, what: str) -> None:
        self._begun, self._what = begun, what
        self._over = threading.Event()
        self._error: CollectiveError | None = None
        threading.Thread(target=self._attend, name=what, daemon=True).start()

    def _attend(self) -> None:
        try:
            self._begun.wait(math.inf)
        except CollectiveError as error:
            self._error = error
        self._over.set()

    def done(self) -> bool:
        if not self._over.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        if not self._over.wait(timeout_s if math.isfinite(timeout_s) else None):
            raise CollectiveError(f"{self._what}: not through within {timeout_s:g} s")
        self.done()


class _Through:
    """What has nothing left to do."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for."""


def _message(work: dist.Work, tensor: Tensor, what: str) -> Pending:
    begun = _Begun(work, tensor, what)
    return _Attended(begun, what) if tensor.device.type == "cpu" else begun


def _no_peer(name: str, member: int, comm: SingleCommunicator | GroupCommunicator) -> str:
    return f"{name}={member}: must be another rank of this group than {comm.rank}, 0 to {comm.size - 1}"


def _check_member(src: int, size: int) -> None:
    if not 0 <= src < size:
        raise ValueError(f"src={src}: must be a rank of this group, 0 to {size - 1}")


def _check_gathered(output: Tensor, tensor: Tensor, size: int) -> None:
    shape = (size, *tensor.shape)
    if tuple(output.shape) != shape or output.dtype != tensor.dtype or not output.is_contiguous():
        raise ValueError(
            f"output of shape {tuple(output.shape)}, {output.dtype}, strides {output.stride()}: "
            f"must be {shape}, {tensor.dtype}, contiguous"
        )
