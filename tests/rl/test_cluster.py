"""Members, roles and requests of a running job under load: whatever changes, every trajectory has the tokens that one engine
alone gives it, each once, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_cases import LONGEST, Town
from engine_cases import model

from pearl.config import ExpandSettings
from pearl.metrics.jsonl import read_jsonl
from pearl.protocol import Done, Failed, HandedOff, Join, Leaving, Ready, Report, TakenOver, Tokens, TokenUpdate
from pearl.rl.types import Group
from pearl.sched.events import StepMeasured

EPISODES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wanted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What one mixed engine gives."""
    town = Town(tmp_path_factory.mktemp("alone"), folder, serving=1)
    town.start(EPISODES)
    tokens = town.play()
    assert len({len(ids) for ids in tokens.values()}) > 8
    return tokens


@pytest.mark.parametrize(("ratio", "report_s"), [("1:1", 0.0), ("1:2", 0.0), ("2:1", 0.0), ("1:2", 60.0)])
def test_a_split_pool_gives_what_one_engine_gives(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path, ratio: str, report_s: float
) -> None:
    """However seldom tokens are told that need not be told at once."""
    serving = sum(map(int, ratio.split(":")))
    town = Town(tmp_path, folder, serving=serving, mode="split", ratio=ratio, seed=1, report_s=report_s)
    town.until(lambda: town.shape == f"{ratio[0]}P{ratio[2]}D" and not town.scheduler.log.open)
    town.start(EPISODES)
    assert town.play() == wanted
    town.settled()
    counts = town.collector.handoffs.counts
    assert counts["taken"] >= EPISODES and counts["taken"] + counts["refused"] + counts["nobody"] == counts["offered"]
    assert town.collector.counts["late_tokens"] == 0


@pytest.mark.parametrize("doubling", [0.0, 0.3])
def test_a_decode_worker_that_loses_its_cache_gives_appends_back(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path, doubling: float
) -> None:
    """Decode workers whose caches are emptied again and again: what they were to append goes to who computes prompts, each turn
    once at most, and every trajectory has the tokens that it has where nothing is lost."""
    options: dict[str, Any] = {"mode": "split", "ratio": "1:2", "append_on_decode": "24"}
    town = Town(tmp_path, folder, serving=3, seed=5, doubling=doubling, **options)
    town.until(lambda: town.shape == "1P2D" and not town.scheduler.log.open)
    decoders = [engine for engine in town.engines.values() if engine.stats().role == "decode"]
    limited: list[str] = []
    for engine in decoders:
        engine.add_request = watched(engine.add_request, limited)
    town.start(EPISODES)
    turns = 0
    while len(town.ended) < EPISODES:
        town.turn()
        turns += 1
        if turns % 25 == 0:
            for engine in decoders:
                engine.reset_prefix_cache()
        assert turns < 60_000, town.status()
    assert {name: trajectory.token_ids for name, trajectory in town.ended.items()} == wanted
    town.settled()
    counts = town.collector.counts
    assert 0 < counts["returned"] <= len(set(limited)) and not counts["interrupted"]
    assert len(set(limited)) == len(limited) or doubling
    assert {name.rsplit(".")[-1] for name in limited}.isdisjoint({"1", "2"}) and not counts["late_tokens"]


def watched(add: Any, limited: list[str]) -> Any:
    """Notes requests that may be given back."""

    def add_request(*args: Any, **options: Any) -> Any:
        if options.get("most_computed") is not None:
            limited.append(options["request_id"])
        return add(*args, **options)

    return add_request


SHAPES = [("mixed", "auto"), ("split", "1:2"), ("hybrid", "auto"), ("split", "2:1")]


