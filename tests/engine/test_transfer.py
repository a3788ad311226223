"""Transfers between members of a gloo group: bit for bit, bounded, one broadcast per bucket, and refused in the same words."""

from __future__ import annotations

import math
import re
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


def drive(transfer: WeightSender | WeightReceiver) -> dict[str, Tensor]:
    """Polls to the end; what a receiver got, put together."""
    got: dict[str, list[Tensor]] = {}
    for _ in range(20_000):
        if isinstance(transfer, WeightSender):
            transfer.poll()
        else:
            for name, rows, start in (piece for bucket in transfer.poll() for piece in bucket):
                assert start == sum(len(part) for part in got.setdefault(name, []))
                got[name].append(rows.clone())
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


def failure(transfer: WeightSender | WeightReceiver) -> str:
    with pytest.raises(ValueError) as caught:
        drive(transfer)
    return str(caught.value)


def goes_on(transfer: WeightSender | WeightReceiver, version: int) -> bool:
    """Whether the same objects on the same group then carry a version as if nothing had been."""
    begin(transfer, version)
    got = drive(transfer)
    return isinstance(transfer, WeightSender) or all(torch.equal(got[name], tensor) for name, tensor in tensors(version))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20])
def test_the_bits_arrive_in_the_sender_s_conversion(dtype: torch.dtype, bucket_bytes: int) -> None:
    def work(comm: GroupCommunicator) -> bool:
        transfer = make(comm, dtype=dtype, bucket_bytes=bucket_bytes)
        assert (len(transfer._buckets) > 2 * BUFFERS) is (bucket_bytes == BUCKET)
        for version in (3, 4, 9):
            begin(transfer, version)
            got = drive(transfer)
            expected = {name: tensor.to(dtype) for name, tensor in tensors(version)}
            if comm.rank:
                assert list(got) == list(expected)
                assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
            assert transfer.nbytes >= sum(tensor.nbytes for tensor in expected.values())
            memory = {message.whole.data_ptr() for message in transfer._messages}
            assert len(memory) == (len(transfer._buckets) if comm.rank else min(BUFFERS, len(transfer._buckets)))
            seen.add((comm.rank, *memory))
        return True

    seen: set[tuple[int, ...]] = set()  # the memory does not change from one transfer to the next
    assert run_members(3, work) == [True] * 3
    assert len(seen) == 3


class Counting(GroupCommunicator):
    """Counts what is asked of the group."""

    def __init__(self, group: object) -> None:
        super().__init__(group)
        self.sums, self.sizes = 0, []

    def all_reduce_sum_async(self, tensor: Tensor, what: str = "") -> Pending:
        self.sums += 1
        return super().all_reduce_sum_async(tensor, what)

    def broadcast_async(self, tensor: Tensor, src: int, what: str = "") -> Pending:
        self.sizes.append(tensor.nbytes)
        return super().broadcast_async(tensor, src, what)


@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20])
def test_one_broadcast_per_bucket_and_plans_are_compared_once(bucket_bytes: int) -> None:
    def work(comm: GroupCommunicator) -> tuple[int, int, bool]:
        counting = Counting(comm.group)
        transfer = make(counting, bucket_bytes=bucket_bytes)
        for version in range(1, 5):
            begin(transfer, version)
            drive(transfer)
        return counting.sums, len(counting.sizes), sum(counting.sizes) == 4 * transfer.nbytes

    buckets = len(make(SingleCommunicator(), bucket_bytes=bucket_bytes)._buckets)
    assert buckets == 1 or bucket_bytes == BUCKET
    assert run_members(3, work) == [(1, 4 * buckets, True)] * 3


def test_tensors_are_taken_one_after_the_other_as_they_are_sent() -> None:
    """A slow receiver holds the source back: no more than some buffers' buckets are taken ahead of it."""
    taken: list[str] = []

    def source(named: Named) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            taken.append(name)
            yield name, tensor

    def work(comm: GroupCommunicator) -> int:
        transfer, most = make(comm), 0
        begin(transfer, 1, source)
        if comm.rank == 0:
            drive(transfer)
            return len(taken)
        names = [[piece.hf_name for piece in bucket.pieces] for bucket in transfer._buckets]
        seen = 0
        while not transfer.finished:
            if arrived := transfer.poll():
                last = max(index for index, bucket in enumerate(names) if arrived[-1][-1][0] in bucket)
                seen = max(seen, last + 1)
                time.sleep(0.005)
                ahead = {name for bucket in names[: seen + 3 * BUFFERS] for name in bucket}
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
    "not finite": (
        _with(LAST - 1, lambda name, t: (name, t.index_fill(0, torch.tensor(1), math.inf))),
        f"{NAMES[LAST - 1]}: 1 of 16 values are not finite in torch.float32",
    ),
    "not a number, in a part": (
        _with(0, lambda name, t: (name, t.index_fill(0, torch.tensor(90), math.nan))),
        f"{NAMES[0]}: 16 of ",
    ),
}


