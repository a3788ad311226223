"""One member's part in carrying out a ReshardPlan, bit by bit, while it does something else between two polls.

Owns the messages of the plan, the memory they lie in, and what becomes of an error. It does not know who decided what moves,
who made the weights, or what they are for. Invariant: either all members end well or all raise, in the same words, and may
then begin another one.

Two ways in, as everywhere: streaming writes what comes straight to the target, and needs `WINDOW` messages of memory; staged
leaves it in the memory that it has come in, a second copy of what the member is to have, until `write`. Memory is kept from
one exchange to the next.

Messages are taken in the order of the plan, `WINDOW` at a time, and each is converted, sealed and checked as in `message.py`.
A member that finds something wrong (a number that is not finite, a message that is not what was sent) goes on to the end, from
then on sending its refusal where it would send numbers, so that nobody waits in vain; at the end all hear of it. What a
member has of the target already is copied within its own memory while it would wait for others.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, Communicator, Pending
from pearl.engine.comm.layout import Layout, held
from pearl.engine.weights import sealing
from pearl.engine.weights.arrivals import FLOAT_DTYPES
from pearl.engine.weights.checkpoint import listed
from pearl.engine.weights.message import REFUSAL_BYTES, Message, not_finite
from pearl.engine.weights.neighbours import ADDRESS_BYTES, Handed, Neighbours, decoded
from pearl.engine.weights.parcels import Parcel
from pearl.engine.weights.reshard import ReshardPlan

WINDOW = 4
"""Messages of one member under way at a time, in both directions together."""
PAUSE_S = 0.0002
"""How long `wait` leaves the processor to the messages themselves between two polls."""

Steps = Generator[bool, None, None]
"""`next` does some work; it yields whether something has to come from outside first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """A message under way."""

    parcel: Parcel
    message: Message | None
    """None: it will be found in the sender's memory."""
    slot: int
    pending: Pending | Handed


