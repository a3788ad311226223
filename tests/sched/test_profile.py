"""What is learned from telemetry, and what is not believed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_cases import COSTS, LOAD

from pearl.sched.cost_profile import (
    ChangeCost,
    CostKey,
    DecodeCost,
    HandOverCost,
    PrefillCost,
    find_profile,
    read_profiles,
    write_profiles,
)
from pearl.sched.fit import Average, StepFit
from pearl.sched.profile import DecodeSample, PrefillSample, RuntimeProfile, StepTelemetry, TransferSample
from pearl.sched.published import qwen3_8b_h800, qwen3_30b_a3b_h800, software_engineering
from pearl.sched.workload import QUANTILES, Workload


def test_averages_weigh_by_count_and_forget() -> None:
    average = Average(value=10.0, keep=0.5, prior=4.0)
    assert average.confidence == 0
    assert average.observe(20.0, 4) and average.value == pytest.approx(15.0)
    assert average.observe(30.0, 4) and average.value == pytest.approx((15 * 4 + 30 * 4) / 8)
    for _ in range(30):
        average.observe(3.0, 8)
    assert average.value == pytest.approx(3.0) and average.confidence > 0.7 and average.deviation < 0.1
    steady = average.cautious
    average.observe(9.0, 8)
    assert average.cautious > steady + 3


def test_one_absurd_value_moves_an_average_by_a_factor_at_most() -> None:
    average = Average(value=1.0, prior=4.0)
    assert average.observe(1e8, 1) and average.value < 3
    for _ in range(20):
        average.observe(1e8, 10)
    assert average.value == pytest.approx(1e8, rel=0.05), "a real change is followed in a few steps"


ABSURD = st.one_of(st.floats(), st.none())


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(ABSURD, min_size=13, max_size=13), count=st.integers(-3, 10**6), quantiles=st.lists(st.floats(), max_size=6)
)
def test_no_telemetry_breaks_the_estimates(values, count, quantiles) -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    names = (
        "turns",
        "appended",
        "generated",
        "context",
        "longest",
        "env_s",
        "miss_share",
        "decode_share",
    )
    given_values = dict(zip(names, values, strict=False))
    a, b, c, d = (1.0 if value is None else value for value in values[8:12])
    samples = (DecodeSample(batch=a, context=b, seconds=c, count=d), DecodeSample(batch=b, context=c, seconds=d, count=a))
    prompts = (PrefillSample(new=a, prefix=b, seconds=c, count=d), PrefillSample(new=b, prefix=a, seconds=d, beside=c))
    moves = (TransferSample(tokens=a, seconds=c, count=d),)
    telemetry = StepTelemetry(
        trajectories=count,
        turn_quantiles=tuple(quantiles),
        decode=samples,
        prefill=prompts,
        transfer=moves,
        **given_values,
    )
    for _ in range(3):
        profile.observe(telemetry)
        profile.observe_residual(a, split=False)
        profile.observe_residual(b, split=True)
        profile.observe_change("borrow", b)
    workload, costs = profile.workload(), profile.costs()  # their own checks refuse what is not finite or negative
    assert 0.25 <= workload.calibration <= 4 and 0.25 <= workload.split_calibration <= 4
    assert math.isfinite(float(costs.decode_step_s(8.0, workload.context)))
    assert costs.decode_step_s(8.0, 4000) > 0 and costs.prefill_s(100, 0) > 0 and profile.change_s("borrow", 1) >= 0


def test_predictions_are_corrected_by_what_pools_of_their_kind_took() -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    profile.observe_residual(1.6, split=False)
    mixed = profile.workload().calibration
    assert 1 < mixed < 1.6 and profile.workload().split_calibration == mixed, "nobody has seen a split"
    for _ in range(8):
        profile.observe_residual(0.9 / profile.workload().split_calibration, split=True)
    assert profile.workload().calibration == mixed and profile.workload().split_calibration == pytest.approx(0.9, rel=0.05)


def test_a_batch_counts_for_the_share_of_its_time_that_it_was_in_pools_of_a_kind() -> None:
    whole, half = RuntimeProfile(COSTS, LOAD), RuntimeProfile(COSTS, LOAD)
    whole.observe_residual(1.6, split=False)
    half.observe_residual(1.6, split=False, share=0.5)
    assert (whole.workload().calibration, half.workload().calibration) == pytest.approx((1 + 0.6 / 3, 1 + 0.6 * 0.5 / 2.5))


def test_a_correction_does_not_grow_while_it_is_not_used() -> None:
    """Predictions are multiplied by no more than 4, however long batches take that need more."""
    profile = RuntimeProfile(COSTS, LOAD)
    for _ in range(15):
        profile.observe_residual(8 / profile.workload().calibration, split=False)
    assert profile.workload().calibration == 4 and profile.calibration[False].value < 9
    for _ in range(12):
        profile.observe_residual(1 / profile.workload().calibration, split=False)
    assert profile.workload().calibration == pytest.approx(1, rel=0.2)


ONE_DECODE, ONE_PROMPT = DecodeSample(batch=8.0, context=4000.0, seconds=0.02), PrefillSample(new=9, prefix=40, seconds=0.02)


@pytest.mark.parametrize("telemetry", [
    *({"decode": (replace(ONE_DECODE, count=count),)} for count in (1.8e306, 1e13, 1e-300, 0.5)),
    *({"decode": (replace(ONE_DECODE, batch=batch),)} for batch in (1e-300, 1e6)),
    *({"decode": (replace(ONE_DECODE, seconds=seconds),)} for seconds in (5e-324, 1e-12, 601.0)),
    *({"prefill": (replace(ONE_PROMPT, beside=beside), ONE_PROMPT)} for beside in (math.nan, -1.0, 1.8e306)),
    *({"transfer": (TransferSample(tokens=64, seconds=0.1, count=count),)} for count in (1.8e306, 1e-300)),
])  # fmt: skip
def test_what_cannot_be_a_time_or_a_count_is_refused(telemetry) -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    for _ in range(3):
        profile.observe(StepTelemetry(trajectories=4, **telemetry))
    [kind] = telemetry
    assert profile.rejected[kind] == 3
    if kind != "prefill":  # there one was sound
        assert profile.confidence()[kind] == 0
    assert all(math.isfinite(value) for value in profile.confidence().values())


def test_the_largest_counts_that_are_believed_do_not_break_the_sums() -> None:
    profile = RuntimeProfile(replace(COSTS, decode=DecodeCost(base_s=0.0), step_overhead_s=0.0), LOAD)  # steps without a price
    for seconds in (1e-9, 600.0, 1e-9, 600.0):
        profile.observe(
            StepTelemetry(
                trajectories=10**12, turns=5.0, decode=(replace(ONE_DECODE, seconds=seconds, count=1e12),),
                prefill=(replace(ONE_PROMPT, seconds=seconds, count=1e12, beside=1e5),),
            )
        )  # fmt: skip
    assert not profile.rejected.total() and math.isfinite(float(profile.costs().decode_step_s(8.0, 4000)))
    assert all(0 <= value <= 1 for value in profile.confidence().values())
    profile.observe(StepTelemetry(trajectories=10**400, turns=5.0))
    assert profile.rejected["turns"] == 1


def test_what_is_rejected_is_counted() -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    profile.observe(
        StepTelemetry(
            trajectories=4, turns=0.0, env_s=float("nan"), miss_share=1.5, turn_quantiles=(3.0, 2.0, 1.0, 1.0, 1.0),
            decode=(DecodeSample(batch=0, context=1, seconds=1), DecodeSample(batch=4, context=4000, seconds=0.014)),
        )
    )  # fmt: skip
    profile.observe_change("switch", -1.0)
    assert {name for name, count in profile.rejected.items() if count} == {
        "turns", "env_s", "miss_share", "turn_quantiles", "decode", "switch"
    }  # fmt: skip
    assert profile.workload().turns == LOAD.turns and profile.confidence()["turns"] == 0
    with pytest.raises(ValueError, match="'sleep': must be one of switch"):
        profile.observe_change("sleep", 1.0)


def test_a_new_load_is_followed_and_confidence_grows() -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    before = profile.confidence()["generated"]
    for _ in range(12):
        profile.observe(StepTelemetry(trajectories=64, generated=300.0, env_s=2.0, turn_quantiles=(0.5, 0.8, 1.2, 1.9, 2.5)))
    workload = profile.workload(batch=128)
    assert workload.generated == pytest.approx(300, rel=0.01) and workload.env_s == pytest.approx(2, rel=0.02)
    assert workload.batch == 128 and workload.turn_quantiles[-1] == pytest.approx(2.5, rel=0.02)
    assert before < 0.1 < 0.9 < profile.confidence()["generated"] and workload.appended == LOAD.appended


@pytest.mark.parametrize("costs", [qwen3_8b_h800(), qwen3_30b_a3b_h800(), COSTS], ids=["dense", "experts", "round"])
def test_step_times_of_another_machine_are_learned_from_a_wrong_profile(costs) -> None:
    """Twice as slow, with a dearer context: predictions where it was measured are right, elsewhere scaled in proportion."""
    keep = costs.decode.expert_keep
    truth = DecodeCost(
        base_s=2 * costs.decode.base_s, per_seq_s=2 * costs.decode.per_seq_s, per_context_s=3 * costs.decode.per_context_s,
        experts_s=2 * costs.decode.experts_s, expert_keep=keep,
    )  # fmt: skip
    prompt = PrefillCost(base_s=0.02, per_token_s=3e-5, per_pair_s=1e-9)
    profile = RuntimeProfile(costs, LOAD)
    draw = np.random.default_rng(0)
    for _ in range(8):
        decode = [
            DecodeSample(batch=n, context=c, seconds=float(truth.seconds(n, c)) * float(draw.uniform(0.95, 1.05)), count=50)
            for n in (1, 4, 16, 40) for c in (2000, 12_000)
        ]  # fmt: skip
        prefill = [
            PrefillSample(new=n, prefix=p, seconds=float(prompt.seconds(n, p)), count=50)
            for n in (100, 2000)
            for p in (0, 9000)
        ]
        profile.observe(StepTelemetry(trajectories=64, decode=tuple(decode), prefill=tuple(prefill)))
    learned = profile.costs()
    for batch, context in ((8, 4000), (40, 12_000), (1, 2000)):
        assert learned.decode_step_s(batch, context) == pytest.approx(float(truth.seconds(batch, context)), rel=0.06)
    assert learned.prefill_s(700, 3000) == pytest.approx(float(prompt.seconds(700, 3000)), rel=0.05)
    assert profile.confidence()["decode"] > 0.9


def test_one_operating_point_bends_nothing() -> None:
    """All measurements at one batch and context, 3 times as slow as expected: everything is 3 times as slow."""
    profile = RuntimeProfile(qwen3_8b_h800(), LOAD)
    prior = qwen3_8b_h800()
    seconds = 3 * float(prior.decode_step_s(12.0, 15_000))
    for _ in range(10):
        profile.observe(
            StepTelemetry(trajectories=64, decode=(DecodeSample(batch=12, context=15_000, seconds=seconds, count=500),))
        )
    learned = profile.costs()
    for batch, context in ((12, 15_000), (1, 15_000), (48, 4000)):
        assert learned.decode_step_s(batch, context) == pytest.approx(3 * float(prior.decode_step_s(batch, context)), rel=0.05)


def test_a_guessed_speed_is_replaced_by_the_first_measurement_however_far_it_lies() -> None:
    """600 times as slow as the guess, with one absurd sample among many."""
    seconds = 600 * float(COSTS.decode_step_s(12.0, 4000))
    absurd = DecodeSample(batch=8, context=4000, seconds=1e-6)
    samples = (DecodeSample(batch=12, context=4000, seconds=seconds, count=90), absurd)
    guess, known = (RuntimeProfile(COSTS, LOAD, guessed=guessed) for guessed in (True, False))
    for profile in (guess, known):
        profile.observe(StepTelemetry(trajectories=64, decode=samples))
    assert 0.5 * seconds < guess.costs().decode_step_s(12.0, 4000) < 1.1 * seconds
    assert known.costs().decode_step_s(12.0, 4000) < 0.1 * seconds, "what was measured before is not thrown away at once"


def test_what_prompts_cost_those_who_decode_beside_them_is_told_from_what_they_cost_alone() -> None:
    """Beside decodes a prompt has no start of its own: for a turn of 1,000 tokens 0.03 of 0.05 s."""
    load = replace(LOAD, appended=1000.0, first_prompt=0.0)
    profile = RuntimeProfile(replace(COSTS, mixing=0.5), load, guessed=True)
    assert profile.costs().mixing == 0.5, "nothing was measured yet"
    for _ in range(5):
        prompts = [
            PrefillSample(new=n, prefix=0.0, seconds=(0.0 if beside else 0.02) + 3e-5 * n, count=200, beside=beside)
            for n in (100.0, 1000.0, 4000.0)
            for beside in (0.0, 8.0)
        ]
        profile.observe(StepTelemetry(trajectories=64, prefill=tuple(prompts)))
    learned = profile.costs()
    assert float(learned.prefill_s(1000, 0)) == pytest.approx(0.05, rel=0.05)
    assert learned.mixing == pytest.approx(0.6, rel=0.08)


def test_decodes_that_take_longer_beside_prompts_are_learned() -> None:
    """Launched kernel by kernel they take 4 times as long as captured: mixed pools show it, whatever was assumed."""
    load, step_s = replace(LOAD, appended=1000.0, first_prompt=0.0), float(COSTS.decode.seconds(8.0, LOAD.context))
    profile = RuntimeProfile(COSTS, load, guessed=True)
    decode = tuple(
        DecodeSample(batch=n, context=LOAD.context, seconds=float(COSTS.decode.seconds(n, LOAD.context)), count=300)
        for n in (2.0, 8.0, 16.0)
    )
    prompts = tuple(
        PrefillSample(new=n, prefix=0.0, seconds=0.02 + 3e-5 * n + (3 * step_s if beside else 0.0), count=200, beside=beside)
        for n in (100.0, 1000.0, 4000.0)
        for beside in (0.0, 8.0)
    )
    for _ in range(4):
        profile.observe(StepTelemetry(trajectories=64, decode=decode, prefill=prompts))
    assert profile.costs().mixing == 1 and profile.costs().eager == pytest.approx(4.0, rel=0.1)


def test_what_a_hand_over_takes_is_learned() -> None:
    profile = RuntimeProfile(replace(COSTS, transfer_base_s=1e-2), LOAD, guessed=True)
    moves = tuple(TransferSample(tokens=n, seconds=0.04 + 1e-5 * n, count=50) for n in (500.0, 8000.0))
    for _ in range(3):
        profile.observe(StepTelemetry(trajectories=64, transfer=(*moves, TransferSample(tokens=-1, seconds=1.0))))
    costs = profile.costs()
    assert costs.transfer_base_s == pytest.approx(0.04, rel=0.15) and profile.rejected["transfer"] == 3
    assert costs.kv_bytes_per_token / costs.transfer_bytes_per_s == pytest.approx(1e-5, rel=0.15)


@pytest.mark.parametrize("copies", [False, True])
def test_what_the_target_s_host_spends_on_a_hand_over_is_not_counted_again(copies: bool) -> None:
    """Requests lost 0.04 s and 10 us per token; 0.03 s of these are the target's host taking them in, which has a price."""
    costs = replace(COSTS, transfer_base_s=1e-2, hand_over=HandOverCost(give_s=0.5, take_s=0.03, copies=copies))
    profile = RuntimeProfile(costs, LOAD, guessed=True)
    moves = tuple(TransferSample(tokens=n, seconds=0.04 + 1e-5 * n, count=500) for n in (500.0, 8000.0))
    for _ in range(3):
        profile.observe(StepTelemetry(trajectories=64, transfer=moves))
    learned = profile.costs()
    assert learned.transfer_base_s == pytest.approx(0.01, rel=0.1) and learned.hand_over.take_s == 0.03
    lost = float(learned.hand_over.take_s + learned.transfer_s(4000))
    assert lost == pytest.approx(0.08, rel=0.05), "together they are what was measured"
    profile.observe(StepTelemetry(trajectories=64, transfer=(TransferSample(tokens=500, seconds=0.02),)))
    assert profile.rejected["transfer"] == 0 and profile.costs().transfer_base_s > 0


