"""A snapshot in host memory: whole weight versions under Hugging Face names, for every process of the node to read.

Owns the shared memory, who may write and read which part of it, and what it costs at most. It does not know where versions
come from or who takes them. Invariants: a version is readable only once all of it is in, checked and sealed; what a reader
has leased is never written to; memory is reserved before it is used, and cannot shrink, so no access can fail; nothing
outlives the processes that have it mapped.

The memory is a memfd: a header, and slots of one version each. A slot is the sealed messages of the model's buckets
(`message.py`), ready to be sent as they lie. A lease is a kernel lock on the slot's byte of the file, so whoever dies gives
its leases back. Others attach by the address, through the owner's entry in /proc.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.engine.host_memory import address_of, open_address, reserve
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.arrivals import FLOAT_DTYPES, Expected, NamedRows
from pearl.engine.weights.buckets import Bucket, fingerprint, plan_buckets
from pearl.engine.weights.filling import Filling, Refill, places_in
from pearl.engine.weights.message import Message
from pearl.engine.weights.transfer import BUCKET_BYTES

HEADER_BYTES = 4096
MAGIC = 0x5045_4152_4C53_4E41
IDENTITY, VERSIONS, DIGESTS = 8, 16, 64
"""Words of the header: up to IDENTITY who this is, then the slots' versions (-1: none) and the sums of their checksums."""
MAX_SLOTS = 32
LINE = 64
POLL_S = 0.005
UNLOCKED, READ, WRITE = fcntl.F_UNLCK, fcntl.F_RDLCK, fcntl.F_WRLCK


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """How a model's versions lie in a slot: `buckets`, and the byte each one's message begins at."""

    config: ModelConfig
    dtype: torch.dtype
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    offsets: tuple[int, ...]
    slot_bytes: int
    fingerprint: int
    """Differs between plans of other names, shapes, order or bucket size."""

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> SnapshotPlan:
        """ValueError for a dtype that is not floating point and for buckets too small for a row."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype={dtype}: must be one of {', '.join(map(str, FLOAT_DTYPES))}")
        buckets = plan_buckets(hf_shapes(config), dtype.itemsize, bucket_bytes)
        offsets, end = [], 0
        for bucket in buckets:
            offsets.append(end)
            end += -(-Message.size(bucket) // LINE) * LINE
        return SnapshotPlan(
            config=config,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            buckets=buckets,
            offsets=tuple(offsets),
            slot_bytes=-(-end // mmap.PAGESIZE) * mmap.PAGESIZE,
            fingerprint=fingerprint(buckets),
        )

    @property
    def identity(self) -> list[int]:
        return [MAGIC, self.fingerprint, FLOAT_DTYPES.index(self.dtype), self.slot_bytes]

    def messages(self, memory: Tensor, slot: int) -> tuple[Message, ...]:
        start = HEADER_BYTES + slot * self.slot_bytes
        places = zip(self.buckets, self.offsets, strict=True)
        return tuple(Message(memory[start + offset :], bucket, self.dtype) for bucket, offset in places)


class Lease:
    """One version, which stays as it is until `close` (or the end of a `with`). Its tensors must not be written to."""

    def __init__(self, fd: int, version: int, digest: int, messages: tuple[Message, ...]) -> None:
        self._fd: int | None = fd
        self.version, self.digest, self.messages = version, digest, messages

    def rows(self) -> Iterator[NamedRows]:
        """(Hugging Face name, rows, number of the first), in the order of the model."""
        return (named for message in self.messages for named in message.rows)

    def check(self, bucket: int | None = None) -> None:
        """ValueError names the first bucket that is not as it was sealed, of all or of this one."""
        for index in range(len(self.messages)) if bucket is None else (bucket,):
            try:
                self.messages[index].take(self.version)
            except ValueError as error:
                raise ValueError(f"snapshot of version {self.version}: bucket {index + 1}: {error}") from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SnapshotReader:
    """A snapshot mapped for reading. May be used by several threads."""

    def __init__(self, plan: SnapshotPlan, fd: int) -> None:
        """Takes over `fd`. ValueError if the snapshot there is of another model, dtype or bucket size."""
        self.plan, self._fd = plan, fd
        size = os.fstat(fd).st_size
        # Private and writable, since torch has no read-only tensors: a stray write stays in this process.
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._words = memory[:HEADER_BYTES].view(torch.int64)
        found = self._words[:4].tolist()
        if found != plan.identity:
            raise ValueError(f"snapshot: has [magic, plan, dtype, slot bytes] {found}, must be {plan.identity}")
        self._slots = int(self._words[IDENTITY - 1])
        self._messages = [plan.messages(memory, slot) for slot in range(self._slots)]

    @staticmethod
    def attach(address: str, plan: SnapshotPlan) -> SnapshotReader:
        """The snapshot of another process of this node, which `Snapshot.address` of it names. ValueError if it is gone."""
        try:
            fd = open_address(address)
        except ValueError as error:
            raise ValueError(f"snapshot {error}") from error
        return SnapshotReader(plan, fd)

    @property
    def newest(self) -> int:
        """The newest version that can be read, -1 if there is none."""
        return max(self._versions())

    def lease(self, version: int | None = None) -> Lease:
        """Holds `version`, or the newest. ValueError if it is not there."""
        found = self._versions()
        for slot in sorted(range(self._slots), key=lambda slot: -found[slot]):
            if found[slot] < 0 or version not in (None, found[slot]):
                continue
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            if _lock(fd, READ, slot) and self._versions()[slot] == found[slot]:
                return Lease(fd, found[slot], int(self._words[DIGESTS + slot]), self._messages[slot])
            os.close(fd)
        there = ", ".join(str(v) for v in sorted(found) if v >= 0) or "none"
        raise ValueError(f"version={version}: the snapshot has {there}")

    def close(self) -> None:
        """No new leases from here; the memory stays mapped as long as a tensor of it lives."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _versions(self) -> list[int]:
        return self._words[VERSIONS : VERSIONS + self._slots].tolist()


