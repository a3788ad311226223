"""Workers come, go, die, stall and lose their connection at random for as long as asked, while one job trains on.

    python -m bench.elastic_soak [--minutes 20] [--seed 0] [--json]

Claim: nothing of that ends the job, loses a token or a trajectory, or makes a process grow. The job has no devices
(docs/elasticity.md); its processes, sockets, signals and books are those of any other. Every few seconds one thing happens to
one external worker: one joins, one is killed, told to leave, stopped and continued, or cut off and connected again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.elastic_job import ElasticJob, Wire, check_books, kill

MOST = 4
"""External workers at a time."""
GROWTH = 1.25
"""A process may have this many times its memory at a quarter of the time when it is over."""
STALLS_S = (0.5, 12.0)
PAGE_KB = 4


class Soak:
    """The job and the hand of chance."""

    def __init__(self, job: ElasticJob, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.events: Counter[str] = Counter()
        self.memory: dict[str, list[int]] = {}
        self.codes: Counter[str] = Counter()
        self._wires: dict[str, Wire] = {}
        self._busy: dict[str, tuple[float, str]] = {}
        """Workers that are stopped or cut off: until when."""
        self._count = 0

    def play(self, minutes: float) -> None:
        end, event_at, look_at = time.monotonic() + 60 * minutes, 0.0, 0.0
        while (now := time.monotonic()) < end:
            if self.job.process.poll() is not None:
                raise RuntimeError(f"the job has ended:\n{self.job.report()}")
            if now >= event_at:
                self._happen(now)
                event_at = now + self.random.uniform(1.0, 5.0)
            if now >= look_at:
                self._look()
                look_at = now + 10.0
            self._release(now)
            time.sleep(0.1)

    def _happen(self, now: float) -> None:
        self._bury()
        there = [name for name in self.job.externals if name not in self._busy]
        choices = ["join"] * (2 if len(self.job.externals) < MOST else 0)
        choices += ["kill", "leave", "stop", "cut"] if there else []
        if not choices:
            return
        what = self.random.choice(choices)
        self.events[what] += 1
        if what == "join":
            self._join()
            return
        name = self.random.choice(there)
        until = now + self.random.uniform(*STALLS_S)
        if what in ("kill", "leave"):
            kill(self.job, name, signal.SIGKILL if what == "kill" else signal.SIGTERM)
        elif what == "stop":
            kill(self.job, name, signal.SIGSTOP)
            self._busy[name] = until, what
        else:
            self._wires[name].cut()
            self._busy[name] = until, what

    def _join(self) -> None:
        self._count += 1
        name = f"w{self._count}"
        self._wires[name] = Wire(self.job.address())
        self.job.join(name, self._wires[name].address)

    def _release(self, now: float) -> None:
        for name, (until, what) in list(self._busy.items()):
            if now >= until:
                del self._busy[name]
                if what == "cut":
                    self._wires[name].mend()
                elif name in self.job.externals:
                    kill(self.job, name, signal.SIGCONT)

    def _bury(self) -> None:
        for name, process in list(self.job.externals.items()):
            if (code := process.poll()) is not None:
                self.codes[str(code)] += 1
                del self.job.externals[name]
                self._busy.pop(name, None)
                self._wires.pop(name).close()

    def _look(self) -> None:
        for pid, role in self.job.family().items():
            if role != "external":
                self.memory.setdefault(role, []).append(resident_mb(pid))

    def finish(self) -> None:
        """Ends the job by a signal, and waits until nothing of it is left."""
        for wire in self._wires.values():
            wire.mend()
        for name in list(self._busy):
            kill(self.job, name, signal.SIGCONT)
        self.job.process.send_signal(signal.SIGINT)
        if self.job.wait_until_gone(60) is None:
            raise RuntimeError(f"left over: {self.job.family()}")
        for wire in self._wires.values():
            wire.close()


def resident_mb(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KB // 1024
    except (OSError, IndexError):
        return 0


def growth(samples: list[int]) -> float:
    """Memory at the end over that at a quarter of the time."""
    quarter = samples[len(samples) // 4] or 1
    return samples[-1] / quarter


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.elastic_soak", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--minutes", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ElasticJob.begin(folder, "max_steps=1000000", f"seed={given.seed}") as job:
            soak = Soak(job, given.seed)
            job.step(1)
            soak.play(given.minutes)
            rows, transitions = job.rows(), job.transitions()
            soak.finish()
            result = conclude(given.minutes, soak, rows, transitions, job.process.wait())
    if given.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


def conclude(
    minutes: float, soak: Soak, rows: list[dict[str, Any]], transitions: list[dict[str, Any]], code: int
) -> dict[str, Any]:
    check_books(rows)
    grown = {role: round(growth(samples), 2) for role, samples in soak.memory.items() if len(samples) > 4}
    last = rows[-1]
    print(f"{minutes:g} minutes, {len(rows)} steps, {soak.events.total()} events: {dict(soak.events)}")
    print(f"transitions: {dict(Counter(row['kind'] for row in transitions))}")
    print(f"exit codes of workers: {dict(soak.codes)}, of the job {code} (ended by SIGINT)")
    print(f"memory at the end over that at a quarter: {grown}; MB: { {role: s[-1] for role, s in soak.memory.items()} }")
    parts = f"trained {last['trained']} + dropped {last['dropped']} + in flight {last['in_flight']}"
    print(f"dispatched {last['dispatched']} = {parts}")
    print(f"tokens lost {last['lost_tokens']}, late {last['late_tokens']}")
    worst = max(grown.values(), default=1.0)
    ok = worst <= GROWTH and code == 128 + signal.SIGINT
    return {"bench": "elastic_soak", "claim": "memory flat, nothing lost", "value": worst, "target": GROWTH, "ok": ok}


if __name__ == "__main__":
    sys.exit(main())
