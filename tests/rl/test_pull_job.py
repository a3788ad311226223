"""Whole jobs whose weights others pull while they run: on several machines, as their ranks believe, and beside those that fail.

A version goes once to each machine, into its snapshot; whoever pulls gets the bits of the trainer, and costs the job nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from job_cases import finish, rows_of, settings
from pull_member import PullMember

from bench.job_process import ROOT, JobProcess
from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.models.config import from_folder
from pearl.engine.weights.pull import Holder, fetch
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan
from pearl.rl.layout import JobLayout
from pearl.rl.node_publisher import snapshot_owners
from pearl.rl.weight_check import TRAINER, checksums

STEPS, MANY = 5, 40


def test_each_machine_has_one_owner_of_its_snapshot() -> None:
    layout = JobLayout(world=7, train_ranks=3)
    assert snapshot_owners(layout, list("aabaabb")) == {0: 0, 3: 0, 4: 0, 5: 5, 6: 5}
    assert snapshot_owners(layout, list("aaabbcb")) == {0: 0, 3: 3, 4: 3, 5: 5, 6: 3}
    assert snapshot_owners(layout, list("aaaaaaa")) == {0: 0, 3: 0, 4: 0, 5: 0, 6: 0}


def start(folder: Path, nodes: str, steps: int = STEPS) -> JobProcess:
    record = folder / "record"
    record.mkdir()
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "NODES": nodes, "RECORD": str(record)}
    arguments = ["quickstart", *settings(folder / "runs", f"max_steps={steps}", "check_weights=true")]
    return JobProcess.start(folder, arguments, world=len(nodes), module="machines_rank", environment=paths)


def holders(job: JobProcess, ranks: list[int], seconds: float = 60.0) -> list[Holder]:
    """Where these ranks have said that weights can be had."""
    deadline, found = time.monotonic() + seconds, {}
    while set(found) != set(ranks):
        assert time.monotonic() < deadline and job.process.poll() is None, job.output()
        time.sleep(0.05)
        run = job.run_directory()
        for path in (run / "logs").glob("rank*.log") if run else ():
            if said := re.search(r"weights can be pulled from (\S+):(\d+)", path.read_text()):
                rank = int(path.stem.removeprefix("rank"))
                found[rank] = Holder(name=path.stem, host=said[1], port=int(said[2]))
    return [found[rank] for rank in ranks]


class Puller(threading.Thread):
    """Takes each version that it can get from one holder; their checksums by version."""

    def __init__(self, plan: SnapshotPlan, holder: Holder) -> None:
        super().__init__(daemon=True)
        self.sums: dict[int, dict[str, int]] = {}
        self.problem = ""
        self.over = False
        self._plan, self._holder = plan, holder

    def run(self) -> None:
        into = Snapshot(self._plan.config, self._plan.dtype)
        while not self.over:
            try:
                report = fetch(into, [self._holder], name="external", total_timeout_s=2.0, timeout_s=5.0)
            except CollectiveError as error:
                if any(word in str(error) for word in ("checksum", "finite", "differ", "offers")):
                    self.problem = str(error)
                continue  # nothing newer yet, or the job has ended
            with into.reader().lease(report.version) as lease:
                tensors: dict[str, list[torch.Tensor]] = {}
                for name, rows, _ in lease.rows():
                    tensors.setdefault(name, []).append(rows)
                whole = ((name, torch.cat(rows)) for name, rows in tensors.items())
                self.sums[report.version] = checksums(TRAINER, whole, self._plan.dtype)


def plan_of(job: JobProcess) -> SnapshotPlan:
    deadline = time.monotonic() + 60
    while (run := job.run_directory()) is None or not (run / "initial_policy" / "generation_config.json").exists():
        assert time.monotonic() < deadline and job.process.poll() is None, job.output()
        time.sleep(0.05)
    config = json.loads((run / "config.json").read_text())
    return SnapshotPlan.of(from_folder(run / "initial_policy"), getattr(torch, config["engine"]["dtype"]))


def state(pid: int) -> str:
    """The letter that the kernel has for a process: T stopped, Z ended."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def check_books(job: JobProcess, steps: int = STEPS) -> None:
    [run] = (job.folder / "runs").iterdir()
    assert [row["step"] for row in rows_of(run)] == list(range(1, steps + 1))
    assert [row["weight_version"] for row in rows_of(run)] == list(range(1, steps + 1))


@pytest.mark.parametrize("nodes", ["aa", pytest.param("aabb", marks=pytest.mark.slow), "ab"])
def test_whoever_pulls_gets_the_bits_of_each_version(tmp_path: Path, nodes: str) -> None:
    owners = [nodes.index(node) for node in sorted(set(nodes))]
    with start(tmp_path, nodes) as job:
        pullers = [Puller(plan_of(job), holder) for holder in holders(job, owners)]
        for puller in pullers:
            puller.start()
        finish(job)
        for puller in pullers:
            puller.over = True
            puller.join(20)
        logs = {path.stem: path.read_text() for path in (tmp_path / "runs").glob("*/logs/rank*.log")}
    check_books(job)
    assert {name for name, text in logs.items() if "can be pulled" in text} == {f"rank{rank}" for rank in owners}
    published = {int(path.stem): json.loads(path.read_text()) for path in (tmp_path / "record").glob("*.json")}
    assert sorted(published) == list(range(STEPS + 1))
    for puller in pullers:
        assert puller.problem == "" and len(puller.sums) >= 3
        assert all(sums == published[version] for version, sums in puller.sums.items())


def test_those_who_pull_and_fail_cost_the_job_nothing(tmp_path: Path) -> None:
    """Of three two are served at a time, and stop or are killed in the middle; steps go on meanwhile, each in a moment."""
    with start(tmp_path, "aa", MANY) as job, ExitStack() as stack:
        plan = plan_of(job)
        ways = {"stopped": (signal.SIGSTOP, 0), "stopped too": (signal.SIGSTOP, 0), "killed": (signal.SIGKILL, 0)}
        members = [PullMember(plan, name, None, fails=way) for name, way in ways.items()]
        for member in members:
            stack.enter_context(member)
        [holder] = holders(job, [0])
        assert [member.hear() for member in members] == ["ready"] * 3
        job.wait_for("warm-up", 60)
        for member in members:
            member.pipe.send(holder.port)
        deadline = time.monotonic() + 30
        while (states := "".join(state(member.process.pid) for member in members)).count("T") + states.count("Z") < 2:
            assert time.monotonic() < deadline, states  # two are served at a time
            time.sleep(0.02)
        assert f"{MANY}/{MANY}" not in job.output()
        finish(job)
    check_books(job, MANY)
    [run] = (tmp_path / "runs").iterdir()
    times = [row["time_s"] for row in rows_of(run)]
    assert max(times[1:]) < 8.0, times  # a stopped one is given up only after 10 s
