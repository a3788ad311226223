"""KV read straight from another process's pool."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from migration_cases import Owner, bits, layout, make_pool, offer, plan_of, some_blocks, wait

from pearl.engine.migration import host, shared_memory
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.transport import TransferError


def test_bytes_arrive_and_nothing_else_changes() -> None:
    """Random plans, layouts and dtypes, from a pool of this process under its address."""
    for seed in range(60):
        rng = random.Random(seed)
        shape = layout(
            dtype=rng.choice(["float32", "bfloat16", "float16"]),
            block_size=rng.choice([1, 4, 16]),
            num_layers=rng.randint(1, 4),
            num_kv_heads=rng.randint(1, 4),
            head_dim=rng.choice([3, 8, 64]),
        )
        source, target = make_pool(shape, rng.randint(4, 40), seed), make_pool(shape, rng.randint(4, 40), seed + 1000)
        count = rng.randint(1, min(source.tensor.shape[2], target.tensor.shape[2]))
        transfer = offer(source, some_blocks(rng, source.tensor.shape[2], count), sender := HostTransport())
        into = some_blocks(rng, target.tensor.shape[2], count)
        held = rng.randrange(count)
        expected = target.tensor.clone()
        expected[:, :, into[held:]] = source.tensor[:, :, transfer.blocks[held:]]
        receiver = HostTransport()
        assert receiver.refusal(transfer, target) is None
        wait(receiver.begin(plan_of(transfer, target, into, first_token=held * shape.block_size), transfer, target))
        assert torch.equal(bits(target.tensor), bits(expected)), seed
        assert sender.address(source) == transfer.source.addresses["host"]


def test_heads_go_where_another_share_of_the_ranks_has_them() -> None:
    """Two sources of 2 heads each fill a pool of 4; and one of 4 fills two."""
    narrow, wide = layout(num_kv_heads=2), layout(num_kv_heads=4)
    halves, whole = [make_pool(narrow, 9, seed) for seed in (1, 2)], make_pool(wide, 7, None)
    for rank, half in enumerate(halves):
        transfer = offer(half, [8, 2, 3], sender := HostTransport())
        heads = {"source_heads": (2 * rank, 2 * rank + 2), "destination_heads": (0, 4)}
        wait(HostTransport().begin(plan_of(transfer, whole, [5, 6, 0], **heads), transfer, whole))
        assert sender.address(half)
    together = torch.cat([half.tensor[:, :, [8, 2, 3]] for half in halves], dim=3)
    assert torch.equal(bits(whole.tensor[:, :, [5, 6, 0]]), bits(together))
    assert bool((whole.tensor[:, :, 1:5] == 1).all())

    part = make_pool(narrow, 4, None)
    transfer = offer(whole, [5, 6, 0], sender := HostTransport())
    heads = {"source_heads": (0, 4), "destination_heads": (2, 4)}
    wait(HostTransport().begin(plan_of(transfer, part, [0, 1, 2], **heads), transfer, part))
    assert torch.equal(bits(part.tensor[:, :, :3]), bits(halves[1].tensor[:, :, [8, 2, 3]]))


def test_layers_go_one_by_one() -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer, receiver = offer(source, [4, 1], sender := HostTransport()), HostTransport()
    for layer in range(3):
        wait(receiver.begin(plan_of(transfer, target, [0, 3], layers=(layer, layer + 1)), transfer, target))
        done = target.tensor[: layer + 1, :, [0, 3]]
        assert torch.equal(bits(done), bits(source.tensor[: layer + 1, :, [4, 1]]))
        assert bool((target.tensor[layer + 1 :] == 1).all())
    assert sender.address(source)


def test_a_second_process_sends_without_doing_anything() -> None:
    """Even while it is stopped."""
    shape = layout(block_size=16, head_dim=64)
    target, twin = make_pool(shape, 50, None), make_pool(shape, 64, 7)
    blocks, into = random.Random(0).sample(range(64), 40), random.Random(1).sample(range(50), 40)
    with Owner("host", shape, 64, 7, blocks) as owner:
        owner.process.send_signal(signal.SIGSTOP)
        wait(HostTransport().begin(plan_of(owner.transfer, target, into), owner.transfer, target))
    assert torch.equal(bits(target.tensor[:, :, into]), bits(twin.tensor[:, :, blocks]))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_BYTES", 1)


def test_a_lease_that_ends_in_the_middle(small_pieces: None) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer, receiver = offer(source, [4, 1], sender := HostTransport()), HostTransport()
    ticket = receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target)
    assert not ticket.done()
    source.leases.close(1)
    for _ in range(2):
        with pytest.raises(TransferError, match="^transfer 't': its lease has ended"):
            ticket.done()
    source.leases.open(1)  # another request's offer of the same block
    with pytest.raises(TransferError, match="its lease has ended"):
        ticket.done()
    with pytest.raises(TransferError, match="its lease has ended"):
        wait(receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target))
    assert bool((target.tensor[:, :, [1, 2, 4, 5]] == 1).all())
    assert sender.address(source)


def test_after_cancel_nothing_is_written(small_pieces: None) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender := HostTransport())
    ticket = HostTransport().begin(plan_of(transfer, target, [0, 3]), transfer, target)
    assert not ticket.done() and ticket.cancel()
    before = target.tensor.clone()
    with pytest.raises(TransferError, match="cancelled"):
        ticket.done()
    assert torch.equal(target.tensor, before) and ticket.cancel()
    assert sender.address(source)


def test_the_sender_is_killed_in_the_middle(small_pieces: None) -> None:
    target, receiver = make_pool(layout(), 6, None), HostTransport()
    with Owner("host", layout(), 6, 1, [4, 1]) as owner:
        ticket = receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target)
        assert not ticket.done() and len(receiver._mappings) == 2
        owner.process.kill()
        os.waitid(os.P_PID, owner.process.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has looked after it yet
        with pytest.raises(TransferError, match=f"in process {owner.process.pid} is gone"):
            ticket.done()
    with pytest.raises(TransferError, match="is gone"):
        receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target)
    for _ in range(2):
        receiver.poll()
    assert len(receiver._mappings) == 0
    address = msgspec.json.decode(owner.transfer.source.addresses["host"], type=host.HostAddress)
    assert f" {address.pool.inode} " not in Path("/proc/self/maps").read_text()


def test_memory_that_the_sender_gave_back_reads_as_zeros_and_does_not_count() -> None:
    target = make_pool(layout(), 6, None)
    with Owner("host", layout(), 6, 1, [4, 1]) as owner:
        receiver = HostTransport()
        wait(receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target))
        first = owner.transfer
        owner.tell("end")
        owner.tell("give_back")
        second = msgspec.json.decode(owner.tell("again"), type=type(first))
        assert second.lease_word != first.lease_word
        with pytest.raises(TransferError, match="its lease has ended"):
            wait(receiver.begin(plan_of(first, target, [0, 3]), first, target))
        wait(receiver.begin(plan_of(second, target, [0, 3]), second, target))
        assert not target.tensor[:, :, [0, 3]].any()


def test_a_plan_of_blocks_that_the_source_lacks_loses_its_transfer() -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender := HostTransport())
    elsewhere = msgspec.structs.replace(transfer, blocks=[10**6, 1])
    ticket = HostTransport().begin(plan_of(elsewhere, target, [0, 3]), transfer, target)
    for _ in range(2):
        with pytest.raises(TransferError, match="1000000"):
            ticket.done()
    assert not (target.tensor != 1).any() and sender.address(source)


@pytest.mark.parametrize("field", ["dtype", "block_size", "num_layers", "head_dim", "order"])
def test_a_pool_of_another_layout_is_refused_by_its_field(field: str) -> None:
    other = {"dtype": "float16", "block_size": 8, "num_layers": 2, "head_dim": 4, "order": "pairs"}[field]
    source, target = make_pool(layout(), 6, 1), make_pool(layout(**{field: other}), 6, None)
    transfer = offer(source, [4, 1], sender := HostTransport())
    assert str(HostTransport().refusal(transfer, target)).startswith(f"{field}=")
    assert sender.address(source)


def _address(transfer: host.KVTransfer, **pool: object) -> host.KVTransfer:
    """The transfer with another address of the pool."""
    address = msgspec.json.decode(transfer.source.addresses["host"], type=host.HostAddress)
    changed = msgspec.structs.replace(address, pool=msgspec.structs.replace(address.pool, **pool))
    addresses = {"host": msgspec.json.encode(changed).decode()}
    return msgspec.structs.replace(transfer, source=msgspec.structs.replace(transfer.source, addresses=addresses))


def test_what_is_not_the_senders_pool_is_never_mapped(tmp_path: Path) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer, receiver = offer(source, [4, 1], sender := HostTransport()), HostTransport()
    plan = plan_of(transfer, target, [0, 3])
    nbytes = source.tensor.nbytes
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, nbytes)
    inode = os.fstat(loose).st_ino
    cases = {
        "another file by now": {"inode": 1},
        f"nbytes={nbytes}, must be {nbytes + 4096}": {"nbytes": nbytes + 4096},
        "could shrink": {"file": loose, "inode": inode},
        "cannot be opened": {"file": 9999},
        "is gone": {"start": 5},
        "on another node": {"node": "elsewhere"},
    }
    for words, change in cases.items():
        with pytest.raises(TransferError, match=words):
            receiver.begin(plan, _address(transfer, **change), target)
    assert "another node" in str(receiver.refusal(_address(transfer, node="elsewhere"), target))
    os.ftruncate(loose, 4096)  # the pool shrank
    with pytest.raises(TransferError, match=f"nbytes=4096, must be {nbytes}"):
        receiver.begin(plan, _address(transfer, file=loose, inode=inode), target)
    os.close(loose)
    fewer = msgspec.structs.replace(transfer, source=msgspec.structs.replace(transfer.source, num_blocks=7))
    with pytest.raises(TransferError, match=f"nbytes={nbytes}, {nbytes // 6 * 7} by its layout"):
        receiver.begin(plan, fewer, target)
    nameless = msgspec.structs.replace(transfer, source=msgspec.structs.replace(transfer.source, addresses={"host": "{}"}))
    with pytest.raises(TransferError, match="address '{}'"):
        receiver.begin(plan, nameless, target)
    assert not (target.tensor != 1).any() and sender.address(source)


def test_what_another_user_owns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that "auto" takes another way, as with another node; what is only gone by now is not refused, but lost."""
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer, receiver = offer(source, [4, 1], sender := HostTransport()), HostTransport()
    assert receiver.refusal(transfer, target) is None and receiver.refusal(_address(transfer, file=9999), target) is None

    def denied(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shared_memory.os, "stat", denied)
    assert f"process {os.getpid()} may not be read" in str(receiver.refusal(transfer, target))
    with pytest.raises(TransferError, match="may not be read"):
        receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target)
    monkeypatch.undo()
    assert sender.address(source)


