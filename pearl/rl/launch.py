"""One rank of a job: `torchrun -m pearl.rl.launch [RECIPE] [--set a.b=c ...]`, and what `pearl run` starts as often as asked.

Owns the life of a rank: run directory, controller process, WORLD (`world.py`), main loop, the end. The options are those of
`command_line.py`. torch is loaded only once the configuration is known to be good. Rank 0 alone prints.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pearl.config import Config
from pearl.engine.node import node
from pearl.metrics.console import duration, step_line
from pearl.metrics.jsonl import read_jsonl
from pearl.metrics.live import LiveView, is_interactive
from pearl.protocol import Hello, Notice, Ready, Status, StepReport, Stop
from pearl.rl import fresh_model, process
from pearl.rl.command_line import EXIT_USAGE, Job, parser, planned, print_config
from pearl.rl.control import LAUNCHER_GONE, ControlThread
from pearl.rl.envs import registry as environments
from pearl.rl.envs.base import words_of
from pearl.rl.rank import RankLoop, report_failure
from pearl.rl.run_state import RunLock, how_to_go_on, rewind_run, write_settings
from pearl.rl.start_watch import StartWatch, launcher_answers

LAST_WORDS_S = 1.0
"""How long a rank that has to go waits for its main thread to have said the last words, if that is about to."""


class LaunchError(RuntimeError):
    """The job could not be started; the message is for the person who tried."""


def rank_main(argv: list[str] | None = None) -> int:
    """One rank under torchrun; returns its exit code."""
    rank, world = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "1"))
    launch: Launch | None = None

    def interrupted(signum: int) -> None:
        if launch is not None:
            launch.interrupted(signum)
            return
        if rank == 0:
            print(f"pearl: interrupted by {signal.Signals(signum).name} before the start", flush=True)
        process.leave(128 + signum)

    if rank >= 0:
        process.on_signals(interrupted)
    arguments = parser("torchrun -m pearl.rl.launch").parse_args(argv)
    try:
        if rank < 0 and not arguments.print:
            raise ValueError("RANK is not set: start this with torchrun, or with `pearl run`")
        job = planned(arguments, world, try_prompt=rank == 0 and not arguments.tried)
    except ValueError as error:
        if rank <= 0:
            print(f"pearl: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.print:
        return print_config(job.config) if rank <= 0 else 0
    launch = Launch(job, rank)
    return launch.run()


class Launch:
    """The life of one rank, in order; `run` undoes what was begun whatever happens. `interrupted` may come from any thread."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.config = job.config
        self.rank = rank
        self.started = time.monotonic()
        self.launcher = os.getppid()
        self.run_directory = Path()  # nowhere yet
        self.lock: RunLock | None = None
        self.controller: subprocess.Popen | None = None
        self.control: ControlThread | None = None
        self.closing = threading.Lock()
        self.watch = StartWatch(
            rank=rank,
            launcher=self.launcher,
            local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            timeouts=self.config.timeouts,
            fail=self._start_failed,
        )
        self.view = LiveView(sys.stdout, interactive=is_interactive(sys.stdout), history=self._history()) if rank == 0 else None

    def run(self) -> int:
        """Returns the exit code: 0 done, 128 + signal when interrupted, 1 for anything that went wrong."""
        process.die_with_parent(signal.SIGTERM, parent=self.launcher)
        self.watch.start()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        code, ending = 1, ""
        try:
            if not launcher_answers():
                raise LaunchError(LAUNCHER_GONE)
            address_fd = self._lead() if self.rank == 0 else None
            loop = self._build(address_fd)
            self.watch.end()
            self._say(f"ready after {time.monotonic() - self.started:.1f} s: {self._who()}")
            code = loop.run()
            self._log(loop.traceback)
            ending = loop.stop_reason if code == 0 else ""
            self._draw_curves(self.run_directory / "metrics.jsonl")
        except LaunchError as error:
            ending = f"failed: {error}"
        except Exception as error:  # one line for people, the rest for the log
            self._log(traceback.format_exc())
            if self.control is None:
                ending = f"failed: {type(error).__name__}: {error}"
            else:
                code = report_failure(self.control, self.rank, error).exit_code
        finally:
            self.watch.end()
            with self.closing:
                self._close(code, ending)
        return code

    # ------------------------------------------------------------------------------------------------- the beginning

    def _lead(self) -> int:
        """What rank 0 does for all before torch is loaded: run directory, fresh policy, controller."""
        resume = self.job.resume
        self.run_directory = resume.run if resume else make_run_directory(self.config)
        try:
            self.lock = RunLock(self.run_directory)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        if resume:
            lost = rewind_run(self.run_directory, resume.state.step)
            aside = ", ".join(f"{count} rows of {name}" for name, count in lost.items() if count)
            self._say(f"resuming after step {resume.state.step}" + (f"; written since and put aside: {aside}" if aside else ""))
            self._say_what_changed(resume.config)
        write_settings(self.run_directory, self.config)
        self._say(f"{self.config.recipe}: run directory {self.run_directory}")
        if self.job.notice:
            self._say(self.job.notice)
        folder = self._model_folder()
        reader, writer = os.pipe()
        checkpoint = str(resume.checkpoint) if resume else ""
        outlet = os.dup(sys.stderr.fileno())  # where people look, should this rank be unable to tell them
        numbers = [str(writer), str(outlet), str(self.job.layout.world), str(os.getpid())]
        arguments = [str(self.run_directory), str(folder), *numbers, checkpoint]
        self.controller = process.start(
            [sys.executable, "-m", "pearl.rl.controller", *arguments],
            self.run_directory / "logs" / "controller.log",
            pass_fds=(writer, outlet),
        )
        self.watch.controller = self.controller
        os.close(writer)
        os.close(outlet)
        return reader

    def _model_folder(self) -> Path:
        """The policy to start from; a fresh one is written into the run (without weights: the trainer makes them)."""
        if self.config.model.path is not None:
            return Path(self.config.model.path)
        folder = self.run_directory / "initial_policy"
        if self.rank == 0 and self.job.resume is None and not folder.exists():  # once: others read it from then on
            environment = environments.make(self.config.env.name, **environments.constructor_options(self.config.env))
            fresh_model.write_model_folder(folder, self.config.model, words_of(environment))
        return folder

    def _build(self, address_fd: int | None) -> RankLoop:
        """Where the ranks find each other, the control thread, and this rank's trainer and engine."""
        timeouts, layout = self.config.timeouts, self.job.layout
        try:
            store = self._meet()
        except (RuntimeError, ValueError) as error:
            raise LaunchError(f"the {layout.world} ranks did not find each other: {error}") from None
        if self.rank == 0 and address_fd is not None:
            store.set("controller", self._read_address(address_fd))
            store.set("run", str(self.run_directory))
        self.run_directory = Path(store.get("run").decode())
        address = store.get("controller").decode()
        self.control = ControlThread(address, self.rank, timeouts, self._show, self.controller, self._overdue)
        self.control.start()
        self.control.send(Hello(rank=self.rank, pid=os.getpid(), host=node(), roles=layout.roles(self.rank)))
        parts = self._parts(store)
        length = parts.engine.max_model_len if parts.engine is not None else 0
        pulls = f"{parts.pulls.host}:{parts.pulls.port}" if parts.pulls is not None else ""
        if pulls:
            self._log(f"weights can be pulled from {pulls}")
        stats = parts.engine.stats() if parts.engine is not None else None
        tokens = stats.total_blocks * self.config.engine.block_size if stats is not None else 0
        lends = parts.fetcher is not None
        self.control.send(Ready(rank=self.rank, max_model_len=length, pulls=pulls, kv_tokens=tokens, lends=lends))
        return RankLoop(
            rank=self.rank,
            control=self.control,
            engine=parts.engine,
            trainer=parts.trainer,
            publisher=parts.publisher,
            publish_timeout_s=timeouts.command_s,
            fetcher=parts.fetcher,
            block_size=self.config.engine.block_size,
            report_s=self.config.report_s,
        )

    def _meet(self) -> Any:
        """A store of what rank 0 tells the others: WORLD's, or without devices that of pipes from the launcher."""
        timeouts = self.config.timeouts
        if self.config.emulated is not None:
            from pearl.rl.emulated import Meeting

            self.watch.missing([])
            return Meeting(self.rank, timeouts.start_s)
        import torch

        from pearl.rl import world

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return world.join(timeouts.start_s, self.watch.missing)  # timeouts.join_s is the watch's: it knows pauses

    def _parts(self, store: Any) -> Any:
        """Trainer, engine and publisher of this rank."""
        layout = self.job.layout
        if self.config.emulated is not None:
            from pearl.rl import emulated

            return emulated.build_parts(self.config, layout, self.rank, self._model_folder())
        from pearl.rl import world

        lend = self.config.borrow.workers not in ("none", "0")
        groups = world.make_groups(layout, self.rank, self.config.timeouts.command_s, store, lend=lend)
        return world.build_parts(self.config, layout, self.rank, groups, self._model_folder(), store)

    def _read_address(self, fd: int) -> str:
        timeout_s = self.config.timeouts.join_s
        if not process.is_readable(fd, timeout_s):
            raise LaunchError(f"waited timeouts.join_s={timeout_s:g} s for the controller's address")
        address = os.read(fd, 4096).decode().strip()
        os.close(fd)
        if not address:
            raise LaunchError(f"the controller did not start; see {self.run_directory / 'logs' / 'controller.log'}")
        return address

    # ------------------------------------------------------------------------------------------------- the end

    def interrupted(self, signum: int) -> None:
        """SIGINT or SIGTERM came; the kernel sends the latter too when the launcher dies."""
        if self.control is not None:
            self.control.interrupt(signum)
            return
        if process.is_orphan(self.launcher):
            self._abandon(1, LAUNCHER_GONE)
        why = signum == signal.SIGTERM and self.watch.lost()
        self._abandon(128 + signum, why or f"interrupted by {signal.Signals(signum).name} while starting")

    def _start_failed(self, reason: str) -> None:
        if self.control is not None:
            self.control.fail(reason)
        else:
            self._abandon(1, reason)

    def _abandon(self, code: int, ending: str) -> NoReturn:
        """Ends the process from another thread, while the main one may sit in C: nothing is there that needs an order."""
        with self.closing:
            if self.controller is not None:
                self.controller.kill()
            self._close(code, ending)
            process.leave(code)

    def _overdue(self, code: int) -> NoReturn:
        """Ends the process from another thread: the main one did not come back in time, from an update that takes longer."""
        if self.closing.acquire(timeout=LAST_WORDS_S):  # else it is on its way out, and hangs there
            self._last_words(code, "")
        process.leave(code)

    def _close(self, code: int, ending: str) -> None:
        if self.control is not None:
            self.control.close()
        if self.controller is not None:
            process.stop(self.controller, self.config.timeouts.stop_s)
        self._last_words(code, ending)
        if self.lock is not None:
            self.lock.release()

    def _last_words(self, code: int, ending: str) -> None:
        if self.view is not None:
            took = duration(time.monotonic() - self.started)
            begun = self.run_directory != Path()
            where = f"results in {self.run_directory}" if begun else ""
            parts = [f"{'done' if code == 0 else 'ended'} after {took}", ending, where]
            text = "; ".join(part for part in parts if part)
            self._log(text)
            self.view.close(text)
            if code and self.lock is not None:
                for line in how_to_go_on(self.run_directory, self.config, self.job.layout.world).splitlines():
                    self._say(line)

    def _draw_curves(self, path: Path) -> None:
        if self.rank or not path.exists():
            return
        try:
            from pearl.metrics.plot import plot_run

            if rows := read_jsonl(path):
                plot_run(rows, self.run_directory / "reward.png", title=self.run_directory.name)
        except Exception as error:  # whatever it is: the run itself is done and saved
            self._say(f"reward.png could not be written: {error}")

    # ------------------------------------------------------------------------------------------------- words

    def _history(self) -> list[dict]:
        """Rows of the part of a resumed run that counts."""
        resume = self.job.resume
        if resume is None or not (resume.run / "metrics.jsonl").exists():
            return []
        try:
            rows = read_jsonl(resume.run / "metrics.jsonl")
        except msgspec.MsgspecError:  # a damaged line, which is put aside when the run is rewound; the display does without
            return []
        return [row for row in rows if row["step"] <= resume.state.step]

    def _say_what_changed(self, before: Config) -> None:
        """The choices that depend on the number of ranks, where a resumed run makes other ones than it did."""
        for name, was, now in (
            ("cluster.train_ranks", before.cluster.train_ranks, self.config.cluster.train_ranks),
            ("max_staleness", before.max_staleness, self.config.max_staleness),
        ):
            if was != now:
                why = f"chosen for --nproc {self.job.layout.world}" if name in self.config.chosen else "set"
                self._say(f"{name}={now} ({why}), it was {was} before")

    def _who(self) -> str:
        layout = self.job.layout
        if layout.takes_turns:
            return "one rank trains and serves by turns"
        return f"{len(layout.training)} training, {len(layout.serving)} serving, max_staleness {self.config.max_staleness}"

    def _show(self, message: StepReport | Status | Notice | Stop) -> None:
        if self.view is None:
            return
        match message:
            case StepReport():
                self.view.step(message.metrics)
                self._log(step_line(message.metrics))
            case Status():
                self.view.status(message)
            case Stop():
                self.view.close("")  # others may print from here on, right through a display that is still drawn
                self._say(message.reason)
            case Notice():
                self._say(message.text)

    def _say(self, text: str) -> None:
        if self.view is not None:
            self.view.notice(text)
        self._log(text)

    def _log(self, text: str) -> None:
        """What cannot be written (a full disk) is lost: people must hear of it, and the job end in order, all the same."""
        if text and self.run_directory != Path():
            path = self.run_directory / "logs" / f"rank{self.rank}.log"
            with contextlib.suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as log:
                    log.write(f"{datetime.datetime.now():%H:%M:%S} {text}\n")


def make_run_directory(config: Config) -> Path:
    """Makes `output_dir/recipe-date-time` (with a counter if it exists). LaunchError if it cannot be written."""
    stem = f"{config.recipe or 'run'}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
            run = Path(config.output_dir) / (stem + suffix)
            with contextlib.suppress(FileExistsError):
                run.mkdir()
                return run
    except OSError as error:
        raise LaunchError(f"output_dir={config.output_dir!r}: cannot be written ({error.strerror})") from None
    raise LaunchError(f"output_dir={config.output_dir!r}: 999 runs began within this second")


if __name__ == "__main__":
    process.leave(rank_main())