class Draft:
    """A slot that is being filled: nobody can read it before `finish`. One of `finish`, `discard`, `abandon` must be called."""

    def __init__(self, snapshot: Snapshot, slot: int, version: int, messages: tuple[Message, ...]) -> None:
        self._snapshot, self.slot = snapshot, slot
        self.version, self.messages = version, messages

    def finish(self) -> None:
        """The messages are all sealed for `version`, checked and finite: lets others read them."""
        digest = digest_of(self.messages)
        self._snapshot._close_draft(self.slot, self.version, digest)

    def discard(self) -> None:
        self._snapshot._close_draft(self.slot, -1, 0)

    def abandon(self) -> None:
        """Something might still be written to the slot: it is never used again."""
        self._snapshot._lose_slot(self.slot)


class Snapshot:
    """The owner's side: writes versions, one at a time. Reading goes through `reader`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, slots: int = 2, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Reserves all memory at once; MemoryError with both numbers if the node has not enough."""
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots={slots}: must be 1 to {MAX_SLOTS}")
        self.plan = SnapshotPlan.of(config, dtype, bucket_bytes)
        self.nbytes = HEADER_BYTES + slots * self.plan.slot_bytes
        self.skipped = 0
        """Versions that were not kept, since readers held all slots."""
        name = f"pearl-snapshot-{secrets.token_hex(8)}"
        self._fd = reserve(name, self.nbytes)
        self.address = address_of(self._fd, name)
        self._memory = torch.frombuffer(mmap.mmap(self._fd, self.nbytes), dtype=torch.uint8)
        self._words = self._memory[:HEADER_BYTES].view(torch.int64)
        self._words[VERSIONS : VERSIONS + slots] = -1
        self._words[:4] = torch.tensor(self.plan.identity)
        self._words[IDENTITY - 1] = self._slots = slots
        self._messages = [self.plan.messages(self._memory, slot) for slot in range(slots)]
        self._expected, self._places = Expected.of(config), [places_in(messages) for messages in self._messages]
        self._refills: list[dict[int, Refill]] = [{} for _ in self._messages]
        self._drafting = threading.Lock()
        self._lost: set[int] = set()

    def reader(self) -> SnapshotReader:
        """The same memory, for reading in this process."""
        return SnapshotReader.attach(self.address, self.plan)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be read, in ascending order."""
        return tuple(sorted(v for v in self._words[VERSIONS : VERSIONS + self._slots].tolist() if v >= 0))

    def write(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, wait_s: float = 1.0) -> bool:
        """Takes a whole version; False (counted in `skipped`) if readers hold every slot for `wait_s`.

        ValueError names what is unknown, doubled, missing, mis-shaped or not finite, and a version that is not newer; then
        nobody sees anything of it.
        """
        draft = self.draft(version, wait_s=wait_s)
        if draft is None:
            return False
        try:
            filling = Filling(self._expected, self._places[draft.slot], draft.messages, version, self._refills[draft.slot])
            filling.take_all(tensors)
            draft.finish()
        except BaseException:
            draft.discard()
            raise
        return True

    def draft(self, version: int, *, wait_s: float = 1.0) -> Draft | None:
        """A slot to fill: the one with the oldest version that nobody reads. None (counted) after `wait_s`.

        The newest version gives way only when its slot is the only one that comes free. ValueError unless `version` is newer
        than all there are; RuntimeError if another draft is open.
        """
        newest = max(self.versions, default=-1)
        if version <= newest:
            raise ValueError(f"version={version}: must be greater than {newest}, the newest in the snapshot")
        if not self._drafting.acquire(blocking=False):
            raise RuntimeError(f"version {version}: another version is being written")
        slot = self._free_slot(time.monotonic() + wait_s)
        if slot is None:
            self._drafting.release()
            self.skipped += 1
            return None
        self._words[VERSIONS + slot] = -1
        return Draft(self, slot, version, self._messages[slot])

    def close(self) -> None:
        """Gives the memory back once no reader has it mapped any more. Nothing of the snapshot may be used afterwards."""
        self._messages, self._places, self._refills, fd, self._fd = [], [], [], self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _free_slot(self, deadline: float) -> int | None:
        """A slot locked for writing."""
        while True:
            usable = set(range(self._slots)) - self._lost
            order = sorted(usable, key=lambda slot: (int(self._words[VERSIONS + slot]), slot))
            late = time.monotonic() >= deadline
            for slot in order if late or len(order) == 1 else order[:-1]:
                if _lock(self._fd, WRITE, slot):
                    return slot
            if late:
                return None
            time.sleep(POLL_S)

    def _lose_slot(self, slot: int) -> None:
        self._lost.add(slot)
        self._drafting.release()

    def _close_draft(self, slot: int, version: int, digest: int) -> None:
        self._words[DIGESTS + slot] = digest
        _lock(self._fd, UNLOCKED, slot)  # first, so that whoever sees the version can have it
        self._words[VERSIONS + slot] = version
        self._drafting.release()


def digest_of(messages: Iterable[Message]) -> int:
    """The sum of the messages' checksums, modulo 2**64: what tells that all of a version has come."""
    total = sum(int(message.words[0]) for message in messages)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _lock(fd: int, kind: int, slot: int) -> bool:
    """A lock of the open file (not of the process) on byte `slot`, without waiting; False if another has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
