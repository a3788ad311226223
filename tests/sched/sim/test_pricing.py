"""Prices against the formulae by hand; steady runs against their single steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.engine.request import ScheduledRequest, SchedulerOutput
from pearl.sched.published import qwen3_8b_h800, qwen3_30b_a3b_h800
from pearl.sched.sim.pricing import price, steady_s, steady_steps

DENSE, EXPERTS = qwen3_8b_h800(), qwen3_30b_a3b_h800()


def output(*entries: tuple[int, int], steps: int = 1) -> SchedulerOutput:
    rows = (
        ScheduledRequest(request_id=f"r{number}", start=start, num_tokens=count, samples=True)
        for number, (start, count) in enumerate(entries)
    )
    return SchedulerOutput(step=0, requests=tuple(rows), num_steps=steps)


def test_decode_step_costs_what_the_profile_says() -> None:
    found = price(output((999, 1), (2999, 1)), DENSE)
    assert found.seconds == pytest.approx(4.18e-3 + 2 * 3.3e-6 + 2.38e-8 * 2 * 2000 + 2e-3)
    assert (found.batch, found.context, found.new, found.prefill_s) == (2, 2000, 0, 0.0)


def test_experts_are_read_once_per_step() -> None:
    found = price(output((99, 1), (99, 1), (99, 1)), EXPERTS)
    assert found.seconds == pytest.approx(2.83e-3 + 1.64e-8 * 300 + 9.32e-3 * (1 - (15 / 16) ** 3) + 2e-3)


def test_prefill_costs_tokens_and_pairs() -> None:
    found = price(output((10_000, 600)), DENSE)
    assert found.seconds == pytest.approx(4.02e-3 + 600 * 1.227e-5 + 4.31e-10 * 600 * 10_300 + 2e-3)
    assert found.seconds == pytest.approx(float(DENSE.prefill_s(600, 10_000)))
    assert (found.new, found.chunks, found.prefix, found.batch) == (600, 1, 10_000, 0)


def test_several_chunks_share_a_base() -> None:
    one, other, both = (price(output(*entries), DENSE) for entries in (((0, 500),), ((700, 300),), ((0, 500), (700, 300))))
    assert both.prefill_s == pytest.approx(one.prefill_s + other.prefill_s - DENSE.prefill.base_s)
    assert both.prefix == pytest.approx(300 * 700 / 800)


def test_a_prompt_in_pieces_pays_once_for_being_one() -> None:
    """Three pieces of 200 tokens pay a start and a step's host time each, and what a prompt costs once; so do two prompts
    of which one has more to come."""
    costs = replace(DENSE, prefill=replace(DENSE.prefill, per_prompt_s=0.1))
    starts = (0, 200, 400)

    def entry(start: int, name: str = "r") -> ScheduledRequest:
        return ScheduledRequest(request_id=name, start=start, num_tokens=200, samples=start == starts[-1])

    pieces = [price(SchedulerOutput(step=0, requests=(entry(start),)), costs).seconds for start in starts]
    every_step = DENSE.prefill.base_s + costs.step_overhead_s
    assert sum(pieces) == pytest.approx(float(costs.prefill_s(600, 0)) + 2 * every_step)
    both = price(SchedulerOutput(step=0, requests=(entry(400), entry(0, "other"))), costs)
    assert both.seconds == pytest.approx(pieces[0] + pieces[2] - every_step)


@pytest.mark.parametrize(("mixing", "share"), [(1.0, 1.0), (0.25, 0.25), (0.0, 0.0)])
def test_mixed_batches_both_ways(mixing: float, share: float) -> None:
    costs = replace(DENSE, mixing=mixing, eager=1.0)
    decode, prefill = price(output((999, 1)), costs).decode_s, price(output((0, 4000)), costs).prefill_s
    both = price(output((999, 1), (0, 4000)), costs)
    assert prefill > decode > 0
    assert both.seconds == pytest.approx(prefill + share * decode + costs.step_overhead_s)


def test_decodes_beside_prompts_are_launched_one_by_one() -> None:
    costs = replace(DENSE, eager=3.0)
    decode, prefill = price(output((999, 1)), costs), price(output((0, 4000)), costs)
    both = price(output((999, 1), (0, 4000)), costs)
    assert both.seconds == pytest.approx(prefill.seconds + 3 * decode.decode_s)
    assert decode.seconds == price(output((999, 1)), replace(DENSE, eager=1.0)).seconds
    with pytest.raises(ValueError, match="profile.eager=0.5: must be >= 1"):
        replace(DENSE, eager=0.5)


def test_nothing_costs_nothing() -> None:
    assert price(output(), DENSE).seconds == 0.0


@given(
    starts=st.lists(st.integers(1, 30_000), min_size=1, max_size=40),
    steps=st.integers(1, 300),
    experts=st.booleans(),
)
def test_steady_run_costs_what_its_steps_cost(starts: list[int], steps: int, experts: bool) -> None:
    costs = EXPERTS if experts else DENSE
    whole = output(*((start, 1) for start in starts), steps=steps)
    single = [price(one, costs).seconds for one in whole.expand()]
    assert len(single) == steps
    assert price(whole, costs).seconds == pytest.approx(sum(single), rel=1e-9)
    tokens = sum(starts) + len(starts)
    for passed in (0.0, single[0] / 2, sum(single[: steps // 2]) + single[-1] / 3, sum(single) * 0.999):
        begun = steady_steps(costs, len(starts), tokens, passed)
        assert begun == 1 or steady_s(costs, len(starts), tokens, begun - 1) <= passed
        assert passed < steady_s(costs, len(starts), tokens, begun)


def test_steady_run_has_no_prefills() -> None:
    with pytest.raises(ValueError, match="num_steps=3"):
        price(output((0, 5), steps=3), DENSE)