def test_host_time_is_told_from_what_steps_compute() -> None:
    """On a machine twice as slow as the profile says, host time is twice as long; the profile's, until prompts say so too."""
    costs = replace(COSTS, step_overhead_s=0.02)
    profile = RuntimeProfile(costs, LOAD)
    assumed = profile.costs()
    assert (assumed.step_overhead_s, assumed.decode.base_s, assumed.prefill.base_s) == pytest.approx((0.02, 0.01, 0.01))
    batches = (2.0, 8.0, 32.0)
    decode = [DecodeSample(batch=n, context=4000.0, seconds=2 * costs.decode_step_s(n, 4000), count=5000) for n in batches]
    prompts = [PrefillSample(new=n, prefix=0.0, seconds=2 * float(costs.prefill_s(n, 0.0)), count=5000) for n in (100.0, 900.0)]
    profile.observe(StepTelemetry(trajectories=64, decode=tuple(decode)))
    assert profile.costs().step_overhead_s == pytest.approx(0.02)
    assert float(profile.costs().prefill_s(400, 4000)) == pytest.approx(float(costs.prefill_s(400, 4000)), rel=0.01)
    for _ in range(9):
        profile.observe(StepTelemetry(trajectories=64, decode=tuple(decode), prefill=tuple(prompts)))
    learned = profile.costs()
    assert learned.step_overhead_s == pytest.approx(0.04, rel=0.02)
    assert learned.decode_step_s(8.0, 4000) == pytest.approx(2 * costs.decode_step_s(8.0, 4000), rel=0.02)
    assert float(learned.prefill_s(400, 0)) == pytest.approx(2 * float(costs.prefill_s(400, 0)), rel=0.02)


