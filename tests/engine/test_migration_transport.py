"""The words of leases, the choice of a transport, and the one that copies inside a process."""

from __future__ import annotations

import gc

import msgspec
import numpy as np
import pytest
import torch

from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.planner import plan_copy
from pearl.engine.migration.transport import LeaseWords, Pool, TransferError, choose
from pearl.protocol import KVEndpoint, KVLayout, KVTransfer, RequestState, SamplingParams

LAYOUT = KVLayout(dtype="float32", block_size=4, num_layers=3, num_kv_heads=4, head_dim=8, order="plain")


def pool(seed: int) -> Pool:
    tensor = torch.randn(3, 2, 6, 4, 4, 8, generator=torch.Generator().manual_seed(seed))
    return Pool(tensor=tensor, memory=None, layout=LAYOUT, leases=LeaseWords(np.zeros(6, dtype=np.int64)))


def transfer_from(source: Pool, transport: LocalTransport, blocks: list[int]) -> KVTransfer:
    state = RequestState(
        request_id="r", name="r", index=0, params=SamplingParams(), token_ids=[1] * 9, num_prompt_tokens=8, max_tokens=4,
        seed=0, stop_token_ids=[], eos_token_ids=[], cache_salt=None, session_id=None, cacheable=True, streaming=True,
        num_cached_tokens=0, num_preemptions=0, logprobs=[-1.0], top_logprobs=[{3: -1.0}], prompt_logprobs=[None],
        weight_versions=[0],
    )  # fmt: skip
    address = transport.address(source)
    where = KVEndpoint(worker="w", host="h", pid=1, num_blocks=6, addresses={transport.name: address})
    return KVTransfer(
        transfer_id="t", request_id="r", state=state, source=where, blocks=blocks, lease_word=source.leases.open(blocks[-1]),
        num_written_tokens=8, layout=LAYOUT, weight_version=0, epoch=0, deadline=5.0,
    )  # fmt: skip


def test_words_tell_offers_apart() -> None:
    words = LeaseWords(np.zeros(3, dtype=np.int64))
    first = words.open(1)
    assert words.holds(1, first)
    words.close(1)
    assert not words.holds(1, first)
    second = words.open(1)
    assert words.holds(1, second) and not words.holds(1, first)


def test_a_transfer_survives_the_wire() -> None:
    transfer = transfer_from(pool(0), LocalTransport(), [2, 5])
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(transfer), type=KVTransfer) == transfer


def test_local_copies_are_exact_and_touch_nothing_else() -> None:
    source, destination = pool(0), pool(1)
    before = destination.tensor.clone()
    there, here = LocalTransport(), LocalTransport()
    transfer = transfer_from(source, there, [2, 5])
    assert here.refusal(transfer, destination) is None
    plan = plan_copy(
        LAYOUT, [2, 5], LAYOUT, [4, 0], num_tokens=8, layers=(1, 3), source_heads=(0, 4), destination_heads=(2, 6)
    )
    ticket = here.begin(plan, transfer, destination)
    assert ticket.done() and ticket.cancel()
    wanted = before.clone()
    for block, other in ((2, 4), (5, 0)):
        wanted[1:3, :, other, 0:2] = source.tensor[1:3, :, block, 2:4]
    assert torch.equal(destination.tensor, wanted)


def test_an_ended_lease_or_a_source_that_is_gone_moves_nothing() -> None:
    source, destination = pool(0), pool(1)
    before = destination.tensor.clone()
    there, here = LocalTransport(), LocalTransport()
    transfer = transfer_from(source, there, [2, 5])
    plan = plan_copy(LAYOUT, [2, 5], LAYOUT, [4, 0], num_tokens=8)
    source.leases.close(5)
    with pytest.raises(TransferError, match="'t': its lease has ended"):
        here.begin(plan, transfer, destination)
    del there
    gc.collect()
    assert here.refusal(transfer, destination) is None
    with pytest.raises(TransferError, match="its source is gone"):
        here.begin(plan, transfer, destination)
    assert torch.equal(destination.tensor, before)


def test_the_first_transport_that_can_is_chosen_and_the_reasons_are_told() -> None:
    source, destination, there = pool(0), pool(1), LocalTransport()
    transfer = transfer_from(source, there, [2, 5])

    class Other(LocalTransport):
        name = "other"

    others = [Other(), LocalTransport()]
    assert choose("auto", others, transfer, destination) is others[1]
    assert choose("local", others, transfer, destination) is others[1]
    assert choose(others[1], [], transfer, destination) is others[1]
    elsewhere = msgspec.structs.replace(transfer.source, addresses={"local": "abc-1:0"})
    foreign = msgspec.structs.replace(transfer, source=elsewhere)
    assert "w (pid 1) is no engine of this process" in there.refusal(foreign, source)
    with pytest.raises(ValueError, match="'other': none can.*'t'.*other: w .pid 1. is no engine"):
        choose("other", others, transfer, destination)
    with pytest.raises(ValueError, match="'x': must be one of auto, other, local"):
        choose("x", others, transfer, destination)
