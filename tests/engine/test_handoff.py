"""Requests that move between two engines give the tokens that they would have given; nothing is left behind, whatever fails."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path
from typing import Any

import hf_models
import msgspec
import pytest
from engine_cases import GREEDY, assert_greedy, log_softmax, make, model, named, one, oracle, run
from pair_cases import FIXED, Pair

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.llm import LLM
from pearl.engine.request import Completion
from pearl.protocol import KVTransfer, Role, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def greedy(max_tokens: int = 8, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def prefilled(pair: Pair, ids: list[int], params: SamplingParams = GREEDY, **fields) -> KVTransfer:
    """The hand-off of a request that the prefill engine has computed."""
    pair.p.add_request(ids, params, **fields)
    for _ in range(50):
        pair.take(pair.p)
        transfers = pair.p.take_handoffs()
        if transfers:
            return transfers[0]
    raise AssertionError("nothing was handed over")


# ---------------------------------------------------------------------------------------------------- the plain way


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_prompts_of_all_lengths_around_blocks(folder: Path, block_size: int) -> None:
    sizes = {"block_size": block_size, "num_blocks": 400 // block_size}
    pair = Pair(folder, p=sizes, d=sizes)
    rids = {pair.p.add_request(hf_models.prompt(n, seed=n), greedy(6)): n for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17)}
    done = pair.run()
    for rid in rids:
        assert_greedy(done[rid, 0], 6)
    assert sorted(pair.moved) == sorted((rid, True) for rid in rids)
    assert pair.p.stats().num_generated_tokens == len(rids) and pair.d.stats().num_generated_tokens == 5 * len(rids)


def test_no_prompt_token_is_computed_twice(folder: Path) -> None:
    """The receiver runs one token per step and request: what it has not computed itself was sent."""
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9))
    assert pair.move(transfer, pair.p, pair.d) and pair.begun == [3]
    request = next(iter(pair.d._core.requests.values()))
    assert (request.num_written_tokens, len(request.token_ids)) == (9, 10)
    pair.run()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_exactly_as_many_tokens_as_asked_for(folder: Path, max_tokens: int) -> None:
    pair = Pair(folder)
    rid = pair.p.add_request(hf_models.prompt(6), greedy(max_tokens))
    assert_greedy(pair.run()[rid, 0], max_tokens)
    assert len(pair.moved) == (max_tokens > 1)


def test_a_first_token_that_ends_the_request_needs_no_transfer(folder: Path) -> None:
    pair = Pair(folder)
    first = oracle(tuple(hf_models.prompt(6)), 1)[0][0]
    rid = pair.p.add_request(hf_models.prompt(6), greedy(8, stop_token_ids=[first]))
    done = pair.run()[rid, 0]
    assert (done.token_ids, done.finish_reason, done.stop_reason) == ([first], "stop", first) and not pair.moved


def same(a: Completion, b: Completion) -> None:
    assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (b.token_ids, b.text, b.finish_reason, b.stop_reason)
    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert a.weight_versions == b.weight_versions and a.index == b.index
    if a.prompt_logprobs is not None:
        assert a.prompt_logprobs[0] is None and a.prompt_logprobs[1:] == pytest.approx(b.prompt_logprobs[1:], abs=1e-4)
    for mine, other in zip(a.top_logprobs or [], b.top_logprobs or [], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


EVERYTHING = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=True),
    SamplingParams(temperature=1.0, max_tokens=12, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, max_tokens=12, n=3, logprobs=2),
    SamplingParams(temperature=0.7, max_tokens=12, n=2, seed=3, logprobs=None),
    greedy(12, min_tokens=9, stop_token_ids=list(range(0, 128, 2))),
    greedy(12, logprobs=2, prompt_logprobs=True),
]


@pytest.mark.parametrize("params", EVERYTHING, ids=range(len(EVERYTHING)))
@pytest.mark.parametrize("after", [1, 4])
def test_everything_a_request_is_moves_with_it(folder: Path, params: SamplingParams, after: int) -> None:
    """Compared with one engine that keeps it; moved by hand after some tokens, there and back again."""
    ids = hf_models.prompt(7)
    alone = make(folder)
    alone.add_request(ids, params, request_id="r")
    wanted = {completion.index: completion for completion in run(alone)["r"]}
    pair = Pair(folder, p={"role": Role.MIXED}, d={"role": Role.MIXED, "seed": 99})
    pair.p.add_request(ids, params, request_id="r")
    for source, destination in ((pair.p, pair.d), (pair.d, pair.p)):
        for _ in range(after):
            pair.take(pair.p)
            pair.take(pair.d)
        for _ in range(params.n):
            wire = msgspec.msgpack.encode(source.export_kv("r"))
            assert pair.move(msgspec.msgpack.decode(wire, type=KVTransfer), source, destination)
        assert source.abort("r") is False
    done = pair.run()
    assert sorted(done) == [("r", index) for index in range(params.n)]
    for index, completion in wanted.items():
        same(done["r", index], completion)


def test_siblings_end_where_they_are(folder: Path) -> None:
    """One of three has ended at the source before the others move, one by one, and come back in another order."""
    ids = hf_models.prompt(7)
    params = SamplingParams(temperature=1.0, max_tokens=6, n=3, seed=7)
    alone = make(folder)
    alone.add_request(ids, params, request_id="r")
    wanted = {completion.index: completion for completion in run(alone)["r"]}
    pair = Pair(folder, p={"role": Role.MIXED}, d={"role": Role.MIXED})
    stop = msgspec.structs.replace(params, stop_token_ids=[wanted[1].token_ids[1]])
    assert all(stop.stop_token_ids[0] not in wanted[index].token_ids for index in (0, 2))
    pair.p.add_request(ids, stop, request_id="r")
    for _ in range(3):
        pair.take(pair.p)
    assert list(pair.done) == [("r", 1)]
    transfers = [pair.p.export_kv("r"), pair.p.export_kv("r")]
    with pytest.raises(ValueError, match="'r'.*no such request"):
        pair.p.export_kv("r")
    assert pair.move(transfers[1], pair.p, pair.d)
    with pytest.raises(ValueError, match="'r'.*in use"):
        pair.d.import_kv(transfers[1])
    with pytest.raises(ValueError, match="'r'.*in use"):
        pair.d.add_request(ids, GREEDY, request_id="r")
    assert pair.move(transfers[0], pair.p, pair.d)
    done = pair.run()
    for index in (0, 2):
        same(done["r", index], wanted[index])
    assert done["r", 1].token_ids == wanted[1].token_ids[:2]
    assert pair.d.add_request(ids, GREEDY, request_id="r") == "r"
    pair.d.discard("r")


def test_eos_of_the_model_ends_it_at_the_receiver(folder: Path, tmp_path: Path) -> None:
    ids, _ = oracle(tuple(hf_models.prompt(6)), 8)
    assert ids[1] != ids[0]
    ending = hf_models.randomise(hf_models.dense(0, eos_token_id=ids[1]), 0)
    pair = Pair(hf_models.save(ending, tmp_path))
    rid = pair.p.add_request(hf_models.prompt(6), GREEDY)
    done = pair.run()[rid, 0]
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[:2], "stop", None) and pair.moved == [(rid, True)]


def test_a_first_tokens_numbers_are_the_models(folder: Path) -> None:
    pair = Pair(folder)
    ids = hf_models.prompt(6)
    rid = pair.p.add_request(ids, greedy(6, logprobs=2, prompt_logprobs=True))
    done = pair.run()[rid, 0]
    assert_greedy(done, 6)
    rows = log_softmax((*ids, *done.token_ids))
    assert done.prompt_logprobs[1:] == pytest.approx([float(rows[at - 1][ids[at]]) for at in range(1, 6)], abs=1e-4)
    for number, top in enumerate(done.top_logprobs):
        best = rows[5 + number].topk(2)
        assert list(top) == best.indices.tolist() and list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len(done.top_logprobs) == len(done.logprobs) == 6


@pytest.mark.parametrize("after", [1, 4, 9])
def test_moved_by_hand_it_counts_on(folder: Path, after: int) -> None:
    pair = Pair(folder, p={"role": Role.MIXED})
    rid = pair.p.add_request(hf_models.prompt(7), greedy(10))
    for _ in range(after):
        pair.take(pair.p)
    assert pair.move(pair.p.export_kv(rid), pair.p, pair.d)
    assert not pair.p.has_unfinished()
    done = pair.run()[rid, 0]
    assert_greedy(done, 10)
    assert len(done.prompt_token_ids) == 7 and pair.d.stats().num_generated_tokens == 10 - after


def test_a_request_moves_before_and_in_the_middle_of_its_prompt(folder: Path) -> None:
    pair = Pair(folder, p={"role": Role.MIXED, "max_batch_tokens": 4})
    rids = [pair.p.add_request(hf_models.prompt(11, seed=seed), greedy(5)) for seed in range(3)]
    pair.take(pair.p)
    for rid in rids:
        assert pair.move(pair.p.export_kv(rid), pair.p, pair.d)
    done = pair.run()
    for rid in rids:
        assert_greedy(done[rid, 0], 5)


# ---------------------------------------------------------------------------------------------------- prefixes and versions


@pytest.mark.parametrize("prompt", [15, 16, 17])
@pytest.mark.parametrize("cached", [0, 4, 8, 12, 16])
def test_only_what_the_receiver_lacks_is_sent(folder: Path, cached: int, prompt: int) -> None:
    pair = Pair(folder)
    ids = hf_models.prompt(prompt)
    if cached:
        one(pair.d, [*ids[:cached], 127], greedy(1))
    rid = pair.p.add_request(ids, greedy(6))
    assert_greedy(pair.run()[rid, 0], 6)
    held = min(cached, prompt // 4 * 4)
    assert pair.begun == [math.ceil(prompt / 4) - held // 4]


def test_what_the_source_had_cached_is_what_is_told(folder: Path) -> None:
    pair = Pair(folder)
    ids = hf_models.prompt(13)
    one(pair.p, [*ids[:8], 127], greedy(1))
    one(pair.d, [*ids[:4], 127], greedy(1))
    rid = pair.p.add_request(ids, GREEDY)
    assert pair.run()[rid, 0].num_cached_tokens == 8 and pair.begun == [3]


def test_another_version_takes_no_cached_prefix_and_caches_nothing(folder: Path) -> None:
    """All of its KV is of the old version; what is computed after it, by others, is of the new."""
    ids = hf_models.prompt(16)
    pair = Pair(folder)
    transfer = prefilled(pair, ids)
    pair.d.update_weights(named(1), 1)
    one(pair.d, ids, greedy(1))
    cached = pair.d.stats().cached_blocks
    assert cached and pair.move(transfer, pair.p, pair.d) and pair.begun == [4]
    done = next(iter(pair.run().values()))
    assert done.weight_versions == [0] + [1] * 7 and done.token_ids[0] == oracle(tuple(ids), 1)[0][0]
    assert pair.d.stats().cached_blocks == cached
    assert_greedy(one(pair.d, ids), 8, seed=1)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("fault", ["none", "slow"])
def test_new_weights_while_it_is_on_its_way(folder: Path, mode: str, side: str, fault: str) -> None:
    pair = Pair(folder, [fault])
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    if side == "destination":
        assert pair.move(transfer, pair.p, pair.d)
        pair.d.update_weights(named(1), 1, mode)
    else:
        pair.p.update_weights(named(1), 1, mode)
        pair.d.update_weights(named(1), 1, mode)
        moved = pair.move(transfer, pair.p, pair.d)
        assert moved is (mode == "keep" or fault == "slow")  # late, the lease is found to have ended
        if moved and mode == "abort":
            assert pair.d.discard("r")  # by whoever hears of the end at the source
    done = pair.run()["r", 0]
    if mode == "abort":
        assert done.finish_reason == "abort"
        return
    assert done.weight_versions == [0] + [1] * 7
    ids = (*hf_models.prompt(9), *done.token_ids)
    if mode == "recompute":
        for number in range(1, 8):
            row = log_softmax(ids, 1)[8 + number]
            assert float(row.max()) - float(row[done.token_ids[number]]) < 1e-4


# ---------------------------------------------------------------------------------------------------- what fails


def test_a_transfer_that_fails_at_once_leaves_the_request_with_its_source(folder: Path) -> None:
    sizes = {"num_blocks": 8}
    pair = Pair(folder, ["refused"] * 20, p=sizes, d=sizes)
    for seed in range(20):
        rid = pair.p.add_request(hf_models.prompt(9, seed=seed), GREEDY)
        assert_greedy(pair.run()[rid, 0], 8)
        assert pair.moved[-1] == (rid, False) and pair.p.stats().role is Role.PREFILL
    rid = pair.p.add_request(hf_models.prompt(5), GREEDY)
    assert_greedy(pair.run()[rid, 0], 8)
    assert pair.moved[-1] == (rid, True)


@pytest.mark.parametrize("fault", ["slow", "lost", "stuck"])
def test_a_transfer_that_is_late_or_lost_costs_time_only(folder: Path, fault: str) -> None:
    """A small pool, in which blocks are used again at once: garbage that still comes must find nobody's blocks."""
    sizes = {"num_blocks": 10}
    pair = Pair(folder, [fault, "none"] * 10, p=sizes, d=sizes)
    for seed in range(8):
        pair.p.add_request(hf_models.prompt(9, seed=seed), GREEDY)
    while pair.p.has_unfinished() or pair.d.has_unfinished():
        pair.step()
        pair.clock.advance(1.0)
        assert pair.num_steps < 300
    for completion in pair.run().values():
        assert_greedy(completion, 8)
    assert fault == "slow" or any(completion.num_preemptions for completion in pair.done.values())