@pytest.mark.parametrize("doubling", [0.0, 0.3])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_roles_flip_under_load(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path, seed: int, doubling: float
) -> None:
    """Also when messages come twice: those are dropped where they come, and counted."""
    town = Town(tmp_path, folder, serving=3, seed=seed, doubling=doubling)
    town.start(EPISODES)
    flips, turns = 0, 0
    while len(town.ended) < EPISODES:
        if turns % 40 == 0:
            town.reshape(*SHAPES[flips % len(SHAPES)])
            flips += 1
        town.turn()
        turns += 1
        assert turns < 60_000, town.status()
    assert {name: trajectory.token_ids for name, trajectory in town.ended.items()} == wanted
    town.settled()
    rows = read_jsonl(tmp_path / "transitions.jsonl")
    assert sum(row["ok"] for row in rows if row["kind"] == "switch") >= 3, rows
    assert town.collector.handoffs.counts["taken"]
    assert doubling or town.collector.counts["late_tokens"] == 0
    stale = sum(loop._serving.stale for loop in town.loops.values() if loop._serving is not None)
    assert bool(stale) == bool(doubling)


def test_small_pools_refuse_and_lose_nothing(folder: Path, wanted: dict[str, list[int]], tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=2, mode="split", ratio="1:1", seed=3, engine={"num_blocks": 26})
    town.start(EPISODES)
    assert town.play() == wanted
    town.settled()


