"""KV between processes whose pools lie in regions that come and go. A stand-in shares the host's memory the way CUDA does."""

from __future__ import annotations

import errno
import os
import random
import resource
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from host_regions import FileRegion, HostGpu, MappedFile, make_region_pool, region_arena
from migration_cases import Owner, bits, layout, make_pool, offer, plan_of, wait

from pearl.engine.device_arena import Door
from pearl.engine.migration import regions
from pearl.engine.migration.blocks import native
from pearl.engine.migration.cuda_ipc import CudaAddress, CudaIpcTransport
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.regions import OpenRegions, RegionAddress, own_region, take_file
from pearl.engine.migration.transport import TransferError, choose
from pearl.kv_transfer import KVTransfer

pytestmark = pytest.mark.skipif(native("cpu")[0] is None, reason="pearl._C is not built")

SHAPE = layout(block_size=16, head_dim=64)
BLOCKS = random.Random(0).sample(range(64), 40)
INTO = random.Random(1).sample(range(50), 40)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------------------------------------- doors


def test_a_door_is_open_while_there_is_memory() -> None:
    """Every time with another odd number and a file for the memory that is there then; none stays open."""
    before, arena = files(), region_arena()
    arena.zeros((10,), torch.float32)
    tensor = arena.zeros((100,), torch.uint8)
    found = arena.door(tensor)
    assert found is not None
    door, offset = found
    assert offset == 512 and door.nbytes == 2 * (32 << 20) and arena.door(tensor) == found
    seen = []
    for value in (3, 4):
        tensor.fill_(value)
        generation, file = door.words.memory.tolist()
        seen.append((generation, os.pread(file, 1, offset)[0]))
        arena.give_back()
        assert door.words.memory[0] == generation + 1 and not door.is_open
        arena.give_back()
        arena.take()
        arena.take()
    assert seen == [(1, 3), (3, 4)]
    arena.give_back()
    assert files() == before


def test_a_door_that_is_forgotten_leaves_no_file() -> None:
    before, region = files(), FileRegion(1)
    door = Door(region)
    door.open()
    assert files() == before + 2
    del door
    assert files() == before + 1
    region.give_back()


def test_memory_that_cannot_be_shared_has_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_region_pool(SHAPE, 4, 1)
    assert pool.memory.door(torch.zeros(3)) is None
    monkeypatch.setattr(FileRegion, "sharing", False)
    assert pool.memory.door(pool.tensor) is None


# ---------------------------------------------------------------------------------------------------- between processes


def test_blocks_of_another_process_s_region() -> None:
    """What is there now is copied, over sleep and wake of its owner; what was there is let go and counts no more."""
    target, twins = make_region_pool(SHAPE, 50, None), [make_pool(SHAPE, 64, seed).tensor for seed in (7, 8)]
    receiver = CudaIpcTransport(HostGpu())
    before = files()
    with Owner("regions", SHAPE, 64, 7, BLOCKS) as owner:
        assert "cuda_ipc" in owner.transfer.source.addresses and receiver.refusal(owner.transfer, target) is None
        for twin in twins:
            transfer = owner.transfer
            for _ in range(5):
                wait(receiver.begin(plan_of(transfer, target, INTO), transfer, target))
            receiver.poll()
            assert len(receiver._regions) == 1
            assert torch.equal(bits(target.tensor[:, :, INTO]), bits(twin[:, :, BLOCKS]))
            owner.tell("end")
            owner.tell("give_back")
            with pytest.raises(TransferError, match="has given back the memory of its region"):
                receiver.begin(plan_of(transfer, target, INTO), transfer, target)
            receiver.poll()
            assert len(receiver._regions) == 0
            owner.tell("take")
            stale = receiver.begin(plan_of(transfer, target, INTO), transfer, target)
            with pytest.raises(TransferError, match="its lease has ended"):
                wait(stale)
            owner.transfer = transfer_of(owner)
        wait(receiver.begin(plan_of(owner.transfer, target, INTO), owner.transfer, target))
    with pytest.raises(TransferError, match="is gone|cannot be opened"):
        wait(receiver.begin(plan_of(owner.transfer, target, INTO), owner.transfer, target))
    receiver.poll()
    assert len(receiver._regions) == 0 and files() == before


def transfer_of(owner: Owner) -> KVTransfer:
    """A new offer of the same blocks."""
    return msgspec.json.decode(owner.tell("again"), type=KVTransfer)


def test_what_is_queued_is_not_unmapped() -> None:
    """A copy that has not run when its owner sleeps runs over memory that is still there, and does not count."""
    target, gpu = make_region_pool(SHAPE, 50, None), HostGpu()
    receiver = CudaIpcTransport(gpu)
    with Owner("regions", SHAPE, 64, 7, BLOCKS) as owner:
        gpu.hold = True
        ticket = receiver.begin(plan_of(owner.transfer, target, INTO), owner.transfer, target)
        assert ticket.done() is False and gpu.held
        owner.tell("end")
        owner.tell("give_back")
        receiver.poll()
        assert len(receiver._regions) == 1 and ticket.done() is False
        gpu.run()
        with pytest.raises(TransferError, match="its lease has ended"):
            ticket.done()
        receiver.poll()
        assert len(receiver._regions) == 0


def test_a_copy_is_not_queued_on_what_was_let_go() -> None:
    """Should a ticket outlive the mapping it began with, it fails instead of reading there."""
    target = make_region_pool(SHAPE, 50, None)
    receiver = CudaIpcTransport(HostGpu())
    source = make_region_pool(SHAPE, 64, 7)
    transfer = offer(source, BLOCKS, CudaIpcTransport(HostGpu()), num_tokens=40 * 16)
    source.leases.announce(BLOCKS[-1], 0, 0, 0)
    ticket = receiver.begin(plan_of(transfer, target, INTO), transfer, target)
    assert ticket.done() is False
    source.memory.give_back()
    source.memory.take()
    receiver.poll()
    source.leases.announce(BLOCKS[-1], 40 * 16, 40 * 16, 0)
    with pytest.raises(TransferError, match="has given back the memory"):
        wait(ticket)


