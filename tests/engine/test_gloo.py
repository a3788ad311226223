"""KV sent by another process over a group of the two."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from migration_cases import CHILD, Owner, bits, layout, make_pool, offer, plan_of, some_blocks, wait

from pearl.engine.migration import gloo, gloo_link, gloo_source
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.gloo_link import LinkError, Message
from pearl.engine.migration.transport import Pool, TransferError

LARGE = layout(block_size=16, num_layers=6, head_dim=64)
"""A pool of 600 blocks has 59 MB, of which the tests move most: it takes a while."""


Ends = tuple[GlooTransport, GlooTransport]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A source and a receiver in this process."""
    both = GlooTransport(timeout_s=5), GlooTransport(timeout_s=5)
    yield both
    for end in both:
        end.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gloo, gloo_source):
        monkeypatch.setattr(module, "PIECE_BYTES", 1)


@pytest.fixture
def slow_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large transfer takes most of a second, so that there is a middle of it to hit."""
    land = gloo._Ticket.land

    def land_slowly(self: gloo._Ticket, *args: object) -> None:
        land(self, *args)  # type: ignore[arg-type]
        time.sleep(0.02)

    monkeypatch.setattr(gloo._Ticket, "land", land_slowly)


def failure(ticket: gloo.Ticket, timeout_s: float) -> str:
    """The error that the ticket ends with in time."""
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        wait(ticket, timeout_s)
    assert time.monotonic() - start < timeout_s
    return str(caught.value)


def test_bytes_arrive_and_nothing_else_changes(ends: Ends, small_pieces: None) -> None:
    sender, receiver = ends
    for seed in range(12):
        rng = random.Random(seed)
        shape = layout(
            dtype=rng.choice(["float32", "bfloat16", "float16"]),
            block_size=rng.choice([1, 4, 16]),
            num_layers=rng.randint(1, 4),
            num_kv_heads=rng.randint(1, 4),
            head_dim=rng.choice([3, 8, 64]),
        )
        source, target = make_pool(shape, rng.randint(4, 20), seed), make_pool(shape, rng.randint(4, 20), seed + 1000)
        count = rng.randint(1, min(source.tensor.shape[2], target.tensor.shape[2]))
        transfer = offer(source, some_blocks(rng, source.tensor.shape[2], count), sender, transfer_id=f"t{seed}")
        into, held = some_blocks(rng, target.tensor.shape[2], count), rng.randrange(count)
        expected = target.tensor.clone()
        expected[:, :, into[held:]] = source.tensor[:, :, transfer.blocks[held:]]
        assert receiver.refusal(transfer, target) is None
        wait(receiver.begin(plan_of(transfer, target, into, first_token=held * shape.block_size), transfer, target))
        assert torch.equal(bits(target.tensor), bits(expected)), seed


def test_heads_go_where_another_share_of_the_ranks_has_them(ends: Ends) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(num_kv_heads=4), 9, 1), make_pool(layout(num_kv_heads=2), 6, None)
    transfer = offer(source, [8, 2, 3], sender)
    heads = {"source_heads": (0, 4), "destination_heads": (2, 4)}
    wait(receiver.begin(plan_of(transfer, target, [0, 1, 5], **heads), transfer, target))
    assert torch.equal(bits(target.tensor[:, :, [0, 1, 5]]), bits(source.tensor[:, :, [8, 2, 3], 2:4]))
    assert bool((target.tensor[:, :, 2:5] == 1).all())


def test_from_a_second_process_many_at_once() -> None:
    blocks, target = random.Random(0).sample(range(600), 500), make_pool(LARGE, 520, None)
    receiver = GlooTransport(timeout_s=10)
    with Owner("gloo", LARGE, 600, 7, blocks) as owner:
        plan = plan_of(owner.transfer, target, blocks_of(target, 500))
        tickets = [receiver.begin(plan, owner.transfer, target) for _ in range(3)]
        for ticket in tickets:
            wait(ticket)
    twin = make_pool(LARGE, 600, 7)
    assert torch.equal(bits(target.tensor[:, :, blocks_of(target, 500)]), bits(twin.tensor[:, :, blocks]))
    receiver.close()


def blocks_of(pool: Pool, count: int) -> list[int]:
    return random.Random(1).sample(range(pool.tensor.shape[2]), count)


def begin_large(owner: Owner, receiver: GlooTransport, target: Pool) -> gloo.Ticket:
    """A large transfer, in the middle: something has come."""
    into = blocks_of(target, len(owner.transfer.blocks))
    ticket = receiver.begin(plan_of(owner.transfer, target, into), owner.transfer, target)
    deadline = time.monotonic() + 10
    while bool((target.tensor[0, :, into[:4]] == 1).all()):
        assert time.monotonic() < deadline and not ticket.done()
    return ticket


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_the_sender_goes_in_the_middle(way: str, slow_landing: None) -> None:
    """Killed, it is missed at once; stopped, after the timeout. Another source's transfer is not concerned."""
    target, receiver = make_pool(LARGE, 600, None), GlooTransport(timeout_s=1.5)
    blocks = [*range(600)]
    other, other_target = make_pool(layout(), 6, 3), make_pool(layout(), 6, None)
    healthy = GlooTransport(timeout_s=5)
    with Owner("gloo", LARGE, 600, 7, blocks) as owner:
        ticket = begin_large(owner, receiver, target)
        owner.process.send_signal(signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        if way == "killed":
            owner.process.wait(10)
        small = offer(other, [1, 2], healthy, transfer_id="other")
        wait(receiver.begin(plan_of(small, other_target, [0, 3]), small, other_target))
        words = failure(ticket, 4)
        assert words.startswith("transfer 't': ")
        assert "of 18 from w0" in words and (way == "killed" or "1.5 s" in words or "1500ms" in words)
        settled = target.tensor.clone()
        words = failure(receiver.begin(plan_of(owner.transfer, target, blocks), owner.transfer, target), 4)
        assert "cannot be reached" in words or "within 1.5 s" in words
    assert torch.equal(bits(settled), bits(target.tensor))
    receiver.poll()
    healthy.close()
    receiver.close()


RECEIVER = """
import sys, time
import msgspec
from migration_cases import make_pool, plan_of
from pearl.engine.migration.gloo import GlooTransport
from pearl.kv_transfer import KVTransfer
transfer = msgspec.json.decode(sys.stdin.readline(), type=KVTransfer)
pool, transport = make_pool(transfer.layout, 600, None), GlooTransport(timeout_s=5)
ticket = transport.begin(plan_of(transfer, pool, list(range(600))), transfer, pool)
while not ticket.done():
    if not bool((pool.tensor[0, :, :4] == 1).all()):
        print("middle", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_the_receiver_goes_in_the_middle(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs its own connection, after the timeout at the latest; another receiver is served meanwhile and afterwards."""
    fill = gloo_source._fill

    def fill_slowly(message: Message, pool: Pool, piece: gloo.CopyPart) -> None:
        fill(message, pool, piece)
        time.sleep(0.03 if pool.layout == LARGE else 0)

    monkeypatch.setattr(gloo_source, "_fill", fill_slowly)
    source, sender = make_pool(LARGE, 600, 7), GlooTransport(timeout_s=1.5)
    transfer = offer(source, [*range(600)], sender)
    small, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    other, receiver = offer(small, [4, 1], sender, transfer_id="other"), GlooTransport(timeout_s=5)
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=CHILD) as process:
        assert process.stdin is not None and process.stdout is not None and sender._source is not None
        process.stdin.write(msgspec.json.encode(transfer) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"middle\n"
        process.send_signal(signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        for turn in range(2):
            wait(receiver.begin(plan_of(other, target, [0, 3]), other, target), 4)
            deadline = time.monotonic() + 5
            while turn == 0 and not sender._source.problems:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert "sending piece" in sender._source.problems[0] and "of transfer 't'" in sender._source.problems[0]
        assert len(sender._source._links) == 1
        process.kill()
    for end in (sender, receiver):
        end.close()


def test_after_cancel_nothing_is_written_and_the_next_transfer_comes(slow_landing: None) -> None:
    target, receiver = make_pool(LARGE, 600, None), GlooTransport(timeout_s=5)
    with Owner("gloo", LARGE, 600, 7, [*range(600)]) as owner:
        ticket = begin_large(owner, receiver, target)
        assert ticket.cancel()
        settled = target.tensor.clone()
        second = receiver.begin(plan_of(owner.transfer, target, [*range(600)], layers=(2, 4)), owner.transfer, target)
        with pytest.raises(TransferError, match="^transfer 't': it was cancelled"):
            ticket.done()
        wait(second)
    assert torch.equal(bits(settled[:2]), bits(target.tensor[:2]))
    assert torch.equal(bits(target.tensor[2:4]), bits(make_pool(LARGE, 600, 7).tensor[2:4]))
    receiver.close()


def test_a_lease_that_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch, small_pieces: None) -> None:
    """Before a piece is sent, between reading and sending it, or before all."""
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    plan = plan_of(transfer, target, [0, 3])
    fill, count = gloo_source._fill, [0]

    def fill_and_end(*args: object) -> None:
        fill(*args)  # type: ignore[arg-type]
        count[0] += 1
        if count[0] == 3:
            source.leases.close(1)

    monkeypatch.setattr(gloo_source, "_fill", fill_and_end)
    assert failure(receiver.begin(plan, transfer, target), 4) == "transfer 't': its lease has ended"
    assert count[0] == 3 and bool((target.tensor[1:] == 1).all())
    sender.withdraw("t")
    assert "refuses: it is not offered (any more)" in failure(receiver.begin(plan, transfer, target), 4)
    again = offer(source, [4, 1], sender)
    assert "refuses: its lease is 3, not 1" in failure(receiver.begin(plan, transfer, target), 4)
    wait(receiver.begin(plan, again, target))
    assert torch.equal(bits(target.tensor[:, :, [0, 3]]), bits(source.tensor[:, :, [4, 1]]))


def test_only_what_is_offered_can_be_had(ends: Ends) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    other = plan_of(msgspec.structs.replace(transfer, blocks=[4, 2]), target, [0, 3])
    assert "blocks [2] are not offered" in failure(receiver.begin(other, transfer, target), 4)
    deeper = layout(num_layers=4)
    plan = plan_of(msgspec.structs.replace(transfer, layout=deeper), make_pool(deeper, 6, None), [0, 3])
    assert "layers (0, 4)" in failure(receiver.begin(plan, transfer, target), 4)
    assert bool((target.tensor == 1).all())


@pytest.mark.parametrize("field", ["dtype", "block_size", "num_layers", "head_dim", "order"])
def test_a_pool_of_another_layout_is_refused_by_its_field(ends: Ends, field: str) -> None:
    other = {"dtype": "float16", "block_size": 8, "num_layers": 2, "head_dim": 4, "order": "pairs"}[field]
    source, target = make_pool(layout(), 6, 1), make_pool(layout(**{field: other}), 6, None)
    transfer = offer(source, [4, 1], ends[0])
    assert str(ends[1].refusal(transfer, target)).startswith(f"{field}=")


def test_a_changed_byte_is_noticed() -> None:
    message = Message(torch.zeros(64 + 104, dtype=torch.uint8), 101)
    message.data.copy_(torch.arange(101, dtype=torch.uint8))
    message.seal(4, void=False)
    assert message.open(4) is True
    with pytest.raises(LinkError, match="piece 4: number 5 came"):
        message.open(3)
    for place in (8, 16, 64, 100, 164):
        message.whole[place] ^= 1
        with pytest.raises(LinkError, match="piece 5: the checksum differs"):
            message.open(4)
        message.whole[place] ^= 1
    message.seal(4, void=True)
    assert message.open(4) is False


def test_damage_on_the_way_ends_the_transfer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], ends[0])
    seal = Message.seal

    def seal_and_damage(self: Message, number: int, *, void: bool) -> None:
        seal(self, number, void=void)
        self.data[7] ^= 1

    monkeypatch.setattr(gloo_link.Message, "seal", seal_and_damage)
    assert "the checksum differs" in failure(ends[1].begin(plan_of(transfer, target, [0, 3]), transfer, target), 4)
    assert bool((target.tensor == 1).all())


def test_a_thousand_transfers_leave_nothing_behind() -> None:
    target, receiver = make_pool(layout(), 6, None), GlooTransport(timeout_s=10)

    def used() -> tuple[int, int, int]:
        memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), int(memory.split()[1])

    with Owner("gloo", layout(), 6, 1, [4, 1]) as owner:
        for turn in range(1000):
            wait(receiver.begin(plan_of(owner.transfer, target, [0, 3]), owner.transfer, target))
            if turn == 200:
                before = used()
        after = used()
    assert after[0] == before[0] and after[1] <= before[1] + 3 and after[2] < before[2] + 8192
    deadline = time.monotonic() + 5
    while receiver._receivers and time.monotonic() < deadline:  # the owner is dead
        receiver.poll()
    assert not receiver._receivers
    assert len(os.listdir("/proc/self/fd")) <= before[0]
