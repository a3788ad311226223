"""The controller process: one event loop around ranks, environments and the order of steps. Torch-free.

    python -m pearl.rl.controller RUN MODEL_FOLDER ADDRESS_FD OUTLET_FD RANKS PARENT_PID CHECKPOINT    (started by rank 0)

Owns sockets, heartbeats, commands and their numbers, and what is written to the run directory. What to do is said by
others: admission (when a trajectory may start, when a batch is complete), router (where a request runs), packing (what is
trained together), the cluster scheduler (who serves in which role, `cluster.py`). Invariants: commands are numbered from 0
without gaps; every wait has a deadline with a name; whatever happens, the ranks are told to stop and the environments end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import zmq

from pearl import config as configuration
from pearl.channel import ChannelError, Server, Waiter
from pearl.clock import Clock, WallClock
from pearl.config import Config, ElasticOptions
from pearl.engine.models.config import from_folder
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import (
    Command,
    Done,
    Failed,
    Hello,
    Interrupted,
    Join,
    Notice,
    Ping,
    Pong,
    Ready,
    Report,
    StepReport,
    Stop,
    ToController,
    Tokens,
)
from pearl.rl import process
from pearl.rl.activity import Activity
from pearl.rl.cluster import Cluster
from pearl.rl.collector import Collector
from pearl.rl.dead_ranks import first_cause, kill_ranks
from pearl.rl.door import JOIN_ADDRESS, write_invitation
from pearl.rl.envs import registry as environments
from pearl.rl.envs.base import example_of, system_prompt_of
from pearl.rl.envs.pool import EnvironmentPool
from pearl.rl.envs.wire import words_for
from pearl.rl.failure import JobFailed, contained
from pearl.rl.heartbeat import LONGEST_GAP_S, Heartbeat
from pearl.rl.layout import JobLayout
from pearl.rl.members import Externals, name_of, number_of
from pearl.rl.rollout import Rollout
from pearl.rl.training import TrainingRun
from pearl.rl.types import Trajectory
from pearl.sched.router import Router

POLL_S = 0.2
STATUS_EVERY_S = 1.0
LOOK_EVERY_S = 0.05
"""How often time passes for those who wait for it, if nothing comes but tokens and what environments say."""
EVERYDAY = (Tokens, Report, Pong)


class Controller:
    """The event loop. `TrainingRun` calls `pump`, `wait_for` and `carry_out`; everything else happens inside `pump`."""

    def __init__(self, config: Config, run: Path, folder: Path, layout: JobLayout, checkpoint: Path | None) -> None:
        self.config, self.checkpoint = config, checkpoint
        self.run, self.folder, self.layout = run, folder, layout
        self.clock: Clock = WallClock()
        self.context = zmq.Context()
        self.server = Server(self.context, "tcp://127.0.0.1:0", ToController)
        self.pool = EnvironmentPool(self.context, config.env, self.clock, run / "logs", self.notice)
        self.collector: Collector | None = None
        self.training: TrainingRun | None = None
        trace = run / f"trace{f'-{checkpoint.name}' if checkpoint else ''}.json"
        self.activity = Activity(trace if config.trace else None, self.clock.now())
        self.interrupted_by: int | None = None
        self.outlet: int | None = None
        self._unprepared, self._shut = "prepare() was not called", ""
        """Why nothing can be played, and why workers cannot join."""
        self.externals = self._open_door(run / JOIN_ADDRESS)
        self.cluster = Cluster(self, self.externals, Router(block_size=config.engine.block_size), self.clock.now())
        self._looked = -math.inf
        self._waiter = Waiter([self.server, *self.pool.ends, *self.externals.ends])
        self._tokenizer: Tokenizer | None = None
        self._system_prompt = ""
        self._example: Sequence[str] = ()
        self._hellos: dict[int, Hello] = {}
        self._killed: set[int] = set()
        self._ready: dict[int, Ready] = {}
        self._done: dict[int, dict[int, Done]] = {}
        self._number = 0
        self._waiting_for, self._waiting_since, self._status_at = "", self.clock.now(), self.clock.now()
        limits = config.timeouts
        self._heartbeat = Heartbeat(every_s=limits.heartbeat_s, silence_s=limits.silence_s, now=self.clock.now())

    # ------------------------------------------------------------------------------------------------- the job

    def _open_door(self, known: Path) -> Externals:
        """Where workers may join; where nobody can, `work` says so to the ranks."""
        options, world, now = self.config.elastic, self.layout.world, self.clock.now()
        try:
            length = from_folder(self.folder).max_position if options.listen else 0
            before = known.read_text() if known.exists() else ""
            return Externals(self.context, options, world, now, before, length)
        except (ValueError, OSError) as error:
            self._shut = str(error)
            return Externals(self.context, ElasticOptions(), world, now)

    def prepare(self) -> None:
        """Loads what takes seconds, before anybody counts on heartbeats. What goes wrong is told by `work`, to the ranks."""
        env = self.config.env
        try:
            self._tokenizer = Tokenizer.from_folder(self.folder)
            self.pool.learn(words_for(self._tokenizer))
            environment = environments.make(env.name, **environments.constructor_options(env))
            self._system_prompt, self._example = system_prompt_of(environment), example_of(environment)
        except Exception as error:  # users' environments are made here too
            traceback.print_exc()
            self._unprepared = f"{type(error).__name__}: {error}"

    def work(self) -> Stop:
        """Plays the whole job and returns how it ended."""
        try:
            tokenizer, ranks = self._tokenizer, self.layout.world
            if tokenizer is None or self._shut:
                self._refuse(f"the controller cannot start: {self._shut or self._unprepared}")
            self.wait_for(lambda: len(self._ready) == ranks, "timeouts.start_s", f"{ranks} ranks to be ready")
            limit = min(self._ready[rank].max_model_len for rank in self.layout.serving)
            self.collector = self._new_collector(tokenizer, limit)
            self.cluster.begin(self.collector, self._ready, self.folder, self.clock.now())
            self._invite()
            self.training = TrainingRun(self, self.collector, tokenizer, max_model_len=limit)
            reason = self.training.run(self.checkpoint)
            return Stop(number=self._number, reason=reason, exit_code=0)
        except JobFailed as failure:
            return Stop(number=self._number, reason=self._explained(str(failure)), exit_code=failure.exit_code)
        except (ChannelError, ValueError) as error:
            traceback.print_exc()
            return Stop(number=self._number, reason=self._explained(f"failed: {error}"), exit_code=1)
        except Exception as error:  # a fault of ours; the ranks must not wait for their time-out to learn of it
            traceback.print_exc()
            return Stop(number=self._number, reason=f"failed: {type(error).__name__}: {error}", exit_code=1)

    def _refuse(self, reason: str) -> NoReturn:
        """JobFailed, once all ranks are there to be told: whose end comes without a word names the launcher's signal for it."""
        try:
            self.wait_for(lambda: len(self._hellos) == self.layout.world, "timeouts.start_s", "ranks to tell")
        except JobFailed as failure:
            if failure.exit_code != 1:  # not for want of a rank, or for another one's failure
                raise
        raise JobFailed(reason)

    def _explained(self, reason: str) -> str:
        return first_cause(reason, [hello for hello in self._hellos.values() if hello.rank not in self._killed])

    def _new_collector(self, tokenizer: Tokenizer, max_model_len: int) -> Collector:
        training = self.config.rollout
        options = {"train": training, "eval": dataclasses.replace(training, temperature=0.0)}

        def new_rollout(trajectory: Trajectory, purpose: str) -> Rollout:
            return Rollout(
                trajectory,
                tokenizer=tokenizer,
                options=options[purpose],
                env=self.config.env,
                max_model_len=max_model_len,
                seed=self.config.seed,
                system_prompt=self._system_prompt,
                example=self._example,
            )

        limit_s = 2 * self.config.engine.transfer_deadline_s
        return Collector(new_rollout, pool=self.pool, router=self.cluster.router, send=self.send_to, move_limit_s=limit_s)

    def _invite(self) -> None:
        """Says where external workers may join, to people and in the run directory."""
        if self.externals.invitation:
            path = write_invitation(self.run, self.externals.invitation)
            self.notice(f"workers may join: python -m pearl.rl.join {path}")  # the token is in no log
            if self.externals.elsewhere:
                self.notice(self.externals.elsewhere)
            self.cluster.invited()

    def end(self, stop: Stop) -> None:
        """Tells the ranks and ends the environments; never raises, and leaves no socket behind."""
        steps: list[Callable[[], Any]] = [partial(self.send, rank, stop) for rank in self._hellos]
        steps += [partial(self.externals.send, number, stop) for number in self.externals.members]
        steps += [self.cluster.close, self.externals.close, self.pool.close, partial(self.activity.close, self.clock.now())]
        steps += [partial(self.server.socket.close, linger=1000), partial(self.context.destroy, linger=1000)]
        for step in steps:
            try:
                step()
            except Exception as error:  # the rest is done all the same
                with contextlib.suppress(OSError):  # the log may be on a full disk
                    print(error if isinstance(error, ChannelError) else traceback.format_exc(), flush=True)

    # ------------------------------------------------------------------------------------------------- the loop

    def pump(self, timeout_s: float = POLL_S) -> None:
        """One turn: lets work start, waits for anything to arrive, takes it, and sends what that leads to.

        The first comes before the wait: between two turns a step may have ended, after which nothing arrives by itself.
        """
        self._let_start()
        self._waiter.wait(timeout_s)
        messages = [message for _, message in self.server.receive()] if self._waiter.came(self.server) else []
        events = self.externals.receive()
        for message in messages:
            self._take(message)
        for event in events:
            self._take_external(event)
        if self.server.rejected:  # it may have been what a wait is for
            raise JobFailed("a message came that is none of this release: do all ranks run the same?")
        now = self.clock.now()
        if self.collector is not None:
            self.collector.poll_environments(now)
        else:
            self.pool.poll(now)  # nobody plays yet: it is told how the model reads
        rare = events or self.externals.joins or not all(isinstance(one, EVERYDAY) for one in messages)
        if rare or now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self.cluster.turn(now)
            if self.cluster.changed():
                self.activity.note_roles(self.cluster.roles(), now)
            self._watch(now)
        self._let_start()

    def _let_start(self) -> None:
        if self.collector is not None and self.training is not None:
            self.training.admit()
            self.collector.flush()

    def wait_for(self, ready: Callable[[], bool], limit: str, what: str, *, renew: Callable[[], Any] | None = None) -> None:
        """Pumps until `ready()`. JobFailed names `what` after the time-out called `limit` ("section.field" of the Config).

        With `renew`, the time starts again whenever its value changes: a wait that ends by silence, not by length.
        """
        left = timeout_s = operator.attrgetter(limit)(self.config)
        seen, last = renew() if renew else None, self.clock.now()
        self._looked = -math.inf  # much may have changed since the last turn
        self._waiting_for, self._waiting_since = what, last
        while not ready():
            self.pump()
            now = self.clock.now()
            left, last = left - min(now - last, LONGEST_GAP_S), now
            if renew and (value := renew()) != seen:
                seen, left, self._waiting_since = value, timeout_s, now
            if left <= 0:
                raise JobFailed(f"waited {limit}={timeout_s:g} s for {what}")

    def carry_out(self, make: Callable[[int], Command], ranks: Iterable[int]) -> dict[int, Done]:
        """Sends the command that `make(number)` gives to these ranks and pumps until all have done it."""
        number = self.next_number()
        command, ranks = make(number), list(ranks)
        name, message = type(command).__name__, self.server.encode(command)  # once: a batch takes time, and much memory
        self._done[number] = {}
        for rank in ranks:
            self.activity.begin(rank, name, self.clock.now())
            self.server.send_encoded(name_of(rank), message)
        self.wait_for(lambda: len(self._done[number]) == len(ranks), "timeouts.command_s", f"command {number} ({name})")
        return self._done.pop(number)

    def next_number(self) -> int:
        """Of a command; no two have the same."""
        number, self._number = self._number, self._number + 1
        return number

    def send(self, rank: int, message: Any) -> None:
        """To a rank of WORLD."""
        self.server.send(name_of(rank), message)

    def send_to(self, worker: str, message: Any) -> None:
        """To any member by its name; one that is gone does not get it."""
        number = number_of(worker)
        if number < self.layout.world:
            self.send(number, message)
        else:
            self.externals.send(number, message)

    def fail(self, reason: str) -> None:
        """JobFailed, with this reason."""
        raise JobFailed(reason)

    def notice(self, text: str) -> None:
        """Has one line printed by rank 0."""
        self.send(0, Notice(text=text))

    def report(self, row: dict[str, Any]) -> None:
        """Has a step's line printed by rank 0."""
        self.send(0, StepReport(metrics=row))

    def _take(self, message: Any) -> None:
        if isinstance(message, Join):
            return  # WORLD's ranks do not ask
        self._heartbeat.heard(message.rank)
        match message:
            case Tokens():
                self.activity.stepped(message, self.clock.now())
                self.cluster.take(message, self.clock.now())
            case Done():
                if (given := self._done.get(message.number)) is not None:
                    self.activity.end(message.rank, self.clock.now())
                    given[message.rank] = message
                elif message.number < self._number:  # of an order to one member, or late, which is counted
                    self.cluster.take(message, self.clock.now())
                else:
                    raise ValueError(f"rank {message.rank} has answered command {message.number}, which was never given")
            case Hello():
                self._hellos[message.rank] = message
                self._heartbeat.advance(self.clock.now())  # time before it came does not count against it
                self._heartbeat.add(message.rank)
            case Ready():
                self._ready[message.rank] = message
            case Failed():
                if not message.traceback:  # it was told of its end, and is not to blame
                    raise JobFailed(message.error)
                print(message.traceback, flush=True)
                raise JobFailed(f"rank {message.rank} failed: {message.error}")
            case Interrupted():
                raise JobFailed(f"interrupted by {message.signal}", 128 + signal.Signals[message.signal])
            case _:
                self.cluster.take(message, self.clock.now())

    def _take_external(self, event: Any) -> None:
        now = self.clock.now()
        with contained(partial(self.cluster.blame, event.rank, now)):
            self.cluster.take_external(event, now)
            if isinstance(event, Tokens) and event.rank in self.externals.members:  # still: its words can be true
                self.activity.stepped(event, now)

    def _watch(self, now: float) -> None:
        if self.interrupted_by is not None:
            raise JobFailed(f"interrupted by {signal.Signals(self.interrupted_by).name}", 128 + self.interrupted_by)
        silent = self._heartbeat.advance(now)
        if silent:
            raise JobFailed(self._kill(silent))
        if self._heartbeat.ping_due():
            for rank in self._hellos:
                self.send(rank, Ping(sequence=self._heartbeat.sequence))
        if now - self._status_at >= STATUS_EVERY_S and 0 in self._hellos:
            self._status_at = now
            queues = self.training.queues() if self.training else {}
            roles = self.cluster.roles()
            self.activity.note_roles(roles, now)
            self.send(0, self.activity.status(self._waiting_for, now - self._waiting_since, queues, roles, now))

    def _kill(self, silent: list[int]) -> str:
        """Ends ranks that answer no more (a launcher would wait half a minute for a stopped one); returns the reason."""
        limit = self.config.timeouts.silence_s
        reason = f"rank {', '.join(map(str, silent))} silent for timeouts.silence_s={limit:g} s, killed"
        self._killed |= set(silent)
        print(reason, flush=True)
        if 0 in silent and self.outlet is not None:  # it cannot say so itself
            os.write(self.outlet, f"ended: {reason}\n".encode())
        kill_ranks(silent, self._hellos, self.send)
        return reason


def main(argv: list[str]) -> int:
    run, folder = Path(argv[0]), Path(argv[1])
    fd, outlet, world, parent = map(int, argv[2:6])
    process.die_with_parent(parent=parent)
    config = configuration.from_json((run / "config.json").read_bytes())
    checkpoint = Path(argv[6]) if argv[6] else None
    controller = Controller(config, run, folder, JobLayout.of(config, world), checkpoint)
    controller.outlet = outlet
    process.on_signals(lambda signum: setattr(controller, "interrupted_by", signum))
    controller.prepare()
    gc.freeze()  # what was loaded stays, and need not be looked through again and again
    os.write(fd, controller.server.address.encode() + b"\n")
    os.close(fd)
    stop = controller.work()
    controller.end(stop)
    with contextlib.suppress(OSError):
        print(f"ended: {stop.reason}", flush=True)
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
