"""Messages between processes: ZeroMQ sockets that carry msgspec structs, and waits that always end.

Owns framing, addresses and deadlines. It does not know what a message means: both ends are told the union of types they
may receive, and anything else is dropped and counted (`rejected`), never raised into a loop.
Invariant: no call blocks longer than the timeout it was given; sending never blocks (a peer that does not read loses its
queue at `HIGH_WATER` messages, which raises `ChannelError` naming the peer).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import zmq

EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
FIRST = int(zmq.SNDMORE) | NOBLOCK
"""As plain numbers: flags of an enumeration cost more than the system calls that they are for."""
HIGH_WATER = 100_000
"""Messages queued for one peer before sending to it is an error."""
UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What decoding raises; the latter for lists in lists without end, also where nobody would read them."""


class ChannelError(RuntimeError):
    """A peer could not be reached or did not answer within a named time."""


class Server:
    """The bound end (ROUTER): many named peers, each reached by the name under which it connected.

    `address` may end in ":0" or ":*" for a free TCP port; the real one is in `.address` afterwards. A message to a peer that
    is not connected raises ChannelError. `options` of ZeroMQ go beyond the usual; of messages with more than `largest` bytes
    there are the senders and sizes in `oversized`, nothing else.
    """

    def __init__(
        self, context: zmq.Context, address: str, receives: Any, *, options: Mapping[int, int | bytes] | None = None,
        largest: int | None = None,
    ) -> None:  # fmt: skip
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, HIGH_WATER)
        self.socket.set(zmq.RCVHWM, HIGH_WATER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        _set(self.socket, options)
        try:
            self.socket.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self.address: str = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.rejected = 0
        self.oversized: list[tuple[str, int]] = []
        self._largest = largest
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, peer: str, message: Any) -> None:
        """Queues a message for a peer; ChannelError if it is unknown or its queue is full."""
        self._send(peer, self._encoder.encode(message), copy=True)

    def encode(self, message: Any) -> zmq.Frame:
        """A message for several peers: made once, and kept once for all of them."""
        return zmq.Frame(self._encoder.encode(message), copy=True)

    def send_encoded(self, peer: str, message: zmq.Frame) -> None:
        """`send` of what `encode` gave."""
        self._send(peer, message, copy=False)

    def _send(self, peer: str, payload: bytes | zmq.Frame, *, copy: bool) -> None:
        try:
            self.socket.send(peer.encode(), FIRST)  # the second frame cannot fail if this one did not
            self.socket.send(payload, NOBLOCK, copy=copy)
        except (zmq.Again, zmq.ZMQError) as error:
            raise ChannelError(f"peer {peer!r} cannot be reached: {error}") from None

    def receive(self, most: int | None = None) -> list[tuple[str, Any]]:
        """What has arrived, as (peer, message), no more than `most` of it; never waits."""
        messages: list[tuple[str, Any]] = []
        taken = 0
        while (most is None or taken < most) and (frames := _receive_now(self.socket)) is not None:
            taken += 1
            try:
                peer = frames[0].decode()
                if self._largest is not None and len(frames[-1]) > self._largest:
                    self.oversized.append((peer, len(frames[-1])))
                    continue
                messages.append((peer, self._decoder.decode(frames[-1])))
            except (*UNREADABLE, UnicodeDecodeError):
                self.rejected += 1
        return messages

    def close(self) -> None:
        self.socket.close(0)


class Client:
    """The connecting end (DEALER), known to the server as `name`. `options` of ZeroMQ go beyond the usual."""

    def __init__(
        self, context: zmq.Context, address: str, name: str, receives: Any, *,
        options: Mapping[int, int | bytes] | None = None,
    ) -> None:  # fmt: skip
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 1000)
        self.socket.set(zmq.SNDHWM, HIGH_WATER)
        self.socket.set(zmq.RCVHWM, HIGH_WATER)
        self.socket.set(zmq.IDENTITY, name.encode())
        _set(self.socket, options)
        self.socket.connect(address)
        self.name = name
        self.rejected = 0
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        """Queues a message for the server; ChannelError if the queue is full."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queues a message that is already encoded (by another thread)."""
        try:
            self.socket.send(payload, NOBLOCK)
        except zmq.Again:
            raise ChannelError(f"{self.name!r}: {HIGH_WATER} messages are queued, the server does not read") from None

    def receive(self) -> list[Any]:
        """Everything that has arrived; never waits."""
        messages = []
        while (frames := _receive_now(self.socket)) is not None:
            try:
                messages.append(self._decoder.decode(frames[-1]))
            except UNREADABLE:
                self.rejected += 1
        return messages

    def close(self) -> None:
        self.socket.close()


class Waiter:
    """Waits on the same ends again and again. `came`: whether the last wait found something at one of them."""

    def __init__(self, ends: Iterable[Server | Client | zmq.Socket]) -> None:
        self._poller = zmq.Poller()
        self._found: dict[Any, int] = {}
        for end in ends:
            self._poller.register(end if isinstance(end, zmq.Socket) else end.socket, POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Until one of the ends has something to receive; False if `timeout_s` passed first."""
        self._found = dict(self._poller.poll(int(max(0.0, timeout_s) * 1000)))
        return bool(self._found)

    def came(self, end: Server | Client) -> bool:
        return end.socket in self._found


def wait(ends: Iterable[Server | Client | zmq.Socket], timeout_s: float) -> bool:
    """Waits until one of the ends has something to receive; False if `timeout_s` passed first."""
    return Waiter(ends).wait(timeout_s)


def wait_until(ends: Iterable[Server | Client], ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits in slices until `ready()` (which receives from the ends) holds; ChannelError names `what` after `timeout_s`."""
    ends = list(ends)
    deadline = time.monotonic() + timeout_s
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            raise ChannelError(f"waited {timeout_s:g} s for {what}")
        wait(ends, min(left, 0.2))


def _set(socket: zmq.Socket, options: Mapping[int, int | bytes] | None) -> None:
    for option, value in (options or {}).items():
        socket.set(option, value)


def _receive_now(socket: zmq.Socket) -> list[bytes] | None:
    if not int(socket.getsockopt(EVENTS)) & POLLIN:  # costs less than the exception below
        return None
    try:
        return socket.recv_multipart(NOBLOCK)
    except zmq.Again:
        return None
