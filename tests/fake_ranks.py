"""The ranks of a job without torch: one thread that answers a controller as they would, and environments without a process.

A serving rank replies to every request with the same text, some tokens per step, each with the version that it serves by
then; a training rank needs `train_s` for a step. Everything that the ranks were told is kept.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from pearl.channel import Client
from pearl.engine.node import node
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import (
    Abort,
    Checkpoint,
    Command,
    Done,
    Event,
    Hello,
    NewRequest,
    Ping,
    Pong,
    Publish,
    Ready,
    Stop,
    Submit,
    Tokens,
    TokenUpdate,
    ToRank,
    TrainStep,
)
from pearl.rl.envs import registry
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.layout import JobLayout
from pearl.rl.members import name_of

WON = "<answer>Right</answer>"
LONGEST_S = 60.0


@dataclass(slots=True)
class _Live:
    request: NewRequest
    left: list[int]


class FakeRanks(threading.Thread):
    """`react(rank, message)` may return an Event to send in place of the usual answer, or True for no answer at all."""

    def __init__(
        self,
        address: str,
        layout: JobLayout,
        folder: str | Path,
        *,
        reply: str | Callable[[NewRequest], str] = WON,
        tokens_per_step: int = 1000,
        step_s: float = 0.0,
        train_s: float = 0.0,
        publish_s: float = 0.0,
        max_model_len: int = 512,
        pids: dict[int, int] | None = None,
        hosts: dict[int, str] | None = None,
        late: dict[int, float] | None = None,
        react: Callable[[int, Any], Event | bool | None] = lambda rank, message: None,
    ) -> None:
        super().__init__(name="fake ranks", daemon=True)
        self.layout = layout
        self.commands: dict[int, list[Command]] = {rank: [] for rank in range(layout.world)}
        self.messages: list[tuple[float, int, Any]] = []
        self.requests: dict[int, list[NewRequest]] = {rank: [] for rank in range(layout.world)}
        self.versions = dict.fromkeys(range(layout.world), -1)
        self.stops: dict[int, Stop] = {}
        self.error: BaseException | None = None
        self.closing = threading.Event()
        self._address = address
        self._tokenizer = Tokenizer.from_folder(folder)
        self._reply, self._tokens_per_step, self._step_s = reply, tokens_per_step, step_s
        self._train_s, self._publish_s, self._max_model_len = train_s, publish_s, max_model_len
        self._pids, self._hosts, self._late = pids or {}, hosts or {}, late or {}
        self._react = react
        self._live: dict[int, dict[str, _Live]] = {rank: {} for rank in layout.serving}
        self._next_step = dict.fromkeys(layout.serving, 0.0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        self.closing.set()
        self.join(5)

    # ------------------------------------------------------------------------------------------------- inside

    def _run(self) -> None:
        context = zmq.Context()
        self._clients = {rank: Client(context, self._address, name_of(rank), ToRank) for rank in range(self.layout.world)}
        poller = zmq.Poller()
        for client in self._clients.values():
            poller.register(client.socket, zmq.POLLIN)
        for rank in self._clients:
            self._after(self._late.get(rank, 0.0), lambda rank=rank: self._begin(rank))
        began = time.monotonic()
        while len(self.stops) < self.layout.world and not self.closing.is_set():
            assert time.monotonic() - began < LONGEST_S, "the fake ranks were never stopped"
            poller.poll(0 if any(self._live.values()) and not self._step_s else 5)
            for rank, client in self._clients.items():
                for message in client.receive():
                    self._take(rank, message)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            for rank in self.layout.serving:
                if self._live[rank] and now >= self._next_step[rank]:
                    self._next_step[rank] = now + self._step_s
                    self._step(rank)
        for client in self._clients.values():
            client.socket.close(0)
        context.term()

    def _begin(self, rank: int) -> None:
        pid, host = self._pids.get(rank, os.getpid()), self._hosts.get(rank, node())
        self._send(rank, Hello(rank=rank, pid=pid, host=host, roles=self.layout.roles(rank)))
        self._send(rank, Ready(rank=rank, max_model_len=self._max_model_len if rank in self.layout.serving else 0))

    def _send(self, rank: int, event: Event) -> None:
        self._clients[rank].send(event)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._serial), do))

    def _take(self, rank: int, message: Any) -> None:
        self.messages.append((time.monotonic(), rank, message))
        if isinstance(message, Stop):
            self.stops[rank] = message
        if isinstance(message, Command):
            self.commands[rank].append(message)
        answer = self._react(rank, message)
        if isinstance(answer, Event):
            self._send(rank, answer)
        if answer:
            return
        match message:
            case Ping():
                self._send(rank, Pong(rank=rank, sequence=message.sequence))
            case Submit():
                self._submit(rank, message.requests)
            case Abort():
                for request_id in message.request_ids:
                    self._live[rank].pop(request_id, None)
            case Stop():
                pass
            case Command():
                self._carry_out(rank, message)

    def _submit(self, rank: int, requests: Iterable[NewRequest]) -> None:
        for request in requests:
            self.requests[rank].append(request)
            text = self._reply if isinstance(self._reply, str) else self._reply(request)
            ids = [*self._tokenizer.encode(text), self._tokenizer.end_of_turn_id][: request.params.max_tokens]
            self._live[rank][request.request_id] = _Live(request, ids)

    def _step(self, rank: int) -> None:
        updates = []
        for name, live in list(self._live[rank].items()):
            ids, live.left = live.left[: self._tokens_per_step], live.left[self._tokens_per_step :]
            if not live.left:
                del self._live[rank][name]
            count = len(ids)
            updates.append(
                TokenUpdate(
                    request_id=name,
                    token_ids=ids,
                    logprobs=[-1.0] * count,
                    weight_versions=[self.versions[rank]] * count,
                    finish_reason=None if live.left else "stop",
                )
            )
        waiting, running = 0, len(self._live[rank])
        tokens = Tokens(rank=rank, updates=updates, seconds=1e-4, waiting=waiting, running=running, free_blocks=100)
        self._send(rank, tokens)

    def _carry_out(self, rank: int, command: Command) -> None:
        seconds = {TrainStep: self._train_s, Publish: self._publish_s}.get(type(command), 0.0)
        metrics = {"loss": 0.5, "tokens": 7, "lr": 0.1} if isinstance(command, TrainStep) else {}

        def done() -> None:
            if isinstance(command, Publish):
                self.versions[rank] = command.version
            if isinstance(command, Checkpoint) and rank == 0:
                Path(command.path).mkdir()
                (Path(command.path) / "weights").write_text(str(command.step))
            self._send(rank, Done(rank=rank, number=command.number, seconds=seconds, metrics=metrics))

        self._after(seconds, done) if seconds else done()


class InlinePool:
    """The environments of a job in this thread: what `EnvironmentPool` offers the controller, for environments that behave."""

    def __init__(self, context: zmq.Context, options: Any, clock: Any, log_dir: Path, notice: Any = None) -> None:
        self.seconds = 0.0
        """Processor time of the environments themselves, which a real pool spends in other processes."""
        self.counts: Counter[str] = Counter(restarts=0, timeouts=0, errors=0, replayed=0)
        self._options = options
        self._live: dict[str, Any] = {}
        self._outcomes: list[EnvOutcome] = []
        address = f"inproc://pool-{id(self)}"
        self._reader, self._writer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._reader.bind(address)
        self._writer.connect(address)
        self.ends = [self._reader]

    def learn(self, words: Any) -> None:
        """Its environments say text."""

    def reset(self, episode_id: str, seed: int) -> None:
        def begun(_: Any) -> tuple:
            env = self._live[episode_id] = registry.make(self._options.name, **registry.constructor_options(self._options))
            return env.reset(seed)[0], 0.0, False, False, {}

        self._answer(episode_id, begun)

    def step(self, episode_id: str, action: str) -> None:
        self._answer(episode_id, lambda env: env.step(action))

    def discard(self, episode_id: str) -> None:
        self._live.pop(episode_id, None)

    def flush(self) -> None:
        if self._outcomes:
            self._writer.send(b"")

    def poll(self, now: float) -> list[EnvOutcome]:
        while self._reader.poll(0):
            self._reader.recv()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        self._reader.close(0)
        self._writer.close(0)

    def _answer(self, episode_id: str, ask: Callable[[Any], tuple]) -> None:
        began = time.thread_time()
        try:
            observation, reward, terminated, truncated, info = ask(self._live.get(episode_id))
            said = {"observation": observation, "reward": reward, "terminated": terminated, "truncated": truncated}
            outcome = EnvOutcome(episode_id=episode_id, info=info, **said)
        except Exception as error:
            self.counts["errors"] += 1
            outcome = EnvOutcome(episode_id=episode_id, error=f"{type(error).__name__}: {error}")
        self.seconds += time.thread_time() - began
        self._outcomes.append(outcome)
