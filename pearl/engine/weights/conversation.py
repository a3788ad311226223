"""What is said between who has a weight version and who wants it, over one TCP connection.

Owns the words (structs), their framing, and the limit on every wait. It does not know how weights travel. Invariants: no
message is larger than `MOST_BYTES`, and a message is here, whole, within its timeout, or `ConversationError` is raised;
the loss of the other end shows at once.

    receiver: Ask -> holder: Answer -> both: Address -> (weights, over a group of the two) -> receiver: Report
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from typing import TypeVar

import msgspec

from pearl.engine.comm.pairs import Address, Pair, form_pair

MOST_BYTES = 1 << 16
_LENGTH = struct.Struct("!I")


class ConversationError(RuntimeError):
    """The other end is lost, silent, or says what cannot be understood."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Wants `version`, or with None the newest, if that is newer than `present`. `plan`: fingerprint of the buckets."""

    name: str
    version: int | None
    present: int
    dtype: str
    plan: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`version` comes, over a group of the number `generation`. Or a refusal; then `later`: whether to ask again."""

    version: int = -1
    generation: int = 0
    refusal: str = ""
    later: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver has: the sum of all checksums of `version` as it came; or why it has nothing."""

    version: int
    generation: int
    digest: int = 0
    problem: str = ""


Said = TypeVar("Said", Ask, Answer, Address, Report)


class Conversation:
    """One end of a connection. `say` and `hear` wait at most `timeout_s` in all."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def begin(host: str, port: int, timeout_s: float) -> Conversation:
        """ConversationError if nobody is there."""
        try:
            return Conversation(socket.create_connection((host, port), timeout=timeout_s))
        except OSError as error:
            raise ConversationError(f"{host}:{port}: cannot be reached within {timeout_s:g} s: {error}") from error

    @property
    def own_host(self) -> str:
        """The address of this machine that the other end sees."""
        return str(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        """The other end's address and port, for people."""
        try:
            return ":".join(map(str, self._socket.getpeername()[:2]))
        except OSError:
            return "somebody who has gone"

    def say(self, words: Ask | Answer | Address | Report, timeout_s: float) -> None:
        payload = msgspec.msgpack.encode(words)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ConversationError(f"{type(words).__name__} cannot be sent within {timeout_s:g} s: {error}") from error

    def hear(self, kind: type[Said], timeout_s: float) -> Said:
        """The next message. ConversationError if it is none of that `kind`."""
        what, deadline = f"waiting for {kind.__name__}", time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, timeout_s, what))
        if length > MOST_BYTES:
            raise ConversationError(f"{what}: {length} bytes were announced, {MOST_BYTES} are the most")
        try:
            return msgspec.msgpack.decode(self._read(length, deadline, timeout_s, what), type=kind)
        except msgspec.DecodeError as error:
            raise ConversationError(f"{what}: {error}") from error

    def heard(self) -> bool:
        """Whether something has come, or the connection has ended; never waits."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline: float, timeout_s: float, what: str) -> bytes:
        data = b""
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConversationError(f"{what}: nothing came within {timeout_s:g} s")
            self._socket.settimeout(left)
            try:
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                continue
            except OSError as error:
                raise ConversationError(f"{what}: the other end is lost: {error}") from error
            if not part:
                raise ConversationError(f"{what}: the other end is gone")
            data += part
        return data


def pair_over(conversation: Conversation, rank: int, generation: int, timeout_s: float) -> Pair:
    """The group of the two that talk here; both call this. ConversationError, CollectiveError."""

    def exchange(mine: Address) -> Address:
        conversation.say(mine, timeout_s)
        return conversation.hear(Address, timeout_s)

    return form_pair(rank, generation, exchange, timeout_s, conversation.own_host)
