"""Tries an environment without a model: `python -m pearl.rl.envs.check NAME [--option NAME=VALUE ...] [--episodes N]`.

Owns the play of random agents and the findings. Exit code 0: nothing found, 1: something is wrong, 2: it cannot be tried.
What it looks at: two instances given one seed and the same replies say the same, and so does an instance that is reset again;
rewards are finite numbers, observations printable text, infos can be sent to another process; nonsense is survived. Each
finding is one line and names the seed.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pearl.config import Config, EnvOptions
from pearl.overrides import override
from pearl.rl.envs import registry
from pearl.rl.envs.base import Environment, system_prompt_of

THEIRS = (Exception, SystemExit)
"""Whatever an environment's own code raises."""
NONSENSE = ("", "no", "<answer></answer>", "\x00\ud83d\ude00", "a" * 5000)


@dataclass(slots=True, kw_only=True)
class Report:
    """What was seen. `problems` holds each kind once, with the seed that showed it first."""

    episodes: int = 0
    turns: int = 0
    successes: int = 0
    cut: int = 0
    invalid: int = 0
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0
    longest_observation: int = 0
    player: str = ""
    problems: dict[str, str] = field(default_factory=dict)

    def find(self, kind: str, detail: str) -> None:
        self.problems.setdefault(kind, detail)


@dataclass(slots=True, kw_only=True)
class _Episode:
    """What was said, in order: (observation, reward, terminated, truncated) per turn, the first of the reset."""

    said: list[tuple] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)


Player = Callable[[Environment, random.Random], str]


def examine(make: Callable[[], Environment], *, episodes: int, seed: int, max_turns: int) -> Report:
    """Plays `episodes` episodes on seeds from `seed` on, each of them again, and nonsense. Whatever is raised is a finding."""
    report = Report()
    player = _player(make(), report)
    for number in range(episodes):
        own = seed + number
        first = _played(make, own, report, player, max_turns)
        if first is not None:
            _again(make, own, report, first)
    _nonsense(make, seed, report, max_turns)
    return report


def _player(environment: Any, report: Report) -> Player:
    chosen = getattr(environment, "random_valid_action", None)
    _close(environment, report)
    report.player = "random_valid_action" if chosen is not None else "nonsense, it has no random_valid_action"
    if chosen is not None:
        return lambda env, rng: env.random_valid_action(rng)  # type: ignore[attr-defined]
    return lambda env, rng: rng.choice(NONSENSE)


def _played(
    make: Callable[[], Environment], seed: int, report: Report, player: Player, max_turns: int, *, count: bool = True
) -> _Episode | None:
    episode, rng = _Episode(), random.Random(f"player/{seed}")  # not the draws of an environment that does the same
    environment: Any = None
    try:
        environment = make()
        observation, info = _timed(report, functools.partial(environment.reset, seed))
        _look(report, seed, observation, 0.0, info)
        episode.said.append((observation,))
        for _ in range(max_turns):
            action = player(environment, rng)
            answer = _timed(report, functools.partial(environment.step, action))
            _look(report, seed, answer[0], answer[1], answer[4])
            episode.actions.append(action)
            episode.said.append(tuple(answer[:4]))
            if count:
                report.invalid += bool(answer[4].get("invalid"))
            if answer[2] or answer[3]:
                break
        if count:
            _enter(report, episode, answer[4])
    except THEIRS as error:
        report.find(f"raises {type(error).__name__}", f"seed {seed}, turn {len(episode.actions) + 1}: {error}")
        return None
    finally:
        _close(environment, report)
    return episode


def _again(make: Callable[[], Environment], seed: int, report: Report, first: _Episode) -> None:
    """The same replies in a new instance, and in that one again after a second reset."""
    environment: Any = None
    try:
        environment = make()
        for kind in ("is not the same for one seed", "is not the same after a second reset"):
            said: list[tuple] = [(environment.reset(seed)[0],)]
            said += [tuple(environment.step(action)[:4]) for action in first.actions]
            wrong = next((turn for turn, (now, then) in enumerate(zip(said, first.said, strict=True)) if now != then), None)
            if wrong is not None:
                report.find(kind, f"seed {seed}, turn {wrong}: {said[wrong]!r:.200} where it was {first.said[wrong]!r:.200}")
    except THEIRS as error:
        report.find(f"raises {type(error).__name__} when played again", f"seed {seed}: {error}")
    finally:
        _close(environment, report)


