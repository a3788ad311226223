"""Steps become samples of what decodes and prompts cost; a simulated worker's are those that a live member tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sched_cases import COSTS
from sim_jobs import plans

from pearl.engine.request import ScheduledRequest, SchedulerOutput
from pearl.protocol import StepSums
from pearl.rl.token_report import TokenReport
from pearl.sched.sim.pricing import StepPrice, price, steady_price
from pearl.sched.sim.recorder import Recorder, step_sums
from pearl.sched.step_samples import StepSamples


def output(*entries: tuple[int, int]) -> SchedulerOutput:
    """A step of (start, tokens) per request."""
    rows = [ScheduledRequest(request_id=f"{at}", start=at, num_tokens=count, samples=True) for at, count in entries]
    return SchedulerOutput(step=0, requests=tuple(rows))


def told_live(prompts: int, decodes: int, computed: int, context: float, seconds: float) -> StepSums:
    """Of one such step, by the code that a member runs."""
    report, names = TokenReport(0.0), [f"old{number}" for number in range(decodes)]
    for name in names:
        report.taken_over(name, begun=True)
    said = {"token_ids": (1,), "logprobs": (0.0,), "weight_versions": (0,), "completion": None}
    names += [f"new{number}" for number in range(prompts)]
    batch, ended = report.add([SimpleNamespace(request_id=name, **said) for name in names])
    report.add_step(computed=computed, batch=batch, prompts=ended, context=context, seconds=seconds)
    [sums] = report.take(0.0)[1]
    return sums


def add(samples: StepSamples, cost: StepPrice, drawn: int, prompts: int = 0, steps: int = 1) -> None:
    sums = step_sums(cost, steps, drawn, prompts)
    assert sums is not None
    samples.add(sums)


def test_prompts_of_one_step_share_its_time() -> None:
    """Three prompts of 200 new tokens each on 1,000 cached ones, in a step of 0.01 + 600 * 1e-4 + 600 * 1100 * 1e-9 s."""
    samples = StepSamples()
    add(samples, price(output(*[(1000, 200)] * 3), COSTS), drawn=3, prompts=3)
    (), [prompt] = samples.take()
    assert (prompt.new, prompt.prefix, prompt.count, prompt.beside) == (200, 1000, 3, 0)
    assert prompt.seconds == pytest.approx((0.01 + 0.06 + 0.00066) / 3)
    assert samples.take() == ((), ())


def test_prompts_beside_decodes_are_told_with_what_decodes_do_not_explain() -> None:
    """Four decodes take 0.01 + 4 * (1e-4 + 1e-7 * 1000) s; with a prompt of 500 tokens 0.01 + 0.05 + 0.000125 s more."""
    samples = StepSamples()
    add(samples, steady_price(COSTS, 4, 4 * 1000, 1), drawn=4)
    add(samples, price(output(*[(999, 1)] * 4, (0, 500)), COSTS), drawn=5, prompts=1)
    [decode], [prompt] = samples.take()
    assert (decode.batch, decode.context, decode.count) == (4, 1000, 1) and decode.seconds == pytest.approx(0.0108)
    assert (prompt.new, prompt.count, prompt.beside) == (500, 1, 4) and prompt.seconds == pytest.approx(0.060125)


def test_steps_at_once_are_so_many_single_ones() -> None:
    samples = StepSamples()
    add(samples, steady_price(COSTS, 4, 4 * 1000, 50), drawn=200, steps=50)
    [decode], () = samples.take()
    assert (decode.batch, decode.count) == (4, 50)
    assert decode.seconds == pytest.approx(0.0104 + 4 * 1e-7 * 1024.5), "each is one token longer than the one before"


def test_the_share_that_decodes_is_of_the_time_that_trajectories_are_under_way() -> None:
    """Fifty steps of four decodes, then four decodes beside a prompt: by so many seconds of four."""
    samples = StepSamples()
    run, both = steady_price(COSTS, 4, 4 * 1000, 50), price(output(*[(999, 1)] * 4, (0, 500)), COSTS)
    add(samples, run, drawn=200, steps=50)
    add(samples, both, drawn=5, prompts=1)
    add(samples, price(output((0, 500)), COSTS), drawn=1, prompts=1)
    assert samples.decode_share(100.0) == pytest.approx(4 * (run.seconds + both.seconds) / 100.0)
    assert samples.decode_share(1e-3) == 1.0, "times of two clocks may not fit"
    assert samples.decode_share(0.0) is None
    samples.take()
    assert samples.decode_share(100.0) is None


def test_pieces_of_a_prompt_are_told_with_the_step_that_gives_its_token() -> None:
    """Of two workers at a time: 600 tokens in pieces of 256, and 200 at once."""
    recorder = Recorder()
    pieces = [price(output((start, min(256, 600 - start))), COSTS) for start in (0, 256, 512)]
    for place, cost in enumerate(pieces):
        recorder.stepped("w0", cost, 1, 0, drawn=place == 2, prompts=place == 2)
        if not place:
            recorder.stepped("w1", price(output((0, 200)), COSTS), 1, 0, drawn=1, prompts=1)
    long, short = sorted(recorder.telemetry([next(plans())], 0.0).prefill, key=lambda one: -one.new)
    assert (long.new, long.count, short.new, short.count) == (600, 1, 200, 1)
    assert long.seconds == pytest.approx(sum(cost.seconds for cost in pieces))


@pytest.mark.parametrize(
    ("entries", "prompts", "decodes"),
    [
        ([(1000, 200)] * 3, 3, 0),
        ([(299, 1)] * 5, 0, 5),
        ([(299, 1)] * 5 + [(100, 200)] * 2, 2, 5),
        ([(299, 1)] * 5 + [(100, 200)] * 2, 0, 5),  # there is more to come of both prompts
        ([(299, 1), (100, 200)], 2, 0),  # all but one token of a prompt was cached
    ],
)
def test_a_simulated_worker_tells_of_a_step_what_a_live_one_tells(
    entries: list[tuple[int, int]], prompts: int, decodes: int
) -> None:
    """Requests of 300 tokens, or 1,200: of these the pool says how many they hold on average."""
    cost = price(output(*entries), COSTS)
    context = sum(at + count for at, count in entries) / len(entries)
    live = told_live(prompts, decodes, sum(count for _, count in entries), context, cost.seconds)
    mine = step_sums(cost, 1, prompts + decodes, prompts)
    assert mine is not None
    assert (mine.prefill, mine.count, mine.size, mine.decodes, mine.prompts) == (
        live.prefill, live.count, live.size, live.decodes, live.prompts,
    )  # fmt: skip
    assert mine.context == pytest.approx(live.context, rel=1e-9) and mine.seconds == live.seconds


def test_what_says_nothing_teaches_nothing() -> None:
    samples, empty = StepSamples(), {"prefill": False, "context": 0.0, "decodes": 0, "seconds": 1.0}
    samples.add(StepSums(count=0, size=4, prompts=1, **empty))
    samples.add(StepSums(count=1, size=0, prompts=1, **empty))
    samples.add(StepSums(count=1, size=9, prompts=0, **(empty | {"prefill": True})))
    assert samples.take() == ((), ())
