"""Whole jobs of several ranks under torchrun: they end, the books add up, and the bound on staleness is held and used."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pearl.metrics.jsonl import read_jsonl
from pearl.metrics.trace import overlap_seconds, read_trace
from pearl.rl.checkpoint_folder import CheckpointFolder, load
from pearl.rl.process import is_alive

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["rollout_batch_size=16", "group_size=4", "optimizer.mini_batch_size=8", "warmup.steps=3", "warmup.episodes=4"]
UNEVEN = ["rollout_batch_size=12", "optimizer.mini_batch_size=1"]
"""Updates of one trajectory, so that one of two training ranks has nothing to do in each of them."""
EVALUATED = ["eval_steps=2", "eval_episodes=6"]
JOBS = {
    "one, in turns": (1, ["max_steps=2", "max_staleness=0"]),
    "two, synchronous": (2, ["max_steps=4", "max_staleness=0", "save_steps=2", "trace=true"]),
    "two": (2, ["max_steps=8", "save_steps=4", "trace=true"]),
    "three": (3, ["max_steps=3", "max_staleness=2"]),
    "four": (4, ["max_steps=3", "trace=true"]),
    "four, two training": (4, ["max_steps=4", "cluster.train_ranks=2", *UNEVEN, *EVALUATED, "trace=true"]),
}
SLOW = ["three", "four"]
MARK = "PEARL_TEST_JOB"
MANY = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name, (world, _) in JOBS.items() if world > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A job that has ended: what it printed, its run directory, and the settings it was started with."""

    output: str
    run: Path
    steps: int
    batch: int
    staleness: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run / "metrics.jsonl")

    @property
    def episodes(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run / "trajectories.jsonl")

    def overlap(self) -> float:
        """Seconds in which rank 0 trained and rank 1 made tokens."""
        events = read_trace(self.run / "trace.json")
        return overlap_seconds(events, "rank0/commands", "TrainStep", "rank1/engine", "engine steps")

    def seconds_of(self, track: str, name: str) -> float:
        """How long the spans of one name took in all, by the trace."""
        spans = [event for event in read_trace(self.run / "trace.json") if event["ph"] == "X"]
        return sum(event["dur"] for event in spans if (event["cat"], event["name"]) == (track, name)) / 1e6


def environment(mark: str = "") -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", MARK: mark}


