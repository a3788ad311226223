"""What was called on the first rank of a tensor-parallel instance, and how the other ranks hear of it.

Owns the messages and their way over the instance's Communicator; it runs nothing. A Call bears the name of a method of Engine
(its tag) and that method's arguments, so that whoever receives it calls the same. Invariant: all members send and receive the
same number of messages in the same order; what was refused on the first rank is never sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

from pearl.clock import Clock
from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.protocol import KVReservation, KVTransfer, Role, SamplingParams

FRAME_BYTES = 4096
"""A message travels in one broadcast of this size, its length first; what does not fit follows in a second one."""
LENGTH_BYTES = 8


class Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="method"):
    """A call of the Engine's method that the tag names. `now` is the first rank's time of it, in seconds."""

    now: float


class AddRequest(Call, frozen=True, tag="add_request"):
    request_id: str
    prompt: list[int]
    params: SamplingParams
    cache_salt: str | None
    session_id: str | None
    reservation: KVReservation | None
    streaming: bool
    most_computed: int | None


class Abort(Call, frozen=True, tag="abort"):
    request_id: str


class Discard(Call, frozen=True, tag="discard"):
    request_id: str


class Preempt(Call, frozen=True, tag="preempt"):
    request_id: str


class Pause(Call, frozen=True, tag="pause"):
    pass


class Resume(Call, frozen=True, tag="resume"):
    pass


class Step(Call, frozen=True, tag="step_updates"):
    """`check`: all ranks compare what they drew."""

    check: bool


class StageWeights(Call, frozen=True, tag="stage_weights"):
    """The tensors follow, see `sent`."""

    version: int


class CommitWeights(Call, frozen=True, tag="commit_weights"):
    version: int
    mode: str


class StreamWeights(Call, frozen=True, tag="stream_weights"):
    """Weights in place; the tensors follow, see `sent`."""

    version: int
    mode: str


class DropWeights(Call, frozen=True, tag="drop_weights"):
    """The weights in place are no whole version on some rank, and so are none on any."""


class DiscardWeights(Call, frozen=True, tag="discard_weights"):
    pass


class SwitchRole(Call, frozen=True, tag="switch_role"):
    """The steps of a drain have been run by then."""

    role: Role
    drain: str


class TakeHandoffs(Call, frozen=True, tag="take_handoffs"):
    pass


class ExportKV(Call, frozen=True, tag="export_kv"):
    request_id: str


class FinishExport(Call, frozen=True, tag="finish_export"):
    transfer_id: str
    ok: bool
    arrived: bool


class ImportKV(Call, frozen=True, tag="import_kv"):
    """`taken`: what the first rank made of it. The KV of each rank may still be lost on its way."""

    transfer: KVTransfer
    transport: str
    taken: bool


class ReadAlong(Call, frozen=True, tag="read_along"):
    transfer: KVTransfer
    transport: str


class ReserveKV(Call, frozen=True, tag="reserve_kv"):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None


class ReleaseReservation(Call, frozen=True, tag="release_reservation"):
    reservation: KVReservation


class ResetPrefixCache(Call, frozen=True, tag="reset_prefix_cache"):
    pass


class Sleep(Call, frozen=True, tag="sleep"):
    weights: str


class Wake(Call, frozen=True, tag="wake"):
    pass


class Close(Call, frozen=True, tag="close"):
    """The instance ends."""


CALLS = (
    AddRequest | Abort | Discard | Preempt | Pause | Resume | Step | StageWeights | CommitWeights | StreamWeights | DropWeights
    | DiscardWeights | SwitchRole | TakeHandoffs | ExportKV | FinishExport | ImportKV | ReadAlong | ReserveKV
    | ReleaseReservation | ResetPrefixCache | Sleep | Wake | Close
)  # fmt: skip


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What comes next: a tensor, whole or (with `start`) some of its rows from that number on. `device`: cpu or cuda."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int | None
    device: str


class HeldClock:
    """A clock that stands still while it is held, so that all decisions of one call, on all ranks, see one time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: float | None = None

    def now(self) -> float:
        return self._clock.now() if self._held is None else self._held

    @contextlib.contextmanager
    def held(self, now: float) -> Iterator[None]:
        """Stands at `now` inside."""
        before, self._held = self._held, now
        try:
            yield
        finally:
            self._held = before


def send_calls(comm: Communicator, calls: list[Call]) -> None:
    """To all other members; rank 0 calls this, the others `receive_calls`."""
    send(comm, msgspec.msgpack.encode(calls))


def receive_calls(comm: Communicator) -> list[Call]:
    """What rank 0 sends next."""
    return msgspec.msgpack.decode(receive(comm), type=list[CALLS])


def arguments(call: Call) -> dict[str, Any]:
    """The call's own fields: what the method is to be given."""
    return {name: getattr(call, name) for name in call.__struct_fields__ if name != "now"}


def send(comm: Communicator, payload: bytes) -> None:
    """Bytes from rank 0 to all members, which call `receive`."""
    data = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
    comm.broadcast(torch.frombuffer(bytearray(data[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")), dtype=torch.uint8), 0)
    if len(data) > FRAME_BYTES:
        comm.broadcast(torch.frombuffer(bytearray(data[FRAME_BYTES:]), dtype=torch.uint8), 0)


def receive(comm: Communicator) -> bytes:
    """What rank 0 gives to `send`. It is waited for as long as rank 0 lives: an instance may be idle for days."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    comm.broadcast(frame, 0, patient=True)
    data = frame.numpy().tobytes()
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    missing = LENGTH_BYTES + length - FRAME_BYTES
    if missing > 0:
        rest = torch.empty(missing, dtype=torch.uint8)
        comm.broadcast(rest, 0)
        data += rest.numpy().tobytes()
    return data[LENGTH_BYTES : LENGTH_BYTES + length]


def sent(comm: Communicator, tensors: Iterable[tuple]) -> Iterator[tuple]:
    """Yields `tensors` (pairs or triples, see NamedRows); each that was taken without complaint goes to all other members.

    Whoever has used it must say that nothing follows, by `send_end`, also after an error.
    """
    for item in tensors:
        yield item
        name, tensor, *start = item
        value = tensor.detach().contiguous()
        piece = Piece(
            name=name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            start=start[0] if start else None,
            device=value.device.type,
        )
        send(comm, msgspec.msgpack.encode(piece))
        comm.broadcast(value, 0)


def send_end(comm: Communicator) -> None:
    """No tensor follows."""
    send(comm, b"")


def arriving(comm: Communicator, device: torch.device) -> Iterator[tuple]:
    """The tensors of `sent`, one in memory at a time; those of a GPU come to `device`.

    CollectiveError when there is no room for one: it cannot be passed over, since the others are in its broadcast.
    """
    while payload := receive(comm):
        piece = msgspec.msgpack.decode(payload, type=Piece)
        place = device if piece.device == "cuda" else torch.device("cpu")
        try:
            tensor = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=place)
        except RuntimeError as error:
            raise CollectiveError(f"{piece.name}: cannot be received: {error}") from error
        comm.broadcast(tensor, 0)
        yield (piece.name, tensor) if piece.start is None else (piece.name, tensor, piece.start)
