"""KV that its source sends, by gloo and by NCCL (a stand-in that moves bytes of host memory): what holds for both."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_nccl
import msgspec
import pytest
import torch
from migration_cases import CHILD, Owner, bits, layout, make_pool, offer, plan_of, some_blocks, wait

from pearl.engine.migration import gloo, nccl, peer_source
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.peer import PeerTransport
from pearl.engine.migration.peer_link import Coming, Link, LinkError
from pearl.engine.migration.peer_receiver import Due, PeerReceiver, PeerTicket
from pearl.engine.migration.planner import CopyPart, CopyPlan
from pearl.engine.migration.transport import Pool, Ticket, TransferError, choose
from pearl.kv_transfer import KVTransfer

LARGE = layout(block_size=16, num_layers=6, head_dim=64)
"""A pool of 600 blocks has 59 MB, of which the tests move most: it takes a while."""
Ends = tuple[PeerTransport, PeerTransport]
NAMES = [
    "gloo",
    pytest.param("nccl", marks=pytest.mark.skipif(fake_nccl.COMPILER is None, reason="no C compiler")),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_nccl.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "nccl":
        for variable, value in (("FAKE_NCCL", request.getfixturevalue("library")), ("FAKE_NCCL_FOLDER", str(tmp_path))):
            monkeypatch.setenv(variable, value)
            monkeypatch.setitem(CHILD, variable, value)
    return request.param


@pytest.fixture
def new(name: str) -> Iterator[Callable[[float], PeerTransport]]:
    """Makes transports, and closes them."""
    made: list[PeerTransport] = []

    def make(timeout_s: float = 5.0) -> PeerTransport:
        way = GlooTransport(timeout_s=timeout_s) if name == "gloo" else fake_nccl.HostNccl(os.environ["FAKE_NCCL"], timeout_s)
        made.append(way)
        return way

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def ends(new: Callable[[], PeerTransport]) -> Ends:
    """A source and a receiver in this process."""
    return new(), new()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gloo, nccl):
        monkeypatch.setattr(module, "PIECE_BYTES", 1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large transfer takes most of a second, so that there is a middle of it to hit."""
    monkeypatch.setattr(nccl, "PIECE_BYTES", 4 << 20)
    for module in (gloo, nccl):
        slow_down(monkeypatch, module)