def test_an_engine_that_is_dropped_takes_its_pool_with_it(small_pieces: None) -> None:
    """Also where the process lives on."""
    source, target, receiver = make_pool(layout(), 6, 1), make_pool(layout(), 6, None), HostTransport()
    transfer = offer(source, [4, 1], sender := HostTransport())
    plan = plan_of(transfer, target, [0, 3])
    ticket = receiver.begin(plan, transfer, target)
    assert not ticket.done() and len(receiver._mappings) == 2
    del source, sender
    with pytest.raises(TransferError, match="its source in process .* is gone"):
        ticket.done()
    with pytest.raises(TransferError, match="cannot be opened|another file"):
        receiver.begin(plan, transfer, target)
    for _ in range(2):
        receiver.poll()
    assert len(receiver._mappings) == 0


def test_two_transports_of_one_pool_agree_on_its_leases() -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], HostTransport())
    again = offer(source, [5, 2], HostTransport(), transfer_id="again")
    receiver = HostTransport()
    for offered in (transfer, again):
        wait(receiver.begin(plan_of(offered, target, [0, 3]), offered, target))
    source.leases.close(1)
    with pytest.raises(TransferError, match="its lease has ended"):
        wait(receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target))
    wait(receiver.begin(plan_of(again, target, [0, 3]), again, target))


def test_a_pool_in_private_memory_has_no_address() -> None:
    pool = make_pool(layout(), 6, 1)
    assert HostTransport().address(replace(pool, tensor=pool.tensor.clone())) is None
    transfer = offer(pool, [4, 1], HostTransport())
    bare = msgspec.structs.replace(transfer, source=msgspec.structs.replace(transfer.source, addresses={}))
    assert "w0 has no pool in shared memory" in str(HostTransport().refusal(bare, pool))


def test_a_thousand_transfers_leave_nothing_behind() -> None:
    target, receiver = make_pool(layout(), 6, None), HostTransport()

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    with Owner("host", layout(), 6, 1, [4, 1]) as owner:
        for turn in range(1000):
            wait(receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target))
            if turn == 20:
                before = used()
        assert used()[0] == before[0] and used()[1] <= before[1] + 4
