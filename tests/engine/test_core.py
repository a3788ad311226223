"""How requests of a core end, what is refused, text, weights, roles and the order of outputs."""

from __future__ import annotations

import pytest
from fake_model import EOS, MODES, VOCAB, Driver, assert_all_free, every_mode, make_core, make_request, oracle

from pearl.engine.request import SampledToken, StepResult
from pearl.protocol import Role


def run_one(prompt, max_tokens=20, mode=MODES[0], core_sizes=None, **params):
    driver = Driver(make_core(**(core_sizes or {})), **mode)
    driver.core.add_request(make_request("r", prompt, max_tokens, **params))
    return driver.run()["r"]


def prompt_that_ends():
    """A prompt whose continuation meets EOS after a few tokens, its tokens up to and with EOS."""
    for start in range(1000):
        prompt = [start % VOCAB, start // VOCAB % VOCAB, start // VOCAB // VOCAB]
        ids = oracle(prompt, 12)
        if EOS in ids[3:8] and EOS not in ids[:3]:
            return prompt, ids[: ids.index(EOS) + 1]
    raise AssertionError("the pretended model never stops")


@every_mode
def test_eos_stop_ids_and_ignore_eos(mode):
    prompt, ids = prompt_that_ends()
    ended = run_one(prompt, mode=mode)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (ids, "stop", None)
    ignored = run_one(prompt, mode=mode, ignore_eos=True)
    assert ignored.token_ids == oracle(prompt, 20) and ignored.finish_reason == "length"
    by_id = run_one(prompt, mode=mode, stop_token_ids=[ids[1]])
    cut = ids[: ids.index(ids[1]) + 1]
    assert (by_id.token_ids, by_id.finish_reason, by_id.stop_reason) == (cut, "stop", ids[1])
    both = run_one(prompt, mode=mode, ignore_eos=True, stop_token_ids=[EOS])
    assert (both.token_ids, both.finish_reason, both.stop_reason) == (ids, "stop", EOS)
    held = run_one(prompt, mode=mode, min_tokens=len(ids) + 1)
    assert len(held.token_ids) > len(ids) and held.token_ids == oracle(prompt, len(held.token_ids))


@every_mode
def test_max_model_len_edges(mode):
    sizes = {"max_model_len": 32}
    for max_tokens in (1, 5, 1000):
        completion = run_one([1] * 31, max_tokens, mode, sizes)
        assert completion.token_ids == oracle([1] * 31, 1)
        assert completion.finish_reason == ("stop" if completion.token_ids == [EOS] else "length")
    assert len(run_one([1] * 30, 5, mode, sizes, ignore_eos=True).token_ids) == 2
    for length in (32, 33):
        with pytest.raises(ValueError, match=f"{length}.*32"):
            make_core(**sizes).add_request(make_request("r", [1] * length))


@every_mode
def test_a_pool_too_small_for_the_answer_ends_the_request(mode):
    driver = Driver(make_core(num_blocks=5), **mode)
    driver.core.add_request(make_request("big", [1] * 6, 100, ignore_eos=True))
    driver.core.add_request(make_request("small", [2] * 6, 3, ignore_eos=True))
    done = driver.run()
    assert done["big"].finish_reason == "error" and "20" in done["big"].error
    assert done["big"].token_ids == oracle([1] * 6, 15)
    assert done["small"].token_ids == oracle([2] * 6, 3)
    alone = run_one([1] * 6, 100, mode, {"num_blocks": 5}, ignore_eos=True)
    assert alone.token_ids == oracle([1] * 6, 15) and alone.num_preemptions == 0


def test_an_impossible_prompt_is_refused_and_harms_nobody():
    driver = Driver(make_core(num_blocks=5))
    with pytest.raises(ValueError, match="20 slots"):
        driver.core.add_request(make_request("big", [1] * 25))
    driver.core.add_request(make_request("r2", [1] * 6, 4, ignore_eos=True))
    assert driver.run()["r2"].token_ids == oracle([1] * 6, 4)


@every_mode
def test_an_error_of_the_model_ends_only_its_request(mode):
    driver = Driver(make_core(), **mode)
    for name in "ab":
        driver.core.add_request(make_request(name, [ord(name) % VOCAB] * 5, 6, ignore_eos=True))
    execute = driver.model.execute

    def broken(output):
        result = execute(output)
        sampled = dict(result.sampled)
        if "a" in sampled and output.step == 2:
            sampled["a"] = SampledToken(token_id=0, logprob=0.0, error="logits are not finite")
        return StepResult(sampled=sampled, weight_version=result.weight_version)

    driver.model.execute = broken
    done = driver.run()
    assert done["a"].finish_reason == "error" and done["a"].error == "logits are not finite"
    assert done["a"].token_ids == oracle([ord("a") % VOCAB] * 5, 2) and len(done["a"].logprobs) == 2
    assert done["b"].token_ids == oracle([ord("b") % VOCAB] * 5, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "at least 1"),
        ({"prompt": [1, VOCAB]}, f"{VOCAB}.*{VOCAB}"),
        ({"prompt": [-1, 2]}, "-1"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logprobs": VOCAB + 1}, "logprobs"),
        ({"request_id": "there"}, "unique"),
    ],
)
def test_refusals_change_nothing(change, words):
    core = make_core()
    core.add_request(make_request("there", [1, 2, 3]))
    before = core.stats()
    with pytest.raises(ValueError, match=words):
        core.add_request(make_request(**{"request_id": "r", "prompt": [1, 2], **change}))
    assert core.stats() == before and list(core.requests) == ["there"]


