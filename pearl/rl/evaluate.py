"""How good a policy is: `python -m pearl.rl.evaluate RUN_OR_MODEL [ENV]`, greedy episodes on seeds that training never sees.

Owns the way from a folder to a policy, and the table. The episodes are those of a job: its collector, its environment
processes and its serving loop, with this process in the place of the controller. Takes a run folder, one of its checkpoints,
or a Hugging Face folder. Exit code 0: all episodes were played, 1: some could not be, 2: it cannot be done at all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from pearl import config as configuration
from pearl.channel import wait
from pearl.clock import WallClock
from pearl.config import ClusterOptions, Config, EngineConfig, EnvOptions, ModelOptions, RolloutOptions
from pearl.engine.engine import Engine
from pearl.engine.model_folder import where_else
from pearl.engine.tokenizer import Tokenizer
from pearl.metrics.jsonl import runs_near
from pearl.overrides import override
from pearl.protocol import Failed, Serve, Stop, Tokens
from pearl.rl import preflight
from pearl.rl.best_policy import FOLDER as BEST
from pearl.rl.checkpoint import is_stable
from pearl.rl.checkpoint_folder import TRAINER_FOLDER, CheckpointFolder
from pearl.rl.collector import Collector
from pearl.rl.envs import registry as environments
from pearl.rl.envs.base import example_of, system_prompt_of, tasks_of
from pearl.rl.envs.pool import EnvironmentPool, EnvironmentPoolError
from pearl.rl.rank import RankLoop
from pearl.rl.rollout import Rollout
from pearl.rl.training import EVAL_SEEDS
from pearl.rl.types import Trajectory
from pearl.sched.router import Router

HERE = "here"
"""The router's name of the only worker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated: the settings it runs with (`config.model.path` is the folder) and its name for people."""

    config: Config
    name: str


class EvaluationError(RuntimeError):
    """The engine failed; the message says how."""


class Desk:
    """The controller's place in front of a serving loop: hands out requests and takes tokens, until all episodes ended."""

    def __init__(
        self,
        config: Config,
        options: RolloutOptions,
        tokenizer: Tokenizer,
        max_model_len: int,
        seeds: range,
        logs: Path,
    ) -> None:
        self.ended: list[Trajectory] = []
        self.error = ""
        self._seeds, self._clock, self._outbox = seeds, WallClock(), [Serve(number=0)]
        self._context = zmq.Context()
        self._pool = EnvironmentPool(self._context, config.env, self._clock, logs, lambda text: print(text, file=sys.stderr))
        prompt, example = _introduction(config.env)
        router = Router()
        router.add_worker(HERE)

        def new_rollout(trajectory: Trajectory, _: str) -> Rollout:
            return Rollout(
                trajectory,
                tokenizer=tokenizer,
                options=options,
                env=config.env,
                max_model_len=max_model_len,
                seed=config.seed,
                system_prompt=prompt,
                example=example,
            )

        self._collector = Collector(
            new_rollout, pool=self._pool, router=router, send=lambda _, message: self._outbox.append(message)
        )
        for seed in seeds:
            self._collector.start(f"eval-{seed}", group_id=-1, env_seed=seed, purpose="eval")
        self._collector.flush()

    def take(self, timeout_s: float) -> list:
        """What the serving loop has to do next; waits for the environments if there is nothing."""
        if not self._outbox:
            wait(self._pool.ends, timeout_s)
        self._collector.poll_environments(self._clock.now())
        self._collector.flush()
        self.ended += self._collector.take_ended()
        if len(self.ended) == len(self._seeds):
            return [Stop(number=1, reason="all episodes ended", exit_code=0)]
        messages, self._outbox = self._outbox, []
        return messages

    def send(self, event: Any) -> None:
        """Takes what the serving loop tells."""
        if isinstance(event, Tokens):
            self._collector.on_tokens(HERE, event)
        elif isinstance(event, Failed):
            self.error = event.error
            self._outbox = [Stop(number=1, reason=event.error, exit_code=1)]

    def close(self) -> None:
        """Ends the environments' processes."""
        self._pool.close()
        self._context.term()


