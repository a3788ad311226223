"""The environments of a job, spread over processes: questions in, outcomes out, nothing ever waits.

Owns the host processes (`host.py`), which episode is where, and its history. It does not know models, tokens or groups.
Invariants: every reset and step is answered by exactly one outcome unless its episode was discarded; no exception, hang or
crash of an environment ends more than its own episode, as long as the others can be played again from seed and actions.
Make it in a thread that lives as long as the pool does: Linux counts the end of that thread as the parent's death.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from pearl.channel import ChannelError, Server
from pearl.clock import Clock
from pearl.config import EnvOptions
from pearl.rl.envs import registry
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.envs.host import PROGRESS_BYTES, Progress
from pearl.rl.envs.wire import Answer, Answers, Batch, Discard, Ready, Replay, Reset, Step, ToPool, Words, fingerprint

MAX_REPLAYS = 2
"""An episode that lost its process more often than this, nobody knows why, ends with an error."""
MAX_FAILED_STARTS = 3
"""So many processes in a row that end before they are ready mean that the environment cannot be run here."""
MAX_NOTICES = 5
"""Kinds of errors that are told; an environment that finds ever new words for them must not fill the screen."""
START_LIMIT_S = 60.0
CHECK_EVERY_S = 0.05
"""How often processes are looked after; asking the system costs more than most messages."""
KEEPALIVE_S = 60.0
CLOSE_LIMIT_S = 2.0


class EnvironmentPoolError(RuntimeError):
    """No process can be started for the environment; the message names the log and ends with its last lines."""


@dataclass(slots=True, eq=False)
class _Episode:
    """`actions` ends with the one being played, if any; `fingerprints` holds one per observation that came."""

    episode_id: str
    seed: int
    host: _HostProcess
    actions: list[str] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    replays: int = 0

    @property
    def waiting(self) -> bool:
        """A reset or step has not been answered yet."""
        return len(self.fingerprints) <= len(self.actions)


Item = Reset | Step | Replay


def scratch_of(progress_file: Path) -> Path:
    """Where the environments of a process put temporary files: beside its log, so that nothing is left elsewhere."""
    return progress_file.with_suffix(".tmp")


class _HostProcess:
    """One process and what it was asked. `progress` tells which item it is at, seen since `seen_at`."""

    def __init__(self, index: int, log_dir: Path, start: Callable[[str, Path, Path], subprocess.Popen]) -> None:
        self.log = log_dir / f"env-{index}.log"
        self._index, self._start, self._progress_file = index, start, log_dir / f"env-{index}.progress"
        self._scratch = scratch_of(self._progress_file)
        self.episodes = 0
        self.failed_starts = 0
        self.last_serial = 0

    def start(self, now: float) -> None:
        self._clear()
        self._scratch.mkdir()
        self._progress_file.write_bytes(bytes(PROGRESS_BYTES))
        self.progress = Progress(str(self._progress_file))
        self.token = f"env-{self._index}-{secrets.token_hex(8)}"
        self.ready = self.killed = self.learned = False
        self.queue: list[tuple[Item | Discard, _Episode]] = []
        self.asked: dict[int, tuple[Item, _Episode]] = {}
        self.seen, self.seen_at, self.spoken_at = 0, now, now
        self.process = self._start(self.token, self.log, self._progress_file)

    def serial(self) -> int:
        self.last_serial += 1
        return self.last_serial

    def overdue(self, now: float, timeout_s: float) -> bool:
        """The item it is at, or the one it should have begun, takes longer than allowed."""
        if not self.ready:
            return now - self.seen_at > START_LIMIT_S
        serial = self.progress.read()
        if serial != self.seen or not self.asked:
            self.seen, self.seen_at = serial, now
        item = self.asked[self.seen][0] if self.seen in self.asked else None
        turns = len(item.fingerprints) if isinstance(item, Replay) else 1
        return now - self.seen_at > timeout_s * turns

    def kill(self) -> None:
        """Ends the process and what the environments started in its group; once."""
        if self.killed:
            return
        self.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.progress.close()
        self._progress_file.unlink(missing_ok=True)
        self._clear()

    def _clear(self) -> None:
        """What environments put aside goes with their process, however that ended."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-5:] if self.log.exists() else []
        return " | ".join(line.strip() for line in lines) or "(empty)"