def test_an_id_is_free_again_after_abort_in_the_queue():
    driver = Driver(make_core(max_num_seqs=1))
    driver.core.add_request(make_request("a", [1, 2], 6, ignore_eos=True))
    driver.core.add_request(make_request("b", [3], 6, ignore_eos=True))
    driver.step()
    assert driver.core.abort("b").completion.finish_reason == "abort"
    assert driver.core.abort("b") is None
    driver.core.add_request(make_request("b", [4], 6, ignore_eos=True))
    done = driver.run()
    assert done["a"].token_ids == oracle([1, 2], 6) and done["b"].token_ids == oracle([4], 6)


# ---------------------------------------------------------------------------------------------------- text


class Letters:
    """A text stream that shows one letter per token and stops at a string."""

    def __init__(self, request) -> None:
        self.stop, self.text, self.stopped_by = request.params.stop, "", None

    def push(self, token_id, *, hidden=False):
        piece = "" if hidden else chr(ord("a") + token_id)
        self.text += piece
        self.stopped_by = next((stop for stop in self.stop if stop in self.text), None)
        return piece

    def close(self):
        self.text += "."
        return "."


@every_mode
def test_text_and_stop_strings(mode):
    prompt, ids = prompt_that_ends()
    letters = [chr(ord("a") + token_id) for token_id in ids]
    for stop, cut, reason in (([], len(ids), None), ([letters[1] + letters[2]], 3, letters[1] + letters[2])):
        driver = Driver(make_core(new_text=Letters), **mode)
        driver.core.add_request(make_request("r", prompt, 20, stop=stop))
        done = driver.run()["r"]
        assert (done.token_ids, done.finish_reason, done.stop_reason) == (ids[:cut], "stop", reason)
        shown = letters[:cut] if reason else letters[:-1]
        assert done.text == "".join(shown) + "." == driver.texts["r"]


# ---------------------------------------------------------------------------------------------------- weights, roles, order


@every_mode
@pytest.mark.parametrize("update", ["keep", "recompute", "abort"])
def test_new_weights_with_requests_in_flight(mode, update):
    driver, prompt = Driver(make_core(max_num_seqs=1), **mode), [1, 2, 3, 4, 5]
    core = driver.core
    core.add_request(make_request("r", prompt, 12, ignore_eos=True))
    core.add_request(make_request("queued", prompt, 3, ignore_eos=True))
    for _ in range(4):
        driver.step()
    while driver.queue:
        driver.finish_one()
    driver.take(core.set_weight_version(3, update))
    driver.model.version = 3
    done = driver.run()
    if update == "abort":
        assert done["r"].finish_reason == "abort" and done["r"].token_ids == oracle(prompt, 4)
        assert done["r"].weight_versions == [0] * 4 and len(done["r"].logprobs) == 4
    else:
        assert done["r"].token_ids == oracle(prompt, 12) and done["r"].weight_versions == [0] * 4 + [3] * 8
        assert done["r"].num_preemptions == (1 if update == "recompute" else 0)
    assert done["queued"].weight_versions == [3] * 3
    assert done["queued"].num_cached_tokens == (4 if update == "recompute" else 0)


def test_recomputed_requests_keep_their_order_and_are_cached_again():
    driver = Driver(make_core())
    prompts = {name: [number] * 5 for number, name in enumerate("abc")}
    for name, prompt in prompts.items():
        driver.core.add_request(make_request(name, prompt, 6, ignore_eos=True))
    driver.step()
    driver.core.set_weight_version(1, "keep")  # KV of two versions from here on
    driver.model.version = 1
    driver.step()
    driver.core.set_weight_version(2, "recompute")
    driver.model.version = 2
    assert [request.request_id for request in driver.core.scheduler.waiting] == ["a", "b", "c"]
    driver.run()
    assert driver.completions["a"].weight_versions == [0, 1, 2, 2, 2, 2]
    for name, prompt in prompts.items():
        assert driver.completions[name].token_ids == oracle(prompt, 6)
        driver.core.add_request(make_request(f"{name}2", [*prompt, *oracle(prompt, 6)], 1))
        assert driver.run()[f"{name}2"].num_cached_tokens == 8


