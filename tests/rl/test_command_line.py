"""From a command line to a job: what is taken from where, and what a resumed run chooses anew."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pearl import config as configuration
from pearl.overrides import override
from pearl.rl import preflight
from pearl.rl.buffer import Buffer
from pearl.rl.checkpoint_folder import CheckpointFolder
from pearl.rl.command_line import PROGRAMS, Job, main, parser, planned, rank_arguments
from pearl.rl.controller_state import capture
from pearl.rl.recipes.quickstart import recipe


def plan(*arguments: str, world: int) -> Job:
    return planned(parser("test").parse_args(list(arguments)), world)


def make_run(run: Path, *settings: str, world: int) -> Path:
    """A run of so many ranks with a checkpoint after step 2."""
    run.mkdir()
    config = configuration.resolve(override(recipe(), list(settings)), world)
    (run / "config.json").write_text(configuration.to_json(config))
    folder = CheckpointFolder(run)
    folder.begin(2)
    folder.commit(2, capture(Buffer(), step=2, weight_version=2, started=0, successes=[0.5, 0.5], counters={}))
    return run


def test_a_resumed_run_chooses_anew_for_its_ranks_what_nobody_set(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "optimizer.lr=0.5", world=1)
    job = plan("--resume", str(run), world=8)
    assert (job.config.max_staleness, job.config.cluster.train_ranks, job.layout.train_ranks) == (1, 2, 2)
    assert job.config.optimizer.lr == 0.5
    assert job.resume is not None and job.resume.state.step == 2
    assert (job.resume.config.max_staleness, job.resume.config.cluster.train_ranks) == (0, 1)


def test_a_resumed_run_keeps_what_was_set_and_takes_what_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "cluster.train_ranks=1", world=8)
    job = plan("--resume", str(run), world=8)
    assert (job.config.max_staleness, job.layout.train_ranks) == (1, 1)
    job = plan("--resume", str(run), "--set", "max_staleness=3", "--set", "cluster.train_ranks=none", world=8)
    assert (job.config.max_staleness, job.layout.train_ranks) == (3, 2)


def test_fewer_ranks_than_trained_before_are_enough_unless_it_was_set(tmp_path: Path) -> None:
    assert plan("--resume", str(make_run(tmp_path / "a", world=8)), world=2).layout.train_ranks == 1
    with pytest.raises(ValueError, match=r"cluster.train_ranks=2: of 2 ranks at most 1 can train"):
        plan("--resume", str(make_run(tmp_path / "b", "cluster.train_ranks=2", world=8)), world=2)


def test_a_recipe_beside_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave the recipe out"):
        plan("quickstart", "--resume", str(tmp_path), world=1)


def test_ranks_get_the_same_command_line() -> None:
    arguments = ["quickstart", "--set", "seed=1", "--set", "env.options={}"]
    assert rank_arguments(parser("test").parse_args(arguments)) == arguments
    assert rank_arguments(parser("test").parse_args(["--resume", "runs/a"])) == ["--resume", "runs/a"]


def test_what_is_wrong_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run", "--nproc", "0"], ["run", "nothing"], ["run", "--set", "seed"]):
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("pearl run: error: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("evaluate runs/a", "'evaluate' is no command: type python -m pearl.rl.evaluate RUN_OR_MODEL"),
        ("pearl.sched.sim", "type python -m pearl.sched.sim"),
        ("report runs/a", "type python -m pearl.rl.report RUN or python -m pearl.engine.kernels.triton.report"),
        ("quickstart", "'quickstart' is no command: type pearl run quickstart"),
        ("train quickstart --set seed=1", "type pearl run quickstart"),
        ("train", "type pearl run, or pearl alone"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_one_that_is(
    typed: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(typed.split())
    said = capsys.readouterr().err
    assert said.startswith("pearl: error: ") and said.endswith("\n") and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "ending"),
    [
        ("quickstart --seed 1", "--seed 1; settings are given so: --set seed=1"),
        ("--seed 1 quickstart", "; settings are given so: --set seed=1"),
        ("--max-steps=5 --env.name hi_lo", "; settings are given so: --set max_steps=5, --set env.name=hi_lo"),
        ("--kl_coef --print", "; settings are given so: --set algorithm.kl_coef=VALUE"),
        ("--nonsense 1 2", "unrecognized arguments: --nonsense 2"),
    ],
)
def test_an_option_with_the_name_of_a_setting_is_answered_with_it(
    typed: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *typed.split()])
    assert capsys.readouterr().err.endswith(f"{ending}\n")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_a_callback_swallows_is_heard(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Python prints and forgets what is raised while it drops an object, as it does all the time during imports."""

    class Callback:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # the handler runs here at the latest

    def check(*_: object, **__: object) -> None:
        Callback()

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the job was started"))
    before = signal.getsignal(signal.SIGINT)
    assert main(["run"]) == 130
    assert "interrupted before the start" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


STARTED_BY_OTHERS = {
    "pearl", "pearl.engine.worker", "pearl.rl.availability", "pearl.rl.controller", "pearl.rl.launch", "pearl.rl.launcher",
    "pearl.rl.plain_launcher", "pearl.rl.envs.host", "pearl.rl.envs.run_tests", "pearl.rl.envs.sandbox_runner",
}  # fmt: skip


def test_the_help_names_every_program_that_a_user_starts(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    started = [path for path in (root / "pearl").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__main__") for path in started}
    assert modules == STARTED_BY_OTHERS | {use.split()[0] for use in PROGRAMS}
    assert main([]) == 2
    said = capsys.readouterr().out
    assert all(use in said and what in said for use, what in PROGRAMS.items())
