"""KV between two processes with GPUs of one node: the receiver copies straight out of the sender's pool, which it has mapped.

Owns what a GPU pool's address says (an allocation of its own by CUDA IPC, or a region of an arena by its door), the opened
allocations, and the pace of a copy. It does not know requests. Invariants as in `host.py`: a copy counts only if the sender's
process was there and its lease whole after the last byte; what is not written is not read (the layers of a running step are
not: their words say that the sender has queued them, not that its GPU is through); no call waits, the ticket is an event. Once
a copy is queued it cannot be taken back: `cancel` says False until it has run. What the sender gives back (sleep) ends all
leases first; the mapping of it goes with the next `poll` that finds nothing queued.

Compiled and refused with a reason where it cannot work, but not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import msgspec
import torch

from pearl.engine.migration.blocks import copy_from, native
from pearl.engine.migration.pieces import Unfolding, view
from pearl.engine.migration.planner import ITEM_BYTES, CopyPart, CopyPlan, check_layouts
from pearl.engine.migration.regions import Mapped, OpenRegions, RegionAddress, own_region
from pearl.engine.migration.shared_memory import FileAddress, Mappings, lives, share, unreachable
from pearl.engine.migration.transport import LeaseWords, Pool, Progress, Ticket, TransferError, Transport
from pearl.kv_transfer import KVLayout, KVTransfer


class CudaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of `nbytes` at `offset` of a region, or of the allocation behind `handle`; its lease words are on the host."""

    handle: bytes
    region: RegionAddress | None = None
    offset: int
    nbytes: int
    words: FileAddress


class Gpu:
    """What the transport asks of CUDA, on a stream of its own per device."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def module(self) -> tuple[ModuleType | None, str]:
        """`pearl._C` with its CUDA part, or why there is none."""
        return native("cuda")

    def holds(self, pool: Pool) -> bool:
        return pool.tensor.is_cuda

    def map_region(self, file: int, nbytes: int, device: int) -> Mapped:
        module, reason = self.module()
        if module is None:
            raise RuntimeError(reason)
        return module.OpenedRegion(file, nbytes, device)

    def follow(self, device: int) -> None:
        """What is copied from now on comes after what this engine still does with its blocks."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def copy(self, device: int, queue: Callable[[], None]) -> Callable[[], bool]:
        """Queues a copy; what tells whether it has run."""
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            queue()
            return stream.record_event().query

    def idle(self, device: int) -> bool:
        """Whether all copies have run."""
        return device not in self._streams or self._streams[device].query()


class CudaIpcTransport(Transport):
    """One per engine, at both ends. Not thread-safe."""

    name = "cuda_ipc"

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu or Gpu()
        self._address: str | None = None
        self._mappings = Mappings()
        self._opened: dict[tuple[bytes, FileAddress, int], int] = {}
        """(handle, whose, device) -> address there; an allocation may be opened once only."""
        self._regions = OpenRegions(self._gpu.map_region)

    def address(self, pool: Pool) -> str | None:
        """None for a pool that is not on a GPU, or whose memory CUDA does not share."""
        module, _ = self._gpu.module()
        if module is None or not self._gpu.holds(pool):
            return None
        if self._address is None:
            handle, region, door = b"", None, pool.memory.door(pool.tensor)
            if door is None:
                try:
                    handle, offset, _ = module.export_memory(pool.tensor.data_ptr())
                except RuntimeError:
                    return None  # as with torch's expandable segments
            else:
                region, offset = own_region(door[0]), door[1]
            address = CudaAddress(
                handle=handle, region=region, offset=offset, nbytes=pool.tensor.nbytes, words=share(pool.leases)
            )
            self._address = msgspec.json.encode(address).decode()
        return self._address

    def refusal(self, transfer: KVTransfer, pool: Pool) -> str | None:
        module, reason = self._gpu.module()
        if module is None:
            return reason
        if not self._gpu.holds(pool):
            return f"the pool here is on {pool.tensor.device}, not on a GPU"
        try:
            address = _address(transfer)
            check_layouts(transfer.layout, pool.layout, heads_may_differ=True)
        except ValueError as error:
            return str(error)
        failed = None if address.region is None else self._regions.refusal(address.region)
        return failed or unreachable(address.words)

    def begin(self, plan: CopyPlan, transfer: KVTransfer, pool: Pool) -> Ticket:
        """TransferError if the sender's pool cannot be opened, or is not as the transfer says."""
        module, reason = self._gpu.module()
        if module is None:
            raise TransferError(transfer.transfer_id, reason)
        try:
            address, device = _address(transfer), pool.tensor.device.index or 0
            words = self._mappings.words(address.words)
            place = self._find(module, address, device)
            self._gpu.follow(device)

            def copy(part: CopyPart) -> Callable[[], bool]:
                source = describe(module, place(), address.nbytes, transfer.layout, transfer.source.num_blocks, part)
                target = view(pool.tensor, part.layers, part.destination_heads)
                blocks = part.source_blocks, part.destination_blocks
                return self._gpu.copy(device, lambda: copy_from(module, source, target, *blocks))

            return Queued(transfer, plan, address.words, words, copy)
        except (ValueError, RuntimeError) as error:
            raise TransferError(transfer.transfer_id, str(error)) from error

    def poll(self) -> None:
        self._mappings.tidy()
        self._regions.tidy(self._gpu.idle)
        module, _ = self._gpu.module()
        if module is None:
            return
        for key in [key for key in self._opened if not lives(key[1]) and self._gpu.idle(key[2])]:
            module.close_memory(self._opened.pop(key))

    def _find(self, module: ModuleType, address: CudaAddress, device: int) -> Callable[[], int]:
        """Opens the pool's memory; what tells where it is here, as long as it is. ValueError or RuntimeError if it is not."""
        if address.region is not None:
            if not 0 <= address.offset <= address.region.nbytes - address.nbytes:
                raise ValueError(f"the source's pool is not within its region of nbytes={address.region.nbytes}")
            region = self._regions.find(address.region, device)
            return lambda: self._regions.place(region) + address.offset
        key = (address.handle, address.words, device)
        if key not in self._opened:
            self._opened[key] = module.open_memory(address.handle, device)

        def place() -> int:
            if key not in self._opened:
                raise ValueError(f"process {address.words.pid} is gone")
            return self._opened[key] + address.offset

        return place


