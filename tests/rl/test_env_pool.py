"""The environment pool with real processes: crashes, hangs, exceptions, replays and clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
import zmq

from pearl.channel import wait
from pearl.clock import WallClock
from pearl.config import EnvOptions
from pearl.engine.plain_tokenizer import Joint
from pearl.engine.tokenizer import Tokenizer
from pearl.rl.envs import pool as pool_module
from pearl.rl.envs.base import EnvOutcome
from pearl.rl.envs.frozen_lake import FrozenLake
from pearl.rl.envs.host import Progress
from pearl.rl.envs.pool import EnvironmentPool, EnvironmentPoolError
from pearl.rl.envs.wire import Words, words_for

TALKER = """
import os, sys, time
import numpy as np

class Talker:
    made = 0
    def __init__(self, reproducible=True, note=""):
        self.reproducible, self.note = reproducible, note
    def reset(self, seed):
        self.seed, self.said = seed, []
        if seed == 666:
            raise KeyError("bad seed")
        return self.observation(), {}
    def observation(self):
        salt = "" if self.reproducible else str(os.getpid())
        return f"{self.seed}:{','.join(self.said)}{salt}"
    def step(self, action):
        self.said.append(action)
        if action == "crash": os._exit(7)
        if action == "exit": sys.exit(3)
        if action == "hang": time.sleep(60)
        if action == "spin":
            while True: pass
        if action == "nap": time.sleep(0.3)
        if action == "raise": raise ValueError("no such\\nmove")
        if action == "nan": return "x", float("nan"), False, False, {}
        if action == "bytes": return b"x", 0.0, False, False, {}
        if action == "surrogate": return chr(0xD800), 0.0, False, False, {}
        if action == "print": print("printed by the environment"); sys.stderr.write("and to stderr\\n")
        info = {"numbers": np.arange(3), "one": np.float32(1.5), "odd": object} if action == "info" else {}
        return self.observation(), np.float32(0.5), action == "end", action == "cut", info
    def close(self):
        if self.note: open(self.note, "a").write(f"{self.seed}\\n")