@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20])
@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_sender_that_gives_up_is_heard_by_all(case: str, bucket_bytes: int) -> None:
    source, words = BAD_SOURCES[case]

    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        transfer = make(comm, bucket_bytes=bucket_bytes)
        begin(transfer, 1, source)
        with pytest.raises(OSError if comm.rank == 0 and case == "raises" else ValueError) as caught:
            drive(transfer)
        assert not transfer.finished
        return str(caught.value), goes_on(transfer, 2)

    results = run_members(3, work)
    assert results == [results[0]] * 3
    assert results[0][0].startswith(words) and results[0][1]


def test_values_whose_sum_is_infinite_are_finite() -> None:
    def work(comm: GroupCommunicator) -> bool:
        transfer = make(comm)
        begin(transfer, 1, _with(0, lambda name, t: (name, torch.full_like(t, 3e38))))
        got = drive(transfer)
        return comm.rank == 0 or bool((got[NAMES[0]] == torch.tensor(3e38)).all())

    assert run_members(2, work) == [True] * 2


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


def test_a_changed_bit_is_seen_and_ends_that_receiver() -> None:
    """It hands nothing on and can take no part any more; the others wait for it as for a lost member."""

    def work(comm: GroupCommunicator) -> tuple[str, str]:
        if comm.rank != 1:
            transfer = make(comm, timeout_s=0.5)
            begin(transfer, 1)
            with pytest.raises(CollectiveError) as caught:
                drive(transfer)
            return str(caught.value), ""
        transfer = make(Flipping(comm.group))
        begin(transfer, 1)
        said = failure(transfer)
        with pytest.raises(CollectiveError) as again:
            begin(transfer, 2)
        time.sleep(1.0)
        return said, str(again.value)

    results = run_members(3, work)
    count = len(make(SingleCommunicator())._buckets)
    words = f"version 1: bucket 2 of {count} from member 0 to 1, 2: the checksum differs"
    assert results[1] == (words, f"version 2: this group cannot be used any more since {words}")
    assert all(said.startswith("version 1: waited 0.5 s for bucket ") for said, _ in (results[0], results[2]))


def test_another_version_is_refused() -> None:
    def work(comm: GroupCommunicator) -> str:
        transfer = make(comm, bucket_bytes=1 << 20)
        begin(transfer, 5 if comm.rank == 0 else 6)
        return "" if comm.rank == 0 and not drive(transfer) else failure(transfer)

    assert run_members(2, work) == ["", "version 6: bucket 1 of 1 from member 0 to 1: version 5 came"]


def test_a_version_that_is_not_newer_is_refused_before_anything_is_posted() -> None:
    def work(comm: GroupCommunicator) -> bool:
        transfer = make(comm)
        if comm.rank:
            with pytest.raises(ValueError, match=r"version=5: must be greater than 5, the present version"):
                begin(transfer, 5, present=5)
        return goes_on(transfer, 6)

    assert run_members(2, work) == [True] * 2


OTHER = replace(CONFIG, intermediate_size=32)
MISMATCHES: dict[str, tuple[dict, str]] = {
    "dtype": ({"dtype": torch.bfloat16}, "version 5: member 0 sends torch.float32, member 2 takes torch.bfloat16"),
    "model": ({"config": OTHER}, f"version 5: the tensors of member 0 ({len(SHAPES)} in"),
    "buckets": ({"bucket_bytes": 4096}, f"version 5: the tensors of member 0 ({len(SHAPES)} in"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_plans_that_differ_are_refused_in_the_same_words_before_anything_is_sent(case: str) -> None:
    options, words = MISMATCHES[case]

    def never(named: Named) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a tensor was asked for")
        yield from named

    def work(comm: GroupCommunicator) -> tuple[str, bool]:
        transfer = make(comm, **(options if comm.rank == 2 else {}))
        begin(transfer, 5, never)
        return failure(transfer), goes_on(make(comm), 7)

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
            drive(transfer)
        waited = time.monotonic() - start
        with pytest.raises(CollectiveError) as again:
            begin(transfer, 2)
        return waited, str(late.value), str(again.value)

    waited, late, again = run_members(2, work)[0]
    assert 0.25 < waited < 1.4
    assert late == "version 1: waited 0.3 s for all members to compare what they send and take"
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
            drive(transfer)
        return str(caught.value)

    count = len(make(SingleCommunicator())._buckets)
    said = run_members(2, work)[0]
    assert re.fullmatch(rf"version 1: waited 0\.4 s for bucket \d+ of {count} from member 0 to 1", said)


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