def test_prompts_that_cost_no_host_time_beside_decodes_cost_all_else() -> None:
    """What is measured is what was assumed: 0.03 s of host, 0.02 s a start and 30 us per token, and beside decodes no host."""
    load = replace(LOAD, appended=1000.0, first_prompt=0.0)
    costs = replace(COSTS, step_overhead_s=0.03, prefill=PrefillCost(base_s=0.02, per_token_s=3e-5))
    profile = RuntimeProfile(costs, load)
    prompts = tuple(
        PrefillSample(new=n, prefix=0.0, seconds=0.02 + 3e-5 * n + (0.0 if beside else 0.03), count=200, beside=beside)
        for n in (100.0, 1000.0, 4000.0)
        for beside in (0.0, 8.0)
    )
    for _ in range(3):
        profile.observe(StepTelemetry(trajectories=64, prefill=prompts))
    learned = profile.costs()
    assert learned.mixing == pytest.approx(1.0, rel=0.02) and learned.eager == pytest.approx(1.0, abs=0.02)
    assert float(learned.prefill_s(1000, 0)) == pytest.approx(0.08, rel=0.02)
    assert float(learned.prefill_beside_s(1000, 0)) == pytest.approx(0.05, rel=0.03)


def test_the_range_of_what_was_measured_grows() -> None:
    profile = RuntimeProfile(replace(COSTS, max_batch=16.0, max_context=4096.0), LOAD)
    assert profile.costs().max_batch == 16
    profile.observe(StepTelemetry(trajectories=8, decode=(DecodeSample(batch=90, context=9000, seconds=0.1),)))
    assert (profile.costs().max_batch, profile.costs().max_context) == (90, 9000)


