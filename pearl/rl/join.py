"""An external worker: `python -m pearl.rl.join ADDRESS [--notice SECONDS]` joins a running job, serves, and leaves when told.

Owns the worker's life: asking to be let in, building an engine when the job wants one, the main loop, leaving, and looking for
a job that vanished. What it serves, and how, the job says. Invariants: its end costs the job nothing but itself; it ends within
its notice after a signal; a job that is not heard of for `elastic.reconnect_s` ends it, and so does a main loop that hangs for
`elastic.stuck_s`.

Exit codes: 0 the job ended well, or the worker left in order; 1 the job refused it, or vanished; 2 for a wrong command line.
torch is loaded only if the job has devices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pearl import config as configuration
from pearl.config import Config, ElasticOptions
from pearl.engine.model_folder import DESCRIPTIONS, descriptions
from pearl.protocol import Done, Joined, Leave, Leaving, Prepare, Ready, Stop
from pearl.rl import process
from pearl.rl.link import Address, Link
from pearl.rl.rank import RankLoop, report_failure

EXIT_USAGE = 2
PAUSE_S = 1.0
"""Between two tries to find the job."""
QUIET_S = 2.0
"""A job that has not answered by then is told of, once, while it is waited for."""
POLL_S = 0.5


class External:
    """One worker. `run` returns its exit code; `interrupted` may come from any thread."""

    def __init__(self, address: Address, *, notice_s: float | None, gpus: list[str]) -> None:
        self._address, self._notice_s, self._gpus = address, notice_s, gpus
        self._options = ElasticOptions()
        self._link: Link | None = None
        self._leaving = False
        self._why = ""
        """What the last job said at the end."""
        self._told = False
        """That no job answers, since the last one did."""

    def run(self) -> int:
        """Serves one job after the other that is found at the address, until one lets it go or none takes it any more."""
        looked_s = 0.0
        while True:
            code, in_vain_s = self._membership()
            if code is not None:
                return code
            looked_s = looked_s + in_vain_s + PAUSE_S if in_vain_s is not None else 0.0
            if looked_s > self._options.reconnect_s:
                why = f" but for: {self._why}" if self._why else ""
                _say(f"no job at {self._where()} for {self._options.reconnect_s:g} s{why}")
                return 1
            time.sleep(PAUSE_S)

    def interrupted(self, signum: int) -> None:
        """SIGINT or SIGTERM: tells the job, which lets go in time; without a job, or the second time, the end is at once."""
        link = self._link
        if self._leaving or link is None or not isinstance(link.answer, Joined) or link.lost:
            process.leave(128 + signum if self._leaving else 0)
        self._leaving = True
        notice_s = self._options.notice_s if self._notice_s is None else self._notice_s
        _say(f"{signal.Signals(signum).name}: leaving within {notice_s:g} s")
        link.send(Leaving(rank=link.answer.rank, notice_s=notice_s))
        timer = threading.Timer(notice_s, lambda: process.leave(0))
        timer.daemon = True
        timer.start()

    # ------------------------------------------------------------------------------------------------ one membership

    def _membership(self) -> tuple[int | None, float | None]:
        """(exit code or None: look again, seconds without a job: 0.0 if it sent the worker away soon, None if it took
        it in, or has not had the time to answer)."""
        began = time.monotonic()
        link = self._link = Link(self._address, self._options.silence_s, self._gpus)
        link.start()
        try:
            self._wait_for_answer(link)
            answer = link.answer
            if answer is None or link.lost:
                return None, None if link.reached else time.monotonic() - began
            if not isinstance(answer, Joined):
                _say(f"refused: {answer.reason}")
                return 1, None
            began = time.monotonic()
            code = self._serve(link, answer)
            return code, None if time.monotonic() - began > self._options.silence_s else 0.0
        finally:
            self._link = None  # a signal that comes now finds no job to tell
            link.close()

    def _wait_for_answer(self, link: Link) -> None:
        """Until it is there or the link is lost; says so once if that takes long, since a mistyped address looks the same."""
        quiet_s = min(QUIET_S, self._options.silence_s)
        if link.answered.wait(quiet_s):
            return
        if not self._told:
            self._told = True
            busy = ", a job is there but still busy" if link.reached else f", trying for {self._options.reconnect_s:g} s"
            _say(f"no answer yet from {self._where()}{busy}")
        link.answered.wait(self._options.silence_s - quiet_s)

    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def _serve(self, link: Link, joined: Joined) -> int | None:
        """The exit code, or None if the job has vanished."""
        config = configuration.from_json(joined.config)
        self._options, self._told = config.elastic, False
        link.stuck_s, link.doubt_s = config.elastic.stuck_s, config.elastic.silence_s
        link.silence_s = max(config.elastic.silence_s, config.timeouts.silence_s)  # then the job's own ranks give it up too
        _say(f"joined as member {joined.rank}")
        order = _first_order(link, joined.rank)
        if isinstance(order, Stop):
            return self._ended(order)
        try:
            parts = _build(config, joined, self._address)
        except Exception as error:  # the job goes on without this worker, and hears why
            report_failure(link, joined.rank, error)
            _say(f"failed: {type(error).__name__}: {error}")
            return 1
        with contextlib.closing(parts):
            engine = parts.engine
            blocks = engine.stats().total_blocks
            tokens = blocks * config.engine.block_size
            link.send(Ready(rank=joined.rank, max_model_len=engine.max_model_len, pulls=parts.pulls, kv_tokens=tokens))
            link.send(Done(rank=joined.rank, number=order.number, seconds=parts.seconds))
            loop = RankLoop(
                rank=joined.rank,
                control=link,
                engine=engine,
                trainer=None,
                publisher=NoPublisher(),
                publish_timeout_s=config.timeouts.command_s,
                fetcher=parts.fetcher,
                block_size=config.engine.block_size,
                report_s=config.report_s,
            )
            link.watch()
            code = loop.run()
        if loop.traceback:
            print(loop.traceback, file=sys.stderr, flush=True)
            return 1
        return self._ended(Stop(number=-1, reason=loop.stop_reason, exit_code=code))

    def _ended(self, stop: Stop) -> int | None:
        self._why = stop.reason
        _say(stop.reason)
        if self._leaving:
            return 0
        return 0 if stop.exit_code == 0 else None


class NoPublisher:
    """An external worker has no part in publications."""

    def begin(self, version: int) -> None:
        raise RuntimeError(f"publishing version {version}: an external worker has no part in it")

    def poll(self) -> dict[str, Any] | None:
        return None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        return {}


def _first_order(link: Link, rank: int) -> Prepare | Stop:
    """Waits until the job wants an engine, or the end of the membership."""
    while True:
        for message in link.take(POLL_S):
            if isinstance(message, Leave):
                link.send(Done(rank=rank, number=message.number, seconds=0.0))
                return Stop(number=message.number, reason="told to leave", exit_code=0)
            if isinstance(message, Prepare | Stop):
                return message


def _build(config: Config, joined: Joined, address: Address) -> Any:
    """Engine, the way to weights, and where others can have them; of a kind that fits the job."""
    start = time.perf_counter()
    with model_folder(joined) as folder:
        if config.emulated is not None:
            from pearl.rl import emulated

            return emulated.build_external(config, folder, start)
        from pearl.rl import external_parts

        return external_parts.build(config, folder, name=f"member {joined.rank}", host=address.own_host(), start=start)


@contextlib.contextmanager
def model_folder(joined: Joined) -> Iterator[Path]:
    """The job's, if this machine sees it; else one of the files that the job has sent along, while an engine is built.

    What is called the same here may be another model's, of another vocabulary or positions: then it is not the job's.
    """
    here: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        here = descriptions(joined.model_folder)
    if "config.json" in here and here == {name: text for name, text in joined.files.items() if name in DESCRIPTIONS}:
        yield Path(joined.model_folder)
        return
    with tempfile.TemporaryDirectory(prefix="pearl-join-") as temporary:
        for name, text in joined.files.items():
            (Path(temporary) / Path(name).name).write_text(text)
        yield Path(temporary)


def _say(text: str) -> None:
    """A terminal or pipe that is gone (Ctrl-C ends the other end of a pipe too) must not keep the worker from leaving."""
    with contextlib.suppress(OSError, ValueError):
        print(f"pearl join: {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    what = (__doc__ or "").splitlines()[0]
    options = argparse.ArgumentParser(prog="python -m pearl.rl.join", allow_abbrev=False, description=what)
    options.add_argument("address", metavar="ADDRESS", help="RUN/join_address, or what it says: HOST:PORT/TOKEN")
    options.add_argument("--notice", type=float, metavar="SECONDS", help="what is left after SIGTERM (default: the job's)")
    options.add_argument("--gpus", default="", metavar="NAMES", help="names of its GPUs, by commas (default: one of its own)")
    options.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)  # it must not outlive who started it
    given = options.parse_args(argv)
    if given.with_parent:
        process.die_with_parent()
    try:
        said = Path(given.address)
        address = Address.parse(said.read_text().strip() if said.is_file() else given.address)
        if given.notice is not None and not given.notice > 0:
            raise ValueError(f"--notice {given.notice}: must be > 0")
    except (ValueError, OSError) as error:
        print(f"pearl join: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker = External(address, notice_s=given.notice, gpus=[name for name in given.gpus.split(",") if name])
    process.on_signals(worker.interrupted)
    return worker.run()


if __name__ == "__main__":
    process.leave(main())
