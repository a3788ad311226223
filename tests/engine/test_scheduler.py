"""Which tokens run: budget, order, chunks, pre-emption, fairness. Run on a core with the pretended model."""

from __future__ import annotations

import pytest
from fake_model import Driver, every_mode, make_core, make_request, oracle

from pearl.engine.role import RolePolicy, plan_role
from pearl.protocol import Role


def shape(output) -> list[tuple[str, int, int]]:
    return [(entry.request_id, entry.start, entry.num_tokens) for entry in output.requests]


def add(driver, name, length, max_tokens=4, **params):
    prompt = [ord(name[0]) % 13] * length
    driver.core.add_request(make_request(name, prompt, max_tokens, ignore_eos=True, **params))
    return oracle(prompt, max_tokens)


def test_chunks_fill_the_budget_and_decodes_come_first():
    driver = Driver(make_core(max_batch_tokens=6))
    add(driver, "a", 3)
    add(driver, "b", 10)
    assert shape(driver.step()) == [("a", 0, 3), ("b", 0, 3)]
    assert shape(driver.step()) == [("a", 3, 1), ("b", 3, 5)]
    last = driver.step()
    assert shape(last) == [("a", 4, 1), ("b", 8, 2)] and [entry.samples for entry in last.requests] == [True, True]
    assert shape(driver.step()) == [("a", 5, 1), ("b", 10, 1)]


def test_one_ahead_runs_the_token_that_is_not_known_yet_and_not_one_too_many():
    driver = Driver(make_core(), ahead=True)
    ids = add(driver, "a", 3, max_tokens=3)
    assert [shape(driver.step()) for _ in range(4)] == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 1)], []]
    assert driver.run()["a"].token_ids == ids


@every_mode
@pytest.mark.parametrize(("sizes", "most"), [({"max_num_seqs": 2}, 2), ({"max_batch_tokens": 3}, 3)])
def test_no_more_requests_run_than_may_or_than_the_budget_can_decode(mode, sizes, most):
    driver = Driver(make_core(**sizes), **mode)
    wanted = {name: add(driver, name, 1, 5) for name in "abcdef"}
    while driver.core.requests:
        assert len(driver.step().requests) <= most and driver.core.stats().running <= most
    assert {name: done.token_ids for name, done in driver.run().items()} == wanted


@every_mode
@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_a_stream_of_arrivals_does_not_stop_a_decode(mode, role):
    driver = Driver(make_core(max_batch_tokens=16, decode_prefill_tokens=8, role=role, num_blocks=400), **mode)
    ids = add(driver, "first", 2, 20)
    seen = []
    for number in range(60):
        add(driver, f"new{number}", 16, 4)
        driver.step()
        seen.append(len(driver.streamed.get("first", [])))
        if number == 21:
            assert driver.completions["first"].token_ids == ids
    gaps = [number for number in range(1, 22) if seen[number] == seen[number - 1] and 0 < seen[number] < 20]
    assert gaps == []
    assert len(driver.run()) == 61


def test_a_decode_role_bounds_what_catches_up():
    driver = Driver(make_core(max_batch_tokens=32, decode_prefill_tokens=4, role=Role.DECODE))
    add(driver, "a", 3, 9)
    driver.step()
    add(driver, "b", 10, 9)
    add(driver, "c", 5, 9)
    assert shape(driver.step()) == [("a", 3, 1), ("b", 0, 4)]
    assert shape(driver.step()) == [("a", 4, 1), ("b", 4, 4)]
    assert shape(driver.step()) == [("a", 5, 1), ("b", 8, 2), ("c", 0, 2)]


@every_mode
@pytest.mark.parametrize("cache", [True, False])
def test_preempted_requests_go_on_with_the_same_tokens(mode, cache):
    driver = Driver(make_core(num_blocks=8, enable_prefix_cache=cache), **mode)
    wanted = {name: add(driver, name, 8, 16) for name in "abc"}
    done = driver.run()
    assert driver.core.stats().num_preemptions >= 2
    assert {name: completion.token_ids for name, completion in done.items()} == wanted == driver.streamed
    assert sum(completion.num_preemptions for completion in done.values()) == driver.core.stats().num_preemptions
    assert done["a"].num_preemptions == 0  # the one admitted first never gives way


def test_the_last_admitted_gives_way_and_comes_back_first():
    driver = Driver(make_core(num_blocks=6))
    wanted = {name: add(driver, name, 7, 12) for name in "abcd"}
    order = []
    while driver.core.requests:
        before = list(driver.core.scheduler.running)
        output = driver.step()
        if output.preempted:
            assert list(output.preempted) == before[::-1][: len(output.preempted)]
            assert driver.core.scheduler.waiting[0].request_id == output.preempted[-1]
            assert not {entry.request_id for entry in output.requests} & set(output.preempted)
            order.extend(output.preempted)
    assert order and {name: done.token_ids for name, done in driver.completions.items()} == wanted


@every_mode
@pytest.mark.parametrize(("num_blocks", "preemptions"), [(6, {"a": 0, "b": 0, "c": 1}), (5, {"a": 0, "b": 1})])
def test_no_more_requests_give_way_than_needed(mode, num_blocks, preemptions):
    driver = Driver(make_core(num_blocks=num_blocks), **mode)
    wanted = {name: add(driver, name, 7, 5) for name in preemptions}  # all need their third block in the same step
    done = driver.run()
    assert {name: completion.token_ids for name, completion in done.items()} == wanted
    assert {name: done[name].num_preemptions for name in preemptions} == preemptions


def test_admission_leaves_blocks_for_those_who_run():
    driver = Driver(make_core(num_blocks=10))
    for name in "abcdefghij":
        add(driver, name, 1, 4)
    driver.step()
    stats = driver.core.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (9, 1, 1)