"""


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = f"talker_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{module}.py").write_text(TALKER)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{module}:Talker"


@pytest.fixture
def make_pool(context: zmq.Context, talker: str, tmp_path: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    made = []

    def make(**options: object) -> EnvironmentPool:
        made.append(EnvironmentPool(context, EnvOptions(**{"name": talker, **options}), WallClock(), tmp_path / "logs"))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def gather(pool: EnvironmentPool, count: int, limit_s: float = 10.0) -> dict[str, EnvOutcome]:
    """Flushes and polls until `count` outcomes came, one per episode; then makes sure that no more come at once."""
    pool.flush()
    outcomes: dict[str, EnvOutcome] = {}
    deadline = time.monotonic() + limit_s
    while len(outcomes) < count and time.monotonic() < deadline:
        wait(pool.ends, 0.02)
        for outcome in pool.poll(WallClock().now()):
            assert outcome.episode_id not in outcomes
            outcomes[outcome.episode_id] = outcome
    assert len(outcomes) == count, outcomes
    assert pool.poll(WallClock().now()) == []
    return outcomes


def begin(pool: EnvironmentPool, *names: str) -> dict[str, EnvOutcome]:
    for seed, name in enumerate(names):
        pool.reset(name, seed)
    return gather(pool, len(names))


def play(pool: EnvironmentPool, **actions: str) -> dict[str, EnvOutcome]:
    for name, action in actions.items():
        pool.step(name, action)
    return gather(pool, len(actions))


def gone(pid: int, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_outcomes_equal_playing_in_this_process(context: zmq.Context, tmp_path: Path) -> None:
    pool = EnvironmentPool(context, EnvOptions(workers=2), WallClock(), tmp_path)
    try:
        here = {f"e{seed}": FrozenLake() for seed in range(12)}
        for seed, name in enumerate(here):
            pool.reset(name, seed)
        first = gather(pool, 12)
        assert {name: outcome.observation for name, outcome in first.items()} == {
            name: lake.reset(seed)[0] for seed, (name, lake) in enumerate(here.items())
        }
        for action in ("Right", "Down", "nonsense", "Down"):
            text = f"<answer>{action}</answer>"
            outcomes = play(pool, **dict.fromkeys(here, text))
            for name, outcome in outcomes.items():
                given = (outcome.observation, outcome.reward, outcome.terminated, outcome.truncated, outcome.info)
                assert given == here[name].step(text)
                if outcome.ended:
                    del here[name]
        assert pool.counts == {"restarts": 0, "timeouts": 0, "errors": 0, "replayed": 0}
        assert {host.episodes for host in pool._hosts} != {0}
    finally:
        pool.close()


def test_observations_come_with_their_ids_also_from_a_process_that_was_started_again(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path / "model", tiny.CHATML))
    pool = make_pool(workers=2)
    pool.learn(words_for(tokenizer))
    assert {one.token_ids for one in begin(pool, "a", "b", "c").values()} == {None}, "what comes first is part of more"

    def wanted(outcome: EnvOutcome) -> list[int]:
        return tokenizer.chat_continue({"role": "user", "content": outcome.observation}, ended=True)

    played = play(pool, a="one", b="two <|im_end|>", c="end")
    assert played.pop("c").token_ids is None, "nobody reads what ends an episode"
    assert [one.token_ids for one in played.values()] == [wanted(one) for one in played.values()]
    for host in pool._hosts:
        os.kill(host.process.pid, signal.SIGKILL)
        host.process.wait()
    played = play(pool, a="three", b="four")
    assert [one.token_ids for one in played.values()] == [wanted(one) for one in played.values()]
    assert pool.counts["replayed"] == 2
    with pytest.raises(ValueError, match="2 episodes have begun"):
        pool.learn(None)


def test_a_process_that_cannot_read_the_tokenizer_plays_all_the_same(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path
) -> None:
    pool = make_pool()
    pool.learn(Words(tokenizer="{}", joint=Joint(before=[], head="", tail="", after=[], strip=(False, False))))
    begin(pool, "a")
    outcome = play(pool, a="one")["a"]
    assert (outcome.observation, outcome.token_ids, outcome.error) == ("0:one", None, None)
    assert "is no tokenizer" in (tmp_path / "logs" / "env-0.log").read_text()


def test_an_exception_costs_its_own_episode(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    names = ("a", "b", "c", "d", "e", "f")
    begin(pool, *names)
    outcomes = play(pool, a="raise", b="nan", c="bytes", d="surrogate", e="exit", f="hello")
    assert outcomes["a"].error == "ValueError: no such move"
    assert "finite" in outcomes["b"].error and "observation must be str" in outcomes["c"].error
    assert "UnicodeEncodeError" in outcomes["d"].error and "SystemExit" in outcomes["e"].error
    assert (outcomes["f"].error, outcomes["f"].observation, outcomes["f"].reward) == (None, "5:hello", 0.5)
    assert pool.counts["errors"] == 5 and pool.counts["restarts"] == 0
    pool.reset("g", 666)
    assert gather(pool, 1)["g"].error == "KeyError: 'bad seed'"
    pool.reset("a", 3)
    assert gather(pool, 1)["a"].observation == "3:"
    assert "Traceback" in pool._hosts[0].log.read_text()


def test_an_episode_ends_once(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    begin(pool, "a", "b", "c")
    with pytest.raises(ValueError, match="'a': is alive"):
        pool.reset("a", 0)
    pool.step("a", "end")
    with pytest.raises(ValueError, match="has not come"):
        pool.step("a", "again")
    pool.step("b", "cut")
    outcomes = gather(pool, 2)
    assert outcomes["a"].terminated and outcomes["b"].truncated
    pool.step("a", "more")
    assert "no such episode" in gather(pool, 1)["a"].error
    pool.discard("a")
    pool.step("c", "hello")
    pool.discard("c")
    pool.flush()
    pool.reset("c", 9)
    assert gather(pool, 1)["c"].observation == "9:"
    assert pool._hosts[0].episodes == 1


def test_info_crosses_as_plain_values(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    begin(pool, "a")
    info = play(pool, a="info")["a"].info
    assert info["numbers"] == [0, 1, 2] and info["one"] == 1.5 and "object" in info["odd"]


def test_the_first_error_of_each_kind_is_told_at_once_and_a_repeated_traceback_is_counted(
    context: zmq.Context, talker: str, tmp_path: Path
) -> None:
    lines: list[str] = []
    pool = EnvironmentPool(context, EnvOptions(name=talker), WallClock(), tmp_path / "logs", lines.append)
    try:
        for number in range(25):
            pool.reset(f"bad{number}", 666)
        pool.reset("good", 1)
        gather(pool, 26)
        log = tmp_path / "logs" / "env-0.log"
        assert lines == [
            f"an episode of {talker} failed: KeyError: 'bad seed'; see {log} (the next like it are only counted)"
        ]
        play(pool, good="raise")
        assert len(lines) == 2 and "ValueError: no such move" in lines[1]
        assert pool.counts["errors"] == 26
        text = log.read_text()
        assert text.count("Traceback") == 2
        assert text.count("10 times so far: KeyError") == 1
    finally:
        pool.close()


def test_few_kinds_of_errors_are_told(context: zmq.Context, talker: str, tmp_path: Path) -> None:
    lines: list[str] = []
    pool = EnvironmentPool(context, EnvOptions(name=talker), WallClock(), tmp_path / "logs", lines.append)
    try:
        for number in range(20):
            pool._tell(f"ValueError: seed {number} at {number / 3}", tmp_path / "x.log")
        assert len(lines) == 1
        for letter in "abcdefgh":
            pool._tell(f"ValueError: {letter}", tmp_path / "x.log")
        assert len(lines) == pool_module.MAX_NOTICES
        assert "further kinds" in lines[-1] and "further kinds" not in lines[-2]
    finally:
        pool.close()


def test_output_goes_to_the_log(make_pool: Callable[..., EnvironmentPool], capfd: pytest.CaptureFixture) -> None:
    pool = make_pool()
    begin(pool, "a")
    play(pool, a="print")
    log = pool._hosts[0].log.read_text()
    assert "printed by the environment" in log and "and to stderr" in log
    assert "printed" not in "".join(capfd.readouterr())


def test_a_crash_costs_the_culprit_and_the_others_are_played_again(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    begin(pool, "a", "b", "c", "d")
    play(pool, a="one", b="one", c="one")
    pool.reset("late", 5)
    outcomes = {}
    pool.step("a", "two")
    pool.step("b", "crash")
    pool.step("c", "two")
    outcomes = gather(pool, 4)
    assert "exit code 7" in outcomes["b"].error
    assert outcomes["a"].observation == "0:one,two" and outcomes["c"].observation == "2:one,two"
    assert outcomes["late"].observation == "5:"
    assert play(pool, d="first", a="three")["d"].observation == "3:first"
    assert pool.counts["restarts"] == 1 and pool.counts["errors"] == 1
    assert 2 <= pool.counts["replayed"] <= 4


def test_a_killed_idle_process_costs_nothing(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    begin(pool, "a", "b")
    play(pool, a="one")
    os.kill(pool._hosts[0].process.pid, signal.SIGKILL)
    pool._hosts[0].process.wait()
    assert play(pool, a="two", b="one")["a"].observation == "0:one,two"
    assert pool.counts == {"restarts": 1, "timeouts": 0, "errors": 0, "replayed": 2}


def test_temporary_files_of_a_killed_process_go_with_it(make_pool: Callable[..., EnvironmentPool], tmp_path: Path) -> None:
    """The repositories of the coding environment are such files; they lie beside the log, not in the machine's folder."""
    pool = make_pool(name="coding")
    begin(pool, "a", "b")
    scratch = tmp_path / "logs" / "env-0.tmp"
    first = set(scratch.iterdir())
    assert len(first) == 2 and all(any(folder.iterdir()) for folder in first)
    os.kill(pool._hosts[0].process.pid, signal.SIGKILL)
    pool._hosts[0].process.wait()
    submit = '<tool_call>{"name": "list_files", "arguments": {}}</tool_call>'
    assert play(pool, a=submit, b=submit)["a"].error is None
    assert not first & set(scratch.iterdir()) and len(list(scratch.iterdir())) == 2
    pool.close()
    assert not scratch.exists()


