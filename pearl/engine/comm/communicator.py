"""Communicators: the few collectives that the system uses, over a group that is passed in.

Owns the calling of collectives. It does not know who is in a group or why, and never looks at an ambient (default) group.
Invariant: every member of a group makes the same calls in the same order; results are the same on every member.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

SHORTEST_WAIT_S = 0.001
"""torch.distributed counts whole milliseconds, and takes 0 of them for no limit at all."""
FOR_EVER = timedelta(days=36500)
LAST_MESSAGES_S = 1.0
"""How long giving up the messages under way may take when the process ends."""


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

    Those called `_async` are begun only, and may overlap: they are through in any order. `what` names one in errors. A message
    between two members may be seen to be through only after those of this member that were begun before it.
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
        self._attendants: _Attendants | None = None

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
        what = what or f"a message of {tensor.nbytes} bytes from member {self.rank} to {dst}"
        return self._message(functools.partial(self.group.send, [tensor], dst, tag), tensor, what)

    def recv_async(self, tensor: Tensor, src: int, what: str = "", *, tag: int = 0) -> Pending:
        """Begins to take a message from member `src`. ValueError for a member that is not another one of the group."""
        if not 0 <= src < self.size or src == self.rank:
            raise ValueError(_no_peer("src", src, self))
        what = what or f"a message of {tensor.nbytes} bytes from member {src} to {self.rank}"
        return self._message(functools.partial(self.group.recv, [tensor], src, tag), tensor, what)

    def _message(self, call: Callable[[], dist.Work], tensor: Tensor, what: str) -> Pending:
        if tensor.device.type != "cpu":
            return _Begun(call(), tensor, what)
        if self._attendants is None:
            self._attendants = _Attendants()
            weakref.finalize(self, _Attendants.take, self._attendants, None).atexit = False
            atexit.register(_give_up, weakref.ref(self))
        message = _Attended(call, tensor, what)
        self._attendants.take(message)
        return message

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
    """A message over gloo. To begin one may read or write all that a socket has or takes, and its handle never says that it is
    through until it has been waited for; so both are for threads of their own to do, the `_Attendants`."""

    def __init__(self, call: Callable[[], dist.Work], tensor: Tensor, what: str) -> None:
        self._call, self._tensor, self._what = call, tensor, what
        self._begun: _Begun | None = None
        self._over = threading.Event()
        self._error: CollectiveError | None = None

    def begin(self) -> None:
        try:
            self._begun = _Begun(self._call(), self._tensor, self._what)
        except RuntimeError as error:
            self._error = CollectiveError(f"{self._what}: failed: {error}")

    def attend(self) -> None:
        try:
            if self._begun is not None:
                self._begun.wait(math.inf)
        except CollectiveError as error:
            self._error = error
        self._begun = None  # the last one to drop a handle must not do so while the interpreter ends
        self._over.set()

    def abort(self) -> None:
        """Ends the wait for it with an error: gloo gives up all messages of a group of which one has come too late."""
        begun = self._begun
        if begun is not None:
            with contextlib.suppress(CollectiveError):
                begun.wait(SHORTEST_WAIT_S)

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


class _Attendants:
    """Two threads for the messages of one group: one begins them, one waits for each in turn."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[_Attended | None] = queue.SimpleQueue()
        self._begun: collections.deque[_Attended] = collections.deque()
        self._some = threading.Semaphore(0)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._begin_all, self._await_all)]
        for thread in self._threads:
            thread.start()

    def take(self, message: _Attended | None) -> None:
        """One more message; None: there will be no more."""
        self._new.put(message)

    def give_up(self) -> None:
        """Ends the threads, and what is under way with them."""
        self.take(None)
        deadline = time.monotonic() + LAST_MESSAGES_S
        while self._threads[1].is_alive() and time.monotonic() < deadline:
            for message in list(self._begun):
                message.abort()
            self._threads[1].join(LAST_MESSAGES_S / 20)

    def _begin_all(self) -> None:
        while (message := self._new.get()) is not None:
            message.begin()
            self._begun.append(message)
            self._some.release()
            del message
        self._some.release()

    def _await_all(self) -> None:
        while True:
            self._some.acquire()
            if not self._begun:
                return
            self._begun[0].attend()
            self._begun.popleft()


def _give_up(ref: weakref.ref[GroupCommunicator]) -> None:
    """When the process ends: a thread that sat in a message while the interpreter ends would end it with an abort."""
    comm = ref()
    if comm is not None and comm._attendants is not None:
        comm._attendants.give_up()


class _Through:
    """What has nothing left to do."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for."""


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
