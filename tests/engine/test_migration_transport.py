"""The words of leases, the choice of a transport, and the one that copies inside a process."""

from __future__ import annotations

import ctypes
import gc

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.planner import plan_copy
from pearl.engine.migration.transport import ALL, LAYER_BITS, AllOf, LeaseWords, Pool, TransferError, choose
from pearl.protocol import KVEndpoint, KVLayout, KVTransfer, RequestState, SamplingParams

LAYOUT = KVLayout(dtype="float32", block_size=4, num_layers=3, num_kv_heads=4, head_dim=8, order="plain")


def pool(seed: int) -> Pool:
    tensor = torch.randn(3, 2, 6, 4, 4, 8, generator=torch.Generator().manual_seed(seed))
    return Pool(tensor=tensor, memory=None, layout=LAYOUT, leases=LeaseWords.zeros(6))


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
    words = LeaseWords.zeros(3)
    first = words.open(1)
    assert words.holds(1, first)
    words.close(1)
    assert not words.holds(1, first)
    second = words.open(1)
    assert words.holds(1, second) and not words.holds(1, first)


def test_an_offer_that_is_still_to_be_opened_is_told_from_one_that_has_ended() -> None:
    words = LeaseWords.zeros(3)
    words.close(1)
    words.close(1)
    word = LeaseWords(words.memory.copy()).open(1)
    assert words.is_due(1, word) and not words.holds(1, word)
    assert words.open(1) == word and not words.is_due(1, word)
    words.close(1)
    assert not words.is_due(1, word) and not words.holds(1, word)


def test_progress_is_of_the_step_that_runs_and_of_no_other() -> None:
    words = LeaseWords.zeros(4)
    words.open(2)
    assert words.progress(2).written == ALL
    words.open(2, 5)
    assert words.progress(2) == (5, 5, 0)
    words.layer_done(6, 3)
    words.announce(2, 5, 12, 7)
    assert words.progress(2) == (5, 5, 0)  # step 6 is another one
    words.layer_done(7, 0)
    assert words.progress(2) == (5, 12, 0)
    words.layer_done(7, 2)
    assert words.progress(2) == (5, 12, 2)
    words.layer_done(8, 1)
    assert words.progress(2) == (5, 5, 0)  # until it is announced that step 7 is through
    words.announce(2, 12, 12, 0)
    assert words.progress(2) == (12, 12, 0)
    assert words.progress(1) == (0, 0, 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    written=st.integers(0, ALL), chunk=st.integers(0, (1 << 17) - 1), step=st.integers(0, 1 << 40), layers=st.integers(0, 1000)
)
def test_progress_of_all_sizes(written: int, chunk: int, step: int, layers: int) -> None:
    """The step counts on for ever; the word has its last bits only."""
    words = LeaseWords.zeros(2)
    words.announce(1, written, written + chunk, step)
    words.layer_done(step, layers)
    assert words.progress(1) == (written, written + chunk, layers)
    words.layer_done(step + 1, layers)
    assert words.progress(1) == (written, written, 0)


def test_a_chunk_that_is_too_long_to_tell_of_is_told_of_when_it_is_through() -> None:
    words = LeaseWords.zeros(2)
    words.announce(1, 3, 3 + (1 << 17), 7)
    words.layer_done(7, 5)
    assert words.progress(1)[:2] == (3, 3)


def test_native_code_stores_the_layers_where_they_are_read() -> None:
    words = LeaseWords.zeros(5)
    words.announce(0, 1, 9, 3)
    ctypes.c_int64.from_address(words.layer_address).value = (3 << LAYER_BITS) + 4
    assert words.progress(0) == (1, 9, 4)


class Told:
    """A ticket that does as told."""

    def __init__(self, *answers: bool | str, stubborn: int = 0) -> None:
        self.answers, self.stubborn, self.asked = list(answers), stubborn, 0

    def done(self) -> bool:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise TransferError("t", answer)
        return answer

    def cancel(self) -> bool:
        self.stubborn -= 1
        return self.stubborn < 0


def test_a_transfer_in_parts_is_there_with_the_last_and_lost_with_the_first() -> None:
    assert AllOf([]).done() and AllOf([]).cancel()
    parts = [Told(False, True), Told(False, False, True)]
    whole = AllOf(parts)
    assert [whole.done(), whole.done(), whole.done()] == [False, False, True]
    assert [part.asked for part in parts] == [3, 3]  # all go on, whoever is the slowest
    lost = AllOf([Told(True), Told("lost as told"), Told(False, stubborn=2)])
    assert not lost.done() and not lost.done()  # something may still be written
    with pytest.raises(TransferError, match="lost as told"):
        lost.done()
    assert lost.cancel()


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


def test_no_lease_holds_on_blocks_that_are_not_there() -> None:
    """The ids come from whoever offers."""
    words = LeaseWords.zeros(4)
    word = words.open(3)
    assert words.holds(3, word) and words.is_due(3, word + 1)
    for block in (-1, 4, 8, 10**12, -(10**12)):
        assert not words.holds(block, 0) and not words.is_due(block, 10**9)
