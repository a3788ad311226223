"""Starts a job: `pearl run [RECIPE] [--set a.b=c ...] [--print]` and `torchrun -m pearl.rl.launch` with the same options.

Owns the command line and the life of one rank: run directory, controller process, WORLD, trainer and engine, main loop,
the end. `pearl run` checks the configuration, then becomes torchrun. Only this module and `pearl.rl.trainer` and its kin
import torch, and only once the configuration is known to be good. Rank 0 alone prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pearl import config as configuration
from pearl.config import Config
from pearl.metrics.console import duration, step_line
from pearl.overrides import override
from pearl.protocol import Hello, Notice, StepReport
from pearl.rl import fresh_model, process
from pearl.rl.control import ControlThread
from pearl.rl.envs import registry as environments
from pearl.rl.envs.base import words_of
from pearl.rl.rank import RankLoop
from pearl.rl.recipes import registry as recipes

if TYPE_CHECKING:
    from torch.distributed import Store

EXIT_USAGE = 2


class LaunchError(RuntimeError):
    """The job could not be started; the message is for the person who tried."""


class Interrupt(BaseException):
    """A signal that arrived before there was a main loop to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def parser(program: str) -> argparse.ArgumentParser:
    """The options of a job, the same for `pearl run` and for torchrun."""
    options = argparse.ArgumentParser(prog=program, allow_abbrev=False, description="Train an agent by reinforcement learning.")
    options.add_argument("recipe", nargs="?", default="quickstart", help=f"one of: {', '.join(recipes.RECIPES)}")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting, e.g. seed=1")
    options.add_argument("--print", action="store_true", help="print the resolved configuration and end")
    return options


def configured(arguments: argparse.Namespace, world: int) -> Config:
    """The Config of a command line, checked as far as it can be without starting anything."""
    config = configuration.resolve(override(recipes.load(arguments.recipe), arguments.set), world)
    environments.check(config.env.name, environments.constructor_options(config.env))
    return config


