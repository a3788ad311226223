"""Transfers between members of a gloo group: bit for bit, bounded, and refused by all members or by none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from gloo_members import run_members
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator, Pending, SingleCommunicator
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.transfer import BUFFERS, WeightReceiver, WeightSender

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    max_position=64,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=False,
    qk_norm=False,
    attention_bias=True,
)
SHAPES = hf_shapes(CONFIG)
BUCKET = 2048
"""Small: the embedding is cut into three, and there are more buckets than buffers."""

Named = list[tuple[str, Tensor]]
Change = Callable[[Named], Iterator[tuple[str, Tensor]] | Named]


def tensors(seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def drive(comm: GroupCommunicator, transfer: WeightSender | WeightReceiver, take: Callable | None = None) -> dict[str, Tensor]:
    """Polls to the end; what a receiver got, put together."""
    got: dict[str, list[Tensor]] = {}
    for _ in range(20_000):
        if isinstance(transfer, WeightSender):
            transfer.poll()
        else:
            for name, rows, start in transfer.poll():
                assert start == sum(len(part) for part in got.setdefault(name, []))
                got[name].append(rows.clone())
                if take is not None:
                    take(transfer, name)
        if transfer.finished:
            return {name: torch.cat(parts) for name, parts in got.items()}
        if transfer.waiting:
            time.sleep(0.0005)
    raise AssertionError("did not end")


def make(comm: GroupCommunicator, **options) -> WeightSender | WeightReceiver:
    kind = WeightSender if comm.rank == 0 else WeightReceiver
    settings = {"config": CONFIG, "dtype": torch.float32, "bucket_bytes": BUCKET, "timeout_s": 15.0} | options
    return kind(comm, **settings)


def begin(transfer: WeightSender | WeightReceiver, version: int, source: Change = list, present: int = -1) -> None:
    if isinstance(transfer, WeightSender):
        transfer.begin(source(tensors(version)), version)
    else:
        transfer.begin(version, present)


def failure(comm: GroupCommunicator, transfer: WeightSender | WeightReceiver, take: Callable | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        drive(comm, transfer, take)
    return str(caught.value)


def goes_on(comm: GroupCommunicator, transfer: WeightSender | WeightReceiver, version: int) -> bool:
    """Whether the same objects on the same group then carry a version as if nothing had been."""
    begin(transfer, version)
    got = drive(comm, transfer)
    return comm.rank == 0 or all(torch.equal(got[name], tensor) for name, tensor in tensors(version))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20])
def test_the_bits_arrive_in_the_sender_s_conversion(dtype: torch.dtype, bucket_bytes: int) -> None:
    def work(comm: GroupCommunicator) -> bool:
        transfer = make(comm, dtype=dtype, bucket_bytes=bucket_bytes)
        assert (len(transfer._buckets) > 2 * BUFFERS) is (bucket_bytes == BUCKET)
        for version in (3, 4, 9):
            begin(transfer, version)
            got = drive(comm, transfer)
            expected = {name: tensor.to(dtype) for name, tensor in tensors(version)}
            if comm.rank:
                assert list(got) == list(expected)
                assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
            assert transfer.nbytes >= sum(tensor.nbytes for tensor in expected.values())
            assert all(buffer.nbytes <= bucket_bytes + 16 for buffer in transfer._buffers)
            memory = sum(buffer.nbytes for buffer in transfer._buffers)
            assert memory <= (transfer.nbytes + 16 * len(transfer._buckets) if comm.rank else BUFFERS * (bucket_bytes + 16))
        return True

    assert run_members(3, work) == [True] * 3


def test_tensors_are_taken_one_after_the_other_as_they_are_sent() -> None:
    """A slow receiver holds the source back: no more than the buffers' buckets are taken ahead of it."""
    taken: list[str] = []

    def source(named: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            taken.append(name)
            yield name, tensor

    def work(comm: GroupCommunicator) -> int:
        transfer, most = make(comm), 0
        begin(transfer, 1, source)
        if comm.rank == 0:
            drive(comm, transfer)
            return len(taken)
        names = [[piece.hf_name for piece in bucket.pieces] for bucket in transfer._buckets]
        seen = 0
        while not transfer.finished:
            if transfer.poll():
                seen += 1
                time.sleep(0.005)
                ahead = {name for bucket in names[: seen + 2 * BUFFERS] for name in bucket}
                most = max(most, len(set(taken) - ahead))
        return most

    assert run_members(2, work) == [len(SHAPES), 0]


def _with(index: int, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Change:
    return lambda named: [change(*pair) if index == number else pair for number, pair in enumerate(named)]


def _breaks(after: int) -> Change:
    def source(named: Named) -> Iterator[tuple[str, Tensor]]:
        yield from named[:after]
        raise OSError("the disk is gone")

    return source


LAST = len(SHAPES) - 1
NAMES = list(SHAPES)
BAD_SOURCES: dict[str, tuple[Change, str]] = {
    "shape of the first": (_with(0, lambda name, t: (name, t[:-1])), f"{NAMES[0]}: shape (95, 16), must be (96, 16)"),
    "shape in the middle": (_with(9, lambda name, t: (name, t[None])), f"{NAMES[9]}: shape"),
    "dtype": (_with(5, lambda name, t: (name, t.long())), f"{NAMES[5]}: dtype torch.int64"),
    "name": (_with(4, lambda name, t: ("x", t)), f"{NAMES[4]}: is due, x came"),
    "order": (lambda named: [*named[:2], named[3], named[2], *named[4:]], f"{NAMES[2]}: is due, {NAMES[3]} came"),
    "nothing": (lambda named: [], f"{NAMES[0]}: is due, the end came"),
    "last missing": (lambda named: named[:-1], f"{NAMES[LAST]}: is due, the end came"),
    "one more": (lambda named: [*named, ("x", torch.zeros(2))], "x: came after the last tensor of the model"),
    "raises": (_breaks(7), "the disk is gone"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_sender_that_gives_up_is_heard_by_all(case: str) -> None:
    source, words = BAD_SOURCES[case]

    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        transfer = make(comm)
        begin(transfer, 1, source)
        with pytest.raises(OSError if comm.rank == 0 and case == "raises" else ValueError) as caught:
            drive(comm, transfer)
        assert not transfer.finished
        return str(caught.value), goes_on(comm, transfer, 2)

    (own, fine), *others = run_members(3, work)
    assert fine and own.startswith(words)
    assert others == [(f"version 1: refused by member 0: {own}", True)] * 2


@pytest.mark.parametrize("at", [0, 6, LAST])
def test_a_receiver_that_refuses_is_heard_by_all(at: int) -> None:
    def take(transfer: WeightReceiver, name: str) -> None:
        if name == NAMES[at]:
            transfer.refuse(ValueError(f"{name}: 1 of 2 values are not finite"))

    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        transfer = make(comm)
        begin(transfer, 1)
        return failure(comm, transfer, take if comm.rank == 2 else None), goes_on(comm, transfer, 2)

    words = f"{NAMES[at]}: 1 of 2 values are not finite"
    others = (f"version 1: refused by member 2: {words}", True)
    assert run_members(3, work) == [others, others, (words, True)]


class Flipping(GroupCommunicator):
    """Changes one bit of the second message that comes in."""

    messages = 0

    def broadcast_async(self, tensor: Tensor, src: int, what: str = "") -> Pending:
        pending = super().broadcast_async(tensor, src, what)
        self.messages += 1
        if self.messages == 2:
            pending.wait(10.0)
            tensor[100] ^= 4
        return pending


def test_a_changed_bit_is_seen() -> None:
    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        transfer = make(Flipping(comm.group) if comm.rank == 1 else comm)
        begin(transfer, 1)
        return failure(comm, transfer), goes_on(comm, transfer, 2)

    results = run_members(3, work)
    words = f"version 1: bucket 2 of {len(make(SingleCommunicator())._buckets)} from member 0 to 1, 2: the checksum differs"
    others = (f"version 1: refused by member 1: {words}", True)
    assert results == [others, (words, True), others]


OTHER = replace(CONFIG, intermediate_size=32)
MISMATCHES: dict[str, tuple[dict, int, int, str]] = {
    "version": ({}, 6, -1, "version 5: member 0 sends it, member 2 awaits version 6"),
    "not newer": ({}, 5, 5, "version=5: must be greater than 5, the present version of member 2"),
    "dtype": ({"dtype": torch.bfloat16}, 5, -1, "version 5: member 0 sends torch.float32, member 2 takes torch.bfloat16"),
    "model": ({"config": OTHER}, 5, -1, f"version 5: the tensors of member 0 ({len(SHAPES)} in"),
    "buckets": ({"bucket_bytes": 4096}, 5, -1, f"version 5: the tensors of member 0 ({len(SHAPES)} in"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_does_not_fit_is_refused_in_the_same_words_before_anything_is_sent(case: str) -> None:
    options, version, present, words = MISMATCHES[case]

    def never(named: Named) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a tensor was asked for")
        yield from named

    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        odd = comm.rank == 2
        transfer = make(comm, **(options if odd else {}))
        begin(transfer, version if odd else 5, never, present if odd else 4)
        said = failure(comm, transfer)
        return said, goes_on(comm, transfer if not options else make(comm), 7)

    results = run_members(3, work)
    assert results == [results[0]] * 3
    assert results[0][0].startswith(words) and results[0][1]


def test_a_member_that_does_not_come_is_waited_for_so_long() -> None:
    def work(comm: GroupCommunicator) -> tuple[float, str, str]:
        if comm.rank == 1:
            time.sleep(1.5)
            return 0.0, "", ""
        transfer = make(comm, timeout_s=0.3)
        begin(transfer, 1)
        start = time.monotonic()
        with pytest.raises(CollectiveError) as late:
            drive(comm, transfer)
        waited = time.monotonic() - start
        with pytest.raises(CollectiveError) as again:
            begin(transfer, 2)
        return waited, str(late.value), str(again.value)

    waited, late, again = run_members(2, work)[0]
    assert 0.25 < waited < 1.4
    assert late == "version 1: waited 0.3 s for all members to begin"
    assert again == f"version 2: this group cannot be used any more since {late}"


def test_a_member_that_stalls_on_the_way_is_waited_for_so_long() -> None:
    def work(comm: GroupCommunicator) -> str:
        transfer = make(comm, timeout_s=0.4)
        begin(transfer, 1)
        if comm.rank == 1:
            while not transfer.poll():
                time.sleep(0.001)
            time.sleep(1.5)
            return ""
        with pytest.raises(CollectiveError) as caught:
            drive(comm, transfer)
        return str(caught.value)

    count = len(make(SingleCommunicator())._buckets)
    assert run_members(2, work)[0] == f"version 1: waited 0.4 s for bucket 4 of {count} from member 0 to 1"


def test_one_at_a_time_and_a_group_of_one() -> None:
    sender = make(SingleCommunicator())
    begin(sender, 1)
    with pytest.raises(RuntimeError, match="version 2: version 1 is still on its way"):
        begin(sender, 2)
    while not sender.poll():
        assert not sender.finished
    assert sender.finished and sender.poll()
    begin(sender, 2)
    assert not sender.finished


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.int32: must be one of torch.float64"):
        WeightSender(SingleCommunicator(), CONFIG, torch.int32)
    with pytest.raises(ValueError, match=r"timeout_s=0: must be > 0"):
        WeightReceiver(SingleCommunicator(), CONFIG, torch.float32, timeout_s=0)
