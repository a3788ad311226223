"""Faults that other RL systems had in their control plane, each as a small job without torch: real environment processes,
a real controller, and ranks that only answer."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import FakeRanks, InlinePool

from pearl.config import Config, resolve, to_json
from pearl.metrics.jsonl import read_jsonl
from pearl.overrides import override
from pearl.protocol import StepReport, TrainStep
from pearl.rl import controller as controller_module
from pearl.rl.control import ControlThread
from pearl.rl.controller import Controller
from pearl.rl.envs import registry
from pearl.rl.fresh_model import write_model_folder
from pearl.rl.layout import JobLayout
from pearl.rl.recipes.quickstart import recipe

ROOT = Path(__file__).resolve().parents[2]
ODD = """
import os, time

class Odd:
    '''A two-turn game; the first process that plays turn two of seed 3 sleeps for ever.'''
    def __init__(self, marker, always_raise=False):
        self.marker, self.always_raise = marker, always_raise
    def reset(self, seed):
        if self.always_raise: raise OSError("the game server is down")
        self.seed, self.turn = seed, 0
        return "go", {}
    def step(self, action):
        self.turn += 1
        if self.seed == 3 and self.turn == 2:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                time.sleep(1000)
            except FileExistsError:
                pass
        return "on", 0.5, self.turn == 2, False, {"success": True}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = recipe()
    environment = registry.make(config.env.name, **registry.constructor_options(config.env))
    return write_model_folder(tmp_path_factory.mktemp("policy") / "policy", config.model, environment.words)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that choose the game above."""
    module = f"odd_{time.monotonic_ns()}"
    (tmp_path / f"{module}.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    return [f"env.name={module}:Odd", f"env.options={json.dumps({'marker': str(tmp_path / 'marker')})}", "env.timeout_s=1.5"]


def small(world: int, *settings: str) -> Config:
    common = ["rollout_batch_size=8", "group_size=4", "optimizer.mini_batch_size=4", "warmup.steps=0", "max_steps=2"]
    return resolve(override(recipe(), [*common, *settings]), world)


def play(run: Path, folder: Path, config: Config, world: int = 2, **options: Any) -> SimpleNamespace:
    """A whole job; how it ended, what the ranks were told, and the seconds it took."""
    layout = JobLayout.of(config, world)
    controller = Controller(config, run, folder, layout, None)
    ranks = FakeRanks(controller.server.address, layout, folder, **options)
    ranks.start()
    began = time.monotonic()
    controller.prepare()
    stop = controller.work()
    controller.end(stop)
    seconds = time.monotonic() - began
    ranks.close()
    assert ranks.error is None
    return SimpleNamespace(stop=stop, ranks=ranks, seconds=seconds, training=controller.training)


@pytest.mark.parametrize("retries", [0, 1])
def test_one_hung_environment_of_64_costs_one_trajectory(
    tmp_path: Path, folder: Path, odd: list[str], retries: int
) -> None:
    sizes = ["rollout_batch_size=64", "group_size=8", "optimizer.mini_batch_size=64", "max_steps=1", f"env.retries={retries}"]
    job = play(tmp_path, folder, small(2, *sizes, *odd))
    assert job.stop.exit_code == 0, job.stop
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    [step] = [command for command in job.ranks.commands[0] if isinstance(command, TrainStep)]
    assert len(step.sequences) == (64 if retries else 63)
    assert (row["dropped"], row["env_timeouts"]) == (1, 1)
    assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"]
    [failed] = [record for record in read_jsonl(tmp_path / "trajectories.jsonl") if record["outcome"] == "failed"]
    assert failed["env_seed"] == 3
    assert "timeout_s=1.5" in failed["error"]


def test_an_environment_that_always_fails_ends_the_job_with_its_own_words(
    tmp_path: Path, folder: Path, odd: list[str]
) -> None:
    options = json.dumps({"marker": str(tmp_path / "marker"), "always_raise": True})
    job = play(tmp_path, folder, small(2, *odd, f"env.options={options}"))
    assert job.stop.exit_code == 1
    assert "OSError: the game server is down" in job.stop.reason
    assert job.seconds < 20


def test_staleness_is_exactly_what_was_allowed_with_a_slow_trainer(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "EnvironmentPool", InlinePool)
    lags: dict[int, set[int]] = {}
    for bound in (0, 1, 2):
        run = tmp_path / str(bound)
        run.mkdir()
        job = play(run, folder, small(3, "max_steps=6", f"max_staleness={bound}"), world=3, train_s=0.15)
        assert job.stop.exit_code == 0
        steps = [command for command in job.ranks.commands[0] if isinstance(command, TrainStep)]
        lags[bound] = {
            step.weight_version - version
            for step in steps
            for sequence in step.sequences
            for version, mask in zip(sequence.weight_versions, sequence.loss_mask, strict=True)
            if mask
        }
        rows = read_jsonl(run / "metrics.jsonl")
        assert all(row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"] for row in rows)
        assert rows[-1]["in_flight"] == 0
    assert {bound: max(seen) for bound, seen in lags.items()} == {0: 0, 1: 1, 2: 2}
    assert lags[0] == {0}


class Subprocess:
    """The controller as rank 0 starts it, in a process of its own."""

    def __init__(self, run: Path, folder: Path, config: Config, world: int) -> None:
        (run / "config.json").write_text(to_json(config))
        reader, writer = os.pipe()
        outlet = os.open(os.devnull, os.O_WRONLY)
        arguments = [str(run), str(folder), *map(str, (writer, outlet, world, os.getpid())), ""]
        self.log = (run / "controller.txt").open("wb")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pearl.rl.controller", *arguments],
            pass_fds=(writer, outlet), stdout=self.log, stderr=self.log, env=environment, cwd=ROOT,
        )  # fmt: skip
        os.close(writer)
        os.close(outlet)
        with os.fdopen(reader) as end:
            self.address = end.readline().strip()
        assert self.address, (run / "controller.txt").read_text()


@pytest.fixture
def start(tmp_path: Path, folder: Path) -> Iterator[Callable[..., Any]]:
    started: list[Subprocess] = []

    def build(config: Config, world: int = 2) -> Subprocess:
        started.append(Subprocess(tmp_path, folder, config, world))
        return started[-1]

    yield build
    for one in started:
        one.process.kill()
        one.process.wait()
        one.log.close()


def test_rows_of_finished_steps_survive_a_killed_controller(
    tmp_path: Path, folder: Path, start: Callable[..., Subprocess]
) -> None:
    config = small(2, "max_steps=100000")
    controller = start(config)
    reported = threading.Event()

    def react(rank: int, message: Any) -> None:
        if isinstance(message, StepReport) and message.metrics["step"] == 3:
            controller.process.send_signal(signal.SIGKILL)
            reported.set()

    ranks = FakeRanks(controller.address, JobLayout.of(config, 2), folder, react=react)
    ranks.start()
    try:
        assert reported.wait(30), (tmp_path / "controller.txt").read_text()
        assert controller.process.wait(10) == -signal.SIGKILL
    finally:
        ranks.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows[:3]] == [1, 2, 3]
    assert len(rows) <= 6
    assert len(read_jsonl(tmp_path / "trajectories.jsonl")) >= 24


def test_a_rank_learns_of_a_controller_that_was_killed(
    tmp_path: Path, start: Callable[..., Subprocess]
) -> None:
    config = small(2)
    controller = start(config)
    limits = dataclasses.replace(config.timeouts, silence_s=30.0, stop_s=30.0)
    thread = ControlThread(controller.address, 0, limits, lambda message: None, controller.process)
    thread.start()
    try:
        controller.process.kill()
        began = time.monotonic()
        messages: list[Any] = []
        while not messages and time.monotonic() - began < 10:
            messages = thread.take(0.1)
        assert [message.reason for message in messages] == ["the controller ended with exit code -9"]
    finally:
        thread.close()


@pytest.mark.parametrize("arguments", [["run", "--prin"], ["run", "--res", "x"], ["run", "--nprocs", "2"], ["ru"]])
def test_shortened_and_unknown_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    from pearl.rl.command_line import main

    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert arguments[-1 if len(arguments) == 1 else 1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "world", "words"),
    [
        (["rollout_batch_size=10", "group_size=4"], 2, ["rollout_batch_size=10", "8 or 12"]),
        (["rollout_batch_size=16", "optimizer.mini_batch_size=5"], 2, ["mini_batch_size=5", "1, 2, 4, 8, 16"]),
        (["cluster.train_ranks=3"], 3, ["cluster.train_ranks=3", "at most 2"]),
        (["cluster.train_ranks=2"], 1, ["cluster.train_ranks=2", "at most 1"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_valid_ones(settings: list[str], world: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        resolve(override(recipe(), settings), world)
    for word in words:
        assert word in str(refusal.value)


def test_correction_is_on_by_default_where_staleness_is() -> None:
    assert resolve(recipe(), 1).max_staleness == 0
    asynchronous = resolve(recipe(), 2)
    assert asynchronous.max_staleness == 1
    assert asynchronous.algorithm.importance_cap >= 1
