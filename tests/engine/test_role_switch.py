"""A role changes in place, between two steps, under load, as often as one likes: no token, block or weight notices."""

from __future__ import annotations

import random
from pathlib import Path

import hf_models
import pytest
from engine_cases import GREEDY, assert_greedy, make, model, one, oracle, run
from pair_cases import Pair

from pearl.engine.engine import Engine
from pearl.engine.role import RolePolicy, plan_role, plan_switch
from pearl.protocol import Role, SamplingParams

ROLES = [Role.MIXED, Role.PREFILL, Role.DECODE]
DRAINS = ["handover", "finish", "recompute"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


def loaded(folder: Path, **settings) -> Pair:
    """The first engine decodes two requests, computes the prompt of a third, and has a fourth in its queue."""
    pair = Pair(folder, p={"role": Role.MIXED, "max_batch_tokens": 6, "max_num_seqs": 3} | settings)
    for seed, size in enumerate((3, 3, 12, 7)):
        pair.p.add_request(hf_models.prompt(size, seed=seed), GREEDY, request_id=str(seed))
        pair.take(pair.p)
    running = pair.p._core.scheduler.running
    assert running["0"].is_decoding and running["1"].is_decoding and not running["2"].is_decoding and "3" not in running
    return pair


def assert_all_right(pair: Pair) -> None:
    assert sorted(pair.run()) == [(str(number), 0) for number in range(4)]
    for completion in pair.done.values():
        assert_greedy(completion, 8)


@pytest.mark.parametrize("drain", DRAINS)
def test_to_prefill_under_load(folder: Path, drain: str) -> None:
    pair = loaded(folder)
    before = pair.p.stats()
    report = pair.p.switch_role(Role.PREFILL, drain)
    counted = (report.moved, report.finished, report.recomputed)
    assert pair.p.stats().role is Role.PREFILL and pair.p.stats().epoch == before.epoch + 1
    if drain == "finish":
        assert report.finished == 2
        assert {rid for rid in "01" if rid in pair.p._core.requests} == set()
    else:
        assert counted == {"handover": (2, 0, 0), "recompute": (0, 0, 2)}[drain]
    assert_all_right(pair)
    by_itself = {"handover": set(), "finish": {"0", "1"}, "recompute": set()}[drain]
    assert {rid for rid, ok in pair.moved if ok} == {"0", "1", "2", "3"} - by_itself


@pytest.mark.parametrize("drain", DRAINS)
@pytest.mark.parametrize("new", [Role.DECODE, Role.MIXED])
def test_from_prefill_under_load_everything_goes_on_where_it_is(folder: Path, new: Role, drain: str) -> None:
    pair = Pair(folder, p={"max_batch_tokens": 6})
    for seed, size in enumerate((3, 4, 12, 7)):
        pair.p.add_request(hf_models.prompt(size, seed=seed), GREEDY, request_id=str(seed))
    pair.take(pair.p)
    [taken] = pair.p.take_handoffs()
    pair.take(pair.p)
    assert pair.p.stats().offered == 2 and pair.p.stats().running and pair.p.stats().waiting
    report = pair.p.switch_role(new, drain)
    assert (report.moved, report.finished, report.recomputed) == (0, 0, 0)
    assert pair.p.stats().offered == 1  # the other one is decoded here now
    assert pair.move(taken, pair.p, pair.d)
    assert_all_right(pair)
    assert pair.moved == [("0", True)]


def test_the_prefix_cache_survives(folder: Path) -> None:
    engine = make(folder)
    one(engine, hf_models.prompt(9))
    for role in ROLES * 2:
        engine.switch_role(role)
        assert engine.stats().cached_blocks == 4
    engine.switch_role(Role.MIXED)
    assert one(engine, hf_models.prompt(9)).num_cached_tokens == 8


def test_a_thousand_switches_leave_everything_as_it_was(folder: Path) -> None:
    """The load goes on all the time; each switch is followed by at most two steps."""
    rng = random.Random(3)
    pair = Pair(folder, p={"num_blocks": 20}, d={"num_blocks": 20})
    parameters = [parameter.data_ptr() for engine in (pair.p, pair.d) for parameter in engine._decoder.parameters()]
    pools = [engine._runner.kv_pool.data_ptr() for engine in (pair.p, pair.d)]
    prompts = {}
    for number in range(1000):
        if number % 10 == 0 and len(prompts) - len(pair.done) < 8:
            ids = hf_models.prompt(rng.randint(1, 20), seed=number)
            rid = rng.choice((pair.p, pair.d)).add_request(ids, GREEDY, request_id=f"r{number}")
            prompts[rid] = ids
        rng.choice((pair.p, pair.d)).switch_role(rng.choice(ROLES), rng.choice(DRAINS))
        for _ in range(rng.choice((0, 0, 1, 2))):
            pair.step()
            pair.num_steps = 0
    assert pair.p.stats().epoch + pair.d.stats().epoch == 1000
    assert len(pair.run()) == len(prompts) > 50
    for completion in pair.done.values():
        assert_greedy(completion, 8)
    assert parameters == [parameter.data_ptr() for engine in (pair.p, pair.d) for parameter in engine._decoder.parameters()]
    assert pools == [engine._runner.kv_pool.data_ptr() for engine in (pair.p, pair.d)]
    for engine in (pair.p, pair.d):
        engine.reset_prefix_cache()
        assert engine.stats().free_blocks == 20
        transfers, core = engine._transfers, engine._core
        assert not any((transfers._tickets, transfers._offered, engine._siblings._families, engine._whole_text, core.arrivals))


def test_what_a_switch_refuses_or_fails_at_leaves_the_old_role(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = loaded(folder)
    before = pair.p.stats()
    wrong = (("boss", "handover", "boss.*mixed, prefill, decode"), (Role.PREFILL, "x", "drain='x'.*recompute"))
    for role, drain, message in wrong:
        with pytest.raises(ValueError, match=message):
            pair.p.switch_role(role, drain)
    pair.p.pause()
    with pytest.raises(ValueError, match="drain='finish'.*paused"):
        pair.p.switch_role(Role.PREFILL, "finish")
    pair.p.resume()
    assert pair.p.stats() == before
    execute, calls = pair.p._runner.launch, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("as told")
        return execute(*arguments, **options)

    monkeypatch.setattr(pair.p._runner, "launch", failing)
    with pytest.raises(MemoryError, match="as told"):
        pair.p.switch_role(Role.PREFILL, "finish")
    assert pair.p.stats().role is Role.MIXED and pair.p.stats().epoch == before.epoch
    assert_all_right(pair)  # with the tokens of the two steps before


def test_a_request_that_came_back_leaves_again_after_the_next_switch(folder: Path) -> None:
    engine = make(folder, role=Role.PREFILL)
    rid = engine.add_request(hf_models.prompt(5), GREEDY)
    engine.step()
    [first] = engine.take_handoffs()
    engine.finish_export(first.transfer_id, False)
    engine.step()
    assert engine.take_handoffs() == []
    engine.switch_role(Role.PREFILL)
    assert engine.take_handoffs() == []
    engine.switch_role(Role.DECODE)
    assert engine.switch_role(Role.PREFILL).moved == 1
    [again] = engine.take_handoffs()
    assert again.state.token_ids[5:] == oracle(tuple(hf_models.prompt(5)), 2)[0] and again.epoch == 3

    engine.finish_export(again.transfer_id, False)
    assert_greedy(run(engine)[rid][0], 8)


def test_a_prefill_engine_decodes_what_was_placed_there_on_purpose(folder: Path) -> None:
    pair = Pair(folder, p={"role": Role.DECODE}, d={"role": Role.PREFILL})
    rid = pair.p.add_request(hf_models.prompt(5), GREEDY)
    pair.take(pair.p)
    assert pair.move(pair.p.export_kv(rid), pair.p, pair.d)
    pair.moved.clear()
    assert_greedy(pair.run()[rid, 0], 8)
    assert pair.moved == []


def test_roles_as_values(folder: Path) -> None:
    sizes = {"max_batch_tokens": 64, "decode_prefill_tokens": 5}
    policies = {role: plan_role(role, **sizes) for role in ROLES}
    assert policies[Role.PREFILL] == RolePolicy(role=Role.PREFILL, prefill_tokens=64, hands_over=True)
    engine: Engine = make(folder)
    engine.add_request(hf_models.prompt(5), SamplingParams(temperature=0.0, max_tokens=9), request_id="r")
    engine.step()
    running = list(engine._core.scheduler.running.values())
    for old in ROLES:
        for new in ROLES:
            switch = plan_switch(policies[old], policies[new], running, 7)
            leaving = new is Role.PREFILL and old is not Role.PREFILL
            assert (switch.old, switch.new, switch.epoch, switch.leaving) == (old, new, 7, ("r",) if leaving else ())
