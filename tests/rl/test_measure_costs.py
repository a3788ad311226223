"""A real engine is measured on a small grid: what is written is a profile that tells its steps' times."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config import EngineConfig, ModelOptions
from pearl.engine.request import ScheduledRequest, SchedulerOutput
from pearl.rl import measure_costs
from pearl.rl.measure_costs import Grid, fitted, fresh_model, hand_over_of
from pearl.rl.serving_mix import StepSample
from pearl.sched.cost_profile import CostKey, CostProfile, read_profiles
from pearl.sched.sim.pricing import price

SMALL = Grid(batches=(1, 4, 16), first=((8, 32), (32, 128)), appended=16, generated=12, pause=4, steps=10, rounds=1)
STEP = (4e-4, 1.5e-5, 6e-8)
PROMPTS = (1e-4, 5e-5, 3e-6, 8e-9)


def sample(batch: int, context: int, *prompts: tuple[int, int], more: float = 0.0, **counts: int) -> StepSample:
    """A step that takes what STEP and PROMPTS say of it; `prompts` of (new, prefix), `more` seconds on top."""
    new, pairs = sum(n for n, _ in prompts), sum(n * (p + n / 2) for n, p in prompts)
    seconds = STEP[0] + STEP[1] * batch + STEP[2] * context + more
    if prompts:
        seconds += PROMPTS[0] + PROMPTS[1] * len(prompts) + PROMPTS[2] * new + PROMPTS[3] * pairs
    return StepSample(seconds=seconds, batch=batch, context=context, prompts=len(prompts), new=new, pairs=pairs, **counts)


SAMPLES = [
    sample(n, n * c, *prompts)
    for n, c in ((0, 0), (1, 40), (4, 200), (16, 60), (64, 300))
    for prompts in ((), ((30, 0),), ((200, 0),), ((20, 64), (90, 16)), ((5, 300),), ((40, 0), (7, 160), (33, 32)))
    if n or prompts
]


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    found = fitted(SAMPLES)
    assert (found.step_overhead_s, found.decode.per_seq_s, found.decode.per_context_s) == pytest.approx(STEP, rel=1e-3)
    prompt = found.prefill
    assert (prompt.base_s, prompt.per_prompt_s, prompt.per_token_s, prompt.per_pair_s) == pytest.approx(PROMPTS, rel=1e-2)
    assert found.decode.base_s == 0.0 and found.error < 1e-3


def test_steps_are_priced_as_they_were_fitted() -> None:
    """A step that decodes and computes prompts costs the sum of both and the step's own time once."""
    found = fitted(SAMPLES)
    costs = CostProfile(
        key=CostKey(gpu="x", model="x"),
        decode=found.decode,
        prefill=found.prefill,
        step_overhead_s=found.step_overhead_s,
        kv_bytes_per_token=1.0,
        kv_capacity_tokens=1.0,
        transfer_bytes_per_s=1.0,
    )
    entries = [(99, 1), (39, 1), (64, 20), (0, 90)]
    rows = [ScheduledRequest(request_id=f"{at}", start=at, num_tokens=count, samples=True) for at, count in entries]
    told = price(SchedulerOutput(step=0, requests=tuple(rows)), costs).seconds
    assert told == pytest.approx(sample(2, 140, (20, 64), (90, 0)).seconds, rel=1e-3)
    assert told == pytest.approx(found.seconds(sample(2, 140, (20, 64), (90, 0))), rel=1e-9)


def test_what_hand_overs_add_is_found_at_both_ends() -> None:
    steps = fitted(SAMPLES)
    given = [sample(0, 0, *[(40, 0)] * n, more=2e-4 * n, given=n) for n in (1, 2, 5)]
    moved = ((0, 0), (1, 50), (3, 90))
    taken = [sample(n, 90 * n, more=3e-4 * k + 2e-6 * t, taken=k, came=t) for n in (1, 9) for k, t in moved]
    give, take, per_token = hand_over_of(given, taken, steps)
    assert (give, take, per_token) == pytest.approx((2e-4, 3e-4, 2e-6), rel=0.02)


@pytest.mark.parametrize("side_by_side", [1, 2])
def test_an_engine_is_measured(side_by_side: int) -> None:
    config = EngineConfig(
        model=fresh_model(ModelOptions()), dtype="float32", load_format="dummy", num_blocks=512, max_model_len=SMALL.longest
    )
    profile, error = measure_costs.measure(config, "tiny", "here", SMALL, side_by_side=side_by_side)
    assert str(profile.key) == "here/tiny/tp1/cpu" or profile.key.kernels == "reference"
    assert profile.kv_capacity_tokens == 512 * 16 and profile.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    one, many = (float(profile.decode_step_s(n, 100.0)) for n in (1.0, 16.0))
    assert 1e-6 < one <= many < 1.0, "more sequences never take less time, and no step of a tiny model takes a second"
    assert 0 < profile.switch.fixed_s < 1 and profile.prepare.fixed_s > 0 and profile.transfer_bytes_per_s > 1e3
    assert profile.hand_over.copies and profile.transfer_base_s == 0.0, "both engines are in this process"
    assert 0 <= profile.hand_over.give_s < 1 and 0 <= profile.hand_over.take_s < 1 and error >= 0


def test_the_command_writes_a_profile_and_replaces_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_costs, "Grid", lambda: SMALL)
    out = tmp_path / "costs.json"
    for name in ("a", "b", "a"):
        assert measure_costs.main(["--out", str(out), "--gpu", name, "--blocks", "176"]) == 0, "the least that is taken"
    assert sorted(profile.key.gpu for profile in read_profiles(out)) == ["a", "b"]
    assert all(profile.key.model == "quickstart" for profile in read_profiles(out))


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure_costs.main([str(tmp_path), "--out", str(tmp_path / "costs.json")])
    assert ended.value.code == 2 and "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "valid"),
    [("--side-by-side", "0", ">= 1"), ("--side-by-side", "-2", ">= 1"), ("--blocks", "175", ">= 176")],
)
def test_too_few_engines_or_blocks_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, value: str, valid: str
) -> None:
    """Sixteen requests of up to 170 tokens need eleven blocks of 16 tokens each."""
    monkeypatch.setattr(measure_costs, "Grid", lambda: SMALL)
    with pytest.raises(SystemExit) as ended:
        measure_costs.main(["--out", str(tmp_path / "costs.json"), option, value])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"{option}={value}: must be {valid}" in said and "Traceback" not in said
    assert not (tmp_path / "costs.json").exists()