def test_blocks_into_which_something_may_still_be_written_are_nobodys(folder: Path) -> None:
    pair = Pair(folder, ["stuck"], d={"num_blocks": 5})
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    assert pair.move(transfer, pair.p, pair.d)
    pair.clock.advance(5.0)
    seen = []
    while pair.d.has_unfinished():
        pair.take(pair.d)
        seen.append((pair.d.stats().arriving, pair.d.stats().leased_blocks))
    assert seen[:3] == [(1, 3), (1, 3), (0, 0)] and pair.d.stats().waiting == 0
    assert_greedy(pair.run()["r", 0], 8)


def test_an_offer_that_nobody_answers_goes_on_at_its_source(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    other = prefilled(pair, hf_models.prompt(9, seed=1), request_id="s")
    for _ in range(3):
        pair.take(pair.p)
    assert pair.tokens["r", 0] == oracle(tuple(hf_models.prompt(9)), 1)[0] and pair.p.stats().offered == 2
    pair.clock.advance(5.0)
    pair.take(pair.p)
    assert pair.p.stats().offered == 0 and pair.p.stats().running == 2
    assert pair.d.import_kv(transfer) is False  # the lease has ended
    pair.p.finish_export(transfer.transfer_id, False)
    pair.p.finish_export("unknown", True)
    assert pair.p.stats().stale_messages == 2
    done = pair.run()
    for rid in "rs":
        assert_greedy(done[rid, 0], 8)
    assert pair.d.import_kv(other) is False
    pair.assert_free()


def test_blocks_used_again_are_never_read_as_what_they_were(folder: Path) -> None:
    pair = Pair(folder, ["slow"], p={"num_blocks": 4})
    transfer = prefilled(pair, hf_models.prompt(13), request_id="r")
    assert pair.d.import_kv(transfer)  # under way
    pair.clock.advance(5.0)
    pair.p.step()
    pair.p.discard("r")
    one(pair.p, hf_models.prompt(13, seed=5), greedy(1))
    assert_greedy(pair.run()["r", 0], 8)
    assert pair.done["r", 0].num_preemptions == 1


def test_an_answer_that_comes_too_late_still_decides_who_has_it(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    assert pair.d.import_kv(transfer)
    pair.clock.advance(5.0)
    pair.p.step()
    assert pair.p.stats().running == 1
    pair.p.finish_export(transfer.transfer_id, True)
    assert not pair.p.has_unfinished()
    assert_greedy(pair.run()["r", 0], 8)


def test_a_late_answer_is_not_about_another_request_of_the_same_name(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    pair.clock.advance(5.0)
    assert_greedy(pair.run()["r", 0], 8)
    pair.p.add_request(hf_models.prompt(5), GREEDY, request_id="r")
    pair.p.finish_export(transfer.transfer_id, True)
    assert_greedy(one(pair.d, hf_models.prompt(4)), 8)
    assert pair.p.has_unfinished() and pair.p.stats().waiting == 1
    pair.p.discard("r")


@pytest.mark.parametrize("fault", ["none", "slow", "lost", "stuck"])
@pytest.mark.parametrize("moment", ["queued", "mid", "offered", "taken", "accepted", "answered"])
def test_abort_at_any_moment_frees_both_sides(folder: Path, moment: str, fault: str) -> None:
    pair = Pair(folder, [fault], p={"max_batch_tokens": 4})
    pair.p.add_request(hf_models.prompt(11), GREEDY, request_id="r")
    steps = {"queued": 0, "mid": 2}.get(moment, 3)
    for _ in range(steps):
        pair.take(pair.p)
    transfers = pair.p.take_handoffs() if moment in ("taken", "accepted", "answered") else []
    accepted = moment in ("accepted", "answered") and pair.d.import_kv(transfers[0])
    if moment == "answered":
        pair.p.finish_export(transfers[0].transfer_id, accepted)
        assert pair.p.abort("r") is False and pair.d.abort("r") is True
    else:
        assert pair.p.abort("r") is True
        if moment == "taken":
            accepted = pair.d.import_kv(transfers[0])
            assert accepted is (fault != "none")  # else the lease is seen to have ended only later
        if accepted:
            assert pair.d.abort("r") is True
        for transfer in transfers:
            pair.p.finish_export(transfer.transfer_id, accepted)
    pair.faults.clear()
    for _ in range(4):
        for engine in (pair.p, pair.d):
            engine.step()
            engine.check_integrity()
    pair.assert_free()
    assert not pair.p.has_unfinished() and not pair.d.has_unfinished()
    rid = pair.p.add_request(hf_models.prompt(11), GREEDY)
    assert_greedy(pair.run()[rid, 0], 8)


def test_a_source_that_dies_in_the_middle_costs_a_computation(folder: Path) -> None:
    pair = Pair(folder, ["slow"])
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    assert pair.d.import_kv(transfer)
    pair.p = Pair(folder).p
    pair.p._clock = pair.clock
    assert_greedy(pair.run()["r", 0], 8)
    assert pair.done["r", 0].num_preemptions == 1


def test_an_offer_of_an_engine_that_is_gone_is_not_taken(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    pair.p = Pair(folder).p
    gc.collect()
    assert pair.d.import_kv(transfer) is False
    pair.assert_free()


def test_asleep_and_empty_engines_take_nothing_in(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(9), request_id="r")
    pair.d.sleep()
    assert pair.d.import_kv(transfer) is False and pair.d.reserve_kv("x", [1], GREEDY) is None
    with pytest.raises(ValueError, match="1 leases"):
        pair.p.sleep()
    pair.d.wake()
    assert pair.move(transfer, pair.p, pair.d)
    pair.p.sleep()
    pair.p.wake()
    assert_greedy(pair.run()["r", 0], 8)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 8}, "block_size=4 at the source, 8"),
        ({"block_size": 2}, "block_size=4 at the source, 2"),
        ({"dtype": "bfloat16"}, "dtype='float32' at the source, 'bfloat16'"),
        ({"max_model_len": 16}, "21 tokens.*max_model_len=16"),
        ({"max_model_len": 24}, "28 tokens.*max_model_len=24"),
        ({"num_blocks": 5}, "21 tokens.*20 slots"),
    ],
)
def test_what_can_never_be_taken_in_is_refused_by_name(folder: Path, settings: dict, message: str) -> None:
    pair = Pair(folder, d=settings)
    transfer = prefilled(pair, hf_models.prompt(20), request_id="r")
    with pytest.raises(ValueError, match=message):
        pair.d.import_kv(transfer)
    assert not pair.d.has_unfinished()
    pair.p.finish_export(transfer.transfer_id, False)
    assert_greedy(pair.run()["r", 0], 8)


