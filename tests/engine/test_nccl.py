"""KV by NCCL: how pieces become messages, what counts, and what is aborted. By a stand-in that moves bytes of host memory.

What holds for every sender is in `test_peer.py`. No GPU has run this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import fake_nccl
import pytest
import torch
from fake_nccl import HostNccl
from migration_cases import bits, layout, make_pool, offer, plan_of, wait

from pearl.engine.comm.pynccl import NcclComm, NcclUnavailable
from pearl.engine.migration import nccl
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.nccl import NcclCarrier, NcclTransport
from pearl.engine.migration.registry import all_transports
from pearl.engine.migration.transport import TransferError, choose

needs_compiler = pytest.mark.skipif(fake_nccl.COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_nccl.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def ends(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HostNccl, HostNccl]]:
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    both = HostNccl(library), HostNccl(library, timeout_s=1.0)
    yield both
    for end in both:
        end.close()


@needs_compiler
@pytest.mark.parametrize(("blocks", "into"), [([2, 3, 4], [5, 0, 1]), ([7, 1, 3], [0, 1, 2]), ([2, 3, 4], [1, 2, 3])])
def test_both_ends_cut_alike_and_only_scattered_blocks_need_a_buffer(
    ends: tuple[HostNccl, HostNccl], blocks: list[int], into: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message each for the keys and the values of a layer, whichever side is scattered."""
    sender, receiver = ends
    buffered: list[str] = []
    for name in ("gather_blocks", "scatter_blocks"):
        original = getattr(nccl, name)
        monkeypatch.setattr(nccl, name, lambda *args, name=name, original=original: (buffered.append(name), original(*args)))
    source, target = make_pool(layout(), 9, 1), make_pool(layout(), 6, None)
    transfer = offer(source, blocks, sender)
    before = sender.library.fake_messages()
    wait(receiver.begin(plan_of(transfer, target, into), transfer, target))
    assert torch.equal(bits(target.tensor[:, :, into]), bits(source.tensor[:, :, blocks]))
    assert sender.library.fake_messages() - before == 2 * 3 * 2  # layers, keys and values, sent and received
    one_run = [ids == list(range(ids[0], ids[0] + 3)) for ids in (blocks, into)]
    assert buffered == [name for name, run in zip(("gather_blocks", "scatter_blocks"), one_run, strict=True) if not run]


@needs_compiler
def test_blocks_are_given_up_only_when_what_was_aborted_has_ended(
    ends: tuple[HostNccl, HostNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that sends nothing: cancelled, the receiver aborts, and says so when its stream is empty, not before."""
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    monkeypatch.setattr(NcclCarrier, "send", lambda self, link, *args: time.sleep(2.5))
    aborted: list[float] = []
    abort, mark = NcclComm.abort, fake_nccl.HostStream.mark

    def abort_slowly(self: NcclComm) -> None:
        abort(self)
        aborted.append(time.monotonic())

    def mark_late(self: fake_nccl.HostStream) -> object:
        through = mark(self)
        return lambda: through() and bool(aborted) and time.monotonic() > aborted[0] + 0.4

    monkeypatch.setattr(NcclComm, "abort", abort_slowly)
    monkeypatch.setattr(fake_nccl.HostStream, "mark", mark_late)
    ticket = receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target)
    deadline = time.monotonic() + 5
    while not ticket._writing:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ticket.cancel() is False and ticket.done() is False
    while not ticket.cancel():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert time.monotonic() > aborted[0] + 0.4
    with pytest.raises(TransferError, match="it was cancelled"):
        ticket.done()
    assert bool((target.tensor == 1).all())


@needs_compiler
def test_an_engines_turn_never_waits_for_a_source_that_hung_up(ends: tuple[HostNccl, HostNccl]) -> None:
    sender, receiver = ends
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    transfer = offer(source, [4, 1], sender)
    wait(receiver.begin(plan_of(transfer, target, [0, 3]), transfer, target))
    sender.close()
    deadline = time.monotonic() + 5
    while receiver._receivers:
        start = time.monotonic()
        receiver.poll()
        assert time.monotonic() - start < 0.5 and time.monotonic() < deadline


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_and_auto_takes_another_way() -> None:
    source, target = make_pool(layout(), 6, 1), make_pool(layout(), 6, None)
    way, other = NcclTransport(), GlooTransport()
    assert way.address(source) is None and way._source is None
    transfer = offer(source, [4, 1], other)
    assert way.refusal(transfer, target) == "the pool here is on cpu, not on a GPU"
    assert choose("auto", [way, other], transfer, target) is other
    other.close()


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str | None = None) -> None:
        raise NcclUnavailable("NCCL cannot be loaded from here")

    monkeypatch.setattr(nccl, "Nccl", missing)
    pool = make_pool(layout(), 6, 1)
    monkeypatch.setattr(type(pool.tensor), "is_cuda", True)
    assert NcclTransport()._missing(pool) == "NCCL cannot be loaded from here"


@pytest.mark.parametrize("gpu", [False, True])
def test_the_order_of_auto(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    between_gpus = ["cuda_ipc", "nccl"] if gpu else []
    assert [transport.name for transport in all_transports()] == ["local", "host", *between_gpus, "gloo"]