class Queued:
    """The ticket of copies on a stream: `copy` queues one and gives what tells whether all up to it are through."""

    def __init__(
        self,
        transfer: KVTransfer,
        plan: CopyPlan,
        owner: FileAddress,
        words: LeaseWords,
        copy: Callable[[CopyPart], Callable[[], bool]],
    ) -> None:
        self._transfer, self._owner, self._words, self._copy = transfer, owner, words, copy
        self._unfolding = Unfolding(plan, transfer.layout, transfer.num_written_tokens)
        self._ran: Callable[[], bool] = lambda: True
        """Whether nothing is queued."""
        self._through = False
        self._error: TransferError | None = None

    def done(self) -> bool:
        block, word = self._transfer.blocks[-1], self._transfer.lease_word
        if not self._through and self._error is None:
            if not lives(self._owner):
                self._end(f"its source in process {self._owner.pid} is gone")
            elif self._words.is_due(block, word):
                return False
            elif not self._words.holds(block, word):
                self._end("its lease has ended")
            elif self._unfolding.whole:
                self._through = self._ran() and self._words.holds(block, word)
            else:
                self._queue(self._words.progress(block).written)
        if self._error is not None and self._ran():
            raise self._error
        return self._through

    def cancel(self) -> bool:
        if not self._through:
            self._end("it was cancelled")
        return self._ran()

    def _queue(self, written: int) -> None:
        try:
            for part in self._unfolding.ready(Progress(written, written, 0)):
                self._ran = self._copy(part)
        except (ValueError, RuntimeError) as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        self._error = self._error or TransferError(self._transfer.transfer_id, reason)


def describe(module: ModuleType, address: int, nbytes: int, layout: KVLayout, num_blocks: int, part: CopyPart) -> object:
    """The source's side of a part, of a pool that lies at an address. ValueError if the pool does not fit its layout."""
    head = layout.block_size * layout.head_dim * ITEM_BYTES[layout.dtype]
    block = layout.num_kv_heads * head
    row = num_blocks * block
    if nbytes != layout.num_layers * 2 * row:
        raise ValueError(f"the source's pool has nbytes={nbytes}, {layout.num_layers * 2 * row} by its layout")
    offset = part.layers[0] * 2 * row + part.source_heads[0] * head
    return module.BlockPool(
        address=address + offset,
        bytes=nbytes - offset,
        rows=(part.layers[1] - part.layers[0]) * 2,
        row_stride=row,
        num_blocks=num_blocks,
        block_stride=block,
        block_bytes=(part.source_heads[1] - part.source_heads[0]) * head,
    )


def _address(transfer: KVTransfer) -> CudaAddress:
    text = transfer.source.addresses.get(CudaIpcTransport.name)
    if text is None:
        raise ValueError(f"{transfer.source.worker} has no pool on a GPU that can be shared")
    try:
        return msgspec.json.decode(text, type=CudaAddress)
    except msgspec.DecodeError as error:
        raise ValueError(f"address {text!r}: {error}") from error
