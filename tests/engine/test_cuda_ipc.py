"""KV by CUDA IPC: what can be checked without a GPU, and with one."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
import torch
from migration_cases import Owner, bits, layout, make_pool, offer, plan_of, some_blocks, wait

from pearl.engine.migration import cuda_ipc
from pearl.engine.migration.blocks import copy_from, native
from pearl.engine.migration.cuda_ipc import CudaAddress, CudaIpcTransport, Queued, describe
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.pieces import copy_part, view
from pearl.engine.migration.planner import CopyPart
from pearl.engine.migration.shared_memory import share
from pearl.engine.migration.transport import Pool, TransferError, choose
from pearl.kv_transfer import KVTransfer

needs_native = pytest.mark.skipif(native("cpu")[0] is None, reason="pearl._C is not built")


@needs_native
def test_a_pool_at_an_address_is_the_pool() -> None:
    """The geometry that goes to the GPU, carried out by the host copy."""
    module, _ = native("cpu")
    assert module is not None
    for seed in range(20):
        rng = random.Random(seed)
        shape = layout(num_layers=rng.randint(1, 4), num_kv_heads=rng.randint(1, 4), dtype=rng.choice(["float32", "bfloat16"]))
        source, target = make_pool(shape, rng.randint(4, 20), seed), make_pool(shape, rng.randint(4, 20), None)
        count = rng.randint(1, min(source.tensor.shape[2], target.tensor.shape[2]))
        ids, into = (some_blocks(rng, pool.tensor.shape[2], count) for pool in (source, target))
        first, head = rng.randrange(shape.num_layers), rng.randrange(shape.num_kv_heads)
        layers, heads = (first, shape.num_layers), (head, shape.num_kv_heads)
        part = CopyPart(
            layers=layers, source_heads=heads, destination_heads=heads,
            source_blocks=tuple(ids), destination_blocks=tuple(into),
        )  # fmt: skip
        place, nbytes, blocks = source.tensor.data_ptr(), source.tensor.nbytes, source.tensor.shape[2]
        pool = describe(module, place, nbytes, shape, blocks, part)
        copy_from(module, pool, view(target.tensor, part.layers, part.destination_heads), ids, into)
        expected = torch.ones_like(target.tensor)
        expected[first:, :, into, head:] = source.tensor[first:, :, ids, head:]
        assert torch.equal(bits(target.tensor), bits(expected)), seed
        with pytest.raises(ValueError, match=f"nbytes={nbytes - 1}, {nbytes} by its layout"):
            describe(module, place, nbytes - 1, shape, blocks, part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_and_another_one_is_chosen() -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transport, host = CudaIpcTransport(), HostTransport()
    assert transport.address(source) is None
    transfer = offer(source, [4, 1], host)
    assert any(words in str(transport.refusal(transfer, target)) for words in ("on cpu, not on a GPU", "pearl._C"))
    assert choose("auto", [transport, host], transfer, target) is host
    with pytest.raises(ValueError, match="cuda_ipc: "):
        choose("cuda_ipc", [transport, host], transfer, target)
    with pytest.raises(TransferError, match="^transfer 't': (w0 has no pool on a GPU|pearl._C)"):
        transport.begin(plan_of(transfer, target, [0, 3]), transfer, target)


@pytest.mark.skipif(native("cuda")[0] is None or torch.cuda.is_available(), reason="needs pearl._C with CUDA and no GPU")
def test_cuda_says_in_its_words_what_is_missing() -> None:
    module, _ = native("cuda")
    assert module is not None
    with pytest.raises(RuntimeError, match="CUDA driver|address="):
        module.export_memory(4096)
    with pytest.raises(ValueError, match="handle of 3 bytes: must have 64"):
        module.open_memory(b"abc", 0)
    with pytest.raises(RuntimeError, match="cudaSetDevice: "):
        module.open_memory(bytes(64), 0)


def test_an_address_goes_through_the_wire() -> None:
    source = make_pool(layout(), 6, 1)
    words = msgspec.json.decode(offer(source, [1], HostTransport()).source.addresses["host"])["words"]
    address = CudaAddress(
        handle=bytes(range(64)), offset=512, nbytes=source.tensor.nbytes, words=msgspec.convert(words, cuda_ipc.FileAddress)
    )
    assert msgspec.json.decode(msgspec.json.encode(address), type=CudaAddress) == address


class Queue:
    """In place of a stream: copies run when they are told to."""

    def __init__(self, source: Pool, target: Pool) -> None:
        self.source, self.target = source, target
        self.left: list[CopyPart] = []

    def copy(self, part: CopyPart) -> Callable[[], bool]:
        self.left.append(part)
        return lambda: not self.left

    def run(self) -> None:
        while self.left:
            copy_part(self.source.tensor, self.target.tensor, self.left.pop(0))


def queued(num_tokens: int = 12) -> tuple[Queued, Queue, KVTransfer]:
    source, target = make_pool(layout(), 9, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [8, 2, 3], HostTransport(), num_tokens=num_tokens)
    queue = Queue(source, target)
    owner = share(source.leases)
    return Queued(transfer, plan_of(transfer, target, [0, 1, 5]), owner, source.leases, queue.copy), queue, transfer


def test_what_is_written_is_queued_by_whole_steps_and_counts_when_it_has_run() -> None:
    ticket, queue, transfer = queued()
    leases = queue.source.leases
    leases.announce(3, 4, 12, 7)
    leases.layer_done(7, 2)  # queued by the sender, for all that is known
    assert ticket.done() is False and [part.source_blocks for part in queue.left] == [(8,)]
    queue.run()
    assert ticket.done() is False and not queue.left
    leases.announce(3, 12, 12, 7)
    assert ticket.done() is False and [part.source_blocks for part in queue.left] == [(2, 3)]
    assert ticket.done() is False and len(queue.left) == 1
    queue.run()
    assert ticket.done() is True
    leases.close(3)
    assert ticket.done() is True
    assert torch.equal(bits(queue.target.tensor[:, :, [0, 1, 5]]), bits(queue.source.tensor[:, :, transfer.blocks]))


@pytest.mark.parametrize("way", ["lease", "cancel", "gone"])
def test_what_is_queued_has_to_run_before_its_blocks_are_anothers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, queue, _ = queued()
    assert ticket.done() is False and len(queue.left) == 1
    if way == "lease":
        queue.source.leases.close(3)
    elif way == "gone":
        monkeypatch.setattr(cuda_ipc, "lives", lambda address: False)
    else:
        assert ticket.cancel() is False
    assert ticket.done() is False and ticket.cancel() is False
    queue.run()
    words = {"lease": "its lease has ended", "cancel": "it was cancelled", "gone": "its source in process [0-9]+ is gone"}[way]
    with pytest.raises(TransferError, match=f"^transfer 't': {words}$"):
        ticket.done()
    assert ticket.cancel() is True


@pytest.mark.gpu
def test_blocks_of_another_process_s_gpu_pool() -> None:
    shape = layout(block_size=16, head_dim=64, dtype="bfloat16")
    target, twin = make_pool(shape, 50, None, "cuda:0"), make_pool(shape, 64, 7)
    blocks, into = random.Random(0).sample(range(64), 40), random.Random(1).sample(range(50), 40)
    receiver = CudaIpcTransport()
    with Owner("cuda_ipc", shape, 64, 7, blocks) as owner:
        assert receiver.refusal(owner.transfer, target) is None
        for _ in range(20):  # its memory is opened once, be it a region or an allocation
            wait(receiver.begin(plan_of(owner.transfer, target, into), owner.transfer, target))
        assert len(receiver._opened) + len(receiver._regions) == 1
        assert torch.equal(bits(target.tensor[:, :, into].cpu()), bits(twin.tensor[:, :, blocks]))
        stale = owner.transfer
        owner.tell("end")
        with pytest.raises(TransferError, match="its lease has ended"):
            wait(receiver.begin(plan_of(stale, target, into), stale, target))
    with pytest.raises(TransferError, match="is gone|cannot be opened"):
        wait(receiver.begin(plan_of(stale, target, into), stale, target))
    receiver.poll()
    assert not receiver._opened and len(receiver._regions) == 0


@pytest.mark.gpu
def test_a_gpu_pool_that_slept_is_read_anew() -> None:
    """What is behind the door of a region after sleep and wake is what the receiver copies, and nothing while there is none."""
    shape = layout(block_size=16, head_dim=64, dtype="bfloat16")
    target, twin = make_pool(shape, 50, None, "cuda:0"), make_pool(shape, 64, 8)
    blocks, receiver = list(range(40)), CudaIpcTransport()
    with Owner("cuda_ipc", shape, 64, 7, blocks) as owner:
        before = owner.transfer
        wait(receiver.begin(plan_of(before, target, blocks), before, target))
        owner.tell("end")
        owner.tell("give_back")
        with pytest.raises(TransferError, match="has given back the memory of its region"):
            receiver.begin(plan_of(before, target, blocks), before, target)
        receiver.poll()
        assert len(receiver._regions) == 0
        owner.tell("take")
        now = msgspec.json.decode(owner.tell("again"), type=KVTransfer)
        wait(receiver.begin(plan_of(now, target, blocks), now, target))
        assert torch.equal(bits(target.tensor[:, :, blocks].cpu()), bits(twin.tensor[:, :, blocks]))
