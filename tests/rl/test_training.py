"""The order of a run on a driver that only counts turns: who is trained with which version, books, evaluation, resuming."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pearl.clock import VirtualClock
from pearl.config import Config, resolve
from pearl.metrics.jsonl import read_jsonl
from pearl.overrides import override
from pearl.protocol import Checkpoint, Command, Done, Export, Publish, Restore, SetReference, TrainStep
from pearl.rl import training
from pearl.rl.checkpoint_folder import CheckpointFolder, load
from pearl.rl.claim import TrainersClaim
from pearl.rl.layout import JobLayout
from pearl.rl.recipes.quickstart import recipe
from pearl.rl.run_state import rewind_run
from pearl.rl.training import EVAL_SEEDS, FILTERED_BATCHES, SEED_STRIDE, TrainingRun
from pearl.rl.types import Trajectory, Turn

SMALL = ["rollout_batch_size=8", "group_size=4", "optimizer.mini_batch_size=4", "warmup.steps=0", "max_steps=6"]
MOST_TURNS = 5000


def small(*settings: str, world: int = 2) -> Config:
    return resolve(override(recipe(), [*SMALL, *settings]), world)


class Episodes:
    """A collector whose episodes sample one token per turn for `length(name)` turns and then end as `outcome(name)` says."""

    def __init__(self, length: Callable[[str], int], outcome: Callable[[str], str]) -> None:
        self.counts = {"generated_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "late_updates": 0}
        self.engine_seconds = self.env_seconds = 0.0
        self.version = -1
        self.started: list[SimpleNamespace] = []
        self._length, self._outcome = length, outcome
        self._running: dict[str, tuple[Trajectory, int]] = {}
        self._ended: list[Trajectory] = []

    @property
    def playing(self) -> int:
        return len(self._running)

    at_engine = playing
    unplaced = 0

    def token_books(self) -> dict[str, int]:
        return {}

    def resumed(self, counts: dict[str, int]) -> None:
        self.counts.update(counts)

    def start(self, trajectory_id: str, *, group_id: int, env_seed: int, purpose: str) -> None:
        assert trajectory_id not in self._running
        trajectory = Trajectory(trajectory_id=trajectory_id, group_id=group_id, env_seed=env_seed)
        self._running[trajectory_id] = (trajectory, self._length(trajectory_id))
        self.started.append(SimpleNamespace(name=trajectory_id, env_seed=env_seed, purpose=purpose, version=self.version))

    def give_up(self, trajectory_id: str, why: str) -> None:
        if trajectory_id in self._running:
            trajectory, _ = self._running.pop(trajectory_id)
            trajectory.outcome, trajectory.error = "failed", why
            self._ended.append(trajectory)

    def take_ended(self) -> list[Trajectory]:
        ended, self._ended = self._ended, []
        return ended

    def turn(self) -> None:
        if self.version < 0:
            return
        for name, (trajectory, left) in list(self._running.items()):
            trajectory.token_ids.append(5)
            trajectory.loss_mask.append(1)
            trajectory.logprobs.append(-0.5)
            trajectory.weight_versions.append(self.version)
            self.counts["generated_tokens"] += 1
            self._running[name] = (trajectory, left - 1)
            if left <= 1:
                del self._running[name]
                trajectory.outcome = self._outcome(name)
                trajectory.error = "environment: it broke" if trajectory.outcome == "failed" else None
                trajectory.turns = [Turn(text="x", num_sampled=1)]
                trajectory.reward = float(sum(map(ord, name)) % 3)
                trajectory.success = trajectory.reward > 1
                self._ended.append(trajectory)


class Cluster:
    """The cluster's part: nobody borrows, so that the trainers' ranks are always free; what it was told is kept."""

    def __init__(self, clock: VirtualClock) -> None:
        self.versions: list[int] = []
        self.claim = TrainersClaim(lambda event, now: None, lends=False, weighed=False, deadline_s=1.0, now=clock.now())

    def resumed(self) -> None:
        pass

    def publishing(self, version: int, now: float) -> None:
        pass

    def published(self, version: int, now: float) -> None:
        self.versions.append(version)

    def measured(self, batch: list, makespan_s: float | None, now: float) -> None:
        assert batch and (makespan_s is None or makespan_s >= 0)

    def metrics(self) -> dict[str, Any]:
        return {}


class Counting:
    """The controller's part: a command takes `busy` turns of the loop, in which episodes go on."""

    def __init__(self, config: Config, run: Path, episodes: Episodes, *, busy: int = 0, world: int = 2) -> None:
        self.config, self.run, self.layout = config, run, JobLayout.of(config, world)
        self.clock = VirtualClock()
        self.pool = SimpleNamespace(counts=Counter())
        self.cluster = Cluster(self.clock)
        self.commands: list[Command] = []
        self.batches: list[TrainStep] = []
        self.rows_at_train: list[int] = []
        self.notices: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.busy = busy
        self.episodes = episodes
        words = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
        self.training = TrainingRun(self, episodes, words, max_model_len=64)

    def turn(self) -> None:
        self.clock.advance(0.01)
        self.episodes.turn()
        self.training.admit()

    def wait_for(self, ready: Callable[[], bool], limit: str, what: str, *, renew: Any = None) -> None:
        for _ in range(MOST_TURNS):
            if ready():
                return
            self.turn()
        raise TimeoutError(f"{what} did not come in {MOST_TURNS} turns")

    def carry_out(self, make: Callable[[int], Command], ranks: Any) -> dict[int, Done]:
        command = make(len(self.commands))
        self.commands.append(command)
        if isinstance(command, TrainStep):
            self.batches.append(command)
            path = self.run / "metrics.jsonl"
            self.rows_at_train.append(len(read_jsonl(path)) if path.exists() else 0)
        for _ in range(self.busy):
            self.turn()
        if isinstance(command, Publish):
            self.episodes.version = command.version
        if isinstance(command, Checkpoint):
            Path(command.path).mkdir()
            (Path(command.path) / "weights").write_text(str(command.step))
        self.clock.advance(0.1)
        return {rank: Done(rank=rank, number=command.number, seconds=0.1, metrics={"tokens": 1}) for rank in ranks}

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def report(self, row: dict[str, Any]) -> None:
        self.reports.append(row)