def test_costs_of_changes_are_learned() -> None:
    profile = RuntimeProfile(COSTS, LOAD)
    assert profile.change_s("borrow", 4) == pytest.approx(2.4) and profile.change_s("borrow", 0) == 0
    profile.observe_change("borrow", 4.8, workers=4)
    assert profile.change_s("borrow", 4) == pytest.approx(4.8) and profile.change_s("borrow", 1) == pytest.approx(4.2)
    assert float(profile.costs().borrow.seconds(4)) == pytest.approx(4.8)
    for _ in range(9):
        profile.observe_change("borrow", 4.8, workers=4)
    steady = profile.change_s("borrow", 4, cautious=True)
    profile.observe_change("borrow", 12.0, workers=4)
    assert profile.change_s("borrow", 4, cautious=True) > steady + 5
    free = RuntimeProfile(replace(COSTS, switch=ChangeCost()), LOAD)
    free.observe_change("switch", 0.25, workers=3)
    assert free.change_s("switch", 1) == pytest.approx(0.25)


def test_non_negative_fit_never_goes_below_zero() -> None:
    fit = StepFit([1.0, 0.1], [[1.0, 1.0], [1.0, 10.0]])
    fit.observe([[1.0, 1.0], [1.0, 10.0]], [2.0, 1.0], [1000.0, 1000.0])  # falls with size: no such cost exists
    assert (fit.coefficients >= 0).all() and fit.coefficients[1] == 0


