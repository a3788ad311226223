"""The controller with ranks that answer without torch: what is sent to whom, how every wait ends, and what ends the job."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_ranks import FakeRanks, InlinePool

from pearl.channel import ChannelError
from pearl.config import Config, Timeouts, resolve
from pearl.metrics.jsonl import read_jsonl
from pearl.overrides import override
from pearl.protocol import (
    Done,
    Export,
    Failed,
    Interrupted,
    Joined,
    Kill,
    Notice,
    Publish,
    Serve,
    SetReference,
    Status,
    StepReport,
    Stop,
    Tokens,
    TrainStep,
)
from pearl.rl import controller as controller_module
from pearl.rl.controller import Controller, JobFailed
from pearl.rl.envs import registry
from pearl.rl.fresh_model import write_model_folder
from pearl.rl.layout import JobLayout
from pearl.rl.link import Address, Link
from pearl.rl.recipes.quickstart import recipe

SIZES = ["rollout_batch_size=8", "group_size=4", "optimizer.mini_batch_size=4"]
SMALL = [*SIZES, "warmup.steps=2", "warmup.episodes=2", "max_steps=3"]


def small(world: int, *settings: str, **timeouts: float) -> Config:
    config = override(recipe(), [*SMALL, *settings])
    return resolve(dataclasses.replace(config, timeouts=dataclasses.replace(config.timeouts, **timeouts)), world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = recipe()
    environment = registry.make(config.env.name, **registry.constructor_options(config.env))
    return write_model_folder(tmp_path_factory.mktemp("policy") / "policy", config.model, environment.words)


@pytest.fixture
def make(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """make(config, world, **fake ranks' options) -> controller and ranks, not yet at work."""
    monkeypatch.setattr(controller_module, "EnvironmentPool", InlinePool)
    made = []

    def build(config: Config, world: int, **options: Any) -> SimpleNamespace:
        layout = JobLayout.of(config, world)
        controller = Controller(config, tmp_path, folder, layout, None)
        ranks = FakeRanks(controller.server.address, layout, folder, **options)
        ranks.start()
        made.append((controller, ranks))
        return SimpleNamespace(controller=controller, ranks=ranks, run=tmp_path, layout=layout)

    yield build
    for controller, ranks in made:
        if not controller.server.socket.closed:
            controller.end(Stop(number=0, reason="", exit_code=0))
        ranks.close()
        assert ranks.error is None


def play(job: SimpleNamespace, join_s: float = 5.0) -> Stop:
    """The whole job, as the controller's process does it."""
    job.controller.prepare()
    stop = job.controller.work()
    job.controller.end(stop)
    job.ranks.join(join_s)
    return stop


def numbers(job: SimpleNamespace, rank: int) -> list[int]:
    """Of all commands but Stop, which is obeyed at any time."""
    return [command.number for command in job.ranks.commands[rank] if not isinstance(command, Stop)]


@pytest.mark.parametrize("train_ranks", [1, 2])
def test_each_command_reaches_the_ranks_it_is_for_in_number_order(make: Callable[..., Any], train_ranks: int) -> None:
    job = make(small(4, f"cluster.train_ranks={train_ranks}"), 4)
    stop = play(job)
    assert (stop.exit_code, stop.reason.split()[0]) == (0, "success"), stop
    training, serving = range(train_ranks), range(train_ranks, 4)
    for rank in range(4):
        got = [type(command) for command in job.ranks.commands[rank]]
        expected = [Publish, Serve, Publish, Publish, Publish, Stop]
        if rank in training:
            expected = [TrainStep, TrainStep, SetReference, Publish, *[TrainStep, Publish] * 3, Export, Stop]
        assert got == expected
        assert numbers(job, rank) == sorted(set(numbers(job, rank)))
    everything = {number for rank in range(4) for number in numbers(job, rank)}
    assert everything == set(range(max(everything) + 1))
    assert all(job.ranks.requests[rank] for rank in serving)
    assert not any(job.ranks.requests[rank] for rank in training)
    plans = {id(command): command for command in job.ranks.commands[0] if isinstance(command, TrainStep)}.values()
    assert all(len(update) == train_ranks for command in plans for update in command.plan.updates)


def test_a_command_is_encoded_once_for_all_its_ranks(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is long: once per rank would take that many times the memory, and no pings meanwhile."""
    encoded: list[type] = []
    encode = msgspec.msgpack.Encoder().encode
    job = make(small(4, "cluster.train_ranks=2"), 4)
    job.controller.server._encoder = SimpleNamespace(encode=lambda one: encoded.append(type(one)) or encode(one))
    assert play(job).exit_code == 0
    assert (encoded.count(TrainStep), encoded.count(Publish)) == (2 + 3, 1 + 3)


def test_a_job_has_exactly_its_steps_and_tells_of_each(make: Callable[..., Any]) -> None:
    job = make(small(2, "max_steps=5"), 2)
    assert play(job).exit_code == 0
    trained = [command for command in job.ranks.commands[0] if isinstance(command, TrainStep)]
    assert [(command.objective, command.step) for command in trained] == [
        *[("sft", step) for step in (1, 2)],
        *[("policy", step) for step in (1, 2, 3, 4, 5)],
    ]
    assert [command.version for command in job.ranks.commands[1] if isinstance(command, Publish)] == [0, 1, 2, 3, 4, 5]
    rows = read_jsonl(job.run / "metrics.jsonl")
    shown = [message.metrics for _, rank, message in job.ranks.messages if isinstance(message, StepReport) and rank == 0]
    assert shown == rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    notices = [message.text for _, rank, message in job.ranks.messages if isinstance(message, Notice) and rank == 0]
    assert notices[0].startswith("warm-up")


def test_a_failed_rank_ends_the_job_with_its_reason(make: Callable[..., Any], capfd: pytest.CaptureFixture) -> None:
    def react(rank: int, message: Any) -> Any:
        if rank == 1 and isinstance(message, Publish) and message.version == 1:
            return Failed(rank=1, error="ValueError: no such tensor", traceback="Traceback: the whole story")
        return None

    job = make(small(3), 3, react=react)
    stop = play(job)
    assert (stop.exit_code, stop.reason) == (1, "rank 1 failed: ValueError: no such tensor")
    assert set(job.ranks.stops) == {0, 1, 2}
    assert {stop.reason for stop in job.ranks.stops.values()} == {stop.reason}
    assert "the whole story" in capfd.readouterr().out
    assert len(read_jsonl(job.run / "metrics.jsonl")) == 0


def test_a_rank_that_died_is_named_before_what_its_peers_say(make: Callable[..., Any]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def react(rank: int, message: Any) -> Any:
        return Failed(rank=0, error="a peer closed its connection") if isinstance(message, SetReference) else None

    stop = play(make(small(2), 2, react=react, pids={1: dead.pid}))
    assert stop.exit_code == 1
    assert f"rank 1 (pid {dead.pid}) died" in stop.reason
    assert "a peer closed its connection" in stop.reason


def test_an_interruption_ends_the_job_with_the_signals_code(make: Callable[..., Any]) -> None:
    def react(rank: int, message: Any) -> Any:
        return Interrupted(rank=0, signal="SIGTERM") if isinstance(message, Serve) else None

    stop = play(make(small(2), 2, react=react))
    assert (stop.exit_code, "interrupted by SIGTERM" in stop.reason) == (128 + 15, True)


def test_a_signal_to_the_controller_itself_ends_the_job(make: Callable[..., Any]) -> None:
    def react(rank: int, message: Any) -> None:
        if isinstance(message, Publish) and message.version == 1:
            job.controller.interrupted_by = 2

    job = make(small(2, "max_steps=100000"), 2, train_s=0.02, react=react)
    stop = play(job)
    assert (stop.exit_code, "interrupted by SIGINT" in stop.reason) == (130, True)
    assert {rank: stop.exit_code for rank, stop in job.ranks.stops.items()} == {0: 130, 1: 130}


def test_a_rank_that_never_comes_is_waited_for_by_name(make: Callable[..., Any]) -> None:
    job = make(small(2, start_s=0.4), 2, late={1: 50.0})
    stop = play(job, join_s=0.3)
    assert stop.exit_code == 1
    assert "timeouts.start_s=0.4" in stop.reason
    assert job.ranks.stops[0].exit_code == 1


def test_a_slow_rank_is_waited_for(make: Callable[..., Any]) -> None:
    job = make(small(3, start_s=30.0, silence_s=0.4, heartbeat_s=0.1), 3, late={0: 1.0, 2: 0.7})
    assert play(job).exit_code == 0


def test_a_command_that_is_never_done_ends_by_its_name(make: Callable[..., Any]) -> None:
    job = make(small(2, command_s=0.5), 2, react=lambda rank, message: rank == 1 and isinstance(message, Serve))
    stop = play(job)
    assert stop.exit_code == 1
    assert "timeouts.command_s=0.5" in stop.reason
    assert "Serve" in stop.reason


def test_a_silent_rank_is_killed_and_named(make: Callable[..., Any]) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        config = small(2, heartbeat_s=0.1, silence_s=0.6)
        job = make(config, 2, pids={1: sleeper.pid}, react=lambda rank, message: rank == 1)
        stop = play(job)
        assert stop.exit_code == 1
        assert "rank 1 silent for timeouts.silence_s=0.6 s" in stop.reason
        assert sleeper.wait(5) == -9
    finally:
        sleeper.kill()


def test_a_silent_rank_elsewhere_is_killed_by_a_peer_of_its_machine(make: Callable[..., Any]) -> None:
    config = small(3, heartbeat_s=0.1, silence_s=0.6)
    hosts = {1: "far away", 2: "far away"}
    job = make(config, 3, hosts=hosts, pids={1: 4242}, react=lambda rank, message: rank == 1)
    stop = play(job)
    assert "rank 1 silent" in stop.reason
    kills = [(rank, message.pid) for _, rank, message in job.ranks.messages if isinstance(message, Kill)]
    assert kills == [(2, 4242)]


PARTS = {
    "admission": lambda controller: patched(controller.training, "admit"),
    "environments": lambda controller: patched(controller.pool, "poll"),
    "collector": lambda controller: patched(controller.collector, "on_tokens"),
    "activity": lambda controller: patched(controller.activity, "status"),
}


def patched(target: Any, name: str, error: Exception | None = None) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error or KeyError("an unexpected state")

    setattr(target, name, broken)


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_in_any_part_is_told_to_all_ranks_at_once(make: Callable[..., Any], part: str) -> None:
    broken_at = []

    def react(rank: int, message: Any) -> Any:
        if isinstance(message, Publish) and message.version == 1 and not broken_at:
            broken_at.append(time.monotonic())
            PARTS[part](job.controller)
        return None

    job = make(small(2, "max_steps=100000"), 2, train_s=0.02, react=react)
    stop = play(job)
    assert stop.exit_code == 1
    assert "an unexpected state" in stop.reason
    told = [when for when, _, message in job.ranks.messages if isinstance(message, Stop)]
    assert len(told) == 2
    assert max(told) - broken_at[0] < 10


def spoken(rank: int) -> Tokens:
    return Tokens(rank=rank, updates=[], seconds=0.0, waiting=0, running=0, free_blocks=9)


class Joining(threading.Thread):
    """An external worker that joins and, once it is let in, says `word`; `told`: why it was let go, and `gone` that it was."""

    def __init__(self, invitation: str, word: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self.link, self.word, self.told, self.gone = Link(Address.parse(invitation), 20.0, []), word, "", threading.Event()

    def run(self) -> None:
        self.link.start()
        deadline = time.monotonic() + 20
        try:
            if self.link.answered.wait(20) and isinstance(self.link.answer, Joined):
                self.link.send(self.word(self.link.answer.rank))
                while not self.told and time.monotonic() < deadline:
                    self.told = "".join(message.reason for message in self.link.take(0.2) if isinstance(message, Stop))
        finally:
            self.link.close()
            self.gone.set()


def test_an_unforeseen_error_from_an_external_worker_s_message_costs_that_worker_alone(
    make: Callable[..., Any], capfd: pytest.CaptureFixture
) -> None:
    def react(rank: int, message: Any) -> None:
        if isinstance(message, Publish) and message.version == 2:
            assert worker.gone.wait(30)

    job = make(small(2, "elastic.listen=127.0.0.1:0", silence_s=60.0), 2, react=react)
    worker = Joining(job.controller.externals.invitation, spoken)
    patched(job.controller.cluster._failures, "weigh")
    worker.start()
    stop = play(job)
    assert (stop.exit_code, stop.reason.split()[0]) == (0, "success"), stop
    assert worker.told == "what it said led to KeyError: 'an unexpected state'"
    assert job.controller.externals.dropped["error"] == 1
    assert read_jsonl(job.run / "metrics.jsonl")[-1]["external_refused"] >= 1  # what it says after that is a stranger's
    said = [message.text for _, _, message in job.ranks.messages if isinstance(message, Notice)]
    assert "worker rank2 is gone: what it said led to KeyError: 'an unexpected state'" in said
    assert "in broken" in capfd.readouterr().err, "with its traceback, in the controller's log"


def test_what_ends_the_job_does_so_from_an_external_worker_s_message_too(make: Callable[..., Any]) -> None:
    job = make(small(2, "elastic.listen=127.0.0.1:0"), 2)
    controller = job.controller
    for reason in (JobFailed("interrupted"), ChannelError("rank 0 cannot be reached")):
        patched(controller.cluster, "take_external", reason)
        with pytest.raises(type(reason)):
            controller._take_external(spoken(2))
    assert not controller.externals.dropped["error"]


@pytest.mark.parametrize("part", ["cluster", "externals", "pool", "activity"])
def test_the_end_is_told_to_everybody_whatever_else_fails(make: Callable[..., Any], part: str) -> None:
    job = make(small(2, "elastic.listen=127.0.0.1:0", "max_steps=1"), 2)
    controller = job.controller
    controller.prepare()
    stop = controller.work()
    assert stop.exit_code == 0
    patched(getattr(controller, part), "close", OSError(28, "No space left on device"))
    controller.end(stop)
    job.ranks.join(5.0)
    assert set(job.ranks.stops) == {0, 1} and controller.context.closed


def test_the_state_is_told_every_second(make: Callable[..., Any]) -> None:
    job = make(small(3, "max_steps=1"), 3, train_s=0.8)
    assert play(job).exit_code == 0
    told = [(when, message) for when, rank, message in job.ranks.messages if isinstance(message, Status)]
    assert len(told) >= 2
    assert all(later - earlier < 2.5 for (earlier, _), (later, _) in itertools.pairwise(told))
    state = told[-1][1]
    assert set(state.workers) == {"rank0", "rank1", "rank2"}
    assert [state.workers[f"rank{rank}"].role for rank in range(3)] == ["train", "mixed", "mixed"]
    assert any("TrainStep" in message.waiting_for for _, message in told)
    assert any(message.workers["rank0"].busy_share > 0.5 for _, message in told)


def test_a_wait_by_silence_starts_again_with_every_sign_of_life(make: Callable[..., Any]) -> None:
    job = make(small(2), 2)
    controller = job.controller
    config = dataclasses.replace(controller.config, timeouts=Timeouts(start_s=0.6))
    controller.config = config
    began = time.monotonic()
    with pytest.raises(JobFailed, match=r"waited timeouts.start_s=0.6 s for the moon"):
        controller.wait_for(lambda: False, "timeouts.start_s", "the moon", renew=lambda: time.monotonic() - began > 0.5)
    assert time.monotonic() - began > 1.0


def test_an_answer_for_a_command_that_was_never_given_ends_the_job(make: Callable[..., Any]) -> None:
    """The rank has lost count: better than to pass for done."""

    def react(rank: int, message: Any) -> Any:
        return Done(rank=1, number=77, seconds=0.0) if rank == 1 and isinstance(message, Serve) else None

    stop = play(make(small(2), 2, react=react))
    assert stop.exit_code == 1


def test_one_turn_of_the_loop_is_short_with_256_environments(make: Callable[..., Any]) -> None:
    settings = ("rollout_batch_size=256", "group_size=8", "optimizer.mini_batch_size=64", "max_steps=2", "max_staleness=0")
    job = make(small(3, *settings), 3, tokens_per_step=4)
    turns = []
    pump, pool = job.controller.pump, job.controller.pool

    def measured(timeout_s: float = 0.2) -> None:
        before, environments = time.thread_time(), pool.seconds
        pump(timeout_s)
        turns.append(time.thread_time() - before - (pool.seconds - environments))

    job.controller.pump = measured
    assert play(job).exit_code == 0
    assert len(read_jsonl(job.run / "trajectories.jsonl")) == 512
    turns.sort()
    assert turns[int(len(turns) * 0.95)] < 0.1, turns[-5:]  # a collection of garbage may fall into one of them
