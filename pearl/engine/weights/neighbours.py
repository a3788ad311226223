"""Messages between members on one machine: written once by the sender, read where they lie by the receiver.

Owns a member's shared memory, its slots and the words that say whose turn a slot is. It does not know what messages say.
Invariants: a slot is written to again only once its receiver has let it go; memory cannot shrink under who reads it; the loss
of a neighbour shows at the next question.

A member's memory is a page of words and its slots. Word i is the ticket of the message that lies in slot i, word SLOTS_MOST + i
the ticket of the last one that was taken from there; a ticket is never used again. Receivers map the page for writing and the
slots for reading, through the sender's entry in /proc.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.host_memory import address_of, open_address, reserve
from pearl.engine.node import node

PAGE = mmap.PAGESIZE
SLOTS_MOST = 64
ADDRESS_BYTES = 256


class Handed:
    """A message given, or expected. `memory`, once `done`: where what was expected lies, until `release`."""

    def __init__(self, look: Callable[[], Tensor | None], release: Callable[[], None] = lambda: None) -> None:
        self._look, self.release = look, release
        self.memory: Tensor | None = None

    def done(self) -> bool:
        """Whether it was taken, or has come; never blocks."""
        self.memory = self._look()
        return self.memory is not None


class Neighbours:
    """One member's side. `publish`, then `attach` what the others published; closed with the last reference to it."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """`slot_bytes`: of the largest message sent here; 0 for a member that sends none."""
        self._fd = -1
        self._watched: dict[int, int] = {}
        """File that becomes readable when a process ends -> the member that it is."""
        if not 1 <= slots <= SLOTS_MOST:
            raise ValueError(f"slots={slots}: must be 1 to {SLOTS_MOST}")
        self._slots, self._slot_bytes = slots, -(-slot_bytes // PAGE) * PAGE
        self._words, self._memory = np.zeros(0, np.int64), torch.empty(0, dtype=torch.uint8)
        self._others: dict[int, tuple[np.ndarray, Tensor]] = {}
        self._poll = select.poll()

    def __del__(self) -> None:
        for fd in (self._fd, *self._watched):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def publish(self) -> bytes:
        """How others find this member's memory (at most ADDRESS_BYTES); empty if there is none, since memory is short."""
        nbytes = PAGE + self._slots * self._slot_bytes
        with contextlib.suppress(MemoryError):
            name = f"pearl-messages-{secrets.token_hex(8)}"
            self._fd = reserve(name, nbytes)
            everything = mmap.mmap(self._fd, nbytes)
            self._words = np.frombuffer(everything, dtype=np.int64, count=2 * SLOTS_MOST)
            self._memory = torch.frombuffer(everything, dtype=torch.uint8)[PAGE:]
            text = f"{node()} {self._slot_bytes} {os.getpid()} {address_of(self._fd, name)}".encode()
            return text if len(text) <= ADDRESS_BYTES else b""
        return b""

    def attach(self, member: int, address: bytes) -> bool:
        """Whether what this member sends can be read where it lies: it is on this machine, and lets us look."""
        try:
            where, slot_bytes, pid, name = address.decode().split(" ")
            if where != node():
                return False
            fd = open_address(name, os.O_RDWR)
        except ValueError:
            return False
        try:
            words = np.frombuffer(mmap.mmap(fd, PAGE), dtype=np.int64, count=2 * SLOTS_MOST)
            nbytes = PAGE + self._slots * int(slot_bytes)
            # Private and writable, since torch has no read-only tensors: a stray write stays in this process.
            slots = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._others[member] = words, torch.frombuffer(slots, dtype=torch.uint8)[PAGE:]
            self.watch(member, int(pid))
        except (OSError, ValueError):
            return False
        finally:
            os.close(fd)
        return True

    def watch(self, member: int, pid: int) -> None:
        """From now on the end of this process is noticed (`check`)."""
        if pid != os.getpid():
            fd = os.pidfd_open(pid)
            self._watched[fd] = member
            self._poll.register(fd, select.POLLIN)

    def check(self) -> None:
        """CollectiveError names the neighbours that have ended."""
        gone = sorted({self._watched[fd] for fd, _ in self._poll.poll(0)})
        if gone:
            raise CollectiveError(f"member {', '.join(map(str, gone))} has ended")

    def slot(self, slot: int) -> Tensor:
        """The memory that a message is written to before it is given."""
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def give(self, slot: int, ticket: int) -> Handed:
        """What lies in the slot is whole, and can be taken by whoever expects this ticket."""
        self._words[slot] = ticket
        return Handed(lambda: self._memory if self._words[SLOTS_MOST + slot] == ticket else None)

    def expect(self, member: int, ticket: int) -> Handed:
        """The message with this ticket, in the sender's memory."""
        words, memory = self._others[member]
        size = len(memory) // self._slots
        found: list[int] = []

        def look() -> Tensor | None:
            if not found:
                found.extend(np.flatnonzero(words[: self._slots] == ticket)[:1].tolist())
            return memory[found[0] * size : (found[0] + 1) * size] if found else None

        def release() -> None:
            words[SLOTS_MOST + found[0]] = ticket

        return Handed(look, release)


def decoded(table: Sequence[Sequence[int]]) -> list[bytes]:
    """Addresses out of rows of bytes that are filled up with zeros."""
    return [bytes(row).rstrip(b"\0") for row in table]