def test_profiles_are_kept_in_files_by_their_key(tmp_path) -> None:
    path = tmp_path / "profiles.json"
    profiles = [qwen3_8b_h800(), COSTS]
    write_profiles(path, profiles)
    assert read_profiles(path) == profiles and find_profile(profiles, COSTS.key) == COSTS
    with pytest.raises(ValueError, match="H800/Qwen3-8B/tp2/sglang, paper/round"):
        find_profile(profiles, CostKey(gpu="H200", model="Qwen3-8B"))
    path.write_text(path.read_text().replace('"base_s": 0.01', '"base_s": -0.01'))
    with pytest.raises(ValueError, match=r"profiles\.json.*decode\.base_s=-0\.01"):
        read_profiles(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a file of cost profiles"):
        read_profiles(path)


def test_workloads_are_checked_and_segmented() -> None:
    assert LOAD.segments() == ((64, 20),)
    load = software_engineering()
    segments = load.segments()
    assert len(segments) == len(QUANTILES) and sum(alive * turns for alive, turns in segments) == pytest.approx(
        64 * 60, rel=0.01
    )
    assert [alive for alive, _ in segments] == sorted((alive for alive, _ in segments), reverse=True)
    assert Workload(
        batch=8, turns=5, generated=1, appended=1, context=9, longest=9, barrier=False, in_flight=16
    ).segments() == ((16, 2.5),)
    assert replace(LOAD, decode_share=0.5).theta == 1.0
    for wrong in ({"turns": 0.0}, {"miss_share": 1.2}, {"env_s": float("nan")}, {"turn_quantiles": (2.0, 1.0, 3.0, 4.0, 5.0)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(LOAD, **wrong)


def test_misses_for_lack_of_memory_are_not_counted_twice() -> None:
    profile = RuntimeProfile(COSTS, replace(LOAD, miss_share=0.2))
    for _ in range(10):
        profile.observe(StepTelemetry(trajectories=64, miss_share=1 - 0.8 * 0.5), lost_share=0.5)
    assert profile.workload().miss_share == pytest.approx(0.2)


def test_a_guessed_workload_is_forgotten_with_the_first_batch() -> None:
    profile = RuntimeProfile(COSTS, replace(LOAD, generated=500.0, turns=10.0), guessed=True)
    profile.observe(StepTelemetry(trajectories=16, generated=20.0, turns=3.0, in_flight=24.0))
    assert (profile.workload().generated, profile.workload().turns, profile.workload().in_flight) == (20.0, 3.0, 24.0)
    profile.observe(StepTelemetry(trajectories=16, generated=400.0))
    assert 20 < profile.workload().generated < 200, "from then on it is a mean"