def evaluate(config: Config, seeds: range, temperature: float = 0.0) -> list[Trajectory]:
    """Plays one episode per seed with the policy in `config.model.path`. EvaluationError if the engine fails."""
    options = dataclasses.replace(config.rollout, temperature=temperature)
    engine = Engine(dataclasses.replace(config.engine, model=config.model.path, seed=config.seed), text=False)
    tokenizer = Tokenizer.from_folder(Path(str(config.model.path)))
    with tempfile.TemporaryDirectory(prefix="pearl-evaluate-") as logs:
        (Path(logs) / "logs").mkdir()
        desk = Desk(config, options, tokenizer, engine.max_model_len, seeds, Path(logs) / "logs")
        try:
            loop = RankLoop(
                rank=0, control=desk, engine=engine, trainer=None, publisher=_NoPublisher(), publish_timeout_s=1.0
            )
            if loop.run():
                raise EvaluationError(desk.error or loop.stop_reason)
        finally:
            desk.close()
    return sorted(desk.ended, key=lambda trajectory: trajectory.env_seed)


class _NoPublisher:
    """Nothing is published here."""

    def begin(self, version: int) -> None:
        raise AssertionError("nothing is published in an evaluation")

    def poll(self) -> dict[str, Any] | None:
        return None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        return {}


# ------------------------------------------------------------------------------------------------------- what and how