@pytest.mark.parametrize(
    ("offer", "state", "message"),
    [
        ({"num_written_tokens": 21}, {}, "KV of 21 of its 21 tokens"),
        ({"num_written_tokens": -1}, {}, "KV of -1"),
        ({"blocks": [0, -9]}, {}, r"blocks \[0, -9\] of a pool of 100"),
        ({"blocks": [0, 1, 2, 3, 100]}, {}, r"blocks \[0, 1, 2, 3, 100\] of a pool of 100"),
        ({"blocks": []}, {}, "KV of 20 tokens in 0 blocks of 4"),
        ({"blocks": [0, 1, 2, 3]}, {}, "KV of 20 tokens in 4 blocks of 4"),
        ({"deadline": math.nan}, {}, "deadline=nan"),
        ({"request_id": "s"}, {}, "'r': the transfer of it is one of request 's'"),
        ({}, {"num_prompt_tokens": 22}, "21 tokens with a prompt of 22"),
        ({}, {"max_tokens": 0}, "0 to sample"),
        ({}, {"logprobs": []}, "1 sampled tokens, 0 log-probs"),
        ({}, {"weight_versions": [0, 0]}, "2 versions"),
        ({}, {"num_cached_tokens": -3}, "never negative"),
    ],
)
def test_what_no_engine_offers_is_refused_before_a_step_is_made_of_it(
    folder: Path, offer: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    """Offers come from other machines: one that cannot be must cost its source alone."""
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(20), request_id="r")
    wrong = msgspec.structs.replace(transfer, state=msgspec.structs.replace(transfer.state, **state), **offer)
    with pytest.raises(ValueError, match=message):
        pair.d.import_kv(wrong)
    assert pair.move(transfer, pair.p, pair.d)
    assert_greedy(pair.run()["r", 0], 8)