def new(
    run: Path,
    *settings: str,
    busy: int = 0,
    length: Callable[[str], int] = lambda name: 3,
    outcome: Callable[[str], str] = lambda name: "done",
) -> Counting:
    return Counting(small(*settings), run, Episodes(length, outcome), busy=busy)


def lags(driver: Counting) -> list[int]:
    """Of every trained token: how many versions older it was than the weights it was trained from."""
    return [
        batch.weight_version - version
        for batch in driver.batches
        for sequence in batch.sequences
        for version in sequence.weight_versions
    ]


def books_add_up(row: dict[str, Any]) -> bool:
    return row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"]


def test_synchronous_trains_each_batch_on_the_present_version_alone(tmp_path: Path) -> None:
    driver = new(tmp_path, "max_staleness=0", busy=20, length=lambda name: 1 + sum(map(ord, name)) % 7)
    driver.training.run()
    assert set(lags(driver)) == {0}
    assert [batch.weight_version for batch in driver.batches] == list(range(6))
    assert [start.version for start in driver.episodes.started] == [version for version in range(6) for _ in range(8)]
    assert [row["staleness_max"] for row in driver.reports] == [0] * 6


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_the_bound_of_staleness_is_reached_and_never_passed(tmp_path: Path, bound: int) -> None:
    driver = new(tmp_path, f"max_staleness={bound}", "max_steps=9", busy=60)
    driver.training.run()
    assert max(lags(driver)) == bound
    assert max(row["staleness_max"] for row in driver.reports) == bound
    assert len(driver.batches) == 9
    assert len(driver.episodes.started) == 9 * 8


def test_every_token_keeps_the_version_that_made_it(tmp_path: Path) -> None:
    driver = new(tmp_path, "max_staleness=2", busy=2, length=lambda name: 11)
    driver.training.run()
    sequences = [sequence for batch in driver.batches for sequence in batch.sequences]
    assert any(len(set(sequence.weight_versions)) > 1 for sequence in sequences)
    for sequence in sequences:
        assert sequence.weight_versions == sorted(sequence.weight_versions)
        assert len(sequence.weight_versions) == len(sequence.token_ids) == 11


