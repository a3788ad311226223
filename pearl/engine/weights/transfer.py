"""Weights from one member of a group to all others, in buckets, while everybody does something else between two polls.

Owns the order of messages of one transfer and the buffers they lie in. It does not know who makes weights or who serves them.
Invariants: the sender needs `BUFFERS` buckets of memory beside the source, a receiver one copy of the model, which can serve
as the engine's staged copy; both are kept from one transfer to the next. A transfer that one member refuses, for whatever
reason, fails on all members with the same words; afterwards (unless a member was lost) the group can be used again.

A transfer of version v, member 0 sending:

    opening    a sum of one table: each member fills in its row (version, plan, dtype), all compare all rows
    bucket i   a broadcast: the bytes, then a trailer [checksum, code]; a bucket may be void: then the sender has given up
    closing    a sum of one table: each member's refusal in words, or nothing

Receivers have always posted the `BUFFERS` buckets from the one that they look at on, so a sender that gives up at bucket i
sends void buckets i to i + BUFFERS - 1 and nobody is left waiting for a message that never comes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator

import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator, Pending
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.buckets import Bucket, Piece, fingerprint, plan_buckets
from pearl.engine.weights.store import FLOAT_DTYPES, NamedRows

BUCKET_BYTES = 32 << 20
BUFFERS = 3
SENDER = 0
TRAILER_BYTES = 16
WHOLE, VOID = 0, 1
TEXT_BYTES = 384

Steps = Generator[bool, None, None]
"""One `next` is one poll's work; it yields whether it could only wait."""


