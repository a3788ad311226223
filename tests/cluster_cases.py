"""A cluster in one process: the controller's half and the ranks' loops as they are in a job, real engines, and a wire that a
test can slow down, double and cut. Fixtures only, no tests.

Nothing runs by itself: `Town.turn` lets one chosen party do a little, by a seeded generator. Sampling is greedy and all weight
versions are equal, so whatever moves where, each trajectory must have the tokens that one engine alone gives it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from engine_cases import assert_free, named

from pearl.clock import VirtualClock
from pearl.config import (
    BorrowSettings,
    ClusterOptions,
    Config,
    EngineConfig,
    EnvOptions,
    OptimizerOptions,
    PdSettings,
    RolloutOptions,
    SchedOptions,
    resolve,
)
from pearl.engine.engine import Engine
from pearl.protocol import Fetch, Join, Ready, Serve, ToController, ToRank
from pearl.rl.cluster import Cluster
from pearl.rl.collector import Collector
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.layout import JobLayout
from pearl.rl.members import Externals
from pearl.rl.rank import RankLoop
from pearl.rl.rollout import Rollout
from pearl.rl.types import Trajectory
from pearl.sched.router import Router

END = 1
LONGEST = 96
ENGINE = {"dtype": "float32", "block_size": 4, "num_blocks": 120, "max_model_len": LONGEST, "kv_fill": float("nan")}


class Letters:
    """One id per character; every message is its text, then END."""

    end_of_turn_id = END

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) % 100 for letter in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(number) for number in ids if number >= 10)

    def chat_start(self, messages: Any) -> list[int]:
        return [number for message in messages for number in [*self.encode(message["content"]), END]]

    def chat_continue(self, message: dict[str, str], *, ended: bool) -> list[int]:
        return self.after_reply([*self.encode(message["content"]), END], ended=ended)

    def after_reply(self, ids: list[int], *, ended: bool) -> list[int]:
        return [*([] if ended else [END]), *ids]


class Episodes:
    """Environments whose episodes have 1 to 4 turns, by their seed; what they say depends on seed and turn alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._played: dict[str, list[int]] = {}
        self._answers: list[EnvOutcome] = []

    def reset(self, episode_id: str, seed: int) -> None:
        self._played[episode_id] = [seed, 0]
        self._answers.append(EnvOutcome(episode_id=episode_id, observation=f"begin {seed} " + "x" * (seed % 23)))

    def step(self, episode_id: str, action: str) -> None:
        played = self._played[episode_id]
        played[1] += 1
        over = played[1] > played[0] % 4
        self._answers.append(EnvOutcome(episode_id=episode_id, observation=f"turn {played[1]}", terminated=over, reward=1.0))

    def discard(self, episode_id: str) -> None:
        self._played.pop(episode_id, None)

    def flush(self) -> None: ...

    def poll(self, now: float) -> list[EnvOutcome]:
        answers, self._answers = self._answers, []
        return answers


class SleepyTrainer:
    """A trainer that only sleeps; `naps` counts."""

    def __init__(self) -> None:
        self.asleep, self.naps = False, 0

    def sleep(self) -> int:
        assert not self.asleep
        self.asleep, self.naps = True, self.naps + 1
        return 0

    def wake(self) -> None:
        self.asleep = False


class EqualWeights:
    """A way to weights that are the same in all versions; each takes `polls` polls. `broken`: it has none to give."""

    def __init__(self, engine: Engine, polls: int = 2) -> None:
        self.engine, self.polls, self.broken, self.left, self.version = engine, polls, False, 0, -1

    def begin(self, version: int, pulls: list[str]) -> None:
        self.left, self.version = self.polls, version

    def poll(self) -> dict[str, float] | None:
        if self.broken:
            raise OSError("nobody has it")
        self.left -= 1
        if self.left > 0:
            return None
        self.engine.update_weights(named(0), self.version)
        return {"fetch_s": 0.0}

    def cancel(self) -> None:
        self.version = -1


class Wire:
    """One member's control port: messages wait here until the town lets them through."""

    def __init__(self) -> None:
        self.down: deque[bytes] = deque()
        self.up: deque[bytes] = deque()
        self.through: list[Any] = []

    def take(self, timeout_s: float) -> list[Any]:
        messages, self.through = self.through, []
        return messages

    def send(self, event: Any) -> None:
        self.up.append(msgspec.msgpack.encode(event))


class LocalExternals(Externals):
    """Externals whose wire is the town's."""

    def __init__(self, town: Town, first: int, options: Any) -> None:
        super().__init__(zmq.Context.instance(), options, first, 0.0)
        self._town = town

    def tell(self, peer: str, message: Any) -> bool:
        number = self._numbers.get(peer)
        if number is not None:
            self._town.send(number, message)
        return True

    def watch(self, now: float) -> list[int]:
        return []


