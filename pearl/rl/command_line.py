"""The command line: `pearl run [RECIPE] [--set a.b=c ...] [--resume RUN] [--print]`, also as `python -m pearl`.

Owns the options, which torchrun's ranks take too (`launch.py`), and the way from them to a checked `Job`. It starts nothing
but the launcher, which takes the place of this process. Invariant: what can be refused before a process starts is refused
here, in one line, with exit code 2. Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from pearl import config as configuration
from pearl.config import Config
from pearl.overrides import keys_of, override
from pearl.rl import preflight
from pearl.rl.layout import JobLayout
from pearl.rl.recipes import registry as recipes
from pearl.rl.run_state import ResumePoint, check_settings, open_run

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
"""As a shell reports a program that wrote to a pipe nobody reads (128 + SIGPIPE)."""

PROGRAMS = {
    "pearl.rl.evaluate RUN_OR_MODEL": "play episodes with a policy, on seeds that training never uses",
    "pearl.rl.report RUN": "a run as one HTML page",
    "pearl.metrics.plot RUN": "a run's curves as a picture",
    "pearl.metrics.text RUN": "a run's episodes as text",
    "pearl.rl.join ADDRESS": "serve a running job from outside",
    "pearl.rl.envs.check ENVIRONMENT": "try an environment without a model",
    "pearl.rl.measure_costs [MODEL]": "measure what serving costs here",
    "pearl.settings_page": "say what each setting means",
    "pearl.sched.sim": "simulate a cluster in virtual time",
    "pearl.engine.smollm2 FOLDER": "fetch a small pretrained model",
    "pearl.engine.kernels.triton.report": "compile the GPU kernels, and say what came out",
}
"""What a user can start beside `pearl run`, each with `python -m`, and each with a `--help` of its own."""


def parser(program: str) -> argparse.ArgumentParser:
    """The options of a job, the same for `pearl run` and for torchrun."""
    options = argparse.ArgumentParser(prog=program, allow_abbrev=False, description="Train an agent by reinforcement learning.")
    options.add_argument("recipe", nargs="?", help=f"one of: {', '.join(recipes.RECIPES)} (default: quickstart)")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting, e.g. seed=1")
    options.add_argument("--resume", metavar="RUN", help="go on from the last checkpoint of this run directory")
    options.add_argument("--print", action="store_true", help="print the resolved configuration and end")
    options.add_argument("--tried", action="store_true", help=argparse.SUPPRESS)  # `pearl run` has looked at the first prompt
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a command line asks for: a resolved configuration, and where to go on, if anywhere. `notice` is for people."""

    config: Config
    layout: JobLayout
    resume: ResumePoint | None
    notice: str = ""


def planned(arguments: argparse.Namespace, world: int, *, try_prompt: bool = False) -> Job:
    """The job of a command line, checked as far as it can be without starting anything. ValueError says what is wrong.

    With `try_prompt` an environment is made, to see whether its first prompt fits. With `--print` it does not matter what
    this machine has: the configuration of a job for another one can be looked at anywhere.
    """
    point = None
    if arguments.resume is not None:
        if arguments.recipe is not None:
            raise ValueError(f"recipe {arguments.recipe!r}: --resume takes the settings of its run; leave the recipe out")
        point = open_run(arguments.resume)
    base = configuration.unresolved(point.config) if point else recipes.load(arguments.recipe or "quickstart")
    config = configuration.resolve(override(base, arguments.set), world)
    if point:
        check_settings(point, config)
    preflight.check(config, new_run=point is None, machine=not arguments.print)
    notice = preflight.check_prompt(config) if try_prompt else ""
    if config.emulated is not None:
        drawn = f"device={config.device}: tokens are drawn at random, steps take the profile's time, and nothing is learned"
        notice = "; ".join(filter(None, (notice, drawn)))
    return Job(config=config, layout=JobLayout.of(config, world), resume=point, notice=notice)