# ---------------------------------------------------------------------------------------------------- what can go wrong


def own(nbytes: int = 1 << 20) -> tuple[RegionAddress, Door, FileRegion]:
    region = FileRegion(nbytes)
    door = Door(region)
    door.open()
    return own_region(door), door, region


def test_a_file_taken_while_its_door_is_shut_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    address, door, _ = own()
    opened = OpenRegions(lambda *file: MappedFile(*file[:2]))
    before = files()

    def meanwhile(pid: int, file: int) -> int:
        found = take_file(pid, file)
        door.shut()
        door.open()
        return found

    monkeypatch.setattr(regions, "take_file", meanwhile)
    with pytest.raises(ValueError, match="has given back"):
        opened.find(address, 0)
    assert len(opened) == 0 and files() == before
    monkeypatch.undo()
    assert opened.place(opened.find(address, 0)) > 0 and opened.refusal(address) is None


def test_a_file_that_is_gone_is_no_reason_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    address, door, _ = own()
    opened = OpenRegions(lambda *file: MappedFile(*file[:2]))
    door.words.memory[1] = 100_000
    with pytest.raises(ValueError, match="cannot be had: .*Bad file descriptor"):
        opened.find(address, 0)
    assert opened.refusal(address) is None


@pytest.mark.parametrize("way", ["forbidden", "not a region", "of another size"])
def test_what_cannot_be_had_once_is_not_tried_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then another transport is chosen, until its owner has gone."""
    source, target = make_region_pool(SHAPE, 64, 7), make_region_pool(SHAPE, 50, None)
    transport = CudaIpcTransport(HostGpu())
    transfer = offer(source, BLOCKS, transport)
    door = source.memory.door(source.tensor)[0]
    if way == "forbidden":
        denied = OSError(errno.EPERM, "pidfd_getfd: Operation not permitted")
        monkeypatch.setattr(regions, "take_file", lambda pid, file: (_ for _ in ()).throw(denied))
    elif way == "not a region":
        door.words.memory[1] = os.open("/dev/null", os.O_RDONLY)
    else:
        os.ftruncate(door._files[0], 4096)
    receiver = CudaIpcTransport(HostGpu())
    plan = plan_of(transfer, target, INTO)
    assert receiver.refusal(transfer, target) is None
    with pytest.raises(TransferError, match="cannot be had|mapping of"):
        receiver.begin(plan, transfer, target)
    reason = receiver.refusal(transfer, target)
    assert reason and ("not permitted" in reason or "mapping of" in reason)
    host = HostTransport()
    with pytest.raises(ValueError, match="cuda_ipc: .*; host: "):
        choose("auto", [receiver, host], transfer, target)
    monkeypatch.setattr(regions, "lives", lambda address: False)
    receiver.poll()
    assert receiver.refusal(transfer, target) is None


@pytest.mark.parametrize(("code", "passes"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EPERM, False)])
def test_what_may_pass_is_tried_again_after_a_while(code: int, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    address, _door, _ = own()
    opened = OpenRegions(lambda *file: MappedFile(*file[:2]))
    now = [1000.0]
    monkeypatch.setattr(regions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with monkeypatch.context() as denied:
        denied.setattr(regions, "take_file", lambda pid, file: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        with pytest.raises(RuntimeError, match="cannot be had"):
            opened.find(address, 0)
    assert opened.failures == 1 and os.strerror(code) in str(opened.refusal(address))
    now[0] += regions.AGAIN_S
    assert (opened.refusal(address) is None) == passes
    assert opened.place(opened.find(address, 0)) > 0


def test_without_a_descriptor_left_a_region_is_had_later() -> None:
    address, _door, _ = own()
    opened = OpenRegions(lambda *file: MappedFile(*file[:2]))
    opened._mappings.words(address.words)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(RuntimeError, match="Too many open files"):
            opened.find(address, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert opened.failures == 1 and opened.refusal(address)
    assert opened.place(opened.find(address, 0)) > 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-512, None), (1 << 40, None), (0, 1 << 40)])
def test_an_address_that_is_not_within_its_region_is_refused(offset: int, nbytes: int | None) -> None:
    source, target = make_region_pool(SHAPE, 64, 7), make_region_pool(SHAPE, 50, None)
    transport = CudaIpcTransport(HostGpu())
    transfer = offer(source, BLOCKS, transport)
    told = msgspec.json.decode(transfer.source.addresses["cuda_ipc"], type=CudaAddress)
    changed = msgspec.structs.replace(told, offset=offset, nbytes=nbytes or told.nbytes)
    transfer.source.addresses["cuda_ipc"] = msgspec.json.encode(changed).decode()
    with pytest.raises(TransferError, match="not within its region"):
        CudaIpcTransport(HostGpu()).begin(plan_of(transfer, target, INTO), transfer, target)


def test_a_file_of_another_process_is_taken_by_number(tmp_path: Path) -> None:
    file = os.open(tmp_path / "here", os.O_RDWR | os.O_CREAT)
    os.write(file, b"yes")
    taken = take_file(os.getpid(), file)
    assert taken != file and os.pread(taken, 3, 0) == b"yes" and not os.get_inheritable(taken)
    for number in (file, taken):
        os.close(number)
    with pytest.raises(OSError, match="pidfd_getfd: Bad file descriptor"):
        take_file(os.getpid(), 100_000)
    with pytest.raises(ProcessLookupError):
        take_file(2**22 - 1, 0)