def test_a_flip_that_fails_leaves_the_old_role_and_is_tried_again(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    town = Town(tmp_path, folder, serving=2, seed=4)
    broken, switch = town.engines[1], town.engines[1].switch_role
    failures = []

    def fails(role: object) -> object:
        if len(failures) < 2:
            failures.append(role)
            raise ValueError("not now")
        return switch(role)

    broken.switch_role = fails
    town.start(EPISODES)
    town.reshape("split", "1:1")
    assert town.play() == wanted
    town.until(lambda: town.shape == "1P1D" and not town.scheduler.log.open)
    assert len(failures) == 2 and broken.stats().role in ("prefill", "decode")
    errors = [row["error"] for row in read_jsonl(tmp_path / "transitions.jsonl") if not row["ok"]]
    assert errors and all(error == "rank1: not now" for error in errors)


@pytest.mark.parametrize("doubling", [0.0, 0.3])
def test_borrow_train_return_for_twenty_rounds(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path, doubling: float
) -> None:
    """Requests are interrupted by each return and go on elsewhere, or when the rank is lent again."""
    town = Town(tmp_path, folder, serving=1, training=2, borrow="all", seed=5, doubling=doubling)
    for round_number in range(20):
        town.until(lambda: town.shape == "3M" and not town.scheduler.log.open)
        assert all(trainer.asleep for trainer in town.trainers.values())
        if round_number % 5 == 0:
            town.start(EPISODES // 4)
        for _ in range(town.rng.randrange(20, 50)):
            town.turn()
        town.begin_training()
        for _ in range(20):
            town.turn()
        town.finish_training()
    assert town.play() == wanted
    town.until(lambda: town.shape == "3M" and not town.scheduler.log.open)
    town.begin_training()
    town.settled()
    rows = read_jsonl(tmp_path / "transitions.jsonl")
    assert [row["ok"] for row in rows] == [True] * len(rows) and len(rows) == 42
    assert all(trainer.naps == 21 for trainer in town.trainers.values())
    assert town.collector.counts["interrupted"] and (doubling or town.collector.counts["late_tokens"] == 0)


def test_with_nobody_left_to_serve_requests_wait(folder: Path, wanted: dict[str, list[int]], tmp_path: Path) -> None:
    """The only server is told to leave; what it had waits until a borrowed rank is there."""
    town = Town(tmp_path, folder, serving=1, training=1, borrow="all", seed=6)
    town.begin_training()
    town.start(EPISODES)
    for _ in range(60):
        town.turn()
    town.cluster.router.drain("rank1")
    town.loops[1]._serving.interrupt()
    town.until(lambda: town.collector.unplaced > 0)
    town.finish_training()
    assert town.play() == wanted


def test_a_rank_that_cannot_get_the_weights_gives_its_device_back(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    town = Town(tmp_path, folder, serving=1, training=1, borrow="all", seed=7)
    town.until(lambda: town.shape == "2M" and not town.scheduler.log.open)
    town.begin_training()
    town.fetchers[0].broken = True
    town.start(EPISODES)
    town.finish_training()
    assert town.play() == wanted
    assert town.engines[0].asleep and not town.trainers[0].asleep
    assert any(row["error"] == "rank0: OSError: nobody has it" for row in read_jsonl(tmp_path / "transitions.jsonl"))


@pytest.mark.parametrize("doubling", [0.0, 0.3])
def test_external_workers_come_and_die(folder: Path, wanted: dict[str, list[int]], tmp_path: Path, doubling: float) -> None:
    """What they had goes on elsewhere, from its last token; roles are mended when the last of one kind is gone."""
    town = Town(tmp_path, folder, serving=1, mode="split", ratio="1:2", seed=8, doubling=doubling)
    settings = town.scheduler.settings
    town.scheduler.settings = dataclasses.replace(settings, expand=ExpandSettings(external="always"))
    town.start(EPISODES // 2)
    first = [town.join(), town.join()]
    town.until(lambda: town.shape == "1P2D" and not town.scheduler.log.open)
    town.start(EPISODES - EPISODES // 2)
    for _ in range(120):
        town.turn()
    for number in first:
        town.kill(number)
    assert town.play() == wanted
    third = town.join()
    town.until(lambda: town.scheduler.state.shape().total == 2 and not town.scheduler.log.open)
    assert third == max(first) + 1 and {f"rank{number}" for number in first}.isdisjoint(town.scheduler.state.workers)
    town.settled()
    assert town.collector.counts["requeued"] + town.collector.handoffs.counts["taken"] > 0
    assert town.failures == []


def test_an_external_worker_that_is_reclaimed_leaves_in_time(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    town = Town(tmp_path, folder, serving=1, seed=9)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: town.shape == "2M" and not town.scheduler.log.open)
    town.start(EPISODES)
    for _ in range(80):
        town.turn()
    town.cluster.take_external(Leaving(rank=number, notice_s=30.0), town.clock.now())
    town.until(lambda: number not in town.externals.members)
    assert town.loops[number]._exit_code == 0 and not town.engines[number].stats().running
    town.stopped.add(number)
    assert town.play() == wanted
    assert town.collector.counts["interrupted"] and not town.collector.counts["late_tokens"]


def test_a_version_is_fetched_by_externals_while_they_serve(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=10)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: town.shape == "2M" and not town.scheduler.log.open)
    town.start(EPISODES)
    for _ in range(4):
        town.begin_training()
        town.finish_training()
    town.play()
    town.until(lambda: town.engines[number].weight_version == town.version)
    town.settled()


def test_a_worker_can_join_whatever_has_become_of_the_model_s_folder(folder: Path, tmp_path: Path) -> None:
    """What it needs of it was read when the job began: no knock at the door may end the job."""
    (tmp_path / "model").symlink_to(folder)
    town = Town(tmp_path, tmp_path / "model", serving=1, seed=21)
    (tmp_path / "model").unlink()
    said, town.externals.tell = [], lambda peer, message: said.append(message) or True
    town.externals.joins.append(("peer", Join(pid=1, host="here")))
    town.cluster.turn(town.clock.now())
    assert "config.json" in said[0].files and town.cluster._vocab_size and "joined" in town.notices[-1]


def test_a_worker_on_the_gpus_of_another_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=22)
    for peer in ("one", "two"):
        town.externals.joins.append((peer, Join(pid=1, host="here", gpus=["node7"])))
    town.cluster.turn(town.clock.now())
    told = [notice.split(":")[0] for notice in town.notices]
    assert told == ["worker rank2 joined from here (pid 1)", "worker rank3 is refused"]
    assert list(town.externals.members) == [2]


def test_a_worker_that_says_it_cannot_leave_costs_nobody_else_anything(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=23)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: town.shape == "2M" and not town.scheduler.log.open)
    town.stopped.add(number)
    town.cluster.take_external(Leaving(rank=number, notice_s=30.0), town.clock.now())
    town.cluster.take_external(Done(rank=number, number=town._number, seconds=0.0, error="no"), town.clock.now())
    town.until(lambda: number not in town.externals.members)
    assert town.shape == "1M" and not town.failures


def test_a_worker_that_answers_no_order_is_said_not_to_answer(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=24, change_timeout_s=5.0)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: town.shape == "2M" and not town.scheduler.log.open)
    town.stopped.add(number)
    town.reshape("split", "1:1")
    town.until(lambda: number not in town.externals.members)
    assert f"worker rank{number} is gone: does not answer" in town.notices
    assert f"rank{number}" not in {worker for worker, *_ in town.cluster.service._open.values()}
    assert any(b"leave" in message for message in town.wires[number].down) and not town.failures


def test_messages_of_strangers_and_of_the_dead_change_nothing(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=11)
    state = town.scheduler.state
    before = dict(state.workers)
    now = town.clock.now()
    town.cluster.take(Report(rank=1, epoch=7, running=1, waiting=1, kv_used=1, kv_total=1, weight_version=1), now)
    town.cluster.take(TakenOver(rank=1, transfer_id="t9", request_id="nobody/0", ok=False), now)
    town.cluster.take(Done(rank=1, number=99_999, seconds=0.0), now)
    assert dict(state.workers) == before and state.dropped["epoch_ahead"] == 1
    assert town.collector.handoffs.counts["unknown"] == 1 and town.cluster.service.counts["stale_answers"] == 1


def test_what_comes_along_with_an_external_worker_s_failure_counts_no_more(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=13)
    number, now = town.join(), town.clock.now()
    town.cluster.take_external(Failed(rank=number, error="broken"), now)
    assert number not in town.externals.members
    for event in (Ready(rank=number, max_model_len=9), Leaving(rank=number, notice_s=1.0)):
        town.cluster.take_external(event, now)
    assert f"rank{number}" not in town.scheduler.state.workers and town.failures == []


@pytest.mark.parametrize(
    "tokens", [([100_000], [0.0], [1]), ([-1], [0.0], [1]), ([5], [float("nan")], [1]), ([5, 6], [0.0], [1])]
)
def test_an_external_worker_whose_tokens_cannot_be_true_is_sent_away(folder: Path, tmp_path: Path, tokens: tuple) -> None:
    town = Town(tmp_path, folder, serving=1, seed=14)
    number = town.join()
    update = TokenUpdate(request_id="0/0", token_ids=tokens[0], logprobs=tokens[1], weight_versions=tokens[2])
    event = Tokens(rank=number, updates=[update], seconds=0.0, waiting=0, running=1, free_blocks=9)
    town.cluster.take_external(event, town.clock.now())
    assert number not in town.externals.members and "request 0/0" in town.notices[-1]
    assert town.collector.counts["generated_tokens"] == 0


def test_an_external_worker_some_of_whose_tokens_were_lost_on_their_way_is_let_go(folder: Path, tmp_path: Path) -> None:
    """What comes after them would be put in their place, and trained on."""
    town = Town(tmp_path, folder, serving=1, seed=15)
    number, now = town.join(), town.clock.now()
    words: dict[str, Any] = {"rank": number, "updates": [], "seconds": 0.0, "waiting": 0, "running": 0, "free_blocks": 9}
    for place in (0, 1):
        town.cluster.take_external(Tokens(**words, place=place), now)
    assert number in town.externals.members
    town.cluster.take_external(Tokens(**words, place=3), now)
    assert number not in town.externals.members and "message 2 with its tokens did not arrive" in town.notices[-1]


def test_an_external_worker_that_keeps_a_request_for_ever_is_let_go_and_the_request_goes_on(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    """It lives, serves others, and says that nothing waits; the job's own limit would end the job."""
    town = Town(tmp_path, folder, serving=1, seed=20)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: f"rank{number}" in town.cluster.router.loads)
    town.start(EPISODES)
    town.until(lambda: any(town.cluster.router.worker_of(str(name)) == f"rank{number}" for name in range(EPISODES)))
    hear = town._hear
    town._hear = lambda event: hear(event) if not (isinstance(event, Tokens) and event.rank == number) else None
    limit = town.config.rollout.request_timeout_s
    town.until(lambda: not town.collector.at_engine or all(
        town.cluster.router.worker_of(name) == f"rank{number}" for name in list(town.collector._rollouts)
    ))  # fmt: skip
    began = town.clock.now()
    while number in town.externals.members:
        town.clock.advance(1.0)
        town.turn()
        assert town.clock.now() - began < limit, "the job would have ended"
    assert "has got no token there" in town.notices[-1]
    town.stopped.add(number)
    assert town.play() == wanted


NUMBERS = (-1, 0, 1, 7, 10**12, -(10**12), 0.5, float("nan"), float("inf"))


def lie(event: Any, rng: random.Random) -> Any:
    """The event with one of its fields, or of its updates', replaced by anything that can be encoded."""
    if isinstance(event, Tokens) and event.updates and rng.random() < 0.7:
        place = rng.randrange(len(event.updates))
        updates = list(event.updates)
        updates[place] = lie(updates[place], rng)
        return msgspec.structs.replace(event, updates=updates)
    if isinstance(event, HandedOff) and event.transfers and rng.random() < 0.7:
        return msgspec.structs.replace(event, transfers=[lie(one, rng) for one in event.transfers] * rng.choice((1, 2)))
    name = rng.choice([name for name in event.__struct_fields__ if name != "rank"] or ["rank"])
    value: Any = getattr(event, name)
    match value:
        case bool():
            value = not value
        case int() | float():
            value = rng.choice(NUMBERS)
        case str():
            value = rng.choice(["", "0/0", "1/0.7", "no/such/request", "x" * 999, value + "/9"])
        case list():
            value = rng.choice([[], value + value, value[:-1], value[::-1]])
        case msgspec.Struct():
            value = lie(value, rng)
        case None:
            value = rng.choice(["error", "stop", "abort", "length"])
    changed = msgspec.structs.replace(event, **{name: value})
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=type(event))
    except msgspec.ValidationError:  # it would be counted as unreadable
        return event


