"""Runs of steady steps against single ones: the same outputs, books, caches and ends, whatever comes and goes between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pearl.engine.core import EngineCore
from pearl.engine.limits import CoreSettings
from pearl.engine.request import Request, SampledToken, SchedulerOutput, StepResult
from pearl.engine.steady import SteadyCore, SteadyResult
from pearl.engine.token_runs import TokenRuns
from pearl.protocol import Role, SamplingParams

SETTINGS = CoreSettings(
    block_size=4, num_blocks=40, max_model_len=100, max_num_seqs=6, max_batch_tokens=24, vocab_size=100, decode_prefill_tokens=5
)
PARAMS = SamplingParams(ignore_eos=True)


def request(number: int, prompt: int, max_tokens: int) -> Request:
    """Each third begins like the others of its kind, so that the cache finds something."""
    ids = TokenRuns.of(number % 3, prompt)
    return Request(
        request_id=f"r{number}", params=PARAMS, token_ids=ids, num_prompt_tokens=prompt, max_tokens=max_tokens, seed=number
    )


def result_of(output: SchedulerOutput, version: int) -> StepResult:
    drawn = {entry.request_id: 7 for entry in output.requests if entry.samples}
    if output.num_steps > 1:
        return SteadyResult(sampled={}, token_ids=drawn, weight_version=version)
    tokens = {name: SampledToken(token_id=token, logprob=0.0) for name, token in drawn.items()}
    return StepResult(sampled=tokens, weight_version=version)


def play(core: EngineCore, seed: int, *, most: int) -> tuple[list[SchedulerOutput], list[tuple[str, int]], int]:
    """Single outputs in order, (request, number of tokens) in order of their ends, and outputs that there really were.

    What happens, happens before a given step: arrivals, aborts, preemptions, new versions, other roles.
    """
    rng, outputs, ends, real, step, number = random.Random(seed), [], [], 0, 0, 0
    events = sorted((rng.randrange(150), rng.random(), number) for number in range(30))
    while events or core.has_unfinished():
        while events and events[0][0] <= step:
            _, what, number = events.pop(0)
            happen(core, what, number)
        room = events[0][0] - step if events else most
        steady = core.steady_steps() if isinstance(core, SteadyCore) else 1
        count = max(1, min(steady, room, most, 1 + number % 40))
        output = core.schedule(0.0, count) if count > 1 else core.schedule(0.0)
        for update in core.finish(output, result_of(output, core.weight_version), 0.0):
            if update.completion is not None:
                ends.append((update.request_id, len(update.completion.token_ids)))
        for export in core.take_offers():
            core.finish_export(export.transfer_id, ok=False)
        core.check_integrity()
        outputs += output.expand()
        real, step = real + 1, step + count
    return outputs, ends, real


def happen(core: EngineCore, what: float, number: int) -> None:
    if what < 0.7:
        core.add_request(request(number, 1 + number * 7 % 30, 1 + number * 11 % 60))
    elif what < 0.8 and core.scheduler.running:
        core.preempt(next(reversed(core.scheduler.running)))
    elif what < 0.87 and core.requests:
        core.abort(next(iter(core.requests)))
    elif what < 0.94:
        core.set_weight_version(core.weight_version + 1, "keep" if number % 2 else "recompute")
    else:
        core.switch_role((Role.PREFILL, Role.DECODE, Role.MIXED)[number % 3])


@pytest.mark.parametrize("seed", range(40))
def test_runs_expand_to_the_single_steps(seed: int) -> None:
    settings = replace(SETTINGS, num_blocks=(40, 26)[seed % 2])
    single, steady = EngineCore(settings), SteadyCore(settings)
    outputs, ends, count = play(single, seed, most=60)
    found, found_ends, real = play(steady, seed, most=60)
    assert found == outputs
    assert found_ends == ends
    assert real < 0.9 * count
    assert steady.stats() == single.stats()
    assert [entry.hash for entry in sorted(steady.blocks.cache.entries(), key=lambda one: one.hash)] == [
        entry.hash for entry in sorted(single.blocks.cache.entries(), key=lambda one: one.hash)
    ]


def core_with(prompt: int = 5, max_tokens: int = 20, params: SamplingParams = PARAMS, **fields: object) -> SteadyCore:
    core = SteadyCore(SETTINGS)
    core.add_request(replace(request(0, prompt, max_tokens), params=params, **fields))
    output = core.schedule(0.0)
    core.finish(output, result_of(output, 0), 0.0)
    return core


def test_a_run_ends_with_its_first_end() -> None:
    core = core_with(max_tokens=20)
    assert core.steady_steps() == 19
    core.add_request(request(1, 3, 6))
    assert core.steady_steps() == 0
    output = core.schedule(0.0)
    core.finish(output, result_of(output, 0), 0.0)
    assert core.steady_steps() == 5
    with pytest.raises(ValueError, match="num_steps=6: only 5"):
        core.schedule(0.0, 6)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": frozenset({3})},
        {"params": SamplingParams(ignore_eos=False), "eos_token_ids": frozenset({3})},
        {"params": SamplingParams(ignore_eos=True, logprobs=2)},
    ],
)
def test_what_only_tokens_tell_is_run_step_by_step(fields: dict) -> None:
    assert core_with(**fields).steady_steps() == 0


def test_a_run_stops_before_somebody_must_give_way() -> None:
    core = SteadyCore(replace(SETTINGS, num_blocks=4))
    for number in range(2):
        core.add_request(request(number, 3, 20))
    output = core.schedule(0.0)
    core.finish(output, result_of(output, 0), 0.0)
    assert core.steady_steps() == 5  # to 8 tokens each, the room of two blocks
    output = core.schedule(0.0, 5)
    core.finish(output, result_of(output, 0), 0.0)
    core.check_integrity()
    assert core.steady_steps() == 0


def test_a_run_does_not_pass_a_deadline() -> None:
    core = core_with()
    assert core.soonest_deadline() == float("inf")
    core.reserve(request(9, 4, 4), 5.0)
    assert core.soonest_deadline() == 5.0 + SETTINGS.transfer_deadline