def _nonsense(make: Callable[[], Environment], seed: int, report: Report, max_turns: int) -> None:
    for text in NONSENSE:
        _played(make, seed, report, functools.partial(_says, text), max_turns, count=False)


def _says(text: str, environment: Environment, rng: random.Random) -> str:
    return text


def _look(report: Report, seed: int, observation: Any, reward: Any, info: Any) -> None:
    where = f"seed {seed}"
    if not isinstance(observation, str):
        report.find("observation is no text", f"{where}: {type(observation).__name__}")
        return
    report.longest_observation = max(report.longest_observation, len(observation))
    unprintable = [sign for sign in observation if not (sign.isprintable() or sign in "\n\t")]
    if unprintable:
        report.find("observation is not printable", f"{where}: holds {unprintable[0]!r}")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        report.find("reward is no finite number", f"{where}: {reward!r}")
    if not isinstance(info, dict):
        report.find("info is no dict", f"{where}: {type(info).__name__}")
        return
    try:
        msgspec.json.encode(info, enc_hook=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        report.find("info cannot be sent", f"{where}: {error}")


def _enter(report: Report, episode: _Episode, info: dict) -> None:
    report.episodes += 1
    report.turns += len(episode.actions)
    report.successes += bool(info.get("success"))
    report.cut += not episode.said[-1][2]
    report.rewards.append(sum(turn[1] for turn in episode.said[1:]))


def _timed(report: Report, ask: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    answer = ask()
    took = time.perf_counter() - began
    report.seconds += took
    report.slowest_s = max(report.slowest_s, took)
    return answer


def _close(environment: Any, report: Report) -> None:
    try:
        getattr(environment, "close", lambda: None)()
    except THEIRS as error:
        report.find(f"raises {type(error).__name__} when closed", str(error))


def written(name: str, report: Report, prompt: str) -> str:
    """The report as lines for people."""
    count = max(1, report.episodes)
    mean = sum(report.rewards) / count
    lines = [
        f"{name}: {report.episodes} episodes, played by {report.player}",
        f"  success {report.successes / count:.2f}   reward {mean:+.3f}"
        f" ({min(report.rewards, default=0):+.2f} to {max(report.rewards, default=0):+.2f})",
        f"  turns {report.turns / count:.1f}   truncated {report.cut / count:.2f}"
        f"   unreadable {report.invalid / max(1, report.turns):.2f}",
        f"  {report.turns / max(report.seconds, 1e-9):.0f} turns/s, the slowest answer {report.slowest_s * 1e3:.1f} ms",
        f"  system prompt {len(prompt)} characters, longest observation {report.longest_observation}",
    ]
    lines += [f"PROBLEM: {kind} ({detail})" for kind, detail in report.problems.items()]
    return "\n".join([*lines, *([] if report.problems else ["no problems found"])])


def main(argv: list[str] | None = None) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pearl.rl.envs.check", allow_abbrev=False, description="Try an environment."
    )
    parser.add_argument("name", help=f"one of {', '.join(registry.names())}, or package.module:ClassName")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of its constructor")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-turns", type=int, default=EnvOptions().max_turns, help="what the job's env.max_turns will be")
    given = parser.parse_args(argv)
    sys.path.insert(0, os.getcwd())
    try:
        if given.episodes < 1 or given.seed < 0:
            raise ValueError("--episodes must be >= 1, --seed >= 0")
        chosen = Config(env=EnvOptions(name=given.name, max_turns=given.max_turns))
        options = registry.constructor_options(override(chosen, [f"env.options.{text}" for text in given.option]).env)
        registry.check(given.name, options)
        environment = registry.make(given.name, **options)
    except THEIRS as error:
        reason = error if isinstance(error, ValueError) else f"{given.name} cannot be made: {type(error).__name__}: {error}"
        print(f"pearl.rl.envs.check: error: {reason}", file=sys.stderr)
        return 2
    prompt = system_prompt_of(environment)
    _close(environment, Report())  # what that raises is found when episodes are played
    make = functools.partial(registry.make, given.name, **options)
    report = examine(make, episodes=given.episodes, seed=given.seed, max_turns=given.max_turns)
    print(written(given.name, report, prompt))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
