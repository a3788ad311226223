"""Random lives of an engine core: whatever happens to it, every request gets the model's tokens and the books add up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from fake_model import EOS, MODES, VOCAB, Driver, chain, make_core, make_request, oracle, prompt_logprob
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.protocol import Role


def expected(prompt, max_tokens, *, stop=(EOS,), most=10**6):
    """Oracle tokens and finish reason: cut after the first stop id, by max_tokens, or at `most` tokens in all."""
    ids = oracle(prompt, min(max_tokens, most - len(prompt)))
    for index, token_id in enumerate(ids):
        if token_id in stop:
            return ids[: index + 1], "stop"
    return ids, "length"


prompts = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    st.sampled_from([[1, 5, 2, 7, 3, 1, 4, 8, 6, 2, 0, 9, 9, 1, 3, 5, 7], [3] * 17]),
    st.integers(0, 17),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
)
adds = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([False, False, True]),
        "salt": st.sampled_from([None, None, "a"]),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=1),
    }
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), adds),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["abort", "preempt", "lease"]), st.integers(0, 20)),
        st.tuples(st.just("update"), st.sampled_from(["keep", "recompute", "abort"])),
        st.tuples(st.sampled_from(["reset", "pause", "resume", "role"]), st.just(0)),
    ),
    min_size=2,
    max_size=30,
)
sizes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 16),
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_num_seqs": st.sampled_from([1, 2, 5, 64]),
        "max_batch_tokens": st.sampled_from([1, 3, 4, 16, 64]),
        "decode_prefill_tokens": st.sampled_from([1, 4]),
        "enable_prefix_cache": st.booleans(),
        "max_model_len": st.sampled_from([24, 256]),
    }
)


@dataclass
class Trace:
    """Carries out random operations and remembers what each request should give."""

    driver: Driver
    added: dict = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)

    def run(self, ops) -> None:
        for number, (name, value) in enumerate(ops):
            getattr(self, f"do_{name}")(value, number)
            self.driver.check()
        self.do_resume(0, 0)
        for lease_id in self.leases:
            self.driver.core.blocks.release_lease(lease_id)
        self.driver.run()

    def do_add(self, value, number) -> None:
        core, request_id = self.driver.core, f"r{number}"
        prompt = value["prompt"]
        request = make_request(request_id, **value)
        if len(prompt) > min(core.settings.max_model_len - 1, core.blocks.num_slots):
            with pytest.raises(ValueError):
                core.add_request(request)
            return
        core.add_request(request)
        self.added[request_id] = value

    def do_step(self, value, number) -> None:
        for _ in range(value):
            self.driver.step()

    def do_abort(self, value, number) -> None:
        if self.added:
            request_id = list(self.added)[value % len(self.added)]
            update = self.driver.core.abort(request_id)
            assert (update is None) == (request_id in self.driver.completions)
            self.driver.take([update] if update else [])

    def do_preempt(self, value, number) -> None:
        running = list(self.driver.core.scheduler.running)
        if running:
            assert self.driver.core.preempt(running[value % len(running)])

    def do_lease(self, value, number) -> None:
        blocks = self.driver.core.blocks
        if self.leases and value % 2:
            blocks.release_lease(self.leases.pop())
        for request in list(self.driver.core.scheduler.running.values())[:1]:
            self.leases.append(blocks.lease(request.block_table))

    def do_update(self, value, number) -> None:
        version = self.driver.core.weight_version + 1
        while self.driver.queue and self.driver.lazy:  # weights change between two steps that have been run
            self.driver.finish_one()
        self.driver.take(self.driver.core.set_weight_version(version, value))
        self.driver.model.version = version

    def do_reset(self, value, number) -> None:
        self.driver.core.reset_prefix_cache()

    def do_pause(self, value, number) -> None:
        self.driver.core.pause()

    def do_resume(self, value, number) -> None:
        self.driver.core.resume()

    def do_role(self, value, number) -> None:
        role = self.driver.core.scheduler.policy.role
        self.driver.core.switch_role(Role.DECODE if role is Role.MIXED else Role.MIXED)


def check_completion(completion, asked, core) -> None:
    prompt, slots = asked["prompt"], core.blocks.num_slots
    stop = set(asked["stop_token_ids"]) | (set() if asked["ignore_eos"] else {EOS})
    ids, reason = expected(prompt, asked["max_tokens"], stop=stop, most=core.settings.max_model_len)
    if completion.finish_reason == "abort":
        assert completion.token_ids == ids[: len(completion.token_ids)]
    elif len(ids) > slots - len(prompt) + 1 or (len(ids) == slots - len(prompt) + 1 and completion.finish_reason == "error"):
        assert completion.finish_reason == "error" and str(slots) in completion.error
        assert completion.token_ids == ids[: slots - len(prompt) + 1]
    else:
        assert (completion.token_ids, completion.finish_reason) == (ids, reason)
    versions = completion.weight_versions
    assert versions == sorted(versions) and len(versions) == len(completion.logprobs) == len(completion.token_ids)
    assert completion.logprobs == [-token_id / 7 for token_id in completion.token_ids]
    if asked["prompt_logprobs"]:
        values = chain(prompt)
        wanted = [None] + [prompt_logprob(values[:at], prompt[at]) for at in range(1, len(prompt))]
        assert completion.prompt_logprobs == wanted[: len(completion.prompt_logprobs)]
        assert completion.finish_reason == "abort" or len(completion.prompt_logprobs) == len(prompt)
    else:
        assert completion.prompt_logprobs is None


@settings(max_examples=250, deadline=None, derandomize=True)
@given(sizes=sizes, ops=operations, mode=st.sampled_from(MODES))
def test_random_traces_give_the_models_tokens(sizes, ops, mode):
    trace = Trace(Driver(make_core(**sizes), **mode))
    trace.run(ops)
    driver = trace.driver
    assert driver.completions.keys() == trace.added.keys()
    for request_id, asked in trace.added.items():
        check_completion(driver.completions[request_id], asked, driver.core)
        assert driver.streamed.get(request_id, []) == driver.completions[request_id].token_ids