def main(argv: list[str] | None = None) -> int:
    """The console script `pearl`."""
    argv = sys.argv[1:] if argv is None else argv
    commands = argparse.ArgumentParser(prog="pearl", allow_abbrev=False, description=__doc__.splitlines()[0])
    commands.add_argument("command", choices=["run"], help="run: train (see `pearl run --help`)")
    commands.parse_args(argv[:1])
    arguments = parser("pearl run").parse_args(argv[1:])
    try:
        config = configured(arguments, world=1)
    except ValueError as error:
        print(f"pearl run: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.print:
        print(configuration.to_json(config))
        return 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    os.execv(sys.executable, [*torchrun, "-m", "pearl.rl.launch", *argv[1:]])


def rank_main(argv: list[str] | None = None) -> int:
    """One rank under torchrun; returns its exit code."""
    rank, world = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "1"))
    arguments = parser("torchrun -m pearl.rl.launch").parse_args(argv)
    try:
        if rank < 0 and not arguments.print:
            raise ValueError("RANK is not set: start this with torchrun, or with `pearl run`")
        config = configured(arguments, world)
    except ValueError as error:
        if rank <= 0:
            print(f"pearl: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.print:
        if rank <= 0:
            print(configuration.to_json(config))
        return 0
    return Launch(config, rank, world).run()


class Launch:
    """The life of one rank, in order; `run` undoes what was begun whatever happens."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        self.config = config
        self.rank = rank
        self.world = world
        self.started = time.monotonic()
        self.run_directory = Path()
        self.controller: subprocess.Popen | None = None
        self.control: ControlThread | None = None

    def run(self) -> int:
        """Returns the exit code: 0 done, 128 + signal when interrupted, 1 for anything that went wrong."""
        process.on_signals(self._interrupted)
        process.die_with_parent(signal.SIGTERM, parent=os.getppid())
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        code = 1
        try:
            self.run_directory = make_run_directory(self.config)
            self._say(f"{self.config.recipe}: run directory {self.run_directory}")
            folder = self._model_folder()
            address = self._start_controller(folder)
            loop = self._build(folder, address)
            self._say(f"ready after {time.monotonic() - self.started:.1f} s")
            code = loop.run()
            self._log(loop.traceback)
            self._say(self._ending(code, loop.stop_reason))
        except LaunchError as error:
            self._say(f"failed: {error}")
        except Interrupt as interrupt:
            code = 128 + interrupt.signum
            self._say(f"interrupted by {signal.Signals(interrupt.signum).name} while starting")
        finally:
            self._close()
        return code

    def _model_folder(self) -> Path:
        if self.config.model.path is not None:
            return Path(self.config.model.path)
        environment = environments.make(self.config.env.name, **environments.constructor_options(self.config.env))
        folder = self.run_directory / "initial_policy"
        fresh_model.write_model_folder(folder, self.config.model, words_of(environment))
        return folder

    def _start_controller(self, folder: Path) -> int:
        reader, writer = os.pipe()
        arguments = [str(self.run_directory), str(folder), str(writer), str(self.world), str(os.getpid())]
        self.controller = process.start(
            [sys.executable, "-m", "pearl.rl.controller", *arguments],
            self.run_directory / "logs" / "controller.log",
            pass_fds=(writer,),
        )
        os.close(writer)
        return reader

    def _build(self, folder: Path, address_fd: int) -> RankLoop:
        import torch

        from pearl.engine.engine import Engine
        from pearl.rl import publisher
        from pearl.rl.trainer import Trainer

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        store = join_world(self.config.timeouts.start_s)
        trainer = Trainer(folder, self.config)
        engine_config = dataclasses.replace(self.config.engine, model=str(folder), seed=self.config.seed)
        engine = Engine(engine_config, load_weights=False, text=False)
        if self.rank == 0:
            store.set("controller", self._read_address(address_fd))
        self.control = ControlThread(
            store.get("controller").decode(), self.rank, self.config.timeouts, self._show, self._controller_ended
        )
        self.control.start()
        self.control.send(Hello(rank=self.rank, pid=os.getpid(), host=socket.gethostname(), max_model_len=engine.max_model_len))
        return RankLoop(
            rank=self.rank,
            control=self.control,
            engine=engine,
            trainer=trainer,
            publish=lambda version: publisher.publish(trainer, engine, version),
        )

    def _read_address(self, fd: int) -> str:
        timeout_s = self.config.timeouts.start_s
        readable, _, _ = select.select([fd], [], [], timeout_s)
        if not readable:
            raise LaunchError(f"waited timeouts.start_s={timeout_s:g} s for the controller's address")
        address = os.read(fd, 4096).decode().strip()
        os.close(fd)
        if not address:
            raise LaunchError(f"the controller did not start; see {self.run_directory / 'logs' / 'controller.log'}")
        return address

    def _controller_ended(self) -> str | None:
        if self.controller is None or self.controller.poll() is None:
            return None
        log = self.run_directory / "logs" / "controller.log"
        return f"the controller ended with exit code {self.controller.returncode}; see {log}"

    def _interrupted(self, signum: int) -> None:
        if self.control is None:
            raise Interrupt(signum)
        self.control.interrupt(signum)

    def _close(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.controller is not None:
            process.stop(self.controller, self.config.timeouts.stop_s)

    def _ending(self, code: int, reason: str) -> str:
        took = duration(time.monotonic() - self.started)
        return f"{'done' if code == 0 else 'ended'} after {took}: {reason}; results in {self.run_directory}"

    def _show(self, message: StepReport | Notice) -> None:
        self._say(step_line(message.metrics) if isinstance(message, StepReport) else message.text)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
        self._log(text)

    def _log(self, text: str) -> None:
        if text and self.run_directory != Path():
            path = self.run_directory / "logs" / f"rank{self.rank}.log"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as log:
                log.write(f"{datetime.datetime.now():%H:%M:%S} {text}\n")


def make_run_directory(config: Config) -> Path:
    """Makes `output_dir/recipe-date-time` (with a counter if it exists) and writes the resolved config.json into it."""
    stem = f"{config.recipe or 'run'}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
            run = Path(config.output_dir) / (stem + suffix)
            if not run.exists():
                run.mkdir()
                (run / "config.json").write_text(configuration.to_json(config) + "\n")
                return run
    except OSError as error:
        raise LaunchError(f"output_dir={config.output_dir!r}: cannot be written ({error.strerror})") from None
    raise LaunchError(f"output_dir={config.output_dir!r}: 999 runs began within this second")


def join_world(timeout_s: float) -> Store:
    """Makes the one WORLD process group of the job from torchrun's environment; returns its store."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=world, timeout=timeout)
    return dist.PrefixStore("job", store)


if __name__ == "__main__":
    sys.exit(rank_main())