def test_ids_in_use_stops_without_text_and_unknown_transports(folder: Path) -> None:
    pair = Pair(folder)
    transfer = prefilled(pair, hf_models.prompt(5), request_id="r")
    with pytest.raises(ValueError, match="'carrier pigeon'.*auto, faulty"):
        pair.d.import_kv(transfer, "carrier pigeon")
    stop = msgspec.structs.replace(transfer.state, params=SamplingParams(temperature=0, max_tokens=8, stop=["x"]))
    with pytest.raises(ValueError, match="stop=.*tokenizer"):
        pair.d.import_kv(msgspec.structs.replace(transfer, state=stop))
    nowhere = msgspec.structs.replace(transfer.source, addresses={})
    with pytest.raises(ValueError, match="faulty: .* no engine of this process"):
        pair.d.import_kv(msgspec.structs.replace(transfer, source=nowhere))
    pair.d.add_request(hf_models.prompt(4), GREEDY, request_id="r")
    with pytest.raises(ValueError, match="'r'.*in use"):
        pair.d.import_kv(transfer)
    pair.p.finish_export(transfer.transfer_id, False)
    pair.d.discard("r")
    assert_greedy(pair.run()["r", 0], 8)


def test_too_long_for_the_receiver_is_known_before_anything_is_computed(folder: Path) -> None:
    pair = Pair(folder, d={"max_model_len": 16})
    with pytest.raises(ValueError, match=r"20 tokens.*max_model_len=16"):
        pair.d.reserve_kv("r", hf_models.prompt(20), GREEDY)
    pair.assert_free()


