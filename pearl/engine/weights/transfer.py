"""Weights from one member of a group to all others, in buckets, while everybody does something else between two polls.

Owns the order of a transfer's messages and the memory they lie in. It does not know who makes weights or who serves them.
Invariants: the sender needs `BUFFERS` buckets of memory beside the source, a receiver one copy of the model, which can serve
as the engine's staged copy; both are kept from one transfer to the next. A receiver hands on only values that sender and
receiver found finite.

A transfer is one broadcast per bucket from member 0 and nothing else: each message carries the version, its checksum, and
tensors or a refusal. Before their first transfer the members compare their plans (dtype, names, shapes, bucket size), once
and for all.

Receivers have always posted the `BUFFERS` buckets from the one that they look at on. So a sender that gives up at bucket i
puts its words into buckets i to i + BUFFERS - 1: everybody raises the same, nobody is left waiting, and the group can be used
again. A receiver that cannot use what has come raises alone. From then on it is out of step, and its owner must end the job.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator

import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator, Pending
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.arrivals import FLOAT_DTYPES, NamedRows
from pearl.engine.weights.buckets import fingerprint, plan_buckets
from pearl.engine.weights.message import Message

BUCKET_BYTES = 8 << 20
"""Small enough that all buffers stay in a processor's cache: filling, checking and sending then read memory once."""
BUFFERS = 3
SENDER = 0

Steps = Generator[bool, None, None]
"""`next` does some work; it yields whether a message has to come first."""


