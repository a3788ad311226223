"""A real engine is measured on a small grid: what is written is a profile that tells its steps' times."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config import EngineConfig, ModelOptions
from pearl.rl import measure_costs
from pearl.rl.measure_costs import Grid, Measured, fitted, fresh_model, mixing_of
from pearl.sched.cost_profile import read_profiles

SMALL = Grid(batches=(1, 4, 16), contexts=(32, 160), new=(16, 64, 128), prefixes=(0, 64), steps=6, rounds=1)


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    decode = [(n, c, 1e-3 + 2e-5 * n + 3e-8 * n * c) for n in (1.0, 4.0, 16.0) for c in (32.0, 512.0)]
    shapes = [(k, n, p) for k in (1.0, 4.0) for n in (16.0, 64.0, 256.0) for p in (0.0, 128.0)]
    prefill = [(k, n, p, 2e-3 + k * (3e-4 + 4e-6 * n + 5e-9 * n * (p + n / 2))) for k, n, p in shapes]
    cost, prompt, error = fitted(Measured(decode=tuple(decode), prefill=tuple(prefill)))
    assert (cost.base_s, cost.per_seq_s, cost.per_context_s) == pytest.approx((1e-3, 2e-5, 3e-8), rel=1e-4)
    found = (prompt.base_s, prompt.per_prompt_s, prompt.per_token_s, prompt.per_pair_s)
    assert found == pytest.approx((2e-3, 3e-4, 4e-6, 5e-9), rel=1e-3)
    assert error < 1e-4
    both = tuple((8.0, 100.0, n, 1e-3 * 0.5 + float(prompt.seconds(n, 0.0))) for n in (64.0, 256.0))
    share = mixing_of(Measured(decode=(), prefill=(), mixed=both), cost, prompt)
    assert share == pytest.approx(0.5e-3 / float(cost.seconds(8.0, 100.0)), rel=1e-3)
    assert mixing_of(Measured(decode=(), prefill=()), cost, prompt) == 1.0, "nothing known: all of it"


def test_an_engine_is_measured() -> None:
    config = EngineConfig(
        model=fresh_model(ModelOptions()), dtype="float32", load_format="dummy", num_blocks=512, max_model_len=SMALL.longest
    )
    profile, error = measure_costs.measure(config, "tiny", "here", SMALL)
    assert str(profile.key) == "here/tiny/tp1/cpu" or profile.key.kernels == "reference"
    assert profile.kv_capacity_tokens == 512 * 16 and profile.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    one, many = (float(profile.decode_step_s(n, 100.0)) for n in (1.0, 16.0))
    assert 1e-6 < one <= many < 1.0, "more sequences never take less time, and no step of a tiny model takes a second"
    assert 0 < profile.switch.fixed_s < 1 and profile.prepare.fixed_s > 0 and profile.transfer_bytes_per_s > 1e3
    assert error >= 0


def test_the_command_writes_a_profile_and_replaces_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_costs, "Grid", lambda: SMALL)
    out = tmp_path / "costs.json"
    for name in ("a", "b", "a"):
        assert measure_costs.main(["--out", str(out), "--gpu", name, "--blocks", "512"]) == 0
    assert sorted(profile.key.gpu for profile in read_profiles(out)) == ["a", "b"]
    assert all(profile.key.model == "quickstart" for profile in read_profiles(out))


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure_costs.main([str(tmp_path), "--out", str(tmp_path / "costs.json")])
    assert ended.value.code == 2 and "config.json" in capsys.readouterr().err