def torchrun(world: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", *arguments]


def settings(root: Path, *extra: str) -> list[str]:
    return [part for value in [*SMALL, f"output_dir={root}", *extra] for part in ("--set", value)]


def marked(mark: str) -> list[int]:
    """Processes that still run of those started with this mark in their environment, however they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def run_job(log: Path, world: int, *arguments: str) -> str:
    """A whole job to its good end; its output."""
    mark = str(log)
    command = torchrun(world, "-m", "pearl.rl.launch", *arguments)
    with log.open("w") as output:
        job = subprocess.Popen(command, cwd=ROOT, env=environment(mark), stdout=output, stderr=output)
        try:
            assert len(marked(mark)) >= 1
            code = job.wait(180)
        finally:
            job.kill()
    text = log.read_text()
    assert code == 0, text
    assert marked(mark) == []
    return text


def play(root: Path, world: int, extra: list[str]) -> Played:
    text = run_job(root.parent / f"{root.name}.txt", world, "quickstart", *settings(root, *extra))
    values = dict(setting.split("=") for setting in extra)
    [run] = root.iterdir()
    default = 0 if world == 1 else 1
    return Played(
        output=text,
        run=run,
        steps=int(values["max_steps"]),
        batch=int(values.get("rollout_batch_size", 16)),
        staleness=int(values.get("max_staleness", default)),
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Played]]:
    """job(name) plays one of JOBS, once."""
    root = tmp_path_factory.mktemp("jobs")
    played: dict[str, Played | AssertionError] = {}

    def get(name: str) -> Played:
        if name not in played:
            world, extra = JOBS[name]
            try:
                played[name] = play(root / name.replace(", ", "-").replace(" ", "-"), world, extra)
            except AssertionError as error:  # the same answer for all who ask, and no second try
                played[name] = error
        found = played[name]
        if isinstance(found, AssertionError):
            raise found
        return found

    yield get


@pytest.mark.parametrize("name", MANY)
def test_a_job_ends_after_exactly_its_steps_and_leaves_no_process(job: Callable[[str], Played], name: str) -> None:
    played = job(name)
    assert [row["step"] for row in played.rows] == list(range(1, played.steps + 1))
    assert [row["weight_version"] for row in played.rows] == list(range(1, played.steps + 1))
    assert len([line for line in played.output.splitlines() if line.startswith("step ")]) == played.steps
    assert "Traceback" not in played.output
    assert (played.run / "policy" / "STABLE").is_file()
    logs = "".join(log.read_text() for log in (played.run / "logs").iterdir())
    assert "Traceback" not in logs


@pytest.mark.parametrize("name", MANY)
def test_the_books_add_up_and_staleness_keeps_its_bound(job: Callable[[str], Played], name: str) -> None:
    played = job(name)
    for row in played.rows:
        assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"]
        assert row["trained"] == played.batch * row["step"]
        assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= played.staleness
    last = played.rows[-1]
    assert (last["dispatched"], last["dropped"], last["in_flight"]) == (played.batch * played.steps, 0, 0)
    episodes = [episode for episode in played.episodes if not episode["trajectory_id"].startswith("eval")]
    assert len({episode["trajectory_id"] for episode in episodes}) == len(episodes) == played.batch * played.steps


def test_a_job_that_may_be_stale_is(job: Callable[[str], Played]) -> None:
    played = job("two")
    assert max(row["staleness_max"] for row in played.rows) == 1
    stale = [row for row in played.rows if row["staleness_mean"] > 0]
    assert all(row["importance_weight_mean"] is not None for row in stale), "what is stale is corrected by default"
    assert all(row["policy_shift"] is not None for row in stale)


def test_all_tokens_of_a_synchronous_job_have_the_present_version(job: Callable[[str], Played]) -> None:
    played = job("two, synchronous")
    for episode in played.episodes:
        group = int(episode["trajectory_id"].split("-")[0])
        assert episode["weight_versions"] == [group // 4, group // 4]
    assert all(row["logprob_gap"] < 1e-4 and row["policy_shift"] is None for row in played.rows)


def test_a_checkpoint_of_a_running_job_keeps_the_version_of_every_token(job: Callable[[str], Played]) -> None:
    played = job("two")
    checkpoints = sorted((played.run / "checkpoints").glob("step_*"))
    assert CheckpointFolder(played.run).latest() == checkpoints[-1]
    for checkpoint in checkpoints:
        state = load(checkpoint)
        held = [
            trajectory
            for group in (*state.holdings.ready, *(entry.group for entry in state.holdings.open))
            for trajectory in group.trajectories
        ]
        for trajectory in held:
            marked = [version >= 0 for version in trajectory.weight_versions]
            assert marked == [mask == 1 for mask in trajectory.loss_mask]
            assert all(version <= state.weight_version for version in trajectory.weight_versions)
        assert state.holdings.dispatched == 16 * state.step + len(held) + sum(len(item.running) for item in state.holdings.open)


def test_training_and_generation_overlap_only_if_staleness_is_allowed(job: Callable[[str], Played]) -> None:
    assert job("two").overlap() > 0
    assert job("two, synchronous").overlap() == 0.0


def test_two_ranks_in_step_play_what_one_rank_does(job: Callable[[str], Played]) -> None:
    one, two = job("one, in turns"), job("two, synchronous")

    def of(played: Played) -> dict[str, tuple[list[int], float, bool]]:
        return {
            episode["trajectory_id"]: (episode["token_ids"], episode["reward"], episode["success"])
            for episode in played.episodes
            if int(episode["trajectory_id"].split("-")[0]) < 8
        }

    assert len(of(one)) == 32
    assert of(one) == of(two)
    for row_one, row_two in zip(one.rows, two.rows, strict=False):
        for name in ("reward_mean", "reward_std", "success_rate", "turns_mean", "batch_tokens", "trained_tokens", "lr"):
            assert row_one[name] == row_two[name]
        assert row_one["loss"] == pytest.approx(row_two["loss"], abs=1e-4)
        assert row_one["grad_norm"] == pytest.approx(row_two["grad_norm"], rel=1e-2)


def test_a_resumed_job_plays_and_learns_what_the_whole_one_did(job: Callable[[str], Played], tmp_path: Path) -> None:
    """Two of its four steps are taken away from a finished job; a resumed copy makes them again."""
    whole = job("two, synchronous")
    run = tmp_path / "copy"
    shutil.copytree(whole.run, run)
    shutil.rmtree(run / "checkpoints" / "step_000004")
    output = run_job(tmp_path / "resumed.txt", 2, "--resume", str(run))
    assert "after step 2" in output
    lines = [line.split()[1] for line in output.splitlines() if line.startswith("step ")]
    assert lines == ["3/4", "4/4"]
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for before, after in zip(whole.rows[2:], rows[2:], strict=True):
        for name in ("reward_mean", "success_rate", "batch_tokens", "trained_tokens", "lr", "trained", "weight_version"):
            assert before[name] == after[name], name
        assert after["dispatched"] == after["trained"] + after["dropped"] + after["in_flight"]
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)

    def played(records: list[dict[str, Any]]) -> dict[str, tuple[int, list[int]]]:
        return {record["trajectory_id"]: (record["env_seed"], record["token_ids"]) for record in records}

    records = read_jsonl(run / "trajectories.jsonl")
    assert len(records) == 64
    assert played(records) == played(whole.episodes)


def test_all_ranks_of_a_kind_share_its_work(job: Callable[[str], Played]) -> None:
    played = job("four, two training")
    training = [played.seconds_of(f"rank{rank}/commands", "TrainStep") for rank in range(4)]
    serving = [played.seconds_of(f"rank{rank}/engine", "engine steps") for rank in range(4)]
    assert min(training[:2]) > 0.5 * max(training[:2])
    assert training[2:] == serving[:2] == [0, 0]
    assert min(serving[2:]) > 0.1 * max(serving[2:])


def test_ranks_without_data_of_their_own_take_part_in_every_update(job: Callable[[str], Played]) -> None:
    for row in job("four, two training").rows:
        assert math.isfinite(row["loss"])
        assert 0 < row["grad_norm"] < 1e4
        assert row["trained_tokens"] > 0


def test_evaluation_is_complete_and_of_the_version_just_published(job: Callable[[str], Played]) -> None:
    played = job("four, two training")
    assert [row["eval_success_rate"] is None for row in played.rows] == [True, False, True, False]
    greedy = [episode for episode in played.episodes if episode["trajectory_id"].startswith("eval")]
    assert len(greedy) == 2 * 6
    for episode in greedy:
        version = int(episode["trajectory_id"].split("-")[1])
        assert episode["weight_versions"] == [version, version]