@contextlib.contextmanager
def subject_of(path: Path) -> Iterator[Subject]:
    """The policy in a folder and the settings it was trained with, if any. ValueError if there is none.

    A checkpoint holds the trainer's state, from which the policy is written aside for the time of the evaluation.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory{where_else(path) or runs_near(path)}")
    if (path / TRAINER_FOLDER).is_dir():
        with _of_checkpoint(path) as subject:
            yield subject
    elif (path / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        policy = next((path / name for name in ("policy", BEST) if is_stable(path / name)), None)
        if policy is not None:
            yield Subject(config=_with_policy(_settings(path), policy), name=str(policy))
            return
        newest = CheckpointFolder(path).latest()
        if newest is None:
            raise ValueError(f"{path}: a run without a policy yet, and without a checkpoint (save_steps was 0?)")
        with _of_checkpoint(newest) as subject:
            yield subject
    else:
        engine = EngineConfig(dtype="float32", max_num_seqs=64, max_batch_tokens=4096)
        yield Subject(config=Config(model=ModelOptions(path=str(path)), engine=engine), name=str(path))


@contextlib.contextmanager
def _of_checkpoint(path: Path) -> Iterator[Subject]:
    from pearl.rl.trainer import Trainer

    run = path.parent.parent
    alone = dataclasses.replace(_settings(run), cluster=ClusterOptions())  # however many ranks trained it
    config = configuration.resolve(configuration.unresolved(alone), world=1)
    folder = Path(config.model.path) if config.model.path else run / "initial_policy"
    trainer = Trainer(folder, config)
    trainer.load_state(path / TRAINER_FOLDER)
    with tempfile.TemporaryDirectory(prefix="pearl-policy-") as aside:
        trainer.save(Path(aside) / "policy")
        del trainer
        yield Subject(config=_with_policy(config, Path(aside) / "policy"), name=str(path))


def _settings(run: Path) -> Config:
    try:
        return configuration.from_json((run / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{run}: config.json is none of a run of this release ({error})") from None


def _with_policy(config: Config, folder: Path) -> Config:
    return dataclasses.replace(config, model=ModelOptions(path=str(folder)))


def _introduction(env: EnvOptions) -> tuple[str, Sequence[str]]:
    environment = _made(env)
    return system_prompt_of(environment), example_of(environment)


def _made(env: EnvOptions) -> Any:
    """An environment that is only asked what it is."""
    environment = environments.make(env.name, **environments.constructor_options(env))
    getattr(environment, "close", lambda: None)()
    return environment


# --------------------------------------------------------------------------------------------------------- the table


def summary(trajectories: list[Trajectory], seconds: float) -> dict[str, Any]:
    """The numbers of the table, over the episodes that did not fail; `success_error` is the standard error of the rate."""
    played = [trajectory for trajectory in trajectories if trajectory.outcome == "done"]
    turns = [turn for trajectory in played for turn in trajectory.turns]
    count = len(played)

    def mean(values: list[float]) -> float | None:
        return sum(values) / count if count else None

    rate = mean([float(trajectory.success) for trajectory in played])
    return {
        "episodes": len(trajectories),
        "failed": len(trajectories) - count,
        "success_rate": rate,
        "success_error": (rate * (1 - rate) / count) ** 0.5 if rate is not None else None,
        "reward_mean": mean([trajectory.reward for trajectory in played]),
        "turns_mean": mean([float(len(trajectory.turns)) for trajectory in played]),
        "tokens_mean": mean([float(sum(trajectory.loss_mask)) for trajectory in played]),
        "invalid_rate": sum(bool(turn.info.get("invalid")) for turn in turns) / len(turns) if turns else None,
        "seconds": seconds,
    }


def table(name: str, env: EnvOptions, seeds: range, numbers: dict[str, Any]) -> str:
    """The same for people; where there are only so many tasks (`numbers["tasks"]`), none of them is new to the policy."""

    def shown(key: str, form: str) -> str:
        return "-" if numbers[key] is None else format(numbers[key], form)

    failed = f", {numbers['failed']} of them failed" if numbers["failed"] else ""
    few = f"  tasks        {numbers['tasks']} in all, the same as in training: only seeds are held out"
    tasks = [few] if numbers["tasks"] else []
    return "\n".join(
        [
            f"{name} on {env.name}, seeds {seeds.start} to {seeds.stop - 1}",
            f"  episodes     {numbers['episodes']}{failed}, in {numbers['seconds']:.1f} s",
            *tasks,
            f"  success      {shown('success_rate', '.3f')} +- {shown('success_error', '.3f')}",
            f"  reward       {shown('reward_mean', '+.3f')}",
            f"  turns        {shown('turns_mean', '.1f')}",
            f"  tokens       {shown('tokens_mean', '.1f')} sampled per episode",
            f"  unreadable   {shown('invalid_rate', '.3f')} of the turns",
        ]
    )


# ------------------------------------------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pearl.rl.evaluate", allow_abbrev=False, description="Evaluate a policy.")
    parser.add_argument("policy", help="a run folder, one of its checkpoints, or a Hugging Face folder")
    parser.add_argument("env", nargs="?", help="environment (default: the run's); with its options by --set env.options.NAME=")
    parser.add_argument("--episodes", type=int, default=64)
    offset = "offset into the held-out seeds (default 0: begins with those that eval_steps uses)"
    parser.add_argument("--seed", type=int, default=0, help=offset)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting, as for pearl run")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    given = parser.parse_args(argv)
    sys.path.insert(0, os.getcwd())
    try:
        if given.episodes < 1 or given.seed < 0:
            raise ValueError("--episodes must be >= 1, --seed >= 0")
        with subject_of(Path(given.policy)) as subject:
            return _report(subject, given)
    except (ValueError, OSError) as error:
        print(f"pearl.rl.evaluate: error: {error}", file=sys.stderr)
        return 2
    except (EvaluationError, EnvironmentPoolError) as error:
        print(f"pearl.rl.evaluate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pearl.rl.evaluate: interrupted", file=sys.stderr)
        return 130


def _report(subject: Subject, given: argparse.Namespace) -> int:
    config = subject.config
    if given.env is not None and given.env != config.env.name:
        config = dataclasses.replace(config, env=EnvOptions(name=given.env))
    elif given.env is None and not config.recipe:
        known = ", ".join(environments.names())
        raise ValueError(f"{subject.name} is no run{runs_near(Path(subject.name))}: name an environment, one of {known}")
    config = override(config, given.set)
    preflight.check(config, new_run=False)
    preflight.check_prompt(config)
    first = EVAL_SEEDS + given.seed
    seeds = range(first, first + given.episodes)
    began = time.monotonic()
    numbers = summary(evaluate(config, seeds, given.temperature), time.monotonic() - began)
    numbers["tasks"] = tasks_of(_made(config.env))
    if given.json:
        print(json.dumps({"policy": subject.name, "env": config.env.name, "first_seed": first} | numbers))
    else:
        print(table(subject.name, config.env, seeds, numbers))
    return 1 if numbers["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