def test_a_step_begun_before_new_weights_keeps_its_version_and_caches_nothing():
    driver = Driver(make_core(), ahead=True)
    driver.core.add_request(make_request("r", [1, 2, 3, 4, 5, 6, 7, 8], 4, ignore_eos=True))
    driver.step()
    assert not driver.core.set_weight_version(1, "recompute")
    driver.model.version = 1
    driver.finish_one()
    driver.check()
    assert len(driver.core.blocks.cache) == 0
    done = driver.run()["r"]
    assert done.weight_versions == [0, 1, 1, 1] and done.token_ids == oracle([1, 2, 3, 4, 5, 6, 7, 8], 4)


@pytest.mark.parametrize(("logprobs", "has", "has_top"), [(None, False, False), (0, True, False), (2, True, True)])
def test_logprobs_as_asked_for(logprobs, has, has_top):
    core = make_core()
    core.add_request(make_request("r", [1, 2], 2, logprobs=logprobs, ignore_eos=True))
    for top in ({3: -0.5, 4: -1.0}, {5: -0.25}):
        output = core.schedule(0.0)
        sampled = {"r": SampledToken(token_id=3, logprob=-0.5, top_logprobs=top)}
        (update,) = core.finish(output, StepResult(sampled=sampled), 0.0)
        assert update.logprobs == (-0.5,) and update.token_ids == (3,)
    done = update.completion
    assert done.logprobs == ([-0.5, -0.5] if has else None)
    assert done.top_logprobs == ([{3: -0.5, 4: -1.0}, {5: -0.25}] if has_top else None)


def test_a_cached_prefix_does_not_outlive_its_weights():
    driver, prompt = Driver(make_core()), [*list(range(12)), 0]
    cached = []
    for version in (0, 0, 1, 1, 0):
        if version != driver.core.weight_version:
            driver.core.set_weight_version(version)
            driver.model.version = version
        driver.core.add_request(make_request("r", prompt, 8, ignore_eos=True))
        driver.run()
        cached.append(driver.completions.pop("r").num_cached_tokens)
    assert cached == [0, 12, 0, 12, 0]


def test_pause_and_roles():
    driver = Driver(make_core(decode_prefill_tokens=2, max_batch_tokens=16))
    core = driver.core
    core.add_request(make_request("r", [1] * 8, 3, ignore_eos=True))
    core.pause()
    assert driver.step().requests == () and core.stats().paused
    core.resume()
    with pytest.raises(ValueError, match="mixed, prefill, decode"):
        core.switch_role("boss")
    assert core.stats().epoch == 0
    switch = core.switch_role(Role.DECODE)
    assert (switch.old, switch.new, switch.epoch) == (Role.MIXED, Role.DECODE, 1)
    assert [driver.step().num_tokens for _ in range(4)] == [2, 2, 2, 2]
    assert driver.run()["r"].token_ids == oracle([1] * 8, 3)


def test_outputs_are_finished_in_order_and_only_two_are_open():
    driver = Driver(make_core())
    core = driver.core
    core.add_request(make_request("r", [1, 2], 5, ignore_eos=True))
    first = core.schedule(0.0)
    result = driver.model.execute(first)
    second = core.schedule(0.0)
    with pytest.raises(RuntimeError, match="unfinished"):
        core.schedule(0.0)
    with pytest.raises(RuntimeError, match="oldest"):
        core.finish(second, result, 0.0)
    with pytest.raises(RuntimeError, match="no sampled token"):
        core.finish(first, StepResult(sampled={}), 0.0)
    assert core.requests["r"].token_ids == [1, 2, -1] and core.requests["r"].output_token_ids == []
    core.finish(first, result, 0.0)
    core.finish(second, driver.model.execute(second), 0.0)
    assert core.requests["r"].output_token_ids == oracle([1, 2], 2)


def test_a_request_that_stopped_keeps_its_blocks_until_the_next_output_is_done():
    prompt, ids = prompt_that_ends()
    driver = Driver(make_core(), ahead=True)
    core = driver.core
    core.add_request(make_request("r", prompt, 20))
    while "r" not in driver.completions:
        driver.step()
    assert driver.completions["r"].token_ids == ids
    assert core.stats().used_blocks > 0 and core.stats().running == 0 and core.abort("r") is None
    with pytest.raises(ValueError, match="unique"):
        core.add_request(make_request("r", [1]))
    driver.finish_one()
    assert_all_free(core)
