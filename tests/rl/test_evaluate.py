"""Evaluation of whole folders: the numbers, that a checkpoint is its policy, and the exit codes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from pearl import config as configuration
from pearl.config import ClusterOptions, Config, EngineConfig, EnvOptions, ModelOptions, RolloutOptions, resolve
from pearl.rl import fresh_model
from pearl.rl.envs.hi_lo import HiLo
from pearl.rl.evaluate import evaluate, main, subject_of, summary, table
from pearl.rl.training import EVAL_SEEDS
from pearl.rl.types import Trajectory, Turn

SIZES = ModelOptions(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
ENGINE = EngineConfig(dtype="float32", max_model_len=256, num_blocks=256, max_num_seqs=16)


FRAGILE = """
from pearl.rl.envs.hi_lo import HiLo


class Fragile(HiLo):
    def reset(self, seed):
        if seed % 3 == 0:
            raise OSError("no more numbers")
        return super().reset(seed)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a job leaves it: fresh policy, another one trained from it, and a checkpoint of the latter."""
    from pearl.rl.trainer import Trainer

    folder = tmp_path_factory.mktemp("evaluate") / "a-run"
    config = Config(
        recipe="test",
        model=SIZES,
        env=EnvOptions(name="hi_lo", max_turns=3),
        rollout=RolloutOptions(max_tokens=4),
        engine=ENGINE,
    )
    config = resolve(config, world=1)
    fresh_model.write_model_folder(folder / "initial_policy", SIZES, HiLo().words)
    trainer = Trainer(folder / "initial_policy", config)
    for parameter in trainer.decoder.parameters():
        parameter.data *= 1.7
    trainer.save(folder / "policy")
    checkpoint = folder / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    trainer.save_state(checkpoint / "trainer")
    (folder / "config.json").write_text(configuration.to_json(config))
    (folder / "metrics.jsonl").write_text('{"step": 3}\n')
    return folder


def played(path: Path) -> list[list[int]]:
    with subject_of(path) as subject:
        assert subject.config.env.name == "hi_lo" and subject.config.rollout.max_tokens == 4
        return [trajectory.token_ids for trajectory in evaluate(subject.config, range(EVAL_SEEDS, EVAL_SEEDS + 6), 0.5)]


def test_a_checkpoint_of_a_run_on_many_ranks_is_evaluated_on_one(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(run, folder)
    config = configuration.from_json((run / "config.json").read_bytes())
    wide = dataclasses.replace(config, chosen=(), max_staleness=1, cluster=ClusterOptions(train_ranks=2))
    (folder / "config.json").write_text(configuration.to_json(wide))
    assert played(folder / "checkpoints" / "step_000003") == played(run)


def test_a_checkpoint_plays_as_the_policy_that_was_exported_from_it(run: Path) -> None:
    policy = played(run)
    assert policy == played(run / "checkpoints" / "step_000003")
    assert len({tuple(ids) for ids in policy}) > 1


def test_a_run_is_evaluated_on_its_own_environment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--episodes", "5", "--seed", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["episodes"], told["failed"], told["env"], told["first_seed"]) == (5, 0, "hi_lo", EVAL_SEEDS + 2)
    assert told["policy"] == str(run / "policy") and 1 <= told["turns_mean"] <= 3 and 1 <= told["tokens_mean"] <= 12


def test_a_plain_folder_needs_an_environment(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run / "policy")
    assert main([folder]) == 2
    assert "name an environment" in capsys.readouterr().err
    assert main([folder, "hi_lo", "--episodes", "3", "--set", "env.max_turns=2", "--set", "rollout.max_tokens=4"]) == 0
    said = capsys.readouterr().out
    assert f"{folder} on hi_lo, seeds {EVAL_SEEDS} to {EVAL_SEEDS + 2}" in said and "turns        " in said
    assert "tasks        10 in all, the same as in training" in said


def test_where_nothing_is_the_runs_beside_it_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.with_name("nope"))]) == 2
    assert f"nope: no such directory (runs in {run.parent}: {run.name})\n" in capsys.readouterr().err
    assert main([str(run.parent)]) == 2
    assert f"is no run (runs in {run.parent}: {run.name}): name an environment" in capsys.readouterr().err
    assert main([str(run / "SmolLM2-135M-Instruct"), "hi_lo"]) == 2
    assert "no such directory; `python -m pearl.engine.smollm2 " in capsys.readouterr().err


def test_seed_is_an_offset_as_the_help_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "offset into the held-out seeds (default 0: begins with those that eval_steps uses)" in said


def test_of_a_task_for_every_seed_nothing_is_said() -> None:
    numbers = summary([], seconds=1.0)
    lines = [table("a", EnvOptions(name="sokoban"), range(2), numbers | {"tasks": count}) for count in (0, 8)]
    assert ["training" in said for said in lines] == [False, True]


def test_episodes_that_fail_are_told_and_are_exit_code_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile_numbers.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = [str(run), "fragile_numbers:Fragile", "--episodes", "6", "--json", "--set", "rollout.max_tokens=4"]
    assert main(argv) == 1
    told = capsys.readouterr()
    assert (json.loads(told.out)["failed"], json.loads(told.out)["episodes"]) == (2, 6) and "no more numbers" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi_lo", "--episodes", "0"], "--episodes must be >= 1"),
        (["hilo"], "did you mean 'hi_lo'"),
        (["hi_lo", "--set", "env.options.hgih=3"], "unknown option of hi_lo"),
        (["hi_lo", "--set", "engine.max_model_len=32"], "must be at least"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run / "policy"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_folder_without_a_policy_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "hi_lo"]) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(configuration.to_json(Config(recipe="x")))
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "without a policy yet" in capsys.readouterr().err


def test_the_numbers() -> None:
    def trajectory(success: bool, turns: int, *, outcome: str = "done") -> Trajectory:
        played = [Turn(text="x", num_sampled=2, info={"invalid": turn == 0}) for turn in range(turns)]
        made = Trajectory(trajectory_id="x", group_id=-1, env_seed=0, turns=played, success=success, reward=float(success))
        made.loss_mask, made.outcome = [0, 1, 1] * turns, outcome
        return made

    numbers = summary([trajectory(True, 1), trajectory(False, 3), trajectory(True, 9, outcome="failed")], 2.0)
    assert (numbers["episodes"], numbers["failed"], numbers["success_rate"], numbers["reward_mean"]) == (3, 1, 0.5, 0.5)
    assert (numbers["turns_mean"], numbers["tokens_mean"], numbers["invalid_rate"]) == (2.0, 4.0, 0.5)
    assert numbers["success_error"] == pytest.approx(0.125**0.5)
    nothing = summary([trajectory(True, 1, outcome="failed")], 1.0)
    assert nothing["success_rate"] is None and nothing["invalid_rate"] is None
