"""Claim: whichever process of a job is killed, stopped or asked to end, in whichever phase, the job ends in order and in time.

It ends within 15 s (30 s after a stop), says why once, leaves nothing behind, and goes on from its last whole checkpoint when
resumed. Two ranks train a small quickstart (`bench/marked_rank.py` says what they are doing). The signal comes at a random
moment inside the phase. A job whose launcher is stopped goes on to its end instead. `value` is the number of cases that did
not behave, `worst_s` the longest time to the end. `--only VICTIM:SIGNAL:PHASE` (any part may be empty) runs a part.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.job_process import JobProcess, send, zombie_exit_code
from bench.marked_rank import MARKS
from pearl.metrics.jsonl import read_jsonl
from pearl.rl.run_state import open_run

VICTIMS = ("rank0", "rank1", "controller", "torchrun")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT")
PHASES = ("start", "warm-up", "rollout", "train", "publish", "checkpoint")
STEPS = 5
OCCURRENCE = {"start": 1, "warm-up": 4, "rollout": 3, "train": 3, "publish": 4, "checkpoint": 3}
"""Which time of a phase is hit; from the third step on there are checkpoints of earlier ones."""

JITTER_S = {"start": 4.0, "warm-up": 0.1, "rollout": 0.2, "train": 0.2, "publish": 0.02, "checkpoint": 0.06}
STOPPED_START_S = 30.0
RESUMED_PHASES = ("publish", "checkpoint")
"""Cases of these are resumed to the end; of the others it is checked that their checkpoint can be."""
PHASE_LIMIT_S = 120.0
RESUME_LIMIT_S = 120.0

SETTINGS = {
    "max_steps": STEPS,
    "save_steps": 1,
    "rollout_batch_size": 32,
    "group_size": 4,
    "optimizer.mini_batch_size": 8,
    "warmup.steps": 12,
    "warmup.episodes": 8,
    "model.hidden_size": 192,
    "model.num_layers": 3,
}


LARGER = {
    "publish": {
        "model.hidden_size": 512,
        "model.intermediate_size": 2048,
        "rollout_batch_size": 16,
        "optimizer.mini_batch_size": 16,
        "warmup.steps": 2,
    }
}
"""A larger model where the phase would be over too soon, and less to do with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Who gets which signal when."""

    victim: str
    signal: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.victim}:{self.signal}:{self.phase}"

    @property
    def limit_s(self) -> float:
        return 30.0 if self.signal == "SIGSTOP" else 15.0

    @property
    def goes_on(self) -> bool:
        """A stopped launcher ends nothing."""
        return (self.victim, self.signal) == ("torchrun", "SIGSTOP")

    @property
    def reason(self) -> str:
        """A pattern that some line of the output has exactly once."""
        if self.goes_on:
            return r"^done after .*; success"
        by_launcher = r"exitcode\s+: -9 \(pid"
        match self.victim, self.signal:
            case "rank0", "SIGSTOP":
                return r"rank 0 (silent|was stopped) for .*killed"
            case "rank0", "SIGKILL":
                return by_launcher
            case "rank1", "SIGKILL":
                return r"rank 1 \(pid \d+\) died"
            case "rank1", "SIGSTOP":
                return r"^.*rank 1 .*(silent|stopped) for .*killed"
            case "controller", "SIGKILL" | "SIGSTOP":
                return r"the controller (ended with exit code -9|was (silent|stopped) for|did not start)"
            case "rank1", "SIGTERM" | "SIGINT" if self.phase == "start":
                return r"rank 1 \(pid \d+\) died while starting|interrupted by"
            case "torchrun", "SIGKILL":
                return r"the launcher is gone"
            case "controller", _:
                return rf"interrupted by {self.signal}|the controller (ended with exit code|did not start)"
        return rf"interrupted by {self.signal}|interrupted by SIGTERM"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened. `code` is torchrun's exit code, `hit` whether the phase was still under way."""

    case: Case
    seconds: float | None = None
    code: int | None = None
    hit: bool = False
    leftovers: list[str] = field(default_factory=list)
    reason: str = ""
    resumed: str = ""
    faults: list[str] = field(default_factory=list)

    def row(self) -> str:
        took = "never" if self.seconds is None else f"{self.seconds:.1f}"
        left = ", ".join(self.leftovers) or "none"
        verdict = "ok" if not self.faults else "FAULT: " + "; ".join(self.faults)
        who = f"{self.case.victim} | {self.case.signal} | {self.case.phase}{'' if self.hit else ' (just over)'}"
        return f"| {who} | {took} | {self.code} | {left} | {self.reason[:110]} | {self.resumed} | {verdict} |"


HEAD = "| victim | signal | phase | seconds | exit code | left over | reason | resumed | |\n" + "|---" * 9 + "|"


