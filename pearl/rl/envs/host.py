"""A process that holds environment instances and plays them on behalf of the pool.

    python -m pearl.rl.envs.host ADDRESS NAME OPTIONS_JSON TOKEN --parent PID --progress FILE

TOKEN is the name under which it connects. It does not know episodes' purpose or models; how a model reads text it may be told,
so that tokenizing is not the work of the one process that asks all others. Invariants: an exception in
an environment is the answer to its own item and harms no other; the serial number of the item being played stands in the
progress file before its code runs (0 between items), so that whoever watches knows the culprit of a hang or a crash; the
process does not outlive its parent. It ignores SIGINT (its parent decides) and closes its instances on SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import signal
import struct
import time
import traceback
from typing import Any

import msgspec
import zmq

from pearl.channel import Client, wait
from pearl.engine.plain_tokenizer import Joint, PlainTokenizer
from pearl.rl import process
from pearl.rl.envs import registry
from pearl.rl.envs.base import Environment
from pearl.rl.envs.wire import Answer, Answers, Batch, Discard, Ready, Replay, Reset, Step, ToHost, Words, fingerprint

PARENT_CHECK_S = 1.0
"""How often the parent is looked for where the system cannot announce its death."""
SILENCE_S = 900.0
"""Without a message from the pool for so long the process ends."""
ANSWER_EVERY_S = 0.002
"""Answers of a batch that takes longer than this are sent before it is through."""
PROGRESS_BYTES = 8


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that it is no environment's error."""