# ---------------------------------------------------------------------------------------------------- credits


def test_a_credit_is_room_that_is_there_when_the_request_comes(folder: Path) -> None:
    pair = Pair(folder, d={"num_blocks": 6})
    ids = hf_models.prompt(9)
    one(pair.d, [*ids[:8], 127], greedy(1))
    credit = pair.d.reserve_kv("r", ids, GREEDY)
    assert credit is not None and credit.num_cached_tokens == 8 and len(credit.blocks) == 3
    assert pair.d.stats().reserved == 1 and pair.d.stats().leased_blocks == 3
    assert pair.d.reserve_kv("s", hf_models.prompt(14, seed=1), GREEDY) is None
    pair.p.add_request(ids, GREEDY, reservation=credit)
    assert_greedy(pair.run()["r", 0], 8)
    assert pair.begun == [1] and pair.d.stats().reserved == 0
    pair.d.release_reservation(credit)
    assert pair.d.stats().stale_messages == 1


def test_credits_end_by_release_deadline_and_change_of_role(folder: Path) -> None:
    pair = Pair(folder)
    for end in (
        lambda credit: pair.d.release_reservation(credit),
        lambda credit: (pair.clock.advance(5.0), pair.d.step()),
        lambda credit: pair.d.switch_role(Role.MIXED),
        lambda credit: pair.d.update_weights(named(0), pair.d.weight_version + 1, "recompute"),
    ):
        credit = pair.d.reserve_kv("r", hf_models.prompt(9), GREEDY)
        pair.p.add_request(hf_models.prompt(9), GREEDY, reservation=credit)
        end(credit)
        assert pair.d.stats().reserved == pair.d.stats().leased_blocks == 0
        assert_greedy(pair.run().pop(("r", 0)), 8)  # without it, there was room all the same
        pair.tokens.clear()
        pair.texts.clear()