def run_case(case: Case, folder: Path, *, seed: int = 0, resume: bool = True) -> Outcome:
    """One job in `folder`, hit as `case` says."""
    outcome = Outcome(case=case)
    marks = folder / "marks"
    folder.mkdir(parents=True, exist_ok=True)
    marks.touch()
    staleness = 0 if case.phase == "rollout" else 1
    values = SETTINGS | {"output_dir": folder / "runs", "max_staleness": staleness} | LARGER.get(case.phase, {})
    with start(folder, values, marks) as job:
        try:
            victim = _reach(job, case, marks, random.Random(f"{case.name}{seed}"))
        except TimeoutError as error:
            outcome.faults.append(f"{error}; output ends: {job.output()[-300:]}")
            return outcome
        hit_at = time.monotonic()
        send(victim, signal.Signals[case.signal])
        if case.goes_on:
            _let_finish(job, outcome)
        else:
            outcome.seconds = job.wait_until_gone(case.limit_s + 15)
            outcome.code = job.process.wait() if outcome.seconds is not None else None
        outcome.hit = not _ended_before(marks, case, hit_at)
        outcome.leftovers = _left_over(job)
        _judge(job, outcome)
        run = job.run_directory()
    if resume and not case.goes_on:
        _resume(run, folder, outcome)
    return outcome


def start(folder: Path, values: dict[str, object], marks: Path, name: str = "out") -> JobProcess:
    """A marked job of two ranks with these settings."""
    arguments = ["quickstart", *(part for key, value in values.items() for part in ("--set", f"{key}={value}"))]
    if "resume" in values:
        arguments = ["--resume", str(values["resume"])]
    environment = {MARKS: str(marks)}
    return JobProcess.start(folder, arguments, world=2, module="bench.marked_rank", environment=environment, name=name)


def _reach(job: JobProcess, case: Case, marks: Path, rng: random.Random) -> int:
    """Waits for the phase, and a random while more; returns the victim's pid. TimeoutError if either does not come."""
    deadline = time.monotonic() + PHASE_LIMIT_S

    def wait_until(holds: Callable[[], object], what: str) -> None:
        while not holds():
            if time.monotonic() > deadline or job.process.poll() is not None:
                raise TimeoutError(what)
            time.sleep(0.002)

    def begun(phase: str, times: int) -> bool:
        return marks.read_text().count(f" {phase} begin") >= times

    pause = rng.random() * JITTER_S[case.phase]
    if case.phase == "start":
        wait_until(lambda: begun("start", 1), "start was not reached")
        time.sleep(pause)
    wait_until(lambda: job.pid_of(case.victim), f"there was no {case.victim}")
    victim = job.pid_of(case.victim)
    if case.phase != "start":
        times = OCCURRENCE[case.phase] * 2 - 1 if case.phase == "publish" else OCCURRENCE[case.phase]  # both ranks say so
        wait_until(lambda: begun(case.phase, times), f"{case.phase} was not reached")
        time.sleep(pause)
    if victim is None:
        raise TimeoutError(f"{case.victim} has gone")
    return victim


def _ended_before(marks: Path, case: Case, moment: float) -> bool:
    """Whether the phase was through on all ranks that take part when the signal came."""
    lines = [line.split() for line in marks.read_text().splitlines()]
    ends = [float(line[0]) for line in lines if line[2:] == [case.phase, "end"]]
    begins = [float(line[0]) for line in lines if line[2:] == [case.phase, "begin"]]
    return sum(end < moment for end in ends) == sum(begin < moment for begin in begins)


def _let_finish(job: JobProcess, outcome: Outcome) -> None:
    """The launcher is stopped: its ranks must end well by themselves, and so must it once it goes on."""
    started = time.monotonic()
    ranks = {pid: role for pid, role in job.family().items() if role.startswith("rank")}
    while time.monotonic() - started < PHASE_LIMIT_S and (family := job.family()).keys() - {job.process.pid}:
        ranks |= {pid: role for pid, role in family.items() if role.startswith("rank")}
        if outcome.case.phase == "start" and time.monotonic() - started > STOPPED_START_S:
            send(job.process.pid, signal.SIGCONT)  # ranks that look for each other need the launcher's store
        time.sleep(0.1)
    outcome.seconds = time.monotonic() - started
    codes = {role: zombie_exit_code(pid) for pid, role in ranks.items()}
    if outcome.case.phase != "start" and (set(codes.values()) != {0} or len(codes) != 2):
        outcome.faults.append(f"ranks ended with {codes}")
    send(job.process.pid, signal.SIGCONT)
    if job.wait_until_gone(20) is None:
        outcome.faults.append("the launcher did not end once it went on")
    else:
        outcome.code = job.process.wait()


def _left_over(job: JobProcess) -> list[str]:
    """Processes, shared memory and temporary files that outlived the job."""
    left = [f"{role} {pid}" for pid, role in job.family().items()]
    run = job.run_directory()
    left += [str(path) for path in Path("/dev/shm").iterdir() if job.tag in path.name]
    left += [path.name for path in (job.folder / "tmp").iterdir() if not path.name.startswith("torch")]  # torch leaves its own
    left += [path.name for path in run.rglob("*.sock")] if run else []
    return left