@pytest.mark.parametrize("seed", range(6))
def test_no_trajectory_is_lost_or_counted_twice(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lengths: dict[str, int] = {}
    driver = new(
        tmp_path,
        f"max_staleness={rng.randrange(3)}",
        "max_steps=12",
        busy=rng.randrange(12),
        length=lambda name: lengths.setdefault(name, rng.choice([1, 2, 3, 40])),
        outcome=lambda name: rng.choice(["done"] * 5 + ["failed"]),
    )
    driver.training.run()
    assert all(map(books_add_up, driver.reports))
    counts = driver.training.buffer.counts()
    assert counts["dispatched"] == len(driver.episodes.started)
    assert counts["trained"] == sum(len(batch.sequences) for batch in driver.batches)
    records = [record for record in read_jsonl(tmp_path / "trajectories.jsonl") if record["outcome"] == "failed"]
    assert counts.get("dropped_failed", 0) == len(records)
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped"))
    assert counts["dispatched"] == counts["trained"] + counts["in_flight"] + dropped


def test_a_slow_group_is_waited_for(tmp_path: Path) -> None:
    slow = {f"2-{member}" for member in range(4)}
    driver = new(tmp_path, "max_staleness=1", "max_steps=8", busy=3, length=lambda name: 60 if name in slow else 3)
    driver.training.run()
    assert max(lags(driver)) == 1
    assert [len(sequence.token_ids) for sequence in driver.batches[1].sequences] == [60] * 4 + [3] * 4
    assert driver.training.buffer.counts() == {"dispatched": 64, "trained": 64, "in_flight": 0}


def test_a_failed_member_is_tried_again_then_its_siblings_go_on_without_it(tmp_path: Path) -> None:
    fate = {"0-1": "failed", "0-1r": "failed"}
    driver = new(tmp_path, "max_staleness=0", "max_steps=1", outcome=lambda name: fate.get(name, "done"))
    driver.training.run()
    assert [start.name for start in driver.episodes.started if start.name.startswith("0-1")] == ["0-1", "0-1r"]
    assert len({start.env_seed for start in driver.episodes.started if start.name.startswith("0-")}) == 1
    [batch] = driver.batches
    assert [sum(sequence.group == group for sequence in batch.sequences) for group in (0, 1)] == [3, 4]
    assert driver.reports[0]["failed_trajectories"] == 2


def test_a_hung_episode_costs_itself(tmp_path: Path) -> None:
    """It ends as failed when its environment's time is over, here after 100 turns; the rest of the batch is trained."""
    driver = new(
        tmp_path,
        "max_staleness=0",
        "max_steps=1",
        "env.retries=0",
        length=lambda name: 100 if name == "1-2" else 3,
        outcome=lambda name: "failed" if name == "1-2" else "done",
    )
    driver.training.run()
    assert len(driver.batches[0].sequences) == 7
    assert driver.reports[0]["dropped"] == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_batch_waits_for_a_straggler_where_there_are_spare_members(tmp_path: Path, staleness: int) -> None:
    """One member of each group hangs for a hundred turns; in one group all end at once, so that one of them is too much."""
    driver = new(
        tmp_path,
        f"max_staleness={staleness}",
        "max_steps=3",
        "rollout.redundancy=1",
        length=lambda name: 100 if name.endswith("-2") and name != "1-2" else 3,
    )
    driver.training.run()
    assert [len(batch.sequences) for batch in driver.batches] == [8, 8, 8]
    assert {len(sequence.token_ids) for batch in driver.batches for sequence in batch.sequences} == {3}
    assert driver.training.buffer.counts() == {"dispatched": 30, "trained": 24, "in_flight": 0, "dropped_spare": 6}
    assert driver.episodes.playing == 0 and all(books_add_up(row) for row in driver.reports)
    given_up = [row for row in read_jsonl(tmp_path / "trajectories.jsonl") if row["error"] == "its siblings were sooner"]
    assert sorted(row["trajectory_id"] for row in given_up) == [f"{group}-2" for group in (0, 2, 3, 4, 5)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_environments_that_only_fail_end_the_run_with_their_reason(tmp_path: Path, staleness: int) -> None:
    driver = new(tmp_path, f"max_staleness={staleness}", outcome=lambda name: "failed")
    with pytest.raises(RuntimeError, match=r"\d+ trajectories in a row failed.*environment: it broke"):
        driver.training.run()
    assert len(driver.episodes.started) < 400
    assert driver.batches == []


def test_many_failures_with_some_success_in_between_go_on(tmp_path: Path) -> None:
    rng = random.Random(0)
    driver = new(tmp_path, "max_steps=3", outcome=lambda name: rng.choice(["done", "failed", "failed"]))
    driver.training.run()
    assert len(driver.batches) == 3


def test_a_steps_row_is_on_disk_before_the_next_step_trains(tmp_path: Path) -> None:
    driver = new(tmp_path, "max_staleness=1", busy=3)
    driver.training.run()
    assert driver.rows_at_train == [0, 1, 2, 3, 4, 5]
    assert read_jsonl(tmp_path / "metrics.jsonl") == driver.reports


def test_evaluation_plays_greedily_on_seeds_of_its_own_while_nothing_new_starts(tmp_path: Path) -> None:
    driver = new(
        tmp_path,
        "max_steps=4",
        "eval_steps=2",
        "eval_episodes=5",
        length=lambda name: 30 if name.startswith("eval") else 3,
        outcome=lambda name: "failed" if name == "eval-2-3" else "done",
    )
    driver.training.run()
    evaluated = [start for start in driver.episodes.started if start.purpose == "eval"]
    assert [start.env_seed for start in evaluated] == [EVAL_SEEDS + number for number in range(5)] * 2
    assert all(start.env_seed < EVAL_SEEDS for start in driver.episodes.started if start.purpose == "train")
    scores = [row["eval_success_rate"] for row in driver.reports]
    assert [score is None for score in scores] == [True, False, True, False]
    assert all(map(books_add_up, driver.reports))
    assert driver.training.buffer.counts()["dispatched"] == 4 * 8
    first = driver.episodes.started.index(evaluated[0])
    assert [start.purpose for start in driver.episodes.started[first : first + 5]] == ["eval"] * 5


def test_the_policy_of_the_best_evaluation_is_kept_beside_the_last(tmp_path: Path) -> None:
    driver = new(tmp_path, "max_steps=6", "eval_steps=1", "eval_episodes=4")
    driver.training.run()
    scores = [row["eval_success_rate"] for row in driver.reports]
    better = [step for step, score in enumerate(scores, 1) if score > max(scores[: step - 1], default=-1)]
    exported = [Path(command.path).name for command in driver.commands if isinstance(command, Export)]
    assert exported == ["best"] * len(better) + ["policy"] and 1 <= len(better) < 6
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": better[-1], "eval_success_rate": max(scores)}


@pytest.mark.parametrize("wrong", [None, "engine/a", "missing"])
def test_weights_that_differ_from_the_trainers_end_the_run(tmp_path: Path, wrong: str | None) -> None:
    driver = new(tmp_path, "check_weights=true", "max_steps=3")
    plain = driver.carry_out

    def with_sums(make: Callable[[int], Command], ranks: Any) -> dict[int, Done]:
        done = plain(make, ranks)
        if not isinstance(driver.commands[-1], Publish):
            return done
        trainer, engine = {"trainer/a": 1, "trainer/b": -(2**63)}, {"engine/a": 1, "engine/b": -(2**63)}
        if driver.commands[-1].version == 2 and wrong is not None:
            engine = {} if wrong == "missing" else engine | {wrong: 2}
        sums = {0: trainer, 1: engine}
        return {rank: msgspec.structs.replace(one, metrics=one.metrics | sums[rank]) for rank, one in done.items()}

    driver.carry_out = with_sums
    if wrong is None:
        assert driver.training.run().startswith("success")
        return
    named = "all" if wrong == "missing" else "a"
    with pytest.raises(RuntimeError, match=rf"check_weights: version 2 on rank 1 is not the trainer's: {named} differ"):
        driver.training.run()
    assert len(driver.reports) == 1


def test_groups_of_different_runs_play_different_seeds(tmp_path: Path) -> None:
    seeds = []
    for seed in (0, 7):
        run = tmp_path / str(seed)
        run.mkdir()
        driver = new(run, f"seed={seed}", "max_steps=1")
        driver.training.run()
        seeds.append({start.env_seed for start in driver.episodes.started})
    assert seeds[0] == {0, 1}
    assert seeds[1] == {7 * SEED_STRIDE, 7 * SEED_STRIDE + 1}


def resumed(run: Path, *settings: str, busy: int, **options: Any) -> Counting:
    """A second process that goes on from the newest checkpoint of `run`."""
    checkpoint = CheckpointFolder(run).latest()
    assert checkpoint is not None
    rewind_run(run, load(checkpoint).step)
    driver = new(run, *settings, busy=busy, **options)
    driver.training.run(checkpoint)
    return driver


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_plays_and_trains_what_the_whole_one_would_have(tmp_path: Path, staleness: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    settings, busy = (f"max_staleness={staleness}", "save_steps=2"), 20
    one = new(whole, *settings, "max_steps=4", busy=busy)
    one.training.run()
    first = new(parts, *settings, "max_steps=4", busy=busy)
    first.carry_out = stop_after(first, 2)
    with pytest.raises(KeyboardInterrupt):
        first.training.run()
    second = resumed(parts, *settings, "max_steps=4", busy=busy)
    assert isinstance(second.commands[0], Restore)
    assert not any(isinstance(command, SetReference) for command in second.commands)
    assert [row["step"] for row in read_jsonl(parts / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [batch.step for batch in second.batches] == [3, 4]
    assert [batch.plan for batch in second.batches] == [batch.plan for batch in one.batches[2:]]

    def played(run: Path) -> list[tuple[str, int]]:
        records = read_jsonl(run / "trajectories.jsonl")
        return sorted({(record["trajectory_id"], record["env_seed"]) for record in records})

    assert played(parts) == played(whole)
    assert len(played(whole)) == 4 * 8
    assert all(map(books_add_up, read_jsonl(parts / "metrics.jsonl")))
    assert second.training.buffer.counts()["trained"] == 32


def stop_after(driver: Counting, step: int) -> Callable[..., dict[int, Done]]:
    """The driver's `carry_out`, until the checkpoint of `step` is whole and the next command comes."""
    carry_out = driver.carry_out

    def stopping(make: Callable[[int], Command], ranks: Any) -> dict[int, Done]:
        if CheckpointFolder(driver.run).path.exists() and (driver.run / "checkpoints" / f"step_{step:06d}" / "STABLE").exists():
            raise KeyboardInterrupt
        return carry_out(make, ranks)

    return stopping


def test_what_ran_at_a_checkpoint_is_counted_and_played_again(tmp_path: Path) -> None:
    settings = ("max_staleness=1", "save_steps=1", "max_steps=4")
    first = new(tmp_path, *settings, busy=2, length=lambda name: 9)
    first.carry_out = stop_after(first, 1)
    with pytest.raises(KeyboardInterrupt):
        first.training.run()
    [checkpoint] = (tmp_path / "checkpoints").glob("step_*")
    running = {name for held in load(checkpoint).holdings.open for name in held.running}
    assert running
    second = resumed(tmp_path, *settings, busy=2, length=lambda name: 9)
    assert {start.name for start in second.episodes.started[: len(running)]} == running
    assert second.training.buffer.counts()["dropped_resume"] == len(running)
    assert all(map(books_add_up, second.reports))
    assert second.training.buffer.counts()["trained"] == 32


def test_the_loop_goes_on_while_a_checkpoint_goes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would take a controller that is at it for as long as a disk may need for dead. What ends meanwhile is not in it."""
    settings = ("max_staleness=1", "save_steps=1", "max_steps=3", "timeouts.heartbeat_s=0.01", "timeouts.silence_s=0.03")
    driver = new(tmp_path, *settings, busy=2, length=lambda name: 9)
    commit, slow, seen = CheckpointFolder.commit, threading.Event(), []

    def commit_slowly(folder: CheckpointFolder, step: int, state: Any) -> Path:
        assert slow.wait(30), "the loop stood still"
        return commit(folder, step, state)

    def wait_for(ready: Callable[[], bool], limit: str, what: str, *, renew: Any = None) -> None:
        if "disk" not in what:
            return Counting.wait_for(driver, ready, limit, what, renew=renew)
        running = set(driver.episodes._running)
        for _ in range(12):
            driver.turn()
        seen.append(running - driver.episodes._running.keys())
        slow.set()
        wait([written[-1]], 30)
        assert limit == "timeouts.command_s" and ready()
        slow.clear()

    written: list[Future] = []
    committing = CheckpointFolder.committing
    monkeypatch.setattr(CheckpointFolder, "commit", commit_slowly)
    monkeypatch.setattr(CheckpointFolder, "committing", lambda *args: written.append(committing(*args)) or written[-1])
    driver.wait_for = wait_for  # type: ignore[method-assign]
    driver.training.run()
    assert len(seen) == 3 and seen[0]
    filed = {row["trajectory_id"]: row["step"] for row in read_jsonl(tmp_path / "trajectories.jsonl")}
    assert {filed[name] for name in seen[0]} == {2}


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "commit", fail)
    with pytest.raises(OSError, match="No space left"):
        new(tmp_path, "save_steps=1").training.run()


def test_the_loop_turns_while_examples_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments may be slow; ranks would take a controller that is busy with them for dead."""
    driver, turns = new(tmp_path, "warmup.steps=2", "max_steps=1"), []

    def sequences(*_: Any, between: Callable[[], None], **limits: Any) -> list:
        assert limits == {"max_turns": driver.config.env.max_turns, "max_model_len": 64}
        for _ in range(10):
            driver.clock.advance(driver.config.timeouts.heartbeat_s / 2)
            between()
        return []

    monkeypatch.setattr(training, "warmup_sequences", sequences)
    turn = driver.turn
    driver.turn = lambda: (turns.append(driver.clock.now()), turn())  # type: ignore[method-assign]
    monkeypatch.setattr(driver.training, "_train_step", lambda *_: SimpleNamespace(metrics={"loss": 1.0}))
    driver.training._warm_up()
    assert 9 <= len(turns) <= 10
    assert max(late - soon for soon, late in itertools.pairwise(turns)) <= 2 * driver.config.timeouts.heartbeat_s


def test_what_is_too_old_is_dropped_counted_and_replaced(tmp_path: Path) -> None:
    """A checkpoint taken under a wider bound holds groups that a narrower one no longer allows."""
    first = new(tmp_path, "max_staleness=2", "save_steps=3", busy=30)
    first.carry_out = stop_after(first, 3)
    with pytest.raises(KeyboardInterrupt):
        first.training.run()
    second = resumed(tmp_path, "max_staleness=0", busy=2)
    counts = second.training.buffer.counts()
    assert set(lags(second)) == {0}
    assert counts["dropped_stale"] == 2 * 8
    assert counts["trained"] == 6 * 8
    assert [batch.step for batch in second.batches] == [4, 5, 6]
    assert all(map(books_add_up, second.reports))
    assert second.reports[-1]["dropped"] == 2 * 8


class Flat(Episodes):
    """Episodes whose reward is 1 in all members of the groups that `flat` names, and the member's number in the others."""

    flat: Callable[[int], bool]

    def take_ended(self) -> list[Trajectory]:
        ended = super().take_ended()
        for trajectory in ended:
            trajectory.reward = 1.0 if self.flat(trajectory.group_id) else float(trajectory.trajectory_id[-1])
        return ended


def filtered(tmp_path: Path, flat: Callable[[int], bool], *settings: str, staleness: int = 0) -> Counting:
    episodes = Flat(lambda name: 2 + hash_of(name) % 3, lambda name: "done")
    episodes.flat = flat
    config = small(f"max_staleness={staleness}", "algorithm.name=dapo", *settings)
    driver = Counting(config, tmp_path, episodes, busy=2)
    driver.training.run()
    return driver


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_that_teach_nothing_are_replaced_and_counted(tmp_path: Path, staleness: int) -> None:
    driver = filtered(tmp_path, lambda group: group % 3 == 1, staleness=staleness)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert all(len(batch.sequences) == 8 for batch in driver.batches) and len(rows) == 6
    assert [row["zero_variance_groups"] for row in rows] == [0.0] * 6
    assert rows[-1]["filtered_trajectories"] > 0 and all(map(books_add_up, rows))
    assert driver.training.buffer.dropped["zero variance"] == rows[-1]["dropped"]


def test_a_policy_that_solves_everything_still_takes_its_steps(tmp_path: Path) -> None:
    """Filtering has an end in each step; then the groups that teach nothing fill the batch."""
    driver = filtered(tmp_path, lambda group: True)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["zero_variance_groups"] for row in rows] == [1.0] * 6 and all(map(books_add_up, rows))
    given_up = [rows[0]["filtered_trajectories"]] + [
        b["filtered_trajectories"] - a["filtered_trajectories"] for a, b in itertools.pairwise(rows)
    ]
    assert given_up == [FILTERED_BATCHES * driver.config.rollout_batch_size] * 6


def test_nothing_is_filtered_unless_asked(tmp_path: Path) -> None:
    driver = filtered(tmp_path, lambda group: True, "algorithm.filter_zero_variance=false")
    assert not driver.training.buffer.dropped