class Exchange:
    """What one member does. `begin`, then `poll` until it returns True, or `wait`. Not thread-safe."""

    def __init__(
        self,
        comm: Communicator,
        plan: ReshardPlan,
        *,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
        shared_memory: bool = True,
    ) -> None:
        """`comm` is the group of the plan's members in ascending order; no message may take longer than `timeout_s` to come
        when nothing else does. `shared_memory`: members of one machine use it instead of the group, if both may. ValueError
        for a group of another size."""
        if comm.size != len(plan.members):
            raise ValueError(f"comm: has {comm.size} members, must have the plan's {len(plan.members)}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be > 0")
        self.timeout_s, self.version = timeout_s, -1
        self.waiting = self.finished = False
        self._comm, self._members, self._device = comm, plan.members, torch.device(device)
        self._fingerprint, self._dtype = plan.fingerprint, getattr(torch, plan.dtype)
        self._part = plan.of(plan.members[comm.rank])
        self._lane = sorted((*self._part.sends, *self._part.receives), key=lambda parcel: parcel.key)
        self._source_shapes = _shapes(plan, plan.source, self._part.member)
        self._target_shapes = _shapes(plan, plan.target, self._part.member)
        self._slots: list[Tensor | None] = [None] * WINDOW
        self._neighbours: Neighbours | None = None
        self._near: set[int] = set()
        """Numbers in the group of the members that are reached through shared memory."""
        self._shares = shared_memory and self._device.type == "cpu"
        self._round = 0
        self._staged: dict[tuple[int, int, int], Message] = {}
        """Memory of what comes or is kept, by the parcel's key."""
        self._writable = False
        self._flying: list[_Flight] = []
        self._steps: Steps | None = None
        self._agreed = False
        self._broken: str | None = None
        self._problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this member sends and receives, headers included."""
        return sum(Message.size(parcel.bucket) for parcel in self._lane)

    def begin(self, version: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None = None) -> None:
        """Starts an exchange of this member's tensors by parameter name, as they are under the source layout.

        With a `target` (those under the target layout, of the plan's dtype) what comes is written there at once, else it is
        staged. The tensors are left alone until the exchange is through.

        ValueError lists what is missing, mis-shaped or of another dtype, before anything is sent. RuntimeError if another
        exchange is under way, CollectiveError if the group is broken.
        """
        if self._broken is not None:
            raise CollectiveError(f"version {version}: this group cannot be used any more since {self._broken}")
        if self._steps is not None:
            raise RuntimeError(f"version {version}: version {self.version} is still on its way")
        problems = _problems("source", source, self._source_shapes, FLOAT_DTYPES)
        problems += [] if target is None else _problems("target", target, self._target_shapes, (self._dtype,))
        if problems:
            raise ValueError(listed(problems))
        self.version, self._problem, self._round = version, None, self._round + 1
        self.waiting = self.finished = self._writable = False
        self._steps = self._exchange(source, target)

    def poll(self) -> bool:
        """Does what can be done without waiting, a few messages at most; True once all members have all they want.

        Raises what was wrong with any member (ValueError; what has been written to a target is void), CollectiveError when
        one is lost.
        """
        for _ in range(WINDOW):
            if self._steps is None:
                break
            try:
                self.waiting = next(self._steps)
            except StopIteration:
                self._steps, self.waiting, self.finished = None, False, True
            except BaseException as error:
                self._steps, self.waiting = None, False
                if isinstance(error, CollectiveError) or self._flying:
                    self._broken, self._flying, self._slots, self._staged = str(error), [], [], {}
                raise
            if self.waiting:
                break
        return self.finished

    def wait(self, timeout_s: float) -> None:
        """Polls to the end; CollectiveError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            if time.monotonic() > deadline:
                raise CollectiveError(f"version {self.version}: not through within {timeout_s:g} s")
            if self.waiting:
                time.sleep(PAUSE_S)

    @torch.no_grad()
    def write(self, target: Mapping[str, Tensor]) -> None:
        """Copies what is staged to the tensors of this member under the target layout, in one call: the live ones, say.

        RuntimeError unless a staged exchange has ended well, ValueError for a target that does not fit.
        """
        if not self._writable:
            raise RuntimeError(f"version {self.version}: nothing is staged that could be written")
        if problems := _problems("target", target, self._target_shapes, (self._dtype,)):
            raise ValueError(listed(problems))
        parcels = (*self._part.receives, *self._part.kept)
        views = [view for parcel in parcels for view in _views(parcel, target)]
        if views:
            torch._foreach_copy_(views, [part for parcel in parcels for part in self._staged[parcel.key].parts])

    @torch.no_grad()
    def _exchange(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None) -> Steps:
        yield from self._agree()
        lane, kept, free = self._lane[::-1], [*self._part.kept], [*range(WINDOW)]
        since = time.monotonic()
        while lane or kept or self._flying:
            worked = False
            if lane and free:
                self._launch(lane.pop(), free.pop(), source, staged=target is None)
                worked = True
            for flight in [flight for flight in self._flying if flight.pending.done()]:
                self._flying.remove(flight)
                if flight.parcel.receiver == self._part.member:
                    self._land(flight, target)
                free.append(flight.slot)
                worked = True
            if kept and not worked:
                self._keep(kept.pop(), source, target)
                worked = True
            if worked:
                since = time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                raise CollectiveError(f"version {self.version}: waited {self.timeout_s:g} s for {self._awaited()}")
            elif self._neighbours is not None:
                self._neighbours.check()
            yield not worked
        yield from self._conclude()
        self._writable = target is None

    def _launch(self, parcel: Parcel, slot: int, source: Mapping[str, Tensor], *, staged: bool) -> None:
        """Begins to send a message, filled, or to take one."""
        what, tag = f"version {self.version}, {_name(parcel)}", parcel.key[0]
        ticket = self._round << 40 | parcel.key[0] << 20 | parcel.key[1]
        sends = parcel.sender == self._part.member
        peer = self._members.index(parcel.receiver if sends else parcel.sender)
        near = self._neighbours if peer in self._near else None
        message: Message | None = None
        pending: Pending | Handed
        if sends:
            memory = self._passing(slot) if near is None else near.slot(slot)
            message = Message(memory, parcel.bucket, self._dtype)
            self._fill(parcel, message, source)
            pending = self._comm.send_async(message.whole, peer, what, tag=tag) if near is None else near.give(slot, ticket)
        elif near is not None:
            pending = near.expect(peer, ticket)
        else:
            message = self._lasting(parcel) if staged else Message(self._passing(slot), parcel.bucket, self._dtype)
            pending = self._comm.recv_async(message.whole, peer, what, tag=tag)
        self._flying.append(_Flight(parcel=parcel, message=message, slot=slot, pending=pending))

    def _passing(self, slot: int) -> Tensor:
        """Memory for a message, which the next one takes over."""
        memory = self._slots[slot]
        if memory is None:
            largest = max(Message.size(other.bucket) for other in self._lane)
            memory = self._slots[slot] = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        return memory

    def _lasting(self, parcel: Parcel) -> Message:
        """The message that this parcel is staged in."""
        if parcel.key not in self._staged:
            memory = torch.zeros(Message.size(parcel.bucket), dtype=torch.uint8, device=self._device)
            self._staged[parcel.key] = Message(memory, parcel.bucket, self._dtype)
        return self._staged[parcel.key]

    def _fill(self, parcel: Parcel, message: Message, source: Mapping[str, Tensor]) -> None:
        if self._problem is None:
            total, finite = message.put(_sources(parcel, source))
            if finite:
                message.seal(self.version, total)
                return
            self._problem = message.not_finite()
        message.refuse(self.version, self._words())

    def _land(self, flight: _Flight, target: Mapping[str, Tensor] | None) -> None:
        """What has come is checked, and goes where it belongs."""
        parcel, message, handed = flight.parcel, flight.message, flight.pending
        targets: Sequence[Tensor] = () if target is None else _views(parcel, target)
        if isinstance(handed, Handed):
            assert handed.memory is not None
            message = Message(handed.memory, parcel.bucket, self._dtype)
            targets = self._lasting(parcel).parts if target is None else targets
        assert message is not None
        try:
            refusal, _ = message.take(self.version, targets)
        except ValueError as error:
            refusal = f"{_name(parcel)}: {error}"
        if isinstance(handed, Handed):
            handed.release()
        self._problem = self._problem or refusal

    def _keep(self, parcel: Parcel, source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None) -> None:
        """Converts what is here already, and notes what is not finite then."""
        views = self._lasting(parcel).parts if target is None else _views(parcel, target)
        if not sealing.copy(views, _sources(parcel, source)):
            names = [move.name for move in parcel.moves]
            self._problem = self._problem or not_finite(zip(names, views, strict=True))

    def _agree(self) -> Steps:
        """Before the first exchange: ValueError, the same on all members, if their plans differ."""
        if self._agreed:
            return
        table = torch.zeros(self._comm.size, dtype=torch.int64, device=self._device)
        table[self._comm.rank] = self._fingerprint  # each fills in its own, so the sum has all
        yield from self._sum(table, "all members to compare their plans")
        others = [member for member, plan in zip(self._members, table.tolist(), strict=True) if plan != table[0]]
        if others:
            raise ValueError(f"version {self.version}: the plan of member {others[0]} is not that of {self._members[0]}")
        if self._comm.size > 1:
            yield from self._find_neighbours()
        self._agreed = True

    def _find_neighbours(self) -> Steps:
        """Whom this member reaches through shared memory: whoever, in both directions, can look into the other's."""
        me, size = self._comm.rank, self._comm.size
        largest = max((Message.size(parcel.bucket) for parcel in self._part.sends), default=0)
        neighbours = Neighbours(WINDOW, largest)
        table = torch.zeros(size, ADDRESS_BYTES, dtype=torch.uint8, device=self._device)
        if self._shares:
            address = neighbours.publish()
            table[me, : len(address)] = torch.tensor(list(address), dtype=torch.uint8)
        yield from self._sum(table, "all members to say where their memory is")
        attached = torch.zeros(size, size, dtype=torch.int64, device=self._device)
        for peer, address in enumerate(decoded(table.tolist())):
            if peer != me and self._shares and address:
                attached[me, peer] = neighbours.attach(peer, address)
        yield from self._sum(attached, "all members to look into each other's memory")
        self._near = {peer for peer in range(size) if peer != me and attached[me, peer] and attached[peer, me]}
        self._neighbours = neighbours if self._near else None

    def _conclude(self) -> Steps:
        """All members hear what was wrong with any: ValueError in the words of the first one."""
        table = torch.zeros(self._comm.size, REFUSAL_BYTES, dtype=torch.uint8, device=self._device)
        if self._problem is not None:
            words = self._words()
            table[self._comm.rank, : len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        yield from self._sum(table, "all members to be through")
        for words in table.cpu().numpy():
            if words[0]:
                raise ValueError(words.tobytes().rstrip(b"\0").decode(errors="ignore"))

    def _sum(self, table: Tensor, what: str) -> Steps:
        pending = self._comm.all_reduce_sum_async(table, f"version {self.version}, waiting for {what}")
        start = time.monotonic()
        while not pending.done():
            if time.monotonic() - start > self.timeout_s:
                raise CollectiveError(f"version {self.version}: waited {self.timeout_s:g} s for {what}")
            yield True

    def _words(self) -> bytes:
        return (self._problem or "").encode()[:REFUSAL_BYTES]

    def _awaited(self) -> str:
        return ", ".join(_name(flight.parcel) for flight in self._flying)


def _name(parcel: Parcel) -> str:
    return f"message {parcel.key[0] + 1} from member {parcel.sender} to member {parcel.receiver}"


def _views(parcel: Parcel, target: Mapping[str, Tensor]) -> list[Tensor]:
    return [target[move.name][move.target_index()] for move in parcel.moves]


def _sources(parcel: Parcel, source: Mapping[str, Tensor]) -> list[Tensor]:
    return [source[move.name][move.source_index()] for move in parcel.moves]


def _shapes(plan: ReshardPlan, layout: Layout, member: int) -> dict[str, tuple[int, ...]]:
    """Those of the tensors that a member holds something of."""
    table = held(plan.config, layout, member) if member in layout.members else ()
    return {spec.name: spec.shape for spec in table if prod(spec.shape)}


def _problems(
    side: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtypes: tuple[torch.dtype, ...]
) -> list[str]:
    problems = []
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"{side}: {name} is missing")
        elif tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            wanted = f"{shape}, {' or '.join(map(str, dtypes))}"
            problems.append(f"{side}: {name} is {tuple(tensor.shape)}, {tensor.dtype}, must be {wanted}")
    return problems