def test_a_blocked_prompt_is_not_hashed_at_every_step(monkeypatch):
    driver = Driver(make_core(num_blocks=8))
    match, tried = driver.core.blocks.match_prefix, []

    def counted(request, version):
        tried.append(request.request_id)
        return match(request, version)

    monkeypatch.setattr(driver.core.blocks, "match_prefix", counted)
    wanted = {"a": add(driver, "a", 8, 16), "b": add(driver, "b", 24, 3)}
    add(driver, "c", 28, 3)
    driver.step()
    for name in ("a2", "a3"):
        wanted[name] = add(driver, name, 8, 2)
    for _ in range(3):
        driver.step()
    driver.core.abort("c")
    assert {name: driver.run()[name].token_ids for name in wanted} == wanted
    assert len(tried) <= 8


@every_mode
def test_admission_counts_blocks_and_not_tokens(mode):
    driver = Driver(make_core(num_blocks=10), **mode)
    wanted = {name: add(driver, name, 9, 1) for name in "abcd"}
    most = 0
    while driver.core.requests:
        most = max(most, len(driver.step().requests))
    done = driver.run()
    assert most == 3 and driver.core.stats().num_preemptions == 0
    assert {name: completion.token_ids for name, completion in done.items()} == wanted


@every_mode
def test_never_an_empty_output_while_something_could_run(mode):
    driver = Driver(make_core(num_blocks=4, max_batch_tokens=8), **mode)
    wanted = {name: add(driver, name, length, 7) for name, length in zip("abcdefg", (9, 1, 16, 4, 8, 10, 3), strict=True)}
    wanted["c"] = wanted["c"][:1]  # 16 tokens fill the pool: one more token and it ends with an error
    empty = 0
    while driver.core.requests:
        empty = 0 if driver.step().requests else empty + 1
        assert empty < 3 and (mode["ahead"] or not empty)
    assert {name: completion.token_ids for name, completion in driver.run().items()} == wanted


def test_a_request_in_flight_is_not_scheduled_again_before_its_output_is_finished():
    driver = Driver(make_core(), ahead=True)
    ids = add(driver, "a", 6, 5)
    driver.step()
    assert driver.core.preempt("a") and not driver.core.preempt("a")
    used = driver.core.stats().used_blocks
    output = driver.core.schedule(0.0)
    assert used == 2 and shape(output) == []
    driver.queue.append((output, driver.model.execute(output)))
    driver.finish_one()
    assert driver.core.stats().used_blocks == 0
    assert driver.run()["a"].token_ids == ids


def test_leases_make_a_request_wait_and_not_fail():
    driver = Driver(make_core(num_blocks=4))
    add(driver, "a", 4, 3)
    add(driver, "b", 4, 1)
    driver.step()
    lease = driver.core.blocks.lease(driver.core.requests["a"].block_table)
    driver.core.abort("a")
    ids = add(driver, "c", 8, 6)
    for _ in range(10):
        driver.step()
    assert driver.core.stats().leased_blocks == 1 and not driver.completions.get("c")
    driver.core.blocks.release_lease(lease)
    assert driver.run()["c"].token_ids == ids and driver.completions["c"].num_preemptions == 0


def test_nothing_possible_is_an_error_and_not_a_loop():
    driver = Driver(make_core(num_blocks=4))
    add(driver, "a", 8, 3)
    driver.core.blocks._free.clear()  # lose the pool
    with pytest.raises(RuntimeError, match="nothing can run"):
        driver.core.schedule(0.0)


def test_roles_are_numbers():
    sizes = {"max_batch_tokens": 64, "decode_prefill_tokens": 100}
    assert plan_role(Role.MIXED, **sizes) == RolePolicy(role=Role.MIXED, prefill_tokens=64, hands_over=False)
    assert plan_role(Role.DECODE, **sizes).prefill_tokens == 64
    assert plan_role(Role.DECODE, max_batch_tokens=64, decode_prefill_tokens=5).prefill_tokens == 5
    with pytest.raises(ValueError, match=r"boss.*mixed, prefill, decode"):
        plan_role("boss", **sizes)


@every_mode
@pytest.mark.parametrize("cache", [True, False])
def test_a_big_request_waits_no_longer_than_those_before_it_run(mode, cache):
    """More short requests arrive than the pool can take, one a step, and never stop; one needs nearly the whole pool."""
    driver = Driver(make_core(num_blocks=20, max_batch_tokens=16, enable_prefix_cache=cache), **mode)
    core, wanted, running_since, arrived = driver.core, {}, {}, []
    head_since = end = None
    for number in range(150):
        name = "big" if number == 12 else f"{'abcdefgh'[number % 8]}{number}"
        wanted[name] = add(driver, name, 68 if name == "big" else 9, 8 if name == "big" else 6)
        arrived.append(name)
        driver.step()
        driver.check()
        for request_id in core.scheduler.running:
            running_since.setdefault(request_id, number)
        if head_since is None and core.scheduler.waiting and core.scheduler.waiting[0].request_id == "big":
            head_since = number
        if end is None and "big" in driver.completions:
            end = number
    assert list(running_since) == arrived[: len(running_since)]  # nobody is overtaken
    assert len(core.scheduler.waiting) > 20 and head_since is not None and end is not None
    # At the head it waits until those that run have drawn their 6 tokens, each at most twice interrupted for the pool's sake.
    assert running_since["big"] - head_since <= 12
    # Then 68 tokens in chunks of 16, 8 more, alone: what follows it never takes its blocks away.
    assert end - running_since["big"] <= 5 + 8 + 2
    assert {name: done.token_ids for name, done in driver.run().items()} == wanted
    assert driver.completions["big"].num_preemptions == 0
