"""One connection between a source of KV and a receiver: words over TCP, bytes over a group of the two.

Owns framing, the messages' layout, and the limit on every wait. It does not know pools or requests. Invariants: no wait is
longer than its timeout, and its error names what was awaited; the loss of the other end, or its giving up, shows within
`SLICE_S`; a byte that changed on the way is noticed. A link that failed is closed, never used again.

    source: Welcome -> both: Address -> (the group) -> as often as one likes:
    receiver: Ask -> source: Reply, and the plan's pieces over the group

A message is a header of int64 (checksum of all that follows, number, 1 if the lease has ended and the data are void) and the
data, [layer, 2, block, kv_head, ...] as in the pool, filled up to whole words.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator, Pending
from pearl.engine.comm.pairs import Address, Pair, form_pair
from pearl.engine.migration.planner import CopyPart

MOST_WORDS = 16 << 20
"""The longest framed message, in bytes: a plan names every block."""
HEADER_BYTES = 64
PIECE_BYTES = 4 << 20
"""Small enough that filling, checking and sending find it in a processor's cache."""
BUFFERS = 2
SOURCE, RECEIVER = 0, 1
"""Their ranks in the group."""
SLICE_S = 0.05
_LENGTH = struct.Struct("!I")


class LinkError(RuntimeError):
    """The other end is lost, silent, has given up, or says what cannot be understood."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The number of the group that the two make next."""

    generation: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Wants the source's side of these parts of an offer."""

    transfer_id: str
    lease_word: int
    parts: tuple[CopyPart, ...]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces follow, unless there is a refusal."""

    refusal: str = ""


Said = TypeVar("Said", Welcome, Address, Ask, Reply)


class Link:
    """One end. Not thread-safe, except for `close`."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.pair: Pair | None = None
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffers: list[Tensor] = []

    @property
    def comm(self) -> Communicator:
        if self.pair is None or self.pair.comm is None:
            raise LinkError("the link is closed")
        return self.pair.comm

    def pair_up(self, rank: int, generation: int) -> None:
        """Makes the group, as member `rank` of it. LinkError or CollectiveError, within twice the timeout."""
        own_host = str(self._socket.getsockname()[0])
        self.pair = form_pair(rank, generation, self._exchange, self.timeout_s, own_host)

    def _exchange(self, own: Address) -> Address:
        self.say(own)
        return self.hear(Address)

    def say(self, words: Welcome | Address | Ask | Reply) -> None:
        payload = msgspec.msgpack.encode(words)
        if len(payload) > MOST_WORDS:
            raise LinkError(f"{type(words).__name__} has {len(payload)} bytes, {MOST_WORDS} are the most")
        try:
            self._socket.settimeout(self.timeout_s)
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise LinkError(f"{type(words).__name__} cannot be sent within {self.timeout_s:g} s: {error}") from error

    def hear(self, kind: type[Said], *, patient: bool = False) -> Said:
        """The next words, within the timeout; `patient`: as late as they may begin to come."""
        what = f"waiting for {kind.__name__}"
        head = self._read(_LENGTH.size, None if patient else self.timeout_s, what)
        (length,) = _LENGTH.unpack(head)
        if length > MOST_WORDS:
            raise LinkError(f"{what}: {length} bytes were announced, {MOST_WORDS} are the most")
        try:
            return msgspec.msgpack.decode(self._read(length, self.timeout_s, what), type=kind)
        except msgspec.DecodeError as error:
            raise LinkError(f"{what}: {error}") from error

    def gone(self) -> bool:
        """Whether the other end has hung up; never waits."""
        try:
            self._socket.settimeout(0)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait(self, pending: Pending, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Until a message is through; `check` is called now and then, and may raise. LinkError at once if the other is gone."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                pending.wait(SLICE_S)
                return
            except CollectiveError as error:
                check()
                try:
                    if pending.done():
                        return
                except CollectiveError:
                    raise LinkError(f"{what}: {error}") from error
            if self.gone():
                raise LinkError(f"{what}: the other end has given up")
            if time.monotonic() > deadline:
                raise LinkError(f"{what}: not through within {self.timeout_s:g} s")

    def buffers(self, nbytes: int) -> list[Tensor]:
        """`BUFFERS` messages with room for `nbytes` of data each; kept from call to call."""
        size = HEADER_BYTES + -(-nbytes // 8) * 8
        if not self._buffers or self._buffers[0].nbytes < size:
            self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(BUFFERS)]
        return self._buffers

    def close(self, *, settled: bool) -> None:
        """At once. `settled`: no message is under way."""
        self._socket.close()
        if self.pair is not None:
            self.pair.close(settled=settled)

    def interrupt(self) -> None:
        """Has whoever waits at this end give up; from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    def _read(self, count: int, timeout_s: float | None, what: str) -> bytes:
        data = bytearray()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(data) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise LinkError(f"{what}: it did not come within {timeout_s:g} s")
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                continue
            except OSError as error:
                raise LinkError(f"{what}: the other end is lost: {error}") from error
            if not part:
                raise LinkError(f"{what}: the other end is gone")
            data += part
        return bytes(data)


class Message:
    """`nbytes` of data at the beginning of a buffer."""

    def __init__(self, buffer: Tensor, nbytes: int) -> None:
        self.whole = buffer[: HEADER_BYTES + -(-nbytes // 8) * 8]
        self.data = buffer[HEADER_BYTES : HEADER_BYTES + nbytes]
        self._words = self.whole.view(torch.int64)

    def seal(self, number: int, *, void: bool) -> None:
        self._words[1], self._words[2] = number, int(void)
        self._words[0] = self._words[1:].sum()

    def open(self, number: int) -> bool:
        """Whether the data count. LinkError for a changed byte or another message."""
        checksum, found, void = self._words[:3].tolist()
        if int(self._words[1:].sum()) != checksum:
            raise LinkError(f"piece {number + 1}: the checksum differs")
        if found != number:
            raise LinkError(f"piece {number + 1}: number {found + 1} came")
        return not void
