"""Jobs without devices and the external workers that join them, as a user starts them; and a wire that can be cut.

The jobs are quick: a worker is prepared in a moment, and a step, which takes about a second, is nearly all rollout.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.job_process import POLL_S, JobProcess, send
from pearl.metrics.jsonl import read_jsonl
from pearl.sched.cost_profile import ChangeCost, DecodeCost, PrefillCost, write_profiles
from pearl.sched.published import qwen3_8b_h800

WAIT_S = 180.0
"""For a busy machine; what is not there by then never comes."""
QUICK = (
    "emulation.train_token_s=1e-4", "emulation.publish_s=0.05", "max_staleness=1",
    "elastic.listen=127.0.0.1:0", "expand.external=always", "rollout_batch_size=32", "group_size=4",
    "optimizer.mini_batch_size=32", "elastic.silence_s=5", "elastic.heartbeat_s=0.5", "emulation.turn_tokens=4",
    "elastic.reconnect_s=3", "timeouts.join_s=90", "timeouts.silence_s=20",
)  # fmt: skip


def profile(folder: Path, **changes: Any) -> Path:
    """A file with the costs of a worker on which a token takes 15 ms."""
    costs = replace(
        qwen3_8b_h800(),
        decode=DecodeCost(base_s=0.013),
        prefill=PrefillCost(base_s=0.01, per_token_s=1e-5),
        switch=ChangeCost(fixed_s=0.05),
        borrow=ChangeCost(fixed_s=0.1),
        give_back=ChangeCost(fixed_s=0.1),
        prepare=ChangeCost(fixed_s=0.1),
        finalise=ChangeCost(),
    )
    path = folder / "costs.json"
    write_profiles(path, [replace(costs, **changes)])
    return path


class ElasticJob(JobProcess):
    """A job that external workers may join. `externals` are those started here, by name."""

    externals: dict[str, subprocess.Popen]

    @classmethod
    def begin(
        cls, folder: Path, *extra: str, world: int = 3, resume: Path | None = None, costs: dict[str, Any] | None = None
    ) -> ElasticJob:
        """A quickstart whose run goes into `folder`/runs; `costs` changes the profile."""
        device = f"device=emulated:{profile(folder, **(costs or {}))}"
        values = [device, *QUICK, f"output_dir={folder / 'runs'}", *extra]
        settings = [part for value in (extra if resume else values) for part in ("--set", value)]
        what = ["--resume", str(resume)] if resume else ["quickstart"]
        job = cls.command(
            folder, ["-m", "pearl", "run", *what, "--nproc", str(world), *settings], name="resumed" if resume else "out"
        )
        assert isinstance(job, ElasticJob)
        job.externals = {}
        return job

    @property
    def run(self) -> Path:
        self.wait_for("run directory", WAIT_S)
        run = self.run_directory()
        assert run is not None
        return run

    def address(self) -> str:
        self.wait_for("workers may join", WAIT_S)
        return (self.run / "join_address").read_text().strip()

    def join(self, name: str, address: str | None = None, *options: str) -> subprocess.Popen:
        """Starts an external worker."""
        self.address()  # once it is there, its file is
        command = ["-m", "pearl.rl.join", address or str(self.run / "join_address"), *options]
        self.externals[name] = self.beside(command, name)
        return self.externals[name]

    def said(self, name: str) -> str:
        """What an external worker printed."""
        return (self.folder / f"{name}.txt").read_text()

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def transitions(self) -> list[dict[str, Any]]:
        path = self.run / "transitions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, ready: Callable[[], Any], what: str, seconds: float = WAIT_S) -> None:
        """AssertionError with all that was printed if that takes longer."""
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"waited up to {seconds:g} s for {what}:\n{self.report()}")
            time.sleep(POLL_S)

    def report(self) -> str:
        others = "".join(f"--- {name}\n{self.said(name)}" for name in self.externals)
        return f"{self.output()[-4000:]}\n{others}\n{self.transitions()}"

    def serving(self, count: int) -> None:
        """Until the scheduler has admitted so many external workers in all."""
        self.until(lambda: sum(self._admitted()) >= count, f"{count} external workers to be admitted")

    def _admitted(self) -> list[int]:
        return [row["workers_changed"] for row in self.transitions() if row["kind"] == "admit" and row["ok"]]

    def step(self, count: int) -> None:
        """Until so many more steps are done."""
        goal = len(self.rows()) + count
        self.until(lambda: len(self.rows()) >= goal, f"{count} more steps")

    def finish(self, *, codes: dict[str, int] | None = None) -> list[dict[str, Any]]:
        """Waits for a job that must end well, and leave nothing; its rows. `codes`: of external workers, 0 unless told."""
        gone = self.wait_until_gone(2 * WAIT_S)
        assert gone is not None, f"not over:\n{self.report()}\n{self.family()}"
        assert self.process.wait() == 0, self.report()
        for name, process in self.externals.items():
            assert process.wait() == (codes or {}).get(name, 0), f"{name}\n{self.report()}"
        rows = self.rows()
        check_books(rows)
        return rows


def check_books(rows: list[dict[str, Any]]) -> None:
    """Every step once, every trajectory trained, dropped or in flight, no token lost."""
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"], row
        assert row["lost_tokens"] == 0, row
        assert row["failed_trajectories"] == 0, row


def kill(job: ElasticJob, name: str, signum: int = signal.SIGKILL) -> None:
    send(job.externals[name].pid, signum)


class Wire(threading.Thread):
    """A TCP proxy to `address`; `cut` stops forwarding without closing anything, `mend` goes on. Pieces come `late_s` late."""

    def __init__(self, address: str, late_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._late_s = late_s
        found = re.fullmatch(r"([^:]+):(\d+)/(\w+)", address)
        assert found is not None
        self._target, self._token = (found[1], int(found[2])), found[3]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}/{self._token}"

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        self._listener.close()
        for end in self._ends:
            end.close()

    def run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, 5.0)
            except OSError:
                return
            far.settimeout(None)
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self._late_s)
                self._open.wait()
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()