def slow_down(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Each piece of a large pool takes its time, at either end in this process."""
    original = module.view  # type: ignore[attr-defined]

    def view(pool: torch.Tensor, *args: object) -> torch.Tensor:
        time.sleep(0.03 if pool.shape[0] == LARGE.num_layers else 0)
        return original(pool, *args)

    monkeypatch.setattr(module, "view", view)
    if module is gloo:
        land = PeerTicket.land

        def land_slowly(self: PeerTicket, *args: object) -> None:
            land(self, *args)  # type: ignore[arg-type]
            time.sleep(0.03 if self.pool.layout == LARGE else 0)

        monkeypatch.setattr(PeerTicket, "land", land_slowly)


def failure(ticket: Ticket, timeout_s: float) -> str:
    """The error that the ticket ends with in time."""
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        wait(ticket, timeout_s)
    assert time.monotonic() - start < timeout_s
    return str(caught.value)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def blocks_of(pool: Pool, count: int) -> list[int]:
    return random.Random(1).sample(range(pool.tensor.shape[2]), count)


def problems(transport: PeerTransport) -> list[str]:
    """Of a source that has offered something."""
    assert transport._source is not None
    return transport._source.problems


# ---------------------------------------------------------------------------------------------------- bytes


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


def test_from_a_second_process_many_at_once(name: str, new: Callable[[float], PeerTransport]) -> None:
    blocks, target = random.Random(0).sample(range(600), 500), make_pool(LARGE, 520, None)
    receiver = new(10)
    with Owner(name, LARGE, 600, 7, blocks) as owner:
        plan = plan_of(owner.transfer, target, blocks_of(target, 500))
        tickets = [receiver.begin(plan, owner.transfer, target) for _ in range(3)]
        for ticket in tickets:
            wait(ticket)
    twin = make_pool(LARGE, 600, 7)
    assert torch.equal(bits(target.tensor[:, :, blocks_of(target, 500)]), bits(twin.tensor[:, :, blocks]))


# ---------------------------------------------------------------------------------------------------- who goes away


def begin_large(transfer: KVTransfer, receiver: PeerTransport, target: Pool) -> Ticket:
    """A large transfer, in the middle: something has come."""
    into = blocks_of(target, len(transfer.blocks))
    ticket = receiver.begin(plan_of(transfer, target, into), transfer, target)
    until(lambda: not bool((target.tensor[0, :, into[:4]] == 1).all()), "nothing came")
    assert not ticket.done()
    return ticket


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_the_sender_goes_in_the_middle(
    name: str, way: signal.Signals, new: Callable[[float], PeerTransport], slow: None
) -> None:
    """Killed, it is missed at once; stopped, after the timeout. Another source's transfer is not concerned."""
    target, receiver = make_pool(LARGE, 600, None), new(1.5)
    blocks = [*range(600)]
    other, other_target = make_pool(layout(), 6, 3), make_pool(layout(), 6, None)
    healthy = new(5)
    with Owner(name, LARGE, 600, 7, random.Random(0).sample(blocks, 600)) as owner:
        ticket = begin_large(owner.transfer, receiver, target)
        owner.process.send_signal(way)
        if way == signal.SIGKILL:
            owner.process.wait(10)
        small = offer(other, [1, 2], healthy, transfer_id="other")
        wait(receiver.begin(plan_of(small, other_target, [0, 3]), small, other_target))
        words = failure(ticket, 5)
        assert words.startswith("transfer 't': ")
        assert way == signal.SIGKILL or "1.5 s" in words or "1500ms" in words
        settled = target.tensor.clone()
        words = failure(receiver.begin(plan_of(owner.transfer, target, blocks), owner.transfer, target), 4)
        assert "cannot be reached" in words or "within 1.5 s" in words
    assert torch.equal(bits(settled), bits(target.tensor))
    receiver.poll()


RECEIVER = """
import os, sys, time
import msgspec
from fake_nccl import HostNccl
from migration_cases import make_pool, plan_of
from pearl.engine.migration.gloo import GlooTransport
from pearl.kv_transfer import KVTransfer
transfer = msgspec.json.decode(sys.stdin.readline(), type=KVTransfer)
transport = GlooTransport(timeout_s=5) if sys.argv[1] == "gloo" else HostNccl(os.environ["FAKE_NCCL"], 5)
pool = make_pool(transfer.layout, 600, None)
ticket = transport.begin(plan_of(transfer, pool, list(range(600))), transfer, pool)
while not ticket.done():
    if not bool((pool.tensor[0, :, :4] == 1).all()):
        print("middle", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
def test_the_receiver_goes_in_the_middle(
    name: str, way: signal.Signals, new: Callable[[float], PeerTransport], slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs its own connection, after the timeout at the latest; another receiver is served meanwhile and afterwards."""
    monkeypatch.setattr(gloo, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(nccl, "PIECE_BYTES", 4 << 20)
    source, sender = make_pool(LARGE, 600, 7), new(1.5)
    transfer = offer(source, [*range(600)][::-1], sender)
    small, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    other, receiver = offer(small, [4, 1], sender, transfer_id="other"), new(5)
    script = RECEIVER.replace("transfer =", f"from pearl.engine.migration import gloo, nccl\n{PIECES}\ntransfer =", 1)
    command = [sys.executable, "-c", script, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=CHILD) as process:
        assert process.stdin is not None and process.stdout is not None and sender._source is not None
        process.stdin.write(msgspec.json.encode(transfer) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"middle\n"
        process.send_signal(way)
        for turn in range(2):
            wait(receiver.begin(plan_of(other, target, [0, 3]), other, target), 4)
            if turn == 0:
                until(lambda: bool(problems(sender)), "the loss was not noticed", 5)
        assert "transfer 't'" in problems(sender)[0] or "ncclGroupEnd" in problems(sender)[0]
        assert len(sender._source._links) == 1
        process.kill()


PIECES = "gloo.PIECE_BYTES, nccl.PIECE_BYTES = 1 << 20, 4 << 20"


def test_after_cancel_nothing_is_written_and_the_next_transfer_comes(
    name: str, new: Callable[[float], PeerTransport], slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, receiver = make_pool(LARGE, 600, None), new(5)
    source, sender = make_pool(LARGE, 600, 7), new(5)
    transfer = offer(source, [*range(600)][::-1], sender)
    ticket = begin_large(transfer, receiver, target)
    until(ticket.cancel, "it goes on being written")
    settled = target.tensor.clone()
    second = receiver.begin(plan_of(transfer, target, [*range(600)], layers=(2, 4)), transfer, target)
    with pytest.raises(TransferError, match="^transfer 't': it was cancelled"):
        ticket.done()
    wait(second)
    assert torch.equal(bits(settled[:2]), bits(target.tensor[:2]))
    assert torch.equal(bits(target.tensor[2:4, :, ::1]), bits(source.tensor[2:4].flip(2)))


# ---------------------------------------------------------------------------------------------------- what may be had


def test_a_lease_that_has_ended(ends: Ends) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    plan = plan_of(transfer, target, [0, 3])
    source.leases.close(1)
    assert "its lease has ended" in failure(receiver.begin(plan, transfer, target), 4)
    assert bool((target.tensor == 1).all())
    sender.withdraw("t")
    assert "refuses: it is not offered (any more)" in failure(receiver.begin(plan, transfer, target), 4)
    again = offer(source, [4, 1], sender)
    assert "refuses: its lease is 3, not 1" in failure(receiver.begin(plan, transfer, target), 4)
    wait(receiver.begin(plan, again, target))
    assert torch.equal(bits(target.tensor[:, :, [0, 3]]), bits(source.tensor[:, :, [4, 1]]))
    nothing = CopyPlan(parts=(), num_bytes=0)
    wait(receiver.begin(nothing, again, target))
    source.leases.close(1)
    assert "its lease has ended" in failure(receiver.begin(nothing, again, target), 4)


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


def test_an_offer_that_is_a_moment_late_is_waited_for_and_one_that_ended_is_not(ends: Ends) -> None:
    """Ranks of one instance open their offers one after the other."""
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    plan = plan_of(transfer, target, [0, 3])
    wait(receiver.begin(plan, transfer, target))  # they know each other
    late = msgspec.structs.replace(transfer, transfer_id="late", lease_word=transfer.lease_word + 2)
    ticket = receiver.begin(plan, late, target)
    time.sleep(0.1)
    assert not ticket.done()
    source.leases.close(1)
    assert offer(source, [4, 1], sender, transfer_id="late").lease_word == late.lease_word
    wait(ticket)
    sender.withdraw("late")
    start = time.monotonic()
    assert "not offered (any more)" in failure(receiver.begin(plan, late, target), 4)
    assert time.monotonic() - start < peer_source.DUE_S / 2


@pytest.mark.parametrize("field", ["dtype", "block_size", "num_layers", "head_dim", "order"])
def test_a_pool_of_another_layout_is_refused_by_its_field(ends: Ends, field: str) -> None:
    other = {"dtype": "float16", "block_size": 8, "num_layers": 2, "head_dim": 4, "order": "pairs"}[field]
    source, target = make_pool(layout(), 6, 1), make_pool(layout(**{field: other}), 6, None)
    transfer = offer(source, [4, 1], ends[0])
    assert str(ends[1].refusal(transfer, target)).startswith(f"{field}=")


def test_another_machine_is_told_that_this_one_gives_to_itself_only(ends: Ends) -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], ends[0])
    place = transfer.source.addresses[ends[0].name].split(" ")[0]
    addresses = {ends[0].name: f"{place} another-machine"}
    far = msgspec.structs.replace(transfer, source=msgspec.structs.replace(transfer.source, addresses=addresses))
    assert ends[1].refusal(transfer, target) is None
    with pytest.raises(ValueError, match=f"{ends[0].name}: w0 gives KV to its own machine only, at 127.0.0.1:"):
        choose("auto", [ends[1]], far, target)


def test_whatever_goes_wrong_costs_what_was_asked_for_and_nothing_that_is_asked_next(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    plan, take = plan_of(transfer, target, [0, 3]), PeerReceiver._take

    def fail(*_: object) -> None:
        monkeypatch.setattr(PeerReceiver, "_take", take)
        raise MemoryError

    monkeypatch.setattr(PeerReceiver, "_take", fail)
    assert "MemoryError" in failure(receiver.begin(plan, transfer, target), 4)
    wait(receiver.begin(plan, transfer, target))
    assert torch.equal(bits(target.tensor[:, :, [0, 3]]), bits(source.tensor[:, :, [4, 1]]))


def test_a_receiver_for_which_no_thread_is_to_be_had_loses_its_transfer_and_the_next_comes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if thread.name == "kv receiver" and not refused and threading.current_thread().name == "kv source":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    plan = plan_of(transfer, target, [0, 3])
    assert failure(receiver.begin(plan, transfer, target), 4)
    assert problems(sender) == ["can't start new thread"]
    wait(receiver.begin(plan, transfer, target))
    assert torch.equal(bits(target.tensor[:, :, [0, 3]]), bits(source.tensor[:, :, [4, 1]]))


def test_nothing_answers_before_the_first_offer(ends: Ends) -> None:
    pool = make_pool(layout(), 6, 1)
    sender, receiver = ends
    address = sender.address(pool)
    assert address is not None and not sender._source._serving and not receiver._receivers
    transfer = offer(pool, [4, 1], sender)
    assert transfer.source.addresses[sender.name] == address and sender._source._serving


# ---------------------------------------------------------------------------------------------------- while it is written


def test_what_is_being_written_is_sent_as_it_comes_and_nothing_before(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 14 tokens in steps of 6 and 8; what is not written is NaN. The receiver hears that nothing is ready."""
    monkeypatch.setattr(peer_source, "SAY_S", 0.05)
    sender, receiver = ends
    real, source, target = make_pool(layout(), 9, 1), make_pool(layout(), 9, 2), make_pool(layout(), 6, None)
    source.tensor.fill_(float("nan"))
    blocks, into = [8, 2, 3, 5], [0, 1, 5, 4]
    leases = source.leases
    transfer = offer(source, blocks, sender, num_tokens=14)
    leases.announce(5, 0, 0, 0)

    def write(layer: int, first: int, end: int) -> None:
        """Tokens of one layer, as a step does."""
        for token in range(first, end):
            place = (layer, slice(None), blocks[token // 4], slice(None), token % 4)
            source.tensor[place] = real.tensor[place]

    def came(layers: range, count: int) -> bool:
        return all(torch.equal(bits(target.tensor[layer][:, into[:count]]), bits(real.tensor[layer][:, blocks[:count]]))
                   for layer in layers)  # fmt: skip

    ticket = receiver.begin(plan_of(transfer, target, into), transfer, target)
    time.sleep(0.3)
    assert not ticket.done() and bool((target.tensor == 1).all())
    leases.announce(5, 0, 6, 1)
    for layer in range(3):
        write(layer, 0, 6)
        leases.layer_done(1, layer + 1)
        until(lambda layer=layer: came(range(layer + 1), 1), f"layer {layer} did not come")
    leases.announce(5, 6, 14, 2)
    time.sleep(0.05)
    assert bool((target.tensor[:, :, into[1:]] == 1).all()) and not ticket.done()
    for layer in range(3):
        write(layer, 6, 14)
        leases.layer_done(2, layer + 1)
        until(lambda layer=layer: came(range(layer + 1), 3), f"layer {layer} did not come")
    wait(ticket)
    assert bool((target.tensor[:, :, [2, 3]] == 1).all())
    assert torch.equal(bits(target.tensor[:, :, 4, :, :2]), bits(real.tensor[:, :, 5, :, :2]))


def test_no_transfer_waits_for_another_whose_prompt_is_still_computed(
    name: str, new: Callable[[float], PeerTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it over one link, also for longer than a silent source would be waited for."""
    sender, receiver = new(1.0), new(1.0)
    source, target = make_pool(layout(), 9, 1), make_pool(layout(), 20, None)
    growing = []
    for number, block in enumerate((1, 3, 5)):
        transfer = offer(source, [block - 1, block], sender, transfer_id=f"g{number}")
        source.leases.announce(block, 0, 0, 0)
        into = [2 * number, 2 * number + 1]
        growing.append((transfer, into, receiver.begin(plan_of(transfer, target, into), transfer, target)))
    whole = offer(source, [8, 7], sender, transfer_id="whole")
    for turn in range(4):
        wait(receiver.begin(plan_of(whole, target, [10 + turn, 15 + turn]), whole, target), 2)
        time.sleep(0.4)
    assert not any(ticket.done() for _, _, ticket in growing) and bool((target.tensor[:, :, :6] == 1).all())
    assert len(sender._source._links) == 1
    for transfer, into, ticket in reversed(growing):
        source.leases.announce(transfer.blocks[-1], 8, 8, 0)
        wait(ticket, 2)
        assert torch.equal(bits(target.tensor[:, :, into]), bits(source.tensor[:, :, transfer.blocks]))


def test_a_lease_that_ends_between_two_batches(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or in the last one: what has come does not count, and no more comes; the link stays."""
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    monkeypatch.setattr(peer_source, "BATCH_BYTES", 1)
    for after in (1, 3, 6):
        transfer = offer(source, [4, 1], sender, transfer_id=f"t{after}")
        target.tensor.fill_(1)
        sent = [0]

        def say(self: Link, words: object, sent: list[int] = sent, after: int = after, say: Callable = Link.say) -> None:
            say(self, words)
            sent[0] += bool(getattr(words, "parts", ())) and isinstance(words, Coming)
            if sent[0] == after:
                source.leases.close(1)
                sent[0] += 100

        with monkeypatch.context() as patched:
            patched.setattr(Link, "say", say)
            words = failure(receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target), 4)
        assert words.endswith("its source refuses: its lease has ended") and sent[0] == 100 + after
        assert (target.tensor != 1).flatten(3).any(-1)[:, 0, [0, 3]].sum() == after
    assert len(sender._source._links) == 1


@pytest.mark.parametrize("way", ["withdrawn", "lease", "cancelled", "closed"])
def test_a_prompt_that_is_given_up_frees_both_sides(ends: Ends, way: str) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(), 9, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [8, 2, 3], sender, num_tokens=12)
    source.leases.announce(3, 4, 4, 0)
    ticket = receiver.begin(plan_of(transfer, target, [0, 1, 5]), transfer, target)
    until(lambda: torch.equal(bits(target.tensor[:, :, 0]), bits(source.tensor[:, :, 8])), "the first block did not come")
    if way == "withdrawn":
        sender.withdraw("t")
    elif way == "lease":
        source.leases.close(3)
    elif way == "cancelled":
        until(ticket.cancel, "it goes on being written")
    else:
        receiver.close()
    words = failure(ticket, 3)
    reasons = {"cancelled": "it was cancelled", "closed": "transport was closed"}
    assert words.endswith(reasons.get(way, "its lease has ended"))
    if way == "closed":
        until(lambda: any("gone" in problem for problem in problems(sender)), str(problems(sender)), 3)
    assert bool((target.tensor[:, :, 1:] == 1).all())
    if way != "closed":
        again = offer(source, [4, 1], sender, transfer_id="u")
        wait(receiver.begin(plan_of(again, target, [2, 3]), again, target))


def test_a_byte_comes_once_and_only_if_it_was_asked_for() -> None:
    def part(layers: tuple[int, int], source: tuple[int, ...], into: tuple[int, ...]) -> CopyPart:
        heads = {"source_heads": (0, 2), "destination_heads": (0, 2)}
        return CopyPart(layers=layers, source_blocks=source, destination_blocks=into, **heads)

    due = Due(CopyPlan(parts=(part((0, 3), (7, 8), (1, 2)),), num_bytes=0))
    due.take(part((0, 2), (7,), (1,)))
    heaven = 2**62  # so many layers, as bits, are more than memory has room for
    wrongs = [part((1, 2), (7,), (1,)), part((0, 1), (8,), (1,)), part((2, 4), (8,), (2,)), part((0, 1), (9,), (3,))]
    wrongs += [part(layers, (8,), (2,)) for layers in ((0, heaven), (heaven, heaven + 1), (1, 1), (2, 1), (-1, 1))]
    for wrong in wrongs:
        with pytest.raises(LinkError, match="came without being due"):
            due.take(wrong)
    due.take(part((2, 3), (7,), (1,)))
    assert due
    due.take(part((0, 3), (8,), (2,)))
    assert not due
