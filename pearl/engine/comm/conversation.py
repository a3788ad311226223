"""What two processes say to each other over one TCP connection before and beside the bytes that they exchange.

Owns the framing of messages, the limit on every wait, and how the two become a group (`pairs.py`). It does not know what is
said: messages are msgspec structs of whoever talks. Invariants: no message is larger than the conversation's limit; a message
is here, whole, within its timeout, or `ConversationError` is raised, which names what was awaited; the loss of the other end
shows at once, that of its machine within two minutes.
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
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""Seconds until the kernel asks whether the other end is still there, between two questions, and how many of them: a machine
that vanishes says no farewell, and whoever waits patiently for its next word would wait for ever."""
_LENGTH = struct.Struct("!I")

Said = TypeVar("Said", bound=msgspec.Struct)


class ConversationError(RuntimeError):
    """The other end is lost, silent, or says what cannot be understood."""


class Conversation:
    """One end of a connection. Not thread-safe, except for `interrupt` and `close`."""

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: how long a message may be."""
        self._socket, self._most_bytes = connection, most_bytes
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    def begin(host: str, port: int, timeout_s: float, most_bytes: int = MOST_BYTES) -> Conversation:
        """ConversationError if nobody is there."""
        try:
            return Conversation(socket.create_connection((host, port), timeout=timeout_s), most_bytes)
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

    def say(self, words: msgspec.Struct, timeout_s: float) -> None:
        """Sends one message, within the timeout in all."""
        payload = msgspec.msgpack.encode(words)
        if len(payload) > self._most_bytes:
            raise ConversationError(f"{type(words).__name__} has {len(payload)} bytes, {self._most_bytes} are the most")
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ConversationError(f"{type(words).__name__} cannot be sent within {timeout_s:g} s: {error}") from error

    def hear(self, kind: type[Said], timeout_s: float, *, patient: bool = False) -> Said:
        """The next message. ConversationError if it is none of that `kind`. `patient`: it may begin to come whenever it likes,
        and has the timeout from then on."""
        what, deadline = f"waiting for {kind.__name__}", time.monotonic() + timeout_s
        head = self._read(_LENGTH.size, None if patient else deadline, timeout_s, what)
        deadline = time.monotonic() + timeout_s if patient else deadline
        (length,) = _LENGTH.unpack(head)
        if length > self._most_bytes:
            raise ConversationError(f"{what}: {length} bytes were announced, {self._most_bytes} are the most")
        try:
            return msgspec.msgpack.decode(self._read(length, deadline, timeout_s, what), type=kind)
        except msgspec.DecodeError as error:
            raise ConversationError(f"{what}: {error}") from error

    def heard(self, within_s: float = 0.0) -> bool:
        """Whether something has come, or the connection has ended; waits for it so long at most."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def gone(self) -> bool:
        """Whether the other end has hung up; never waits."""
        try:
            self._socket.settimeout(0)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def interrupt(self) -> None:
        """Has whoever waits at either end give up; from any thread."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline: float | None, timeout_s: float, what: str) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise ConversationError(f"{what}: it did not come within {timeout_s:g} s")
            try:
                self._socket.settimeout(left)
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                continue
            except OSError as error:
                raise ConversationError(f"{what}: the other end is lost: {error}") from error
            if not part:
                raise ConversationError(f"{what}: the other end is gone")
            data += part
        return bytes(data)


def pair_over(conversation: Conversation, rank: int, generation: int, timeout_s: float) -> Pair:
    """The group of the two that talk here; both call this. ConversationError, CollectiveError."""

    def exchange(mine: Address) -> Address:
        conversation.say(mine, timeout_s)
        return conversation.hear(Address, timeout_s)

    return form_pair(rank, generation, exchange, timeout_s, conversation.own_host)
