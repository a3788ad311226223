"""Blocks and the prefix cache as requests of a core see them: hits, boundaries, isolation, nothing left behind."""

from __future__ import annotations

import pytest
from fake_model import VOCAB, Driver, assert_all_free, chain, every_mode, make_core, make_request, oracle, prompt_logprob


@every_mode
@pytest.mark.parametrize("cache", [True, False])
def test_every_block_boundary(mode, cache):
    for length in range(1, 14):
        for max_tokens in range(1, 10):
            driver = Driver(make_core(num_blocks=8, enable_prefix_cache=cache), **mode)
            prompt = [(3 * at) % VOCAB for at in range(length)]
            driver.core.add_request(make_request("r", prompt, max_tokens, ignore_eos=True))
            while driver.core.requests:
                driver.step()
                request = driver.core.requests.get("r")
                if request is not None and not mode["ahead"]:
                    assert len(request.block_table) == -(-request.num_computed_tokens // 4)
            assert driver.run()["r"].token_ids == oracle(prompt, max_tokens)


@every_mode
@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_wholly_cached_prompt_still_computes_its_last_token(mode, length):
    core, prompt = make_core(), list(range(1, length + 1))
    driver = Driver(core, **mode)
    for turn in range(3):
        names = [f"{turn}a", f"{turn}b"]
        for name in names:
            core.add_request(make_request(name, prompt, 6, ignore_eos=True))
        driver.run()
        for name in names:
            assert driver.completions[name].token_ids == oracle(prompt, 6)
            assert driver.completions[name].num_cached_tokens == (0 if turn == 0 else length - 4)


def test_equal_hashes_do_not_mean_equal_blocks(monkeypatch):
    monkeypatch.setattr("pearl.engine.prefix_cache.block_hash", lambda parent_hash, token_ids: 7)
    monkeypatch.setattr("pearl.engine.prefix_cache.root_hash", lambda root: 7)
    driver = Driver(make_core())
    asked = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [11, 10, 9, 8, 5, 6, 7, 8], "c": [5, 6, 7, 8, 1, 2, 3, 4]}
    for turn in range(2):
        for name, prompt in asked.items():
            driver.core.add_request(make_request(f"{name}{turn}", prompt, 8, ignore_eos=True))
            driver.run()
            assert driver.completions[f"{name}{turn}"].token_ids == oracle(prompt, 8)
            assert driver.completions[f"{name}{turn}"].num_cached_tokens == 4 * turn


def test_a_reused_block_is_found_no_more():
    driver = Driver(make_core(num_blocks=4))
    first, other = [1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2]
    for name, prompt, cached in (("a", first, 0), ("b", other, 0), ("a2", first, None)):
        driver.core.add_request(make_request(name, prompt, 5, ignore_eos=True))
        driver.run()
        assert driver.completions[name].token_ids == oracle(prompt, 5)
        if cached is not None:
            assert driver.completions[name].num_cached_tokens == cached


@every_mode
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_block_is_visible_only_once_written(mode, chunk):
    core, prompt = make_core(max_batch_tokens=chunk), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    driver = Driver(core, **mode)
    for name in "abc":
        core.add_request(make_request(name, prompt, 6, ignore_eos=True))
        if chunk == 4:
            driver.step()
    driver.run()
    assert all(completion.token_ids == oracle(prompt, 6) for completion in driver.completions.values())
    assert driver.completions["a"].num_cached_tokens == 0


def test_salts_do_not_share():
    driver, prompt = Driver(make_core()), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cached = []
    for number, salt in enumerate(["a", "b", "a", "b", None, "None"]):
        driver.core.add_request(make_request(str(number), prompt, 3, salt=salt))
        driver.run()
        cached.append(driver.completions[str(number)].num_cached_tokens)
    assert cached == [0, 0, 8, 8, 0, 0]


@every_mode
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_leaves_no_reference(mode, steps):
    driver = Driver(make_core(num_blocks=8, max_num_seqs=1), **mode)
    core, warm = driver.core, [1, 2, 3, 4, 5, 6, 7, 8]
    core.add_request(make_request("warm", [*warm, 9], 1))
    driver.run()
    for number in range(50):
        for name in (f"run{number}", f"wait{number}"):
            core.add_request(make_request(name, [*warm, 9, 9, 9, 9, 9], 5))
        for _ in range(steps):
            driver.step()
        for name in (f"wait{number}", f"run{number}"):
            update = core.abort(name)
            driver.take([update] if update else [])
        driver.run()
        assert_all_free(core)
    prompt = [5] * 32
    core.add_request(make_request("all", prompt, 1))
    assert driver.run()["all"].token_ids == oracle(prompt, 1)


def test_blocks_come_back_after_every_request():
    driver = Driver(make_core(num_blocks=8))
    for number in range(200):
        prompt = [number % 10, number % 2] + [3] * 7
        driver.core.add_request(make_request(str(number), prompt, 3, ignore_eos=True))
        driver.run()
        assert driver.completions[str(number)].token_ids == oracle(prompt, 3)
    assert driver.core.stats().num_preemptions == 0


@every_mode
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_prompt_logprobs_miss_no_position_and_still_warm_the_cache(mode, length):
    driver, prompt = Driver(make_core(), **mode), [1, 2, 3, 4, 5, 6, 7, 8, 9][:length]
    wanted = [None] + [prompt_logprob(chain(prompt)[:at], prompt[at]) for at in range(1, length)]
    for name in "ab":
        driver.core.add_request(make_request(name, prompt, 2, prompt_logprobs=True))
        driver.run()
        assert driver.completions[name].prompt_logprobs == wanted
    driver.core.add_request(make_request("plain", prompt, 2))
    driver.run()
    assert driver.completions["plain"].num_cached_tokens == (length - 1) // 4 * 4


@every_mode
def test_prompt_logprobs_survive_chunks_and_preemption(mode):
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    driver = Driver(make_core(max_batch_tokens=4), **mode)
    driver.core.add_request(make_request("r", prompt, 4, prompt_logprobs=True, ignore_eos=True))
    driver.step()
    driver.step()
    assert driver.core.preempt("r")
    completion = driver.run()["r"]
    wanted = [None] + [prompt_logprob(chain(prompt)[:at], prompt[at]) for at in range(1, 12)]
    assert completion.prompt_logprobs == wanted and completion.token_ids == oracle(prompt, 4)
    assert len(completion.logprobs) == 4 and completion.num_preemptions == 1


def test_prompt_logprobs_are_not_asked_for_twice():
    driver = Driver(make_core(enable_prefix_cache=False))
    driver.core.add_request(make_request("r", [1, 2, 3, 4, 5], 4, prompt_logprobs=True, ignore_eos=True))
    driver.step()
    driver.core.preempt("r")
    driver.run()
    wanted = [entry.wants_prompt_logprobs for output in driver.outputs for entry in output.requests]
    assert wanted == [True, False, False, False]