class EnvironmentPool:
    """Plays `options.workers` processes. Ask with `reset`, `step`, `discard`; `flush` sends; `poll` gives what came.

    `counts` only rise: "restarts" (processes started again), "timeouts" (killed because an item took longer than
    `options.timeout_s`), "errors" (episodes that ended with one), "replayed" (episodes brought back after a loss).
    `notice` is told of the first error of each kind, at once and in one line with the name of the log.
    `ends` can be given to `channel.wait`; poll at least every second or so besides, since a lost process sends nothing.
    ValueError for a bad environment name or options, before any process starts.
    """

    def __init__(
        self,
        context: zmq.Context,
        options: EnvOptions,
        clock: Clock,
        log_dir: str | Path,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        registry.check(options.name, registry.constructor_options(options))
        self.seconds = 0.0
        """Time spent inside environments, over all processes."""
        self.counts = {"restarts": 0, "timeouts": 0, "errors": 0, "replayed": 0}
        self._options, self._clock, self._notice = options, clock, notice
        self._told: set[str] = set()
        self._server = Server(context, "tcp://127.0.0.1:0", ToPool)
        self.ends = [self._server]
        self._episodes: dict[str, _Episode] = {}
        self._outcomes: list[EnvOutcome] = []
        self._words: Words | None = None
        self._checked = -math.inf
        log_path = Path(log_dir).resolve()
        log_path.mkdir(parents=True, exist_ok=True)
        self._hosts = [_HostProcess(index, log_path, self._popen) for index in range(options.workers)]
        for host in self._hosts:
            host.start(clock.now())

    def learn(self, words: Words | None) -> None:
        """From now on outcomes come with the ids of their observations, as a rule; without words they do not. ValueError once
        episodes have begun."""
        if self._episodes:
            raise ValueError(f"{len(self._episodes)} episodes have begun: say how a model reads before")
        self._words = words
        for host in self._hosts:
            if host.ready and words is not None:
                self._teach(host, words, self._clock.now())

    def reset(self, episode_id: str, seed: int) -> None:
        """Begins an episode; ValueError if one of this id is alive."""
        if episode_id in self._episodes:
            raise ValueError(f"episode_id={episode_id!r}: is alive; discard it first")
        host = min(self._hosts, key=lambda host: host.episodes)
        episode = self._episodes[episode_id] = _Episode(episode_id, seed, host)
        host.episodes += 1
        host.queue.append((Reset(host.serial(), episode_id, seed), episode))

    def step(self, episode_id: str, action: str) -> None:
        """Plays a turn. An episode that is over answers with an error outcome; ValueError while an answer is awaited."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            self._outcomes.append(EnvOutcome(episode_id=episode_id, error="no such episode: it ended or was never begun"))
            return
        if episode.waiting:
            raise ValueError(f"episode_id={episode_id!r}: its last answer has not come yet")
        episode.actions.append(action)
        episode.host.queue.append((Step(episode.host.serial(), episode_id, action), episode))

    def discard(self, episode_id: str) -> None:
        """Gives up an episode; no outcome of it comes any more. Harmless for one that is over."""
        episode = self._episodes.get(episode_id)
        if episode is not None:
            self._remove(episode)
            episode.host.queue.append((Discard(episode_id), episode))

    def flush(self) -> None:
        """Sends what was asked since the last time, one message per process."""
        for host in self._hosts:
            if host.ready and host.queue:
                self._send(host, self._clock.now())

    def poll(self, now: float) -> list[EnvOutcome]:
        """What came since the last time; also replaces processes that died or hang. Never waits.

        EnvironmentPoolError if the environment's process cannot be started at all.
        """
        self._receive(now)
        if now - self._checked >= CHECK_EVERY_S:
            self._checked = now
            self._check(now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _check(self, now: float) -> None:
        for host in self._hosts:
            code = host.process.poll()
            if code is not None:
                self._receive(now)
                self._replace(host, f"its process ended ({_describe(code)}), see {host.log}", now)
            elif host.overdue(now, self._options.timeout_s):
                self._receive(now)
                if host.overdue(now, self._options.timeout_s):
                    self.counts["timeouts"] += 1
                    self._replace(host, f"no answer within timeout_s={self._options.timeout_s:g}", now)
            elif host.ready and now - host.spoken_at > KEEPALIVE_S:
                self._send(host, now)

    def close(self) -> None:
        """Ends the processes: asked first, so that environments can close, killed after CLOSE_LIMIT_S."""
        for host in self._hosts:
            host.process.terminate()
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for host in self._hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.01, deadline - time.monotonic()))
            host.kill()
        self._hosts = []
        self._episodes.clear()
        self._server.close()

    # ------------------------------------------------------------------------------------------------- inside

    def _popen(self, token: str, log: Path, progress: Path) -> subprocess.Popen:
        options = json.dumps(registry.constructor_options(self._options))
        command = [sys.executable, "-u", "-m", "pearl.rl.envs.host", self._server.address]
        command += [registry.target_of(self._options.name), options, token]
        command += ["--parent", str(os.getpid()), "--progress", str(progress)]
        paths = os.pathsep.join(path for path in sys.path if path)
        scratch = str(scratch_of(progress).resolve())
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, "TMPDIR": scratch}
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, process_group=0
            )

    def _send(self, host: _HostProcess, now: float) -> None:
        """What cannot be sent counts as asked all the same: the process is gone or will be overdue, and is replaced."""
        items = [item for item, _ in host.queue]
        if not host.asked:
            host.seen_at = now
        host.asked.update({item.serial: (item, episode) for item, episode in host.queue if not isinstance(item, Discard)})
        host.queue.clear()
        host.spoken_at = now
        with contextlib.suppress(ChannelError):
            self._server.send(host.token, Batch(items))

    def _receive(self, now: float) -> None:
        if not (messages := self._server.receive()):
            return
        hosts = {host.token: host for host in self._hosts}
        for token, message in messages:
            host = hosts.get(token)
            if host is None:
                continue
            if isinstance(message, Ready) and self._words is not None and not host.learned:
                self._teach(host, self._words, now)
            elif isinstance(message, Ready):
                host.ready, host.failed_starts = True, 0
                self._send(host, now)
            elif isinstance(message, Answers):
                self.seconds += message.seconds
                for answer in message.answers:
                    self._take(host, answer)

    def _teach(self, host: _HostProcess, words: Words, now: float) -> None:
        """Reading a large tokenizer takes a second or two, which no episode's time counts: it is not ready meanwhile."""
        host.learned, host.ready, host.seen_at = True, False, now
        with contextlib.suppress(ChannelError):  # the process is gone, and is replaced
            self._server.send(host.token, words)

    def _take(self, host: _HostProcess, answer: Answer) -> None:
        item, episode = host.asked.pop(answer.serial, (None, None))
        if item is None or episode is None or self._episodes.get(episode.episode_id) is not episode:
            return
        if answer.error is not None:
            self._end_with_error(episode, answer.error)
        elif isinstance(item, Replay):
            self.counts["replayed"] += 1
        else:
            episode.fingerprints.append(fingerprint(answer.observation))
            if answer.terminated or answer.truncated:
                self._remove(episode)
            self._outcomes.append(
                EnvOutcome(
                    episode_id=episode.episode_id,
                    observation=answer.observation,
                    reward=answer.reward,
                    terminated=answer.terminated,
                    truncated=answer.truncated,
                    info=answer.info,
                    token_ids=answer.token_ids,
                )
            )

    def _end_with_error(self, episode: _Episode, error: str) -> None:
        self._remove(episode)
        self.counts["errors"] += 1
        self._tell(error, episode.host.log)
        self._outcomes.append(EnvOutcome(episode_id=episode.episode_id, error=error))

    def _tell(self, error: str, log: Path) -> None:
        """Errors that differ in their numbers only (a seed, a count) are of one kind."""
        kind = re.sub(r"\d+", "0", error)
        if kind in self._told or len(self._told) >= MAX_NOTICES:
            return
        self._told.add(kind)
        more = f"; see {log}" if str(log) not in error else ""
        last = "; further kinds of errors are only counted" if len(self._told) == MAX_NOTICES else ""
        self._notice(f"an episode of {self._options.name} failed: {error}{more} (the next like it are only counted){last}")

    def _remove(self, episode: _Episode) -> None:
        del self._episodes[episode.episode_id]
        episode.host.episodes -= 1

    def _replace(self, host: _HostProcess, reason: str, now: float) -> None:
        """Starts the process anew. The episode it was at ends with an error; the others are played again.

        This ends: each time either one episode fewer comes back, or all those that do are nearer to MAX_REPLAYS.
        """
        at = host.progress.read()
        culprit = host.asked[at][1] if at in host.asked else None
        was_ready = host.ready
        host.kill()
        host.failed_starts += not was_ready
        if host.failed_starts >= MAX_FAILED_STARTS:
            raise EnvironmentPoolError(f"environment {self._options.name!r}: {reason}; {host.log} ends: {host.last_lines()}")
        self.counts["restarts"] += 1
        host.start(now)
        for episode in [episode for episode in self._episodes.values() if episode.host is host]:
            episode.replays += was_ready and culprit is None
            if episode is culprit or episode.replays > MAX_REPLAYS:
                self._end_with_error(episode, reason)
            else:
                self._ask_again(host, episode)

    def _ask_again(self, host: _HostProcess, episode: _Episode) -> None:
        if not episode.fingerprints:
            host.queue.append((Reset(host.serial(), episode.episode_id, episode.seed), episode))
            return
        known = len(episode.fingerprints) - 1
        replay = Replay(host.serial(), episode.episode_id, episode.seed, episode.actions[:known], episode.fingerprints[:])
        host.queue.append((replay, episode))
        if episode.waiting:
            host.queue.append((Step(host.serial(), episode.episode_id, episode.actions[-1]), episode))


def _describe(code: int) -> str:
    return f"signal {-code}: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