class Progress:
    """The serial number of the item being played, in a small file that the pool maps too."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), PROGRESS_BYTES)

    def write(self, serial: int) -> None:
        struct.pack_into("<q", self._memory, 0, serial)

    def read(self) -> int:
        return struct.unpack_from("<q", self._memory, 0)[0]

    def close(self) -> None:
        self._memory.close()


class Tracebacks:
    """Writes what environments raise to the log: in full the first time, later only how often, at 10, 100, 1000 and so on.

    Exceptions of one type from one place are the same, whatever they say.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], int] = {}

    def write(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        where = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
        kind = (type(error).__name__, *where)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            traceback.print_exception(error)
        elif str(count).strip("0") == "1":
            print(f"{count} times so far: {_one_line(error)} ({where[0]}:{where[1]})", flush=True)


class Instances:
    """The episodes in this process: a new environment for each, closed at its end."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, options
        self._tracebacks = Tracebacks()
        self._environments: dict[str, Environment] = {}
        self._words: tuple[Joint, PlainTokenizer] | None = None

    def learn(self, words: Words) -> None:
        """Answers to steps come with ids from now on. Without the library, or for a tokenizer that it cannot read, they do
        not, and whoever asked makes them."""
        try:
            self._words = words.joint, PlainTokenizer.from_json(words.tokenizer)
        except (ImportError, ValueError) as error:
            self._tracebacks.write(error)

    def play(self, item: Reset | Step | Replay) -> Answer:
        """Plays one item; whatever the environment raises becomes the answer's error, and its traceback goes to the log."""
        try:
            answer = self._play(item)
        except (Exception, SystemExit) as error:
            self._tracebacks.write(error)
            answer = Answer(item.serial, item.episode_id, error=_one_line(error))
        if answer.error is not None or answer.terminated or answer.truncated:
            self.discard(item.episode_id)
        return answer

    def discard(self, episode_id: str) -> None:
        """Drops an instance if it is here; an exception of its `close` only goes to the log."""
        environment = self._environments.pop(episode_id, None)
        close = getattr(environment, "close", None)
        if close is not None:
            try:
                close()
            except (Exception, SystemExit) as error:
                self._tracebacks.write(error)

    def discard_all(self) -> None:
        for episode_id in list(self._environments):
            self.discard(episode_id)

    def _play(self, item: Reset | Step | Replay) -> Answer:
        if isinstance(item, Step):
            if item.episode_id not in self._environments:
                raise LookupError(f"episode {item.episode_id!r} is not held by this process")
            return self._with_ids(self._step(item.serial, item.episode_id, item.action))
        self.discard(item.episode_id)
        environment = self._environments[item.episode_id] = registry.make(self._name, **self._options)
        observation, info = environment.reset(item.seed)
        answer = _checked(Answer(item.serial, item.episode_id, observation=observation, info=info))
        return self._replay(item, answer) if isinstance(item, Replay) else answer

    def _step(self, serial: int, episode_id: str, action: str) -> Answer:
        observation, reward, terminated, truncated, info = self._environments[episode_id].step(action)
        return _checked(Answer(serial, episode_id, observation, float(reward), bool(terminated), bool(truncated), info))

    def _with_ids(self, answer: Answer) -> Answer:
        """What goes on will be read by the model."""
        if self._words is None or answer.terminated or answer.truncated or not Joint.takes(answer.observation):
            return answer
        joint, tokenizer = self._words
        try:
            return msgspec.structs.replace(answer, token_ids=joint.ids(tokenizer, answer.observation))
        except ValueError as error:  # a text that this tokenizer cannot express: told by whoever needs its ids
            self._tracebacks.write(error)
            return answer

    def _replay(self, item: Replay, first: Answer) -> Answer:
        answer = first
        for turn, expected in enumerate(item.fingerprints):
            if turn:
                answer = self._step(item.serial, item.episode_id, item.actions[turn - 1])
            if fingerprint(answer.observation) != expected or answer.terminated or answer.truncated:
                raise RuntimeError(f"its process was lost, and played again it went another way at turn {turn}")
        return answer


def _checked(answer: Answer) -> Answer:
    if not isinstance(answer.observation, str):
        raise TypeError(f"observation must be str, the environment gave {type(answer.observation).__name__}")
    if not math.isfinite(answer.reward):
        raise ValueError(f"reward must be finite, the environment gave {answer.reward}")
    if not isinstance(answer.info, dict):
        raise TypeError(f"info must be dict, the environment gave {type(answer.info).__name__}")
    answer = msgspec.structs.replace(answer, info=msgspec.to_builtins(answer.info, enc_hook=_plain, str_keys=True))
    msgspec.msgpack.encode(answer)  # what cannot cross to another process (a lone surrogate) is this episode's error
    return answer


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's; anything else by its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).encode("utf-8", "replace").decode().split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


class Host:
    """The loop: batches in, answers out."""

    def __init__(self, client: Client, instances: Instances, progress: Progress, parent: int) -> None:
        self._client, self._instances, self._progress, self._parent = client, instances, progress, parent
        self._answers: list[Answer] = []
        self._seconds = 0.0

    def run(self) -> str:
        """Until the parent is gone or silent; returns why it ended."""
        self._client.send(Ready(os.getpid()))
        heard = time.monotonic()
        while time.monotonic() - heard < SILENCE_S:
            if os.getppid() != self._parent:
                return "the parent process is gone"
            wait([self._client], PARENT_CHECK_S)
            for message in self._client.receive():
                heard = time.monotonic()
                if isinstance(message, Words):
                    self._instances.learn(message)
                    self._client.send(Ready(os.getpid()))
                else:
                    self._serve(message)
                heard = time.monotonic()
        return f"nothing heard for {SILENCE_S:g} s"

    def _serve(self, batch: Batch) -> None:
        sent = time.monotonic()
        for item in batch.items:
            if isinstance(item, Discard):
                self._instances.discard(item.episode_id)
                continue
            self._progress.write(item.serial)
            began = time.perf_counter()
            self._answers.append(self._instances.play(item))
            self._seconds += time.perf_counter() - began
            self._progress.write(0)
            if time.monotonic() - sent > ANSWER_EVERY_S:
                self._send()
                sent = time.monotonic()
        self._send()

    def _send(self) -> None:
        if self._answers:
            self._client.send(Answers(self._answers, self._seconds))
            self._answers, self._seconds = [], 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pearl.rl.envs.host", allow_abbrev=False)
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("token")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--progress", required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    process.die_with_parent(parent=given.parent)
    registry.check(given.name, given.options)  # imports the environment before the clock of its first reset runs
    instances = Instances(given.name, given.options)
    client = Client(zmq.Context(), given.address, given.token, ToHost)
    try:
        print(Host(client, instances, Progress(given.progress), given.parent).run())
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        instances.discard_all()
        client.close()


def _terminate(*_: Any) -> None:
    raise Terminated


if __name__ == "__main__":
    main()