def _judge(job: JobProcess, outcome: Outcome) -> None:
    case, output = outcome.case, job.output()
    lines = [line.strip() for line in output.splitlines() if re.search(case.reason, line.strip())]
    outcome.reason = re.sub(r"^ended after [^;]*; |; results in .*$", "", lines[0]) if lines else ""
    processes = [name for name in outcome.leftovers if " " in name]
    checks = {
        f"not over within {case.limit_s:g} s": not case.goes_on and (outcome.seconds or 1e9) > case.limit_s,
        f"exit code {outcome.code}": (outcome.code == 0) != case.goes_on or outcome.code is None,
        f"left over: {processes}": bool(processes),
        f"reason said {len(lines)} times": len(lines) != 1,
    }
    outcome.faults += [text for text, wrong in checks.items() if wrong]


def _resume(run: Path | None, folder: Path, outcome: Outcome) -> None:
    """Checks what the run can be resumed from (without a checkpoint it must be refused), and resumes it to its end."""
    if run is None:
        outcome.resumed = "no run yet"
        return
    written = _steps(run)
    try:
        step = open_run(run).state.step
    except ValueError as error:
        outcome.resumed = "refused: no checkpoint yet"
        if "it has no checkpoint" not in str(error) or outcome.case.phase not in ("start", "warm-up"):
            outcome.faults.append(f"cannot be resumed: {error}")
        return
    if step < len(written) - 1:
        outcome.faults.append(f"checkpoint of step {step}, but {len(written)} steps were written")
    outcome.resumed = f"can from {step}"
    if outcome.case.phase not in RESUMED_PHASES:
        return
    marks = folder / "marks-resumed"
    with start(folder, {"resume": run}, marks, name="resumed") as job:
        gone = job.wait_until_gone(RESUME_LIMIT_S)
        code = job.process.wait() if gone is not None else None
        outcome.resumed = f"from {step} to {len(_steps(run))}"
        if gone is None or code != 0 or _steps(run) != list(range(1, STEPS + 1)):
            outcome.faults.append(f"resuming: exit code {code}, steps {_steps(run)}; {job.output()[-300:]}")


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [row["step"] for row in read_jsonl(path)] if path.exists() else []


def cases(only: str = "") -> Iterator[Case]:
    """All cases, or those that fit VICTIM:SIGNAL:PHASE, of which any part may be empty or a list with commas."""
    wanted = [part.split(",") if part else [] for part in [*only.split(":"), "", "", ""][:3]]
    for part, valid in zip(wanted, (VICTIMS, SIGNALS, PHASES), strict=True):
        if wrong := set(part) - set(valid):
            raise ValueError(f"only={only!r}: {sorted(wrong)[0]!r} must be one of {', '.join(valid)}")
    for phase in PHASES:
        for victim in VICTIMS:
            for signum in SIGNALS:
                row = (victim, signum, phase)
                if all(not part or value in part for part, value in zip(wanted, row, strict=True)):
                    yield Case(victim=victim, signal=signum, phase=phase)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kill_matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="VICTIM:SIGNAL:PHASE")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments inside the phases")
    parser.add_argument("--no-resume", action="store_true", help="do not resume the jobs that ended")
    parser.add_argument("--keep", metavar="FOLDER", help="leave runs and outputs here")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        root = Path(options.keep or temporary)
        todo = [
            pool.submit(run_case, case, root / case.name.replace(":", "-"), seed=options.seed, resume=not options.no_resume)
            for case in cases(options.only)
        ]
        print(HEAD, flush=True)
        for future in todo:
            outcomes.append(future.result())
            print(outcomes[-1].row(), flush=True)
    bad = [outcome for outcome in outcomes if outcome.faults]
    print(f"\n{len(outcomes)} cases in {time.monotonic() - began:.0f} s, {len(bad)} faults")
    if options.json:
        print(json.dumps(verdict(outcomes)))
    return 1 if bad else 0


def verdict(outcomes: list[Outcome]) -> dict[str, object]:
    bad = [outcome.case.name for outcome in outcomes if outcome.faults]
    timed = [outcome for outcome in outcomes if outcome.seconds is not None and not outcome.case.goes_on]
    return {
        "bench": "kill_matrix",
        "claim": "ends in time, says why once, leaves nothing, resumes: cases that did not",
        "value": len(bad),
        "target": 0,
        "ok": not bad,
        "cases": len(outcomes),
        "worst_s": max((round(o.seconds or 0.0, 1) for o in timed if o.case.signal != "SIGSTOP"), default=None),
        "worst_stopped_s": max((round(o.seconds or 0.0, 1) for o in timed if o.case.signal == "SIGSTOP"), default=None),
        "faults": bad,
    }


if __name__ == "__main__":
    sys.exit(main())
