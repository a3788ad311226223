"""The controller process: one event loop around ranks, environments and the order of steps. Torch-free.

    python -m pearl.rl.controller RUN MODEL_FOLDER ADDRESS_FD RANKS PARENT_PID        (started by rank 0)

Owns sockets, heartbeats, commands and their numbers, and what is written to the run directory. What to do is said by
others: admission (when a trajectory may start, when a batch is complete), router (where a request runs), packing (what is
trained together). Invariants: commands are numbered from 0 without gaps; every wait has a deadline with a name; whatever
happens, the ranks are told to stop and the environments end.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from pearl import config as configuration
from pearl.channel import ChannelError, Server, wait
from pearl.clock import Clock, WallClock
from pearl.config import Config
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import (
    Command,
    Done,
    Failed,
    Hello,
    Interrupted,
    Notice,
    Ping,
    StepReport,
    Stop,
    ToController,
    Tokens,
)
from pearl.rl import process
from pearl.rl.collector import Collector
from pearl.rl.envs import registry as environments
from pearl.rl.envs.base import system_prompt_of
from pearl.rl.envs.pool import EnvironmentPool
from pearl.rl.heartbeat import LONGEST_GAP_S, Heartbeat
from pearl.rl.rollout import Rollout
from pearl.rl.training import TrainingRun
from pearl.rl.types import Trajectory
from pearl.sched.router import Router

POLL_S = 0.2


class JobFailed(RuntimeError):
    """The job cannot go on; the message is its one-line reason."""


class Controller:
    """The event loop. `TrainingRun` calls `pump`, `wait_for` and `carry_out`; everything else happens inside `pump`."""

    def __init__(self, config: Config, run: Path, folder: Path, ranks: int) -> None:
        self.config = config
        self.run = run
        self.folder = folder
        self.clock: Clock = WallClock()
        self.context = zmq.Context()
        self.server = Server(self.context, "tcp://127.0.0.1:0", ToController)
        self.names = [f"rank{rank}" for rank in range(ranks)]
        self.pool = EnvironmentPool(self.context, config.env, self.clock, run / "logs")
        self.collector: Collector | None = None
        self._hellos: dict[str, Hello] = {}
        self._done: dict[int, Done] = {}
        self._number = 0
        self._each_turn: Callable[[], None] = lambda: None
        silence_s = config.timeouts.silence_s
        self._heartbeat = Heartbeat([], every_s=config.timeouts.heartbeat_s, silence_s=silence_s, now=self.clock.now())

    # ------------------------------------------------------------------------------------------------- the job

    def work(self) -> Stop:
        """Plays the whole job and returns how it ended."""
        try:
            tokenizer = Tokenizer.from_folder(self.folder)
            self.wait_for(lambda: len(self._hellos) == len(self.names), "timeouts.start_s", "all ranks to be ready")
            self._heartbeat = Heartbeat(
                self.names,
                every_s=self.config.timeouts.heartbeat_s,
                silence_s=self.config.timeouts.silence_s,
                now=self.clock.now(),
            )
            limit = min(hello.max_model_len for hello in self._hellos.values())
            self.collector = self._new_collector(tokenizer, limit)
            training = TrainingRun(self, self.collector, tokenizer, max_model_len=limit)
            self._each_turn = training.admit
            return Stop(number=self._number, reason=training.run(), exit_code=0)
        except (JobFailed, ChannelError, ValueError) as error:
            traceback.print_exc()
            return Stop(number=self._number, reason=f"failed: {error}", exit_code=1)
        except Exception as error:  # a fault of ours; the ranks must not wait for their time-out to learn of it
            traceback.print_exc()
            return Stop(number=self._number, reason=f"failed: {type(error).__name__}: {error}", exit_code=1)

    def _new_collector(self, tokenizer: Tokenizer, max_model_len: int) -> Collector:
        router = Router()
        for name in self.names:
            router.add_worker(name)
        env = self.config.env
        system_prompt = system_prompt_of(environments.make(env.name, **environments.constructor_options(env)))
        training = self.config.rollout
        options = {"train": training, "eval": dataclasses.replace(training, temperature=0.0)}

        def new_rollout(trajectory: Trajectory, purpose: str) -> Rollout:
            return Rollout(
                trajectory,
                tokenizer=tokenizer,
                options=options[purpose],
                env=env,
                max_model_len=max_model_len,
                seed=self.config.seed,
                system_prompt=system_prompt,
            )

        return Collector(new_rollout, pool=self.pool, router=router, send=self.send)

    def end(self, stop: Stop) -> None:
        """Tells the ranks and ends the environments; never raises."""
        for name in self._hellos:
            try:
                self.server.send(name, stop)
            except ChannelError as error:
                print(error, flush=True)
        self.pool.close()
        self.server.socket.close(linger=1000)
        self.context.term()

    # ------------------------------------------------------------------------------------------------- the loop

    def pump(self, timeout_s: float = POLL_S) -> None:
        """One turn: waits for anything to arrive, takes it, lets new work start, and sends what has gathered."""
        wait([self.server, *self.pool.ends], timeout_s)
        for name, message in self.server.receive():
            self._heartbeat.heard(name)
            self._take(name, message)
        now = self.clock.now()
        if self.collector is not None:
            self.collector.poll_environments(now)
            self._each_turn()
            self.collector.flush()
        self._watch(now)

    def wait_for(self, ready: Callable[[], bool], limit: str, what: str, *, renew: Callable[[], Any] | None = None) -> None:
        """Pumps until `ready()`. JobFailed names `what` after the time-out called `limit` ("section.field" of the Config).

        With `renew`, the time starts again whenever its value changes: a wait that ends by silence, not by length.
        """
        section, field = limit.split(".")
        left = timeout_s = getattr(getattr(self.config, section), field)
        seen, last = renew() if renew else None, self.clock.now()
        while not ready():
            self.pump()
            now = self.clock.now()
            left, last = left - min(now - last, LONGEST_GAP_S), now
            if renew and (value := renew()) != seen:
                seen, left = value, timeout_s
            if left <= 0:
                raise JobFailed(f"waited {limit}={timeout_s:g} s for {what}")

    def carry_out(self, make: Callable[[int], Command]) -> Done:
        """Sends the command that `make(number)` gives to all ranks and pumps until it is done."""
        number, self._number = self._number, self._number + 1
        command = make(number)
        for name in self.names:
            self.send(name, command)
        what = f"command {number} ({type(command).__name__})"
        self.wait_for(lambda: number in self._done, "timeouts.command_s", what)
        return self._done.pop(number)

    def send(self, name: str, message: Any) -> None:
        self.server.send(name, message)

    def notice(self, text: str) -> None:
        """Has one line printed by rank 0."""
        self.send(self.names[0], Notice(text=text))

    def report(self, row: dict[str, Any]) -> None:
        """Has a step's line printed by rank 0."""
        self.send(self.names[0], StepReport(metrics=row))

    def _take(self, name: str, message: Any) -> None:
        if isinstance(message, Tokens):
            if self.collector is not None:
                self.collector.on_tokens(name, message)
        elif isinstance(message, Done):
            self._done[message.number] = message
        elif isinstance(message, Hello):
            self._hellos[name] = message
        elif isinstance(message, Failed):
            print(message.traceback, flush=True)
            raise JobFailed(f"rank {message.rank}: {message.error}")
        elif isinstance(message, Interrupted):
            raise JobFailed(f"interrupted by {message.signal}")

    def _watch(self, now: float) -> None:
        silent = self._heartbeat.advance(now)
        if silent:
            raise JobFailed(f"{', '.join(silent)} silent for timeouts.silence_s={self.config.timeouts.silence_s:g} s")
        if self._heartbeat.ping_due():
            for name in self._hellos:
                self.send(name, Ping(sequence=self._heartbeat.sequence))


def main(argv: list[str]) -> int:
    run, folder, fd, ranks, parent = Path(argv[0]), Path(argv[1]), int(argv[2]), int(argv[3]), int(argv[4])
    process.die_with_parent(parent=parent)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # a rank that is interrupted tells us; we end in order, with it
    config = configuration.from_json((run / "config.json").read_bytes())
    controller = Controller(config, run, folder, ranks)
    os.write(fd, controller.server.address.encode() + b"\n")
    os.close(fd)
    started = time.monotonic()
    stop = controller.work()
    controller.end(stop)
    print(f"ended after {time.monotonic() - started:.1f} s: {stop.reason}", flush=True)
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