def test_a_cached_prefix_of_an_older_version_is_not_used(folder: Path) -> None:
    pair = Pair(folder)
    ids = hf_models.prompt(9)
    one(pair.d, ids, greedy(1))
    credit = pair.d.reserve_kv("r", ids, GREEDY)
    assert credit is not None and credit.num_cached_tokens == 8
    for engine in (pair.p, pair.d):
        engine.update_weights(named(1), 1)
    pair.p.add_request(ids, GREEDY, reservation=credit)
    assert_greedy(pair.run()["r", 0], 8, seed=1)
    assert pair.begun == [3]


def test_places_among_the_running_are_kept_for_those_who_have_credit(folder: Path) -> None:
    pair = Pair(folder, d={"max_num_seqs": 3})
    first, second = (pair.d.reserve_kv(name, hf_models.prompt(5), GREEDY) for name in "rs")
    for name in "xyz":
        pair.d.add_request(hf_models.prompt(6, seed=ord(name)), GREEDY, request_id=name)
    pair.take(pair.d)
    assert (pair.d.stats().running, pair.d.stats().waiting, pair.d.stats().reserved) == (1, 2, 2)
    assert pair.d.reserve_kv("t", hf_models.prompt(5), GREEDY) is None
    refused = prefilled(pair, hf_models.prompt(5, seed=1), request_id="t")
    assert pair.move(refused, pair.p, pair.d) is False
    pair.d.release_reservation(second)
    pair.p.add_request(hf_models.prompt(5), GREEDY, reservation=first)
    while pair.p.has_unfinished() or pair.d.has_unfinished():
        pair.step()
        assert pair.d.stats().running <= 3
    for completion in pair.run().values():
        assert_greedy(completion, 8)
    assert len(pair.done) == 5