class Town:
    """`training` + `serving` ranks, all lent where `borrow` says so; `doubling`: how often a message comes twice."""

    def __init__(
        self,
        tmp_path: Path,
        folder: Path,
        *,
        serving: int = 2,
        training: int = 1,
        mode: str = "mixed",
        ratio: str = "auto",
        borrow: str = "none",
        seed: int = 0,
        doubling: float = 0.0,
        change_timeout_s: float = 500.0,
        engine: dict[str, Any] | None = None,
        report_s: float = 0.0,
        append_on_decode: str = "auto",
    ) -> None:
        self.rng, self.clock, self.doubling, self.folder = random.Random(seed), VirtualClock(), doubling, folder
        self.config = resolve(
            Config(
                rollout_batch_size=8,
                group_size=2,
                max_staleness=0,
                rollout=RolloutOptions(max_tokens=9, report_s=report_s),
                env=EnvOptions(max_turns=6),
                engine=EngineConfig(model=str(folder), **(ENGINE | (engine or {}))),
                pd=PdSettings(mode=mode, ratio=ratio, append_on_decode=append_on_decode),
                borrow=BorrowSettings(workers=borrow),
                sched=SchedOptions(change_timeout_s=change_timeout_s),
                optimizer=OptimizerOptions(mini_batch_size=8),
                cluster=ClusterOptions(train_ranks=training),
            ),
            training + serving,
        )
        self.layout, self.run = JobLayout.of(self.config, training + serving), tmp_path
        self.notices: list[str] = []
        self.failures: list[str] = []
        self.wires: dict[int, Wire] = {}
        self.loops: dict[int, RankLoop] = {}
        self.engines: dict[int, Engine] = {}
        self.trainers: dict[int, SleepyTrainer] = {}
        self.fetchers: dict[int, EqualWeights] = {}
        self.stopped: set[int] = set()
        self.ended: dict[str, Trajectory] = {}
        self.started = self.version = self._number = 0
        self.externals = LocalExternals(self, self.layout.world, self.config.elastic)
        self.cluster = Cluster(self, self.externals, Router(block_size=4), 0.0)
        for rank in range(self.layout.world):
            self._build(rank, trainer=rank in self.layout.training)
        self.pool = Episodes()
        self.collector = Collector(self._rollout, pool=self.pool, router=self.cluster.router, send=self.send_to)
        lends = borrow != "none"
        ready = {rank: Ready(rank=rank, max_model_len=LONGEST, kv_tokens=480, lends=lends) for rank in self.loops}
        self.cluster.begin(self.collector, ready, folder, 0.0)
        self.cluster.claim.begin(0.0)
        for rank in self.layout.serving:
            self.send(rank, Serve(number=self.next_number()))
        self.finish_training()

    # ------------------------------------------------------------------------------------------------- the driver's part

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def send(self, rank: int, message: Any) -> None:
        if rank in self.wires:
            for _ in range(1 + (self.rng.random() < self.doubling and not isinstance(message, Serve | Fetch))):
                self.wires[rank].down.append(msgspec.msgpack.encode(message))

    def send_to(self, worker: str, message: Any) -> None:
        self.send(int(worker.removeprefix("rank")), message)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def fail(self, reason: str) -> None:
        self.failures.append(reason)

    # ------------------------------------------------------------------------------------------------- what tests do

    def start(self, count: int) -> None:
        """So many more episodes."""
        for number in range(self.started, self.started + count):
            self.collector.start(f"{number}", group_id=number, env_seed=number, purpose="train")
        self.started += count

    def turn(self) -> None:
        """Somebody does a little."""
        self.clock.advance(0.01)
        now = self.clock.now()
        self.cluster.turn(now)
        self.collector.poll_environments(now)
        self.collector.flush()
        for trajectory in self.collector.take_ended():
            self.ended[trajectory.trajectory_id] = trajectory
        rank = self.rng.choice([rank for rank in self.wires if rank not in self.stopped])
        wire = self.wires[rank]
        for _ in range(self.rng.randrange(4)):
            if wire.down:
                wire.through.append(msgspec.msgpack.decode(wire.down.popleft(), type=ToRank))
        if rank in self.loops:
            self.loops[rank].turn()
        for _ in range(self.rng.randrange(4)):
            if wire.up:
                event = msgspec.msgpack.decode(wire.up.popleft(), type=ToController)
                self._hear(event)
                if self.rng.random() < self.doubling and type(event).__name__ in ("HandedOff", "TakenOver", "Done"):
                    self._hear(event)

    def until(self, condition: Any, most: int = 60_000) -> None:
        for _ in range(most):
            if condition():
                return
            self.turn()
        raise AssertionError(f"not within {most} turns; {self.status()}")

    def play(self) -> dict[str, list[int]]:
        """Until all episodes have ended; their tokens."""
        self.until(lambda: len(self.ended) == self.started)
        return {name: trajectory.token_ids for name, trajectory in self.ended.items()}

    def begin_training(self) -> None:
        """The trainers get their ranks back."""
        session = self.cluster.claim.begin(self.clock.now())
        self.until(lambda: self.cluster.claim.may_begin >= session)
        for rank, trainer in self.trainers.items():
            assert not trainer.asleep and self.engines[rank].asleep

    def finish_training(self, unfinished: int = 8) -> None:
        """A new version is published, and the trainers idle."""
        self.version += 1
        self.cluster.publishing(self.version, self.clock.now())
        for rank in self.layout.serving:
            self.engines[rank].update_weights(named(0), self.version)
        self.cluster.published(self.version, self.clock.now())
        self.cluster.claim.finish(unfinished, self.clock.now())

    def reshape(self, mode: str, ratio: str = "auto") -> None:
        """From the next time that the scheduler thinks, the pool is to have this shape."""
        scheduler = self.scheduler
        pd = PdSettings(mode=mode, ratio=ratio)
        scheduler.settings = dataclasses.replace(scheduler.settings, pd=pd)
        self.clock.advance(scheduler.settings.consider_s + 1)

    def join(self) -> int:
        """An external worker comes, with its engine built in no time; its number."""
        member_peer = f"peer{len(self.externals._numbers)}"
        number = self.externals._next
        self.wires[number] = Wire()
        self.externals.joins.append((member_peer, Join(pid=1, host="here")))
        self.cluster.turn(self.clock.now())
        self._build(number, trainer=False)
        self.engines[number].sleep()
        self.cluster.take_external(Ready(rank=number, max_model_len=LONGEST, kv_tokens=480), self.clock.now())
        return number

    def kill(self, number: int, reason: str = "silent") -> None:
        """An external worker dies, and after a while that is noticed."""
        self.stopped.add(number)
        self.wires[number] = Wire()
        for _ in range(self.rng.randrange(60)):
            self.turn()
        self.cluster.gone(number, reason, self.clock.now())

    def settled(self) -> None:
        """Nothing is left anywhere."""
        self.until(lambda: not any(wire.down or wire.up or wire.through for wire in self.living()))
        for _ in range(400):
            self.turn()
        self.cluster.service.scheduler.state.check()
        assert self.collector.playing == self.collector.unplaced == self.collector.handoffs.under_way == 0
        for rank, engine in self.engines.items():
            if rank not in self.stopped:
                engine.check_integrity()
                assert_free(engine)
        for load in self.cluster.router.loads.values():
            assert (load.in_flight, load.promised) == (0, 0)

    def living(self) -> list[Wire]:
        return [wire for rank, wire in self.wires.items() if rank not in self.stopped]

    @property
    def scheduler(self) -> Any:
        return self.cluster.service.scheduler

    @property
    def shape(self) -> str:
        return str(self.scheduler.state.shape())

    def status(self) -> str:
        roles = {name: (str(row.role), str(row.activity)) for name, row in self.scheduler.state.workers.items()}
        moves = self.collector.handoffs.under_way
        return f"{len(self.ended)} of {self.started}, {moves} moves, {self.collector.unplaced} unplaced, {roles}"

    # ------------------------------------------------------------------------------------------------- inside

    def _build(self, rank: int, *, trainer: bool) -> None:
        self.wires.setdefault(rank, Wire())
        engine = Engine(EngineConfig(model=str(self.folder), **ENGINE), self.clock, load_weights=not trainer, text=False)
        if trainer:
            engine.sleep("drop")
            self.trainers[rank] = SleepyTrainer()
        self.engines[rank], self.fetchers[rank] = engine, EqualWeights(engine)
        self.loops[rank] = RankLoop(
            rank=rank,
            control=self.wires[rank],
            engine=engine,
            trainer=self.trainers.get(rank),
            publisher=SimpleNamespace(),
            publish_timeout_s=1.0,
            fetcher=self.fetchers[rank],
            block_size=4,
            report_s=self.config.rollout.report_s,
        )

    def _hear(self, event: Any) -> None:
        if event.rank in self.externals.members:
            self.cluster.take_external(event, self.clock.now())
        elif event.rank < self.layout.world:
            self.cluster.take(event, self.clock.now())

    def _rollout(self, trajectory: Trajectory, purpose: str) -> Rollout:
        options = RolloutOptions(max_tokens=9, temperature=0.0)
        return Rollout(
            trajectory, tokenizer=Letters(), options=options, env=self.config.env, max_model_len=LONGEST, seed=0
        )
