"""A decode worker that has lost the prefix of what it was to append gives the request back, unbegun; nobody else does."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
from engine_cases import GREEDY, assert_free, make, model
from fake_model import Driver, every_mode, make_core, make_request, oracle

from pearl.engine.core import EngineCore
from pearl.engine.request import Request
from pearl.protocol import Role

FIRST = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
LIMIT = 3 + 4
"""An append of three tokens, and a block."""


def second_turn(driver: Driver, most: int | None = LIMIT, name: str = "second") -> Request:
    """The session's first turn is played; the next one appends three tokens."""
    if "first" not in driver.completions:
        driver.core.add_request(make_request("first", FIRST, 6, ignore_eos=True))
        driver.run()
    request = make_request(name, [*FIRST, *driver.completions["first"].token_ids, 1, 2, 3], 5, ignore_eos=True)
    request.most_computed = most
    return request


def decoding(role: Role = Role.DECODE, **sizes: int) -> EngineCore:
    return make_core(role=role, decode_prefill_tokens=4, **sizes)


@every_mode
def test_what_is_cached_is_appended_and_what_is_not_is_given_back(mode):
    driver = Driver(decoding(), **mode)
    request = second_turn(driver)
    driver.core.add_request(request)
    done = driver.run()["second"]
    assert done.token_ids == oracle(done.prompt_token_ids, 5) and done.num_cached_tokens == 12
    driver.core.reset_prefix_cache()
    driver.core.add_request(make_request("busy", [7, 7, 7], 30, ignore_eos=True))
    driver.core.add_request(second_turn(driver, name="again"))
    driver.core.add_request(make_request("behind", [8, 8], 3, ignore_eos=True))
    computed = driver.core.stats().num_computed_tokens
    driver.run()
    back, busy, behind = (driver.completions[name] for name in ("again", "busy", "behind"))
    assert (back.finish_reason, back.token_ids, back.num_preemptions) == ("abort", [], 0)
    assert (busy.token_ids, behind.token_ids) == (oracle([7, 7, 7], 30), oracle([8, 8], 3)), "nobody else notices"
    assert driver.core.stats().num_computed_tokens - computed == 3 + 29 + 2 + 2, "nothing of it was computed"


@every_mode
@pytest.mark.parametrize(("role", "most"), [(Role.MIXED, LIMIT), (Role.PREFILL, LIMIT), (Role.DECODE, None)])
def test_who_computes_prompts_or_was_not_asked_to_gives_nothing_back(mode, role, most):
    driver = Driver(decoding(), **mode)
    request = second_turn(driver, most)
    driver.core.reset_prefix_cache()
    driver.core.switch_role(role)
    driver.core.add_request(request)
    while "second" not in driver.completions and not driver.core.exports:
        driver.step()
    if role is Role.PREFILL:
        [export] = driver.core.exports.values()
        assert export.request is request and export.num_tokens == len(request.token_ids) - 1
    else:
        done = driver.completions["second"]
        assert done.token_ids == oracle(done.prompt_token_ids, 5)


def test_one_that_gave_way_is_computed_again_where_it_was_begun():
    driver = Driver(decoding())
    driver.core.add_request(second_turn(driver))
    driver.step()
    assert driver.core.preempt("second")
    driver.core.reset_prefix_cache()
    done = driver.run()["second"]
    assert done.token_ids == oracle(done.prompt_token_ids, 5) and done.num_preemptions == 1


def test_it_is_given_back_though_there_is_no_room_for_it():
    """The pool is full of one that runs: what cannot be begun here does not wait for room."""
    driver = Driver(decoding(num_blocks=8, enable_prefix_cache=False))
    request = second_turn(driver)
    driver.core.add_request(make_request("busy", [5] * 20, 8, ignore_eos=True))
    driver.core.add_request(request)
    for _ in range(7):
        driver.step()
    assert driver.completions["second"].finish_reason == "abort" and "busy" in driver.core.requests
    assert driver.run()["busy"].token_ids == oracle([5] * 20, 8)


@pytest.mark.parametrize("what", ["nothing", "abort", "cancel"])
def test_it_ends_once_whatever_happens_before_the_step_is_finished(what: str):
    driver = Driver(decoding())
    request = second_turn(driver)
    core = driver.core
    core.reset_prefix_cache()
    core.add_request(request)
    output = core.schedule(0.0)
    core.check_integrity()
    assert not output.requests and core.has_unfinished()
    if what == "abort":
        update = core.abort("second")
        assert update is not None and update.completion is not None and update.completion.finish_reason == "abort"
    elif what == "cancel":
        core.cancel(output)
        output = core.schedule(0.0)
    updates = core.finish(output, driver.model.execute(output), 0.0)
    assert [update.request_id for update in updates] == ([] if what == "abort" else ["second"])
    assert driver.run().keys() == {"first"}


def test_an_engine_with_a_model_gives_back_and_says_so(tmp_path: Path) -> None:
    engine = make(hf_models.save(model(), tmp_path), role=Role.DECODE)
    prompt = hf_models.prompt(24)
    for most, reason in ((None, "length"), (8, "length"), (8, "abort")):
        if reason == "abort":
            engine.reset_prefix_cache()
        engine.add_request(prompt, GREEDY, session_id="s", most_computed=most)
        completions = []
        while engine.has_unfinished():
            completions += engine.step()
        assert [one.finish_reason for one in completions] == [reason]
    assert_free(engine)
    with pytest.raises(ValueError, match="most_computed=-1: must be >= 0, or None"):
        engine.add_request(prompt, GREEDY, most_computed=-1)