@pytest.mark.parametrize("way", ["hang", "spin"])
def test_a_hang_costs_the_culprit(make_pool: Callable[..., EnvironmentPool], way: str) -> None:
    pool = make_pool(timeout_s=0.5)
    begin(pool, "a", "b", "c")
    play(pool, a="one", b="one", c="one")
    began = time.monotonic()
    outcomes = play(pool, a="two", b=way, c="two")
    assert time.monotonic() - began < 4
    assert outcomes["b"].error == "no answer within timeout_s=0.5"
    assert outcomes["a"].observation == "0:one,two" and outcomes["c"].observation == "2:one,two"
    assert pool.counts["timeouts"] == pool.counts["restarts"] == pool.counts["errors"] == 1


def test_a_stopped_process_is_replaced(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(timeout_s=0.5)
    begin(pool, "a")
    os.kill(pool._hosts[0].process.pid, signal.SIGSTOP)
    assert play(pool, a="one")["a"].observation == "0:one"
    assert pool.counts == {"restarts": 1, "timeouts": 1, "errors": 0, "replayed": 1}


def test_a_long_queue_is_not_a_hang(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(timeout_s=0.8)
    names = [f"e{number}" for number in range(5)]
    begin(pool, *names)
    outcomes = play(pool, **dict.fromkeys(names, "nap"))
    assert all(outcome.error is None for outcome in outcomes.values())
    assert pool.counts["timeouts"] == 0


def test_an_environment_that_cannot_be_played_again_says_so(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(options={"reproducible": False})
    begin(pool, "a", "b", "c")
    outcomes = {}
    pool.step("a", "crash")
    pool.step("b", "one")
    outcomes = gather(pool, 3)
    assert "exit code 7" in outcomes["a"].error
    assert "another way at turn 0" in outcomes["b"].error and "another way" in outcomes["c"].error
    assert pool.counts["replayed"] == 0 and pool.counts["errors"] == 3 and not pool._episodes


def test_an_episode_is_not_played_again_for_ever(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool()
    begin(pool, "a")
    for number in range(3):
        os.kill(pool._hosts[0].process.pid, signal.SIGKILL)
        pool._hosts[0].process.wait()
        outcome = play(pool, a=f"turn {number}")["a"]
    assert "signal 9" in outcome.error and pool.counts["errors"] == 1


def test_only_the_host_of_the_culprit_is_replaced(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(workers=2)
    begin(pool, "a", "b", "c", "d")
    assert [host.episodes for host in pool._hosts] == [2, 2]
    pids = [host.process.pid for host in pool._hosts]
    play(pool, a="crash", b="one", c="one", d="one")
    assert [host.process.pid == pid for host, pid in zip(pool._hosts, pids, strict=True)] == [False, True]


def test_an_environment_that_never_starts_ends_the_job_with_its_reason(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(f"import os\nassert os.getpid() == {os.getpid()}, 'not in this process'\n" + TALKER)
    pool = make_pool(name="only_here:Talker")
    pool.reset("a", 0)
    pool.flush()
    with pytest.raises(EnvironmentPoolError, match=r"only_here.*exit code 1.*not in this process"):
        for _ in range(1000):
            wait(pool.ends, 0.02)
            assert pool.poll(WallClock().now()) == []


def test_a_start_that_hangs_is_given_up(make_pool: Callable[..., EnvironmentPool], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    begin(pool, "a")
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.0)
    os.kill(pool._hosts[0].process.pid, signal.SIGKILL)
    pool._hosts[0].process.wait()
    with pytest.raises(EnvironmentPoolError, match="timeout_s"):
        for _ in range(1000):
            pool.poll(WallClock().now())
            time.sleep(0.01)


def test_a_bad_choice_starts_no_process(context: zmq.Context, tmp_path: Path) -> None:
    for options in ({"name": "nowhere"}, {"options": {"size": 0}}, {"options": {"colour": 1}}):
        with pytest.raises(ValueError, match=r"env\.|size"):
            EnvironmentPool(context, EnvOptions(**options), WallClock(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_close_lets_environments_close_and_leaves_nothing(make_pool: Callable[..., EnvironmentPool], tmp_path: Path) -> None:
    note = tmp_path / "closed"
    pool = make_pool(workers=2, options={"note": str(note)}, timeout_s=30)
    begin(pool, "a", "b", "c")
    play(pool, a="end")
    pids = [host.process.pid for host in pool._hosts]
    pool.step("b", "hang")
    pool.flush()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 3
    assert all(gone(pid) for pid in pids)
    assert sorted(note.read_text().split()) == ["0", "1", "2"]
    assert [path.name for path in sorted((tmp_path / "logs").iterdir())] == ["env-0.log", "env-1.log"]


PARENT = """
import sys, time, zmq
from pearl.clock import WallClock
from pearl.config import EnvOptions
from pearl.rl.envs.pool import EnvironmentPool
pool = EnvironmentPool(zmq.Context(), EnvOptions(name=sys.argv[1]), WallClock(), sys.argv[2])
pool.reset("a", 0)
while not (came := pool.poll(0.0)): pool.flush(); time.sleep(0.01)
pool.step("a", "hang"); pool.flush()
print(pool._hosts[0].process.pid, flush=True)
time.sleep(60)
"""


def test_a_host_dies_with_its_parent_even_while_it_hangs(talker: str, tmp_path: Path) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", PARENT, talker, str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGINT)
        assert not gone(pid, 0.2)
        parent.kill()
    assert gone(pid)


def test_a_host_whose_parent_is_another_refuses(tmp_path: Path, talker: str) -> None:
    (tmp_path / "progress").write_bytes(bytes(8))
    command = [sys.executable, "-m", "pearl.rl.envs.host", "tcp://127.0.0.1:9", talker, json.dumps({}), "token"]
    command += ["--parent", "1", "--progress", str(tmp_path / "progress")]
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=10)
    assert ended.returncode == 1 and "parent process is gone" in ended.stderr


def test_progress_is_seen_by_both_who_map_it(tmp_path: Path) -> None:
    (tmp_path / "progress").write_bytes(bytes(8))
    one, other = Progress(str(tmp_path / "progress")), Progress(str(tmp_path / "progress"))
    one.write(2**40 + 1)
    assert other.read() == 2**40 + 1