@pytest.mark.parametrize("seed", range(6))
def test_whatever_an_external_worker_says_the_job_goes_on_and_its_books_are_right(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    mode, ratio = (("mixed", "auto"), ("split", "1:1"))[seed % 2]
    town = Town(tmp_path, folder, serving=1 + seed % 2, mode=mode, ratio=ratio, seed=seed)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    rng, hear, lies = random.Random(seed), town._hear, []

    def misheard(event: Any) -> None:
        if event.rank >= town.layout.world and rng.random() < 0.1:
            event = lie(event, rng)
            lies.append(event)
        hear(event)

    first = [town.join(), town.join()]
    town.until(lambda: all(f"rank{number}" in town.cluster.router.loads for number in first))
    town._hear = misheard
    town.start(4 * EPISODES)
    joined, turns = 2, 0
    while len(town.ended) < town.started:
        members = list(town.externals.members)
        if joined < 20 and len(members) < 2:
            town.join()
            joined += 1
            town.clock.advance(town.scheduler.settings.consider_s)
        town.stopped |= {number for number in town.loops if number >= town.layout.world and number not in members}
        if turns > 10_000:  # what is waited for may never come: then time is all that helps
            town.clock.advance(1.0)
        town.turn()
        turns += 1
        assert turns < 60_000 and not town.failures, (town.status(), lies[-5:])
        assert town.collector.token_books()["lost_tokens"] == 0
    for trajectory in town.ended.values():
        assert len(trajectory.token_ids) <= LONGEST and all(0 < turn.num_sampled <= 9 for turn in trajectory.turns)
    assert lies


def test_the_scheduler_is_told_who_decodes_and_what_turns_miss(folder: Path, tmp_path: Path) -> None:
    """With caches that are left alone turns find all but their last, partial blocks; with caches that are emptied in between
    they miss the more."""
    town = Town(tmp_path, folder, serving=2, mode="split", ratio="1:1", seed=12, append_on_decode="0")
    town.until(lambda: town.shape == "1P1D" and not town.scheduler.log.open)
    fed: list[Any] = []
    town.cluster.feed = lambda event, now: fed.append(event)
    missed = []
    for emptied in (False, True):
        town.start(4)  # as many as the caches hold
        turns = 0
        while len(town.ended) < town.started:
            town.turn()
            turns += 1
            if emptied and turns % 5 == 0:
                for engine in town.engines.values():
                    engine.reset_prefix_cache()
        batch = [Group(group_id=0, env_seed=0)]
        batch[0].trajectories.extend(town.ended.values())
        town.clock.advance(2.0)
        town.cluster.measured(batch, None, town.clock.now())
        told = next(event.telemetry for event in reversed(fed) if isinstance(event, StepMeasured))
        assert told.decode_share is not None and 0 < told.decode_share <= 1
        missed.append(told.miss_share)
    assert 0 < missed[0] < 0.15 and missed[0] + 0.3 < missed[1] <= 1


def test_what_was_counted_before_a_resume_is_not_measured_again(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=1, seed=15)
    town.collector.resumed({"prompt_tokens": 10**6, "cached_tokens": 10**6, "trajectories": 10**6})
    town.cluster.resumed()
    town.start(4)
    town.play()
    town.pool.seconds, fed = 3.0, []
    town.cluster.feed = lambda event, now: fed.append(event)
    batch = [Group(group_id=0, env_seed=0, trajectories=list(town.ended.values()))]
    town.cluster.measured(batch, None, town.clock.now() + 2.0)
    turns = sum(len(one.turns) for one in town.ended.values())
    assert fed[0].telemetry.env_s == pytest.approx(3.0 / turns)


def test_transitions_of_a_resumed_run_go_on_from_those_before(folder: Path, tmp_path: Path) -> None:
    first = Town(tmp_path, folder, serving=2, mode="split", ratio="1:1", seed=16)
    first.until(lambda: first.shape == "1P1D" and not first.scheduler.log.open)
    [before] = read_jsonl(tmp_path / "transitions.jsonl")
    again = Town(tmp_path, folder, serving=2, mode="split", ratio="1:1", seed=17)
    again.until(lambda: again.shape == "1P1D" and not again.scheduler.log.open)
    [_, after] = read_jsonl(tmp_path / "transitions.jsonl")
    assert after["at"] >= before["at"] + before["seconds"] > 0
    assert again.cluster.metrics()["transitions"] == 2


def test_a_rank_of_world_that_answers_no_order_ends_the_job(folder: Path, tmp_path: Path) -> None:
    town = Town(tmp_path, folder, serving=2, seed=12, change_timeout_s=5.0)
    town.stopped.add(2)
    town.reshape("split", "1:1")
    town.until(lambda: bool(town.failures))
    assert town.failures[0] == "rank 2 does not carry out what it is told"


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_leaves_in_the_middle_of_its_switch(
    folder: Path, wanted: dict[str, list[int]], tmp_path: Path, seed: int
) -> None:
    """Its order to change the role is overtaken by the one to leave; the pool is mended, and nothing is lost."""
    town = Town(tmp_path, folder, serving=2, seed=20 + seed)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    number = town.join()
    town.until(lambda: town.shape == "3M" and not town.scheduler.log.open)
    town.start(EPISODES)
    for _ in range(60):
        town.turn()
    town.reshape("split", "2:1")
    town.until(lambda: bool(town.scheduler.log.open))
    town.cluster.take_external(Leaving(rank=number, notice_s=30.0), town.clock.now())
    town.until(lambda: number not in town.externals.members)
    town.stopped.add(number)
    assert town.play() == wanted
    town.until(lambda: town.shape == "1P1D" and not town.scheduler.log.open)
    town.settled()
    assert town.collector.counts["late_tokens"] == 0 and town.failures == []


def test_all_decode_workers_are_gone(folder: Path, wanted: dict[str, list[int]], tmp_path: Path) -> None:
    """What the prefill worker offers stays there, and what the dead had goes on there; then the pool gets a new shape."""
    town = Town(tmp_path, folder, serving=1, mode="split", ratio="1:2", seed=30)
    town.scheduler.settings = dataclasses.replace(town.scheduler.settings, expand=ExpandSettings(external="always"))
    town.start(EPISODES)
    externals = [town.join(), town.join()]
    town.until(lambda: town.shape == "1P2D" and not town.scheduler.log.open)
    roles = {name: str(row.role) for name, row in town.scheduler.state.workers.items()}
    for number in externals:
        town.kill(number)
    assert town.play() == wanted
    town.until(lambda: town.scheduler.state.shape().total == 1 and not town.scheduler.log.open)
    town.settled()
    assert set(roles.values()) == {"prefill", "decode"} and town.failures == []