class _Transfer:
    """What both sides share: the plan, the messages, and the polling of what is under way."""

    _keeps = False
    """Whether every bucket has memory of its own, instead of `BUFFERS` buffers used in turn."""

    def __init__(
        self,
        comm: Communicator,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`timeout_s` bounds the wait for any one message, in seconds. ValueError for a dtype that is not floating point."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype={dtype}: must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        self.dtype, self.timeout_s = dtype, timeout_s
        self.version = -1
        self.waiting = False
        self._comm, self._device = comm, torch.device(device)
        self._shapes = hf_shapes(config)
        self._buckets = plan_buckets(self._shapes, dtype.itemsize, bucket_bytes)
        self._messages: list[Message] = []
        self._pending: list[Pending | None] = [None] * BUFFERS
        self._steps: Steps | None = None
        self._agreed = self._finished = False
        self._broken: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the transfer that was begun last is through on this member."""
        return self._finished

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer."""
        return sum(Message.size(bucket) for bucket in self._buckets)

    def _start(self, version: int, steps: Steps) -> None:
        if self._broken is not None:
            raise CollectiveError(f"version {version}: this group cannot be used any more since {self._broken}")
        if self._steps is not None:
            raise RuntimeError(f"version {version}: version {self.version} is still on its way")
        self.version, self._steps, self._finished, self.waiting = version, steps, False, False

    def _advance(self) -> None:
        """One poll's work: at most `BUFFERS` buckets, which is all that can have come since the last. An error ends all."""
        for _ in range(BUFFERS + 1):
            if self._steps is None:
                return
            try:
                self.waiting = next(self._steps)
            except StopIteration:
                self._steps, self.waiting, self._finished = None, False, True
            except BaseException as error:
                self._steps, self.waiting = None, False
                if isinstance(error, CollectiveError) or any(self._pending):
                    self._broken, self._messages = str(error), []
                raise
            if self.waiting:
                return

    def _until(self, pending: Pending | None, what: str) -> Steps:
        """Polls until a message is through, for at most `timeout_s` from now on."""
        start = time.monotonic()
        while pending is not None and not pending.done():
            if time.monotonic() - start > self.timeout_s:
                raise CollectiveError(f"version {self.version}: waited {self.timeout_s:g} s for {what}")
            yield True

    def _until_free(self, index: int) -> Steps:
        """Waits for the message that was last in the place of bucket `index`."""
        slot = index % BUFFERS
        if self._pending[slot] is not None:
            yield from self._until(self._pending[slot], self._name(index if self._keeps else index - BUFFERS))
            self._pending[slot] = None

    def _until_all(self) -> Steps:
        for slot, pending in enumerate(self._pending):
            yield from self._until(pending, f"the last of {len(self._buckets)} buckets {self._way()}")
            self._pending[slot] = None

    def _way(self) -> str:
        others = ", ".join(str(member) for member in range(self._comm.size) if member != SENDER)
        return f"from member {SENDER} to {others or 'nobody'}"

    def _name(self, index: int) -> str:
        return f"bucket {index + 1} of {len(self._buckets)} {self._way()}"

    def _allocate(self) -> None:
        if self._messages:
            return
        sizes = [Message.size(bucket) for bucket in self._buckets]
        sizes = sizes if self._keeps else [max(sizes)] * min(BUFFERS, len(sizes))
        memory = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self._messages = [
            Message(memory[index % len(memory)], bucket, self.dtype) for index, bucket in enumerate(self._buckets)
        ]

    def _broadcast(self, index: int) -> None:
        """Starts the message of bucket `index` from, or into, its memory."""
        what = f"version {self.version}, {self._name(index)}"
        self._pending[index % BUFFERS] = self._comm.broadcast_async(self._messages[index].whole, SENDER, what)

    def _agree(self) -> Steps:
        """Before the first transfer: ValueError, the same on all members, if their plans differ."""
        if self._agreed:
            return
        mine = [FLOAT_DTYPES.index(self.dtype), fingerprint(self._buckets), len(self._shapes), len(self._buckets)]
        table = torch.zeros(self._comm.size, len(mine), dtype=torch.int64, device=self._device)
        table[self._comm.rank] = torch.tensor(mine)  # each fills in its own row, so the sum has all rows
        what = "all members to compare what they send and take"
        yield from self._until(self._comm.all_reduce_sum_async(table, f"version {self.version}, waiting for {what}"), what)
        problem = _disagreement(table.tolist())
        if problem is not None:
            raise ValueError(f"version {self.version}: {problem}")
        self._agreed = True


class WeightSender(_Transfer):
    """Member 0's side. `begin`, then `poll` until it returns True."""

    _tensor: Tensor | None = None
    """The tensor whose rows are being sent."""

    def begin(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Starts a transfer of all the model's tensors, in the order of `hf_shapes(config)`; they are taken as they are sent.

        RuntimeError if another transfer is under way.
        """
        self._start(version, self._send(iter(tensors)))

    def poll(self) -> bool:
        """Does what can be done without waiting; True once everything has left this member.

        Raises what was wrong with a tensor, after all members were told (ValueError if it does not fit or is not finite);
        CollectiveError when a member is lost.
        """
        self._advance()
        return self._finished

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> Steps:
        yield from self._agree()
        self._allocate()
        for index in range(len(self._buckets)):
            yield from self._until_free(index)
            try:
                self._fill(index, tensors)
            except Exception as error:  # whatever the source raises, the members must hear of it
                yield from self._give_up(index, str(error) or type(error).__name__)
                raise
            self._broadcast(index)
            yield False
        yield from self._until_all()

    @torch.no_grad()
    def _fill(self, index: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        message, sources = self._messages[index], []
        for name, rows, start in message.rows:
            if start == 0:
                self._tensor = self._next(name, tensors)
            assert self._tensor is not None
            whole = rows.shape == self._tensor.shape
            sources.append(self._tensor if whole else self._tensor[start : start + rows.shape[0]])
        total, finite = message.put(sources)
        if not finite:
            raise ValueError(message.not_finite())
        if index + 1 == len(self._buckets):
            self._tensor = None
            for name, _ in tensors:
                raise ValueError(f"{name}: came after the last tensor of the model")
        message.seal(self.version, total)

    def _next(self, expected: str, tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
        name, tensor = next(tensors, (None, None))
        if name != expected or tensor is None:
            raise ValueError(f"{expected}: is due, {name or 'the end'} came (tensors are sent in the order of the model)")
        if tensor.shape != self._shapes[expected]:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {self._shapes[expected]}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        return tensor

    def _give_up(self, at: int, words: str) -> Steps:
        """Puts the words into all that receivers have posted."""
        self._tensor = None
        for index in range(at, min(at + BUFFERS, len(self._buckets))):
            yield from self._until_free(index)
            self._messages[index].refuse(self.version, words.encode())
            self._broadcast(index)
        yield from self._until_all()


class WeightReceiver(_Transfer):
    """The other members' side. `begin`, then `poll` until `finished`."""

    _keeps = True

    def begin(self, version: int, present: int = -1) -> None:
        """Takes part in the transfer of `version`; ValueError unless it is newer than `present`, the version served here."""
        if version <= present:
            raise ValueError(f"version={version}: must be greater than {present}, the present version")
        self._start(version, self._receive())

    def poll(self) -> list[tuple[NamedRows, ...]]:
        """The buckets that arrived since the last poll, of (Hugging Face name, rows, number of the first row); never waits.

        A bucket is the same tuple of the same tensors each time. They are valid until the next `begin`. ValueError in the
        sender's words if it has given up, or if what has come is not what was sent; CollectiveError when a member is lost.
        """
        self._ready: list[tuple[NamedRows, ...]] = []
        self._advance()
        return self._ready

    def _receive(self) -> Steps:
        yield from self._agree()
        self._allocate()
        for index in range(min(BUFFERS, len(self._buckets))):
            self._broadcast(index)
        for index, message in enumerate(self._messages):
            yield from self._until_free(index)
            try:
                refusal, finite = message.take(self.version)
                if not finite and (problem := message.not_finite()):
                    raise ValueError(problem)
            except ValueError as error:
                raise ValueError(f"version {self.version}: {self._name(index)}: {error}") from error
            if refusal is not None:
                yield from self._until_all()
                raise ValueError(refusal)
            if index + BUFFERS < len(self._buckets):
                self._broadcast(index + BUFFERS)
            self._ready.append(message.rows)
            yield False


def _disagreement(plans: list[list[int]]) -> str | None:
    """Why members with these plans [dtype, fingerprint, tensors, buckets] cannot work together."""
    sent, plan, tensors, buckets = plans[SENDER]
    for member, (dtype, other, *counts) in enumerate(plans):
        if dtype != sent:
            return f"member {SENDER} sends {FLOAT_DTYPES[sent]}, member {member} takes {FLOAT_DTYPES[dtype]}"
        if other != plan:
            return (
                f"the tensors of member {SENDER} ({tensors} in {buckets} buckets) and member {member} "
                f"({counts[0]} in {counts[1]} buckets) differ in name, shape, order or bucket size"
            )
    return None
