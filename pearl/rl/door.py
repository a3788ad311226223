"""The door by which external workers reach a job: who is let in, and how much one may say.

Owns the rules of that socket: the token is asked for in ZeroMQ's own handshake (PLAIN, RFC 24; answered by ZAP, RFC 27), so
that not one message of a stranger is ever held; a message has a largest size, and a peer a longest queue. Invariant: what
strangers send costs a connection and this handshake, and refusing them is counted. Torch-free.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import zmq

JOIN_ADDRESS = "join_address"
"""The file of a run directory that says where workers may join."""
USER, DOMAIN = b"worker", b"pearl"
ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, in the context of the socket that is asked for."""
HANDSHAKE_S = 10
"""Who has not shown the token by then is cut off."""
QUEUED = 100
"""Messages of one worker that are held here; what is beyond waits at the worker."""
FIXED_BYTES, TOKEN_BYTES = 4 << 20, 32
"""The largest message is a hand-over of one request: per token its id, log-prob, version and share of a block id (at most 22
bytes in msgpack); or the end of some ten thousand requests at once."""


def largest_message(max_model_len: int) -> int:
    """Bytes of the largest message that a worker may send, of a model that takes so many tokens."""
    return FIXED_BYTES + TOKEN_BYTES * max_model_len


def server_options(largest: int) -> dict[int, int | bytes]:
    """Of the socket. What is larger than `largest` is dropped and told; of what is twice as large not a byte is held."""
    return {
        zmq.PLAIN_SERVER: 1,
        zmq.ZAP_DOMAIN: DOMAIN,
        zmq.HANDSHAKE_IVL: HANDSHAKE_S * 1000,
        zmq.MAXMSGSIZE: 2 * largest,
        zmq.RCVHWM: QUEUED,
    }


def client_options(token: str) -> dict[int, int | bytes]:
    """Of a worker's socket."""
    return {zmq.PLAIN_USERNAME: USER, zmq.PLAIN_PASSWORD: token.encode()}


def write_invitation(run: Path, invitation: str) -> Path:
    """The file that says where to join, for its owner alone."""
    path, fresh = run / JOIN_ADDRESS, run / f".{JOIN_ADDRESS}"  # aside: who waits for the file reads all of it
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(invitation + "\n")
    return fresh.replace(path)


class Doorkeeper:
    """Answers who is let in, for all doors of `context`; `socket` is to be waited for. `refused` counts."""

    def __init__(self, context: zmq.Context, token: str) -> None:
        self.refused = 0
        self._token = token.encode()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP)

    def answer(self) -> None:
        """To everybody who has knocked since the last call; never waits."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            asked = frames.index(b"") + 1  # before it: who asks
            version, number, _, _, _, mechanism, *words = frames[asked:]
            knows = mechanism == b"PLAIN" and len(words) == 2 and secrets.compare_digest(words[1], self._token)
            self.refused += not knows
            code, text = (b"200", b"OK") if knows else (b"400", b"the token is not that of this job")
            self.socket.send_multipart([*frames[:asked], version, number, code, text, b"", b""])

    def close(self) -> None:
        self.socket.close(0)