def test_who_waits_for_room_comes_before_those_from_elsewhere(folder: Path) -> None:
    pair = Pair(folder, d={"num_blocks": 8})
    for name, size in (("x", 17), ("y", 13)):
        pair.d.add_request(hf_models.prompt(size), greedy(3), request_id=name, cache_salt=name)
    pair.take(pair.d)
    assert pair.d.stats().waiting == 1 and pair.d.stats().free_blocks == 3
    transfer = prefilled(pair, hf_models.prompt(3), request_id="r")
    assert pair.d.reserve_kv("s", [1], GREEDY) is None
    assert pair.move(transfer, pair.p, pair.d) is False
    assert len(pair.run()) == 3


def test_a_second_credit_takes_the_place_of_the_first_and_ids_in_use_get_none(folder: Path) -> None:
    pair = Pair(folder)
    first, second = (pair.d.reserve_kv("r", hf_models.prompt(9), GREEDY) for _ in range(2))
    assert pair.d.stats().reserved == 1 and pair.d.stats().leased_blocks == 3
    pair.d.release_reservation(first)
    assert pair.d.stats().reserved == 1
    pair.d.release_reservation(second)
    pair.assert_free()
    pair.d.add_request(hf_models.prompt(4), GREEDY, request_id="r")
    with pytest.raises(ValueError, match="'r'.*in use"):
        pair.d.reserve_kv("r", hf_models.prompt(9), GREEDY)
    pair.d.discard("r")