class _Transfer:
    """What both sides share: the plan, the buffers, the two tables, and the polling of what is under way."""

    _keeps = False
    """Whether every bucket has a buffer of its own, instead of `BUFFERS` used in turn."""

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
        self._fingerprint = fingerprint(self._buckets)
        self._buffers: list[Tensor] = []
        self._pending: list[Pending | None] = []
        self._steps: Steps | None = None
        self._finished = False
        self._broken: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the transfer that was begun last is through on all members."""
        return self._finished

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def _start(self, version: int, steps: Steps) -> None:
        if self._broken is not None:
            raise CollectiveError(f"version {version}: this group cannot be used any more since {self._broken}")
        if self._steps is not None:
            raise RuntimeError(f"version {version}: version {self.version} is still on its way")
        self.version, self._steps, self._finished, self.waiting = version, steps, False, False

    def _advance(self) -> None:
        """One poll's work. What it raises ends the transfer."""
        if self._steps is None:
            return
        try:
            self.waiting = next(self._steps)
        except StopIteration:
            self._steps, self._finished, self.waiting = None, True, False
        except CollectiveError as error:
            self._steps, self._broken = None, str(error)
            self._buffers = []  # messages that were not through keep theirs
            raise
        except BaseException:
            self._steps = None
            raise

    def _until(self, pending: Pending | None, what: str) -> Steps:
        """Polls until a message is through, for at most `timeout_s` from now on."""
        start = time.monotonic()
        while pending is not None and not pending.done():
            if time.monotonic() - start > self.timeout_s:
                raise CollectiveError(f"version {self.version}: waited {self.timeout_s:g} s for {what}")
            yield True

    def _until_all(self) -> Steps:
        for slot, pending in enumerate(self._pending):
            yield from self._until(pending, f"the last buckets of {len(self._buckets)} {self._way()}")
            self._pending[slot] = None

    def _way(self) -> str:
        others = ", ".join(str(member) for member in range(self._comm.size) if member != SENDER)
        return f"from member {SENDER} to {others or 'nobody'}"

    def _allocate(self) -> None:
        count = min(BUFFERS, len(self._buckets))
        self._pending = [None] * count
        if not self._buffers:
            sizes = [bucket.nbytes + TRAILER_BYTES for bucket in self._buckets]
            sizes = sizes if self._keeps else [max(sizes)] * count
            self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def _buffer(self, index: int) -> Tensor:
        return self._buffers[index % len(self._buffers)]

    def _broadcast(self, index: int) -> None:
        """Starts the message of bucket `index` from, or into, its buffer."""
        message = self._buffer(index)[: self._buckets[index].nbytes + TRAILER_BYTES]
        what = f"version {self.version}, {self._name(index)}"
        self._pending[index % BUFFERS] = self._comm.broadcast_async(message, SENDER, what)

    def _name(self, index: int) -> str:
        return f"bucket {index + 1} of {len(self._buckets)} {self._way()}"

    def _trailer(self, index: int) -> Tensor:
        """int64 [checksum, code] behind the bytes of bucket `index`."""
        end = self._buckets[index].nbytes
        return self._buffer(index)[end : end + TRAILER_BYTES].view(torch.int64)

    def _checksum(self, index: int) -> Tensor:
        """The sum of the bucket's 64-bit words, modulo 2**64: any one changed word changes it."""
        return self._buffer(index)[: self._buckets[index].nbytes].view(torch.int64).sum()

    def _rows(self, index: int, piece: Piece) -> Tensor:
        """The rows of one piece, as a view of the bucket's buffer."""
        data = self._buffer(index)[piece.offset : piece.offset + piece.nbytes]
        return data.view(self.dtype).view(piece.shape)

    # ------------------------------------------------------------------------------------------------ the two tables

    def _open(self, present: int) -> Steps:
        """Waits for all members to begin; ValueError, the same everywhere, if their rows do not fit one another."""
        tensors, dtype = len(self._shapes), FLOAT_DTYPES.index(self.dtype)
        mine = [self.version, present, dtype, self._fingerprint, tensors, len(self._buckets)]
        table = torch.zeros(self._comm.size, len(mine), dtype=torch.int64)
        table[self._comm.rank] = torch.tensor(mine)
        rows = yield from self._exchange(table, "all members to begin")
        problem = _disagreement(rows)
        if problem is not None:
            raise ValueError(problem)

    def _close(self, failure: Exception | None) -> Steps:
        """Waits for all members to say how it went; raises `failure`, or what another member says."""
        words = b"" if failure is None else (str(failure) or type(failure).__name__).encode()[:TEXT_BYTES]
        table = torch.zeros(self._comm.size, TEXT_BYTES, dtype=torch.uint8)
        table[self._comm.rank, : len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        rows = yield from self._exchange(table, "all members to have all buckets")
        if failure is not None:
            raise failure
        for member, row in enumerate(rows):
            text = bytes(row).rstrip(b"\0").decode(errors="replace")
            if text:
                raise ValueError(f"version {self.version}: refused by member {member}: {text}")

    def _exchange(self, table: Tensor, what: str) -> Generator[bool, None, list[list[int]]]:
        """The sum of all members' tables; each fills its own row, so everybody has all rows afterwards."""
        table = table.to(self._device)
        pending = self._comm.all_reduce_sum_async(table, f"version {self.version}, waiting for {what}")
        yield from self._until(pending, what)
        return table.tolist()


class WeightSender(_Transfer):
    """Member 0's side. `begin`, then `poll` until it returns True."""

    _tensor: Tensor | None = None
    """The tensor whose rows are being sent."""

    def begin(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Starts a transfer of all the model's tensors, in the order of `hf_shapes(config)`; they are taken as they are sent.

        Nothing is read before all members have begun. RuntimeError if another transfer is under way.
        """
        self._start(version, self._send(iter(tensors)))

    def poll(self) -> bool:
        """Does what can be done without waiting, at most one bucket; True once all members have everything.

        ValueError when a tensor or a member does not fit (all members raise then); CollectiveError when a member is lost.
        """
        self._advance()
        return self._finished

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> Steps:
        yield from self._open(present=-1)
        self._allocate()
        failure: Exception | None = None
        for index, bucket in enumerate(self._buckets):
            yield from self._until(self._pending[index % BUFFERS], self._name(index - BUFFERS))
            try:
                self._fill(index, bucket, tensors)
            except Exception as error:  # whatever the source raises, the members must hear of it
                failure = error
                yield from self._give_up(index)
                break
            self._broadcast(index)
            yield False
        if failure is None:
            extra = next(tensors, None)
            failure = None if extra is None else ValueError(f"{extra[0]}: came after the last tensor of the model")
        self._tensor = None
        yield from self._until_all()
        yield from self._close(failure)

    @torch.no_grad()
    def _fill(self, index: int, bucket: Bucket, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for piece in bucket.pieces:
            if piece.start == 0:
                self._tensor = self._next(piece.hf_name, tensors)
            assert self._tensor is not None
            self._rows(index, piece).copy_(self._tensor[piece.start : piece.start + piece.shape[0]])
        trailer = self._trailer(index)
        trailer[0], trailer[1] = self._checksum(index), WHOLE

    def _next(self, expected: str, tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
        name, tensor = next(tensors, (None, None))
        if name != expected or tensor is None:
            raise ValueError(f"{expected}: is due, {name or 'the end'} came (tensors are sent in the order of the model)")
        if tuple(tensor.shape) != self._shapes[expected]:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {self._shapes[expected]}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        return tensor

    def _give_up(self, at: int) -> Steps:
        """Void buckets for all that receivers have posted."""
        for index in range(at, min(at + BUFFERS, len(self._buckets))):
            yield from self._until(self._pending[index % BUFFERS], self._name(index - BUFFERS))
            self._trailer(index)[1] = VOID
            self._broadcast(index)


class WeightReceiver(_Transfer):
    """The other members' side. `begin`, then `poll` until `finished`."""

    _keeps = True

    def begin(self, version: int, present: int = -1) -> None:
        """Takes part in the transfer of `version`, which must be newer than `present`, the version served here."""
        self._ready: list[NamedRows] = []
        self._refusal: Exception | None = None
        self._start(version, self._receive(present))

    def poll(self) -> list[NamedRows]:
        """The next bucket as (Hugging Face name, rows, number of the first row), empty if none has arrived; never waits.

        The tensors are valid until the next `begin`. What is raised is as for the sender.
        """
        self._ready = []
        self._advance()
        return self._ready

    def refuse(self, error: Exception) -> None:
        """Says that this member cannot use what it was given: the transfer runs out unused, and fails on all members.

        Here it then raises `error` itself.
        """
        self._refusal = self._refusal or error

    def _receive(self, present: int) -> Steps:
        yield from self._open(present)
        self._allocate()
        for index in range(len(self._pending)):
            self._broadcast(index)
        for index, bucket in enumerate(self._buckets):
            yield from self._until(self._pending[index % BUFFERS], self._name(index))
            checksum, code = self._trailer(index).tolist()
            if code == VOID:
                break
            if self._refusal is None and int(self._checksum(index)) != checksum:
                self.refuse(ValueError(f"version {self.version}: {self._name(index)}: the checksum differs"))
            if self._refusal is None:
                self._ready = [(piece.hf_name, self._rows(index, piece), piece.start) for piece in bucket.pieces]
            yield False
            if index + BUFFERS < len(self._buckets):
                self._broadcast(index + BUFFERS)
        yield from self._until_all()
        yield from self._close(self._refusal)


def _disagreement(rows: list[list[int]]) -> str | None:
    """Why a transfer between members of these rows [version, present, dtype, plan, tensors, buckets] cannot be."""
    sender = rows[SENDER]
    version = sender[0]
    for member, (asked, present, dtype, plan, tensors, buckets) in enumerate(rows):
        if asked != version:
            return f"version {version}: member {SENDER} sends it, member {member} awaits version {asked}"
        if present >= version:
            return f"version={version}: must be greater than {present}, the present version of member {member}"
        if dtype != sender[2]:
            sent, taken = FLOAT_DTYPES[sender[2]], FLOAT_DTYPES[dtype]
            return f"version {version}: member {SENDER} sends {sent}, member {member} takes {taken}; they must be the same"
        if plan != sender[3]:
            return (
                f"version {version}: the tensors of member {SENDER} ({sender[4]} in {sender[5]} buckets) and member {member} "
                f"({tensors} in {buckets} buckets) differ in name, shape or order"
            )
    return None