def main(argv: list[str] | None = None) -> int:
    """What `pearl` does."""
    argv = sys.argv[1:] if argv is None else argv
    sys.path.insert(0, os.getcwd())  # users' environments, as `python -m` finds them
    commands = argparse.ArgumentParser(
        prog="pearl",
        allow_abbrev=False,
        description="Trains language-model agents by reinforcement learning over many turns.",
        epilog="\n".join(["started with python -m:", *(f"  {use:<36}  {what}" for use, what in PROGRAMS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands.add_argument("command", nargs="?", choices=["run"], help="run: train an agent (see `pearl run --help`)")
    commands.add_argument("--version", action="store_true", help="print the version and end")
    if argv and not argv[0].startswith("-") and argv[0] != "run":
        commands.exit(EXIT_USAGE, f"pearl: error: {argv[0]!r} is no command: {_instead(argv)}\n")
    asked = commands.parse_args(argv[:1])
    if asked.version:
        print(f"pearl {version()}")
        return 0
    if asked.command is None:
        commands.print_help()
        return EXIT_USAGE
    return run(argv[1:])


def run(argv: list[str]) -> int:
    """`pearl run`: becomes the launcher, or returns an exit code."""
    options = parser("pearl run")
    options.add_argument("--nproc", type=int, default=1, metavar="W", help="ranks (processes) on this machine, default 1")
    options.add_argument("--list", action="store_true", help="list the recipes and end")
    arguments, unknown = options.parse_known_args(argv)
    if unknown:
        options.error(f"unrecognized arguments: {' '.join(unknown)}{_as_settings(argv, unknown)}")
    if arguments.list:
        return _printed(recipes.listed())
    try:
        if arguments.nproc < 1:
            raise ValueError(f"--nproc {arguments.nproc}: must be >= 1")
        with _interruptible():
            job = planned(arguments, world=arguments.nproc, try_prompt=not arguments.print)
    except ValueError as error:
        print(f"pearl run: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("pearl run: interrupted before the start", file=sys.stderr)
        return 128 + signal.SIGINT
    if arguments.print:
        return print_config(job.config)
    if job.notice:
        print(f"pearl run: {job.notice}", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's launcher would say that it does so
    module = "pearl.rl.launcher" if job.config.emulated is None else "pearl.rl.plain_launcher"
    launcher = [sys.executable, "-m", module, str(job.layout.world), *rank_arguments(arguments), "--tried"]
    os.execv(sys.executable, launcher)


def _instead(argv: list[str]) -> str:
    """What whoever typed this may have meant."""
    word = argv[0]
    programs = [f"python -m {use}" for use in PROGRAMS if word in (use.split()[0], use.split()[0].rsplit(".", 1)[-1])]
    if programs:
        return f"type {' or '.join(programs)}"
    recipe = next((part for part in argv[:2] if part in recipes.RECIPES), None)
    return f"type pearl run {recipe}" if recipe else "type pearl run, or pearl alone for what else there is"


def _as_settings(argv: list[str], unknown: list[str]) -> str:
    """The end of a message: how unknown options that have the name of a setting are given, or ""."""
    keys, hints = list(keys_of(Config())), []
    for option in (part for part in unknown if part.startswith("--")):
        name, given, value = option[2:].replace("-", "_").partition("=")
        after = argv[argv.index(option) + 1 :]
        if not given:
            value = after[0] if after and not after[0].startswith("--") else "VALUE"
        fitting = [name] if name in keys else [key for key in keys if key.rsplit(".", 1)[-1] == name]
        hints += [" or ".join(f"--set {shlex.quote(f'{key}={value}')}" for key in fitting)] if fitting else []
    return f"; settings are given so: {', '.join(hints)}" if hints else ""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A KeyboardInterrupt that is raised in a callback, as imports have many, is printed and lost: it is raised again after."""
    came: list[int] = []

    def interrupted(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        signal.default_int_handler(signum, frame)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
        if came:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def rank_arguments(arguments: argparse.Namespace) -> list[str]:
    """The command line of a rank, from that of `pearl run`."""
    recipe = [arguments.recipe] if arguments.recipe else []
    resume = ["--resume", arguments.resume] if arguments.resume else []
    return [*recipe, *resume, *(part for setting in arguments.set for part in ("--set", setting))]


def print_config(config: Config) -> int:
    """Every setting on standard output; the exit code, which is not 0 if its reader has gone (`| head`)."""
    return _printed(configuration.to_json(config))


def _printed(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit cannot fail
        return EXIT_BROKEN_PIPE
    return 0


def version() -> str:
    """The installed distribution's version."""
    try:
        return importlib.metadata.version("pearl-rl")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