def test_a_credit_for_other_tokens_or_another_salt_is_only_room(folder: Path) -> None:
    """Its prefix is not the request's, so that none of it may be used."""
    pair = Pair(folder)
    ids, others = hf_models.prompt(9), hf_models.prompt(9, seed=1)
    one(pair.d, ids, greedy(1))
    for name, prompt, salt in (("r", others, None), ("s", ids, "salt")):
        credit = pair.d.reserve_kv(name, ids, GREEDY)
        assert credit is not None and credit.num_cached_tokens == 8
        pair.p.add_request(prompt, GREEDY, reservation=credit, cache_salt=salt)
        assert_greedy(pair.run()[name, 0], 8)
        assert pair.begun.pop() == 3 and pair.d.stats().reserved == 0


def test_wrong_credits_are_refused(folder: Path) -> None:
    pair = Pair(folder, d={"block_size": 8})
    credit = pair.d.reserve_kv("r", hf_models.prompt(9), GREEDY)
    with pytest.raises(ValueError, match="block_size=4 at the source, 8"):
        pair.p.add_request(hf_models.prompt(9), GREEDY, reservation=credit)
    with pytest.raises(ValueError, match="'x'.*'r'"):
        pair.d.add_request(hf_models.prompt(9), GREEDY, request_id="x", reservation=credit)
    assert not pair.p.has_unfinished() and not pair.d.has_unfinished()


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("credits", [False, True])
def test_two_pools_of_four_blocks_never_wait_for_each_other(folder: Path, order: str, reverse: bool, credits: bool) -> None:
    sizes = {"num_blocks": 4}
    pair = Pair(folder, p=sizes, d=sizes)
    pair.reverse = reverse
    waiting = [(name, hf_models.prompt(8, seed="ab".index(name))) for name in order]
    while waiting or pair.p.has_unfinished() or pair.d.has_unfinished():
        while waiting:
            name, ids = waiting[0]
            credit = pair.d.reserve_kv(name, ids, greedy(6)) if credits else None
            if credits and credit is None:
                break
            pair.p.add_request(ids, greedy(6), request_id=name, reservation=credit)
            waiting.pop(0)
        pair.step()
        assert pair.num_steps < 200
    for completion in pair.run().values():
        assert_greedy(completion, 6)
    assert len(pair.done) == 2


def test_one_place_each_is_enough(folder: Path) -> None:
    sizes = {"max_num_seqs": 1}
    pair = Pair(folder, p=sizes, d=sizes)
    for seed in range(5):
        pair.p.add_request(hf_models.prompt(6 + seed, seed=seed), GREEDY)
    for completion in pair.run().values():
        assert_greedy(completion, 8)


def test_an_llm_has_no_other_engine_and_decodes_itself(folder: Path) -> None:
    llm = LLM(folder, role=Role.PREFILL, **FIXED)
    for completion in llm.generate([hf_models.prompt(5), hf_models.prompt(9)], GREEDY):
        assert_greedy(completion, 8)


def test_an_engine_alone_serves_its_own_offers(folder: Path) -> None:
    engine = Engine(EngineConfig(model=folder, role=Role.PREFILL, **FIXED))
    engine.add_request(hf_models.prompt(5), GREEDY)
    assert [update.token_ids for update in engine.stream()] == [tuple(oracle(tuple(hf_models.prompt(5)), 1)[0])]
    [transfer] = engine.take_handoffs()
    engine.finish_export(transfer.transfer_id, False)
    assert_greedy(next(iter(run(engine).values()))[0], 8)
    assert engine.stats().role is Role.PREFILL


# ---------------------------------------------------------------------------------------------------- the end of an engine


def test_a_closed_engine_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    source, target = (make(folder, role=role) for role in (Role.PREFILL, Role.DECODE))
    source.add_request(hf_models.prompt(9), GREEDY)
    while not (transfers := source.take_handoffs()):
        source.step()
    assert target.import_kv(transfers[0], transport="gloo")
    while target.has_unfinished():
        target.step()
        source.step()
    assert set(threading.enumerate()) - before
    for engine in (source, target, source, target):
        engine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name
