"""A job whose workers come and go: one trains, two serve, two more join, one of these is killed, the other told to leave.

    python examples/elastic.py [--steps N] [--set KEY=VALUE ...]        (also: make demo-elastic)

Training goes on through all of it, on the quickstart's task, and at the end the books are printed: what was dispatched, and
what became of it; how many sampled tokens were lost; what the cluster became, in the order of time. The exit code is 0 if
nothing was lost. The run stays in runs/demo-elastic-<date>-<time>/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 300.0


class Demo:
    """The job, the external workers, and what has been written of both."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.workers: dict[str, subprocess.Popen] = {}
        command = [sys.executable, "-m", "pearl", "run", "quickstart", "--nproc", "3", *arguments]
        self.job = subprocess.Popen([*command, "--set", f"output_dir={folder}"])

    def until(self, ready: Callable[[], Any], what: str) -> None:
        """Waits; RuntimeError if the job ends before, or it takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            if self.job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come about")
            time.sleep(0.05)

    def file(self, name: str) -> str:
        """A file of the run directory; "" if it is not there yet."""
        found = list(self.folder.glob(f"*/{name}"))
        return found[0].read_text() if found else ""

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file(name).splitlines() if line.endswith("}")]

    def admitted(self) -> int:
        """Workers that have been let in so far."""
        return sum(row["workers_changed"] for row in self.rows("transitions.jsonl") if row["kind"] == "admit")

    def join(self, name: str) -> None:
        address = self.file("join_address").strip()
        print(f"demo: {name} joins {address.partition('/')[0]}", flush=True)
        self.workers[name] = subprocess.Popen([sys.executable, "-m", "pearl.rl.join", address])

    def signal(self, name: str, signum: signal.Signals, told: str) -> None:
        print(f"demo: {name} gets {signum.name}: {told}", flush=True)
        self.workers[name].send_signal(signum)

    def steps(self, more: int) -> None:
        goal = len(self.rows("metrics.jsonl")) + more
        self.until(lambda: len(self.rows("metrics.jsonl")) >= goal, f"step {goal}")

    def close(self) -> None:
        for process in (self.job, *self.workers.values()):
            if process.poll() is None:
                process.kill()
            process.wait()


def play(demo: Demo) -> None:
    """The story."""
    demo.until(lambda: demo.file("join_address"), "the job's address")
    for name in ("external A", "external B"):
        demo.join(name)
    demo.until(lambda: demo.admitted() >= 2, "that both serve")
    demo.steps(3)
    lost = "what its broken connections are told of from here on is expected, and that it is gone after 5 s"
    demo.signal("external A", signal.SIGKILL, lost)
    demo.steps(5)
    demo.signal("external B", signal.SIGTERM, "its GPUs are reclaimed, so it leaves")
    demo.workers["external B"].wait(LIMIT_S)
    demo.job.wait(LIMIT_S)


def conclude(demo: Demo) -> bool:
    """Prints what became of everything; whether all of it is accounted for."""
    rows = demo.rows("metrics.jsonl")
    last, quarter = rows[-1], max(1, len(rows) // 4)
    first, final = (sum(row["reward_mean"] for row in part) / quarter for part in (rows[:quarter], rows[-quarter:]))
    parts = last["trained"] + last["dropped"] + last["in_flight"]
    print(f"reward: {first:+.3f} in the first {quarter} steps, {final:+.3f} in the last {quarter}")
    print(
        f"trajectories: dispatched {last['dispatched']} = trained {last['trained']} + dropped {last['dropped']} + "
        f"in flight {last['in_flight']}"
    )
    print(f"tokens lost: {last['lost_tokens']} (late, of a worker that was given up: {last['late_tokens']})")
    print("decisions (a worker that is killed is none; letters: docs/scheduler.md, The log):")
    for row in sorted(demo.rows("transitions.jsonl"), key=lambda row: row["at"]):  # the file has them as they finished
        print(f"at {row['at']:6.1f} s  {row['kind']:8} {row['before']} -> {row['after']}  ({row['cause']})")
    left = demo.workers["external B"].returncode
    print(f"exit codes: job {demo.job.returncode}, external B {left}")
    return last["dispatched"] == parts and last["lost_tokens"] == 0 and demo.job.returncode == left == 0 and final > first


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=30, help="of training (default 30)")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting, as for pearl run")
    given = options.parse_args()
    wanted = ["elastic.listen=127.0.0.1:0", "expand.external=always", f"max_steps={given.steps}", *given.set]
    folder = Path("runs") / f"demo-elastic-{datetime.datetime.now():%Y%m%d-%H%M%S}"  # its own: the demo reads what is there
    demo = Demo(folder, [part for value in wanted for part in ("--set", value)])
    try:
        play(demo)
        return 0 if conclude(demo) else 1
    finally:
        demo.close()


if __name__ == "__main__":
    sys.exit(main())
