"""Recipes: what each asks for is there, fits, and can be looked at anywhere; the large ones run in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_cases import python

from pearl.config import resolve
from pearl.metrics.jsonl import read_jsonl
from pearl.rl import preflight
from pearl.rl.command_line import main
from pearl.rl.envs import registry as environments
from pearl.rl.recipes import registry

FRESH = [name for name in registry.RECIPES if registry.load(name).model.path is None]


@pytest.mark.parametrize("name", registry.RECIPES)
def test_its_environment_takes_its_options_and_whole_groups_fill_a_batch(name: str) -> None:
    config = resolve(registry.load(name), world=8)
    environments.check(config.env.name, environments.constructor_options(config.env))
    preflight.check(config, machine=False)
    assert config.rollout_batch_size % config.group_size == 0 and config.recipe == name


@pytest.mark.parametrize("name", FRESH)
def test_whole_episodes_of_a_fresh_policy_fit(name: str) -> None:
    assert preflight.check_prompt(resolve(registry.load(name), world=1)) == ""


@pytest.mark.parametrize("name", registry.RECIPES)
def test_it_can_be_printed_where_its_model_is_not(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", name, "--print"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["recipe"] == name and told.err == ""


def test_a_wrong_setting_is_refused_in_print_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "qwen3_8b_swe", "--print", "--set", "env.options.task=x"]) == 2
    assert "unknown option of coding" in capsys.readouterr().err


def test_a_missing_model_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "qwen3_8b_swe"]) == 2
    said = capsys.readouterr().err
    assert "model.path='models/Qwen3-8B'" in said
    assert "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B` brings it" in said
    assert main(["run", "qwen3_8b_swe", "--set", "model.path=models/mine"]) == 2
    assert "hf download" not in capsys.readouterr().err
    assert main(["run", "smollm2_hilo"]) == 2
    assert "`python -m pearl.engine.smollm2 models/SmolLM2-135M-Instruct` brings it" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in registry.RECIPES if name.startswith("qwen")])
def test_a_model_of_the_hub_has_its_name_there(name: str) -> None:
    path = registry.load(name).model.path
    assert path is not None and registry.hub_name(name, path) == f"Qwen/{Path(path).name}"
    others = ((name, "models/mine"), ("mine", path), ("quickstart", path))
    assert [registry.hub_name(*other) for other in others] == ["", "", ""]


def test_they_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.RECIPES)
    [hilo] = [line for line in lines if line.startswith("smollm2_hilo")]
    assert hilo.endswith("learns to guess a number.") and "halves" not in hilo, "it steps, as its page says"
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.slow
def test_the_paper_setting_runs_in_small(tmp_path: Path) -> None:
    small = ["model.path=none", "model.max_position=4096", "engine.max_model_len=4096", "engine.dtype=float32"]
    small += ["rollout_batch_size=8", "group_size=4", "optimizer.mini_batch_size=8", "optimizer.micro_batch_tokens=8192"]
    small += ["rollout.max_tokens=24", "env.max_turns=2", "env.workers=1", "max_steps=2", "save_steps=1", "eval_steps=2"]
    small += ["eval_episodes=4", f"output_dir={tmp_path}"]
    result = python("-m", "pearl", "run", "qwen3_8b_swe", *(part for value in small for part in ("--set", value)))
    assert result.returncode == 0, result.stdout + result.stderr
    [run] = tmp_path.iterdir()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["failed_trajectories"] for row in rows] == [0, 0] and rows[-1]["eval_success_rate"] == 0.0
    assert rows[-1]["turns_mean"] == 2.0 and (run / "best").is_dir()
