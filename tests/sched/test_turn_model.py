"""The queueing model: exact where it can be worked out by hand, close to a simulation of the same pool elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from sched_cases import COSTS, LOAD, busy_load

from pearl.sched.cost_profile import HandOverCost
from pearl.sched.published import qwen3_30b_a3b_h800
from pearl.sched.turn_model import TurnModel, lost_prefixes


def simulated_turn(decoders: int, prefillers: int, count: int, seed: int = 0) -> float:
    """Seconds per turn of `count` trajectories with exponential environments: what LOAD and COSTS mean, event by event.

    A worker with prompts to compute shares its time among them and decodes nothing meanwhile; decode steps get longer with
    every sequence. Nothing is lost from caches.
    """
    draw = random.Random(seed)
    new = LOAD.appended + (LOAD.generated if prefillers else 0)
    work = float(COSTS.prefill_s(new, LOAD.context))
    state = [["env", draw.expovariate(1 / LOAD.env_s), 0] for _ in range(count)]
    now, turns, began = 0.0, 0, 0.0
    while turns < count * 60:
        if turns >= count * 10 and not began:
            began, skipped = now, turns
        prompts = [0] * max(decoders, prefillers)
        decoding = [0] * decoders
        for what, _, place in state:
            if what == "prefill":
                prompts[place] += 1
            elif what == "decode":
                decoding[place] += 1
        speeds = []
        for what, _, place in state:
            if what == "env":
                speeds.append(1.0)
            elif what == "prefill":
                speeds.append(1 / prompts[place])
            else:
                stopped = not prefillers and prompts[place]
                speeds.append(0.0 if stopped else 1 / float(COSTS.decode_step_s(decoding[place], LOAD.context)))
        step = min(left / speed for (_, left, _), speed in zip(state, speeds, strict=True) if speed)
        now += step
        for number, (row, speed) in enumerate(zip(state, speeds, strict=True)):
            row[1] -= step * speed
            if row[1] > 1e-12:
                continue
            if row[0] == "env":
                row[:] = ["prefill", work, number % (prefillers or decoders)]
            elif row[0] == "prefill":
                row[:] = ["decode", LOAD.generated, number % decoders]
            else:
                row[:] = ["env", draw.expovariate(1 / LOAD.env_s), 0]
                turns += 1
    return (now - began) * count / (turns - skipped)


@pytest.mark.parametrize(
    ("decoders", "prefillers", "count"), [(2, 0, 4), (2, 0, 24), (3, 0, 9), (2, 1, 8), (3, 2, 30), (2, 2, 24), (4, 1, 48)]
)
def test_it_agrees_with_a_simulation(decoders: int, prefillers: int, count: int) -> None:
    turn = TurnModel(LOAD, replace(COSTS, kv_capacity_tokens=1e9)).solve(decoders, prefillers, count).turn
    assert float(turn) == pytest.approx(simulated_turn(decoders, prefillers, count), rel=0.05)


def test_a_single_trajectory_waits_for_nobody() -> None:
    turn = TurnModel(LOAD, COSTS).solve(1, 0, 1)
    alone = LOAD.env_s + COSTS.prefill_s(400, 4000) + 100 * COSTS.decode_step_s(1.0, 4000)
    assert float(turn.turn) == pytest.approx(float(alone), rel=0.02) and float(turn.queue) == 0
    split = TurnModel(LOAD, COSTS).solve(1, 1, 1)
    sent = 400 * 1e5 / 1e10
    alone = LOAD.env_s + COSTS.prefill_s(500, 4000) + 100 * COSTS.decode_step_s(1.0, 4000) + sent
    assert float(split.turn) == pytest.approx(float(alone), rel=0.02) and float(split.transfer) == pytest.approx(sent)


def test_hand_overs_are_work_of_both_ends() -> None:
    paid = replace(COSTS, hand_over=HandOverCost(give_s=0.2, take_s=0.3))
    free, alone = (float(TurnModel(LOAD, costs).solve(1, 1, 1).turn) for costs in (COSTS, paid))
    assert alone == pytest.approx(free + 0.5, rel=0.01)
    busy = [float(TurnModel(LOAD, costs).solve(8, 1, 90).turn) for costs in (COSTS, paid)]
    assert busy[1] - busy[0] == pytest.approx(90 * 0.2, rel=0.05), "the prefill worker sets the pace"
    mixed = [float(TurnModel(LOAD, costs).solve(2, 0, 20).turn) for costs in (COSTS, paid)]
    assert mixed[0] == mixed[1], "where nothing is handed over it costs nothing"


def test_kv_that_the_target_copies_keeps_those_who_decode_there_waiting() -> None:
    slow = replace(COSTS, transfer_bytes_per_s=1e8, kv_capacity_tokens=1e9)  # 0.4 s, and nothing is lost from caches
    copied = replace(slow, hand_over=HandOverCost(copies=True))
    sent, work = (TurnModel(LOAD, costs).solve(1, 8, 40) for costs in (slow, copied))
    assert float(sent.transfer) == pytest.approx(0.4) and float(work.transfer) == 0
    assert float(work.turn) > float(sent.turn) + 1.0
    one = [float(TurnModel(LOAD, costs).solve(1, 1, 1).turn) for costs in (slow, copied)]
    assert one[0] == pytest.approx(one[1], rel=0.01)


def test_what_is_busy_all_the_time_sets_the_pace() -> None:
    """Bottleneck law: a turn is no shorter than the work of all trajectories on the busiest workers, and about that if many."""
    load = replace(LOAD, appended=4000.0, context=1000.0, longest=6000.0)
    turn = TurnModel(load, COSTS).solve(8, 1, 60)
    work = 60 * float(COSTS.prefill_s(4100, 1000))
    assert float(turn.turn) == pytest.approx(work, rel=0.02) and float(turn.turn) >= work * 0.999
    assert float(turn.prefill_busy) == pytest.approx(1.0, rel=0.02)


def test_terms_add_up_to_the_turn() -> None:
    for shape in ((4, 0, 64), (3, 2, 64), (1, 1, 64), (5, 3, 7)):
        turn = TurnModel(busy_load(), qwen3_30b_a3b_h800()).solve(*shape)
        parts = turn.wait + turn.prefill + turn.transfer + turn.decode + turn.interference + turn.queue
        assert float(parts) == pytest.approx(float(turn.turn), rel=2e-3)


def test_more_workers_never_make_a_turn_longer() -> None:
    model = TurnModel(busy_load(), qwen3_30b_a3b_h800())
    workers = np.arange(1, 40)
    assert (np.diff(model.solve(workers, 0, 64).turn) < 1e-9).all()
    assert (np.diff(model.solve(workers, 4, 64).turn) < 1e-9).all()
    assert (np.diff(model.solve(4, workers, 64).turn) < 1e-9).all()


def test_memory_that_is_short_costs() -> None:
    """With contexts for 25 trajectories per worker, 24 that are at different points lose nothing, 60 compute most again, and
    running ones queue for room."""
    ample = TurnModel(LOAD, replace(COSTS, kv_capacity_tokens=1e9))
    mingled, together = TurnModel(replace(LOAD, barrier=False), COSTS), TurnModel(LOAD, COSTS)
    assert float(mingled.solve(1, 0, 24).turn) == float(ample.solve(1, 0, 24).turn) < float(together.solve(1, 0, 24).turn)
    for short in (mingled, together):
        lost = short.solve(1, 0, 60)
        assert float(lost.miss_share) > 0.5 and float(lost.turn) > 1.3 * float(ample.solve(1, 0, 60).turn)
    tiny = TurnModel(LOAD, replace(COSTS, kv_capacity_tokens=9_000.0)).solve(1, 4, 60)
    assert float(tiny.queue) > 0.5 * float(tiny.turn) and float(tiny.decode_batch) == pytest.approx(0.97 * 9 / 4)
    prefix = together.solve(10, 1, 60)
    assert float(prefix.miss_share) == pytest.approx(float(lost_prefixes(60 / (0.97 * 25), True))), "the prefiller's, too"


def test_what_a_split_pool_lost_is_computed_and_sent_where_its_turns_are() -> None:
    """Sixty contexts where there is room for 0.97 * 25: a prefiller's, of which there is one, or each of two decoders'."""
    gone = {"decoders": float(lost_prefixes(30 / (0.97 * 25), True)), "prefiller": float(lost_prefixes(60 / (0.97 * 25), True))}
    ample = replace(COSTS, kv_capacity_tokens=1e12)
    for share in (0.0, 0.25, 1.0):
        load = replace(LOAD, local_share=share, local_appended=50.0)
        short, roomy = TurnModel(load, COSTS).solve(2, 1, 60), TurnModel(load, ample).solve(2, 1, 60)
        missed = share * gone["decoders"] + (1 - share) * gone["prefiller"]
        assert float(short.miss_share) == pytest.approx(missed) and float(roomy.miss_share) < 1e-6
        whole_s = gone["decoders"] * 4000 * 1e5 / 1e10
        moved_s = float(short.transfer - roomy.transfer)
        assert moved_s == pytest.approx(whole_s, abs=1e-5), "of all turns: those of decoders are given back"


def test_an_append_whose_prefix_is_lost_is_a_prefiller_s() -> None:
    """One trajectory: half of its turns have 4,000 tokens computed apart and sent, instead of 50 where they decode. Where many
    decode, none of them waits for that."""
    load = replace(LOAD, local_share=1.0, local_appended=50.0)
    costs = replace(COSTS, kv_capacity_tokens=1e12, transfer_base_s=0.3)
    there, gone = (TurnModel(replace(load, miss_share=share), costs) for share in (0.0, 0.5))
    whole_s = float(costs.prefill_s(4000, 0)) + 0.3 + 4000 * 1e5 / 1e10 - float(costs.prefill_beside_s(50, 4000))
    alone = float(gone.solve(1, 1, 1).turn - there.solve(1, 1, 1).turn)
    assert alone == pytest.approx(0.5 * whole_s, rel=0.03)
    crowd = gone.solve(1, 40, 40)
    assert 0 < float(crowd.interference) < 0.6 * float(there.solve(1, 40, 40).interference)
    mixed = [float(model.solve(4, 0, 4).turn) for model in (there, gone)]
    assert mixed[1] - mixed[0] == pytest.approx(0.5 * (4000 * 1e-4 + 1e-9 * 4000 * 2000), rel=0.05), "nothing is given back"


def test_the_host_s_time_is_paid_by_steps_and_not_by_prompts_beside_decodes() -> None:
    """Nearly all of a trajectory is decoding: of 24 others some always do. A worker then makes as many steps as its sequences
    have tokens, and host time is paid for these; it is one more where a trajectory is alone, or nobody decodes."""
    load, host_s = replace(LOAD, env_s=0.0), 0.05
    costs = replace(COSTS, kv_capacity_tokens=1e12)
    for pool, steps in (((1, 0, 24), 100), ((1, 0, 1), 101), ((1, 1, 1), 101)):
        free, paid = (TurnModel(load, replace(costs, step_overhead_s=s)).solve(*pool).turn for s in (0.0, host_s))
        assert float(paid - free) == pytest.approx(steps * host_s, rel=5e-3), pool


@pytest.mark.parametrize("barrier", [True, False])
def test_a_cache_that_is_a_little_too_small_loses_more_than_does_not_fit(barrier: bool) -> None:
    loads = np.linspace(0.1, 3.0, 30)
    lost = lost_prefixes(loads, barrier)
    assert (np.diff(lost) >= 0).all() and lost[0] == 0 and lost[-1] < 1
    assert (lost[loads > 1.05] > 1 - 1 / loads[loads > 1.05]).all()


@pytest.mark.parametrize("barrier", [True, False])
def test_a_cache_that_keeps_loses_what_does_not_fit(barrier: bool) -> None:
    """Of contexts that are all as long, 1 - 0.8 / load; of those that grow, the mean of that over their lengths. Never more
    than by age."""
    loads, grown = np.linspace(0.1, 3.0, 30), np.linspace(0.25, 1.75, 20_001) if barrier else np.ones(1)
    lost = lost_prefixes(loads, barrier, "keep")
    expected = [np.maximum(0.0, grown - 0.8 / load).mean() for load in loads]
    assert lost == pytest.approx(np.minimum(expected, lost_prefixes(loads, barrier)), abs=1e-4)
    assert lost[0] == 0 and lost[-1] < 0.9 * lost_prefixes(loads, barrier)[-1]


def test_prefill_workers_alone_profit_from_a_cache_that_keeps() -> None:
    by_age, keep = TurnModel(LOAD, COSTS), TurnModel(replace(LOAD, eviction="keep"), COSTS)
    assert float(keep.solve(1, 0, 60).turn) == float(by_age.solve(1, 0, 60).turn)
    assert float(keep.solve(10, 1, 60).miss_share) < 0.9 * float(by_age.solve(10, 1, 60).miss_share)
    with pytest.raises(ValueError, match="workload.eviction='fifo': must be one of lru, keep"):
        replace(LOAD, eviction="fifo")


def test_misses_and_short_appends_are_priced() -> None:
    model = TurnModel(LOAD, COSTS)
    missing = TurnModel(replace(LOAD, miss_share=0.5), COSTS)
    assert float(missing.solve(4, 0, 4).turn - model.solve(4, 0, 4).turn) == pytest.approx(
        0.5 * COSTS.prefill_s(4000, 0), rel=0.05
    )
    local = TurnModel(replace(LOAD, local_share=1.0, local_appended=50.0), COSTS)
    assert float(local.solve(4, 1, 60).turn) < float(model.solve(4, 1, 60).turn), "an overloaded prefill worker is relieved"
    assert float(local.solve(4, 1, 60).interference) > 0 == float(model.solve(4, 1, 60).interference)
    waits = TurnModel(replace(LOAD, local_share=0.75), replace(COSTS, transfer_base_s=2.0))
    assert float(waits.solve(4, 1, 4).transfer) == pytest.approx(0.25 * (2.0 + 400 * 1e5 / 1e10)), "nothing is sent else"


def test_steps_that_are_not_captured_slow_down_who_decodes_beside_prompts() -> None:
    captured, launched = TurnModel(LOAD, COSTS), TurnModel(LOAD, replace(COSTS, eager=4.0))
    mixed = float(captured.solve(4, 0, 40).interference), float(launched.solve(4, 0, 40).interference)
    step = float(COSTS.decode.seconds(float(captured.solve(4, 0, 40).decode_batch), LOAD.context))
    assert mixed[1] > mixed[0] + 3 * step, "each turn meets more than one other's prompt"
    assert float(launched.solve(4, 0, 1).interference) == 0.0 == float(launched.solve(4, 4, 40).interference)


def test_a_hybrid_gives_both_parts_turns_of_equal_length() -> None:
    model = TurnModel(busy_load(), qwen3_30b_a3b_h800())
    for shape in ((3, 1, 2), (5, 3, 8), (2, 2, 1)):
        turn = model.solve_beside(*([[float(count)]] for count in shape), np.array([64.0]))
        beside = model.solve(shape[2], 0, 64 - turn.trajectories)
        alone = model.solve(shape[0], shape[1], turn.trajectories)
        assert float(turn.turn.item()) == pytest.approx(max(beside.turn.item(), alone.turn.item()), rel=0.01)
        assert beside.turn.item() == pytest.approx(alone.turn.item(), rel=0.1)
