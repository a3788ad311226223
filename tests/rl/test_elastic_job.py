"""Whole jobs whose ranks change what they do: roles, hand-offs between processes, lent training ranks. The books stay right."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_cases import finish, rows_of, start

from bench.job_process import JobProcess
from pearl.metrics.jsonl import read_jsonl
from pearl.metrics.trace import read_trace

pytestmark = pytest.mark.slow

LIMIT_S = 400.0


def books(job: JobProcess) -> list[dict]:
    """The rows of a job that ended well, of which each adds up and none has lost a token."""
    output = finish(job, LIMIT_S)
    [run] = (job.folder / "runs").iterdir()
    rows = rows_of(run)
    for row in rows:
        assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"], row
        assert row["late_tokens"] == row["requeued"] == row["failed_trajectories"] == 0
    assert "in_flight 0" in output
    return rows


def transitions(job: JobProcess) -> list[dict]:
    [run] = (job.folder / "runs").iterdir()
    return read_jsonl(run / "transitions.jsonl")


def test_a_split_pool_of_processes_plays_a_whole_run(tmp_path: Path) -> None:
    job = start(tmp_path, "pd.mode=split", "pd.ratio=1:1", "max_steps=12", "trace=true", "check_weights=true", world=3)
    rows = books(job)
    assert {row["serving_shape"] for row in rows[4:]} == {"1P1D"} and rows[-1]["handed_over"] > 50
    first = transitions(job)[0]
    assert (first["kind"], first["after"], first["ok"], first["forced"]) == ("switch", "1P1D", True, True)
    [run] = (tmp_path / "runs").iterdir()
    spans = {(event.get("cat"), event["name"]) for event in read_trace(run / "trace.json")}
    assert {("rank1/role", "mixed"), ("rank0/role", "train")} < spans
    assert {("rank1/role", "prefill"), ("rank2/role", "decode")} < spans or {("rank2/role", "prefill")} < spans


@pytest.mark.parametrize("world", [2, 3])
def test_training_ranks_serve_while_nothing_is_trained(tmp_path: Path, world: int) -> None:
    """With checkpoints and evaluations in between, which need the trainer; weights are compared after each publication."""
    settings = ("borrow.workers=all", "max_staleness=0", "max_steps=12", "save_steps=4", "check_weights=true")
    extra = (f"cluster.train_ranks={world - 1}", "eval_steps=5", "eval_episodes=8")
    job = start(tmp_path, *settings, *extra, world=world)
    rows = books(job)
    assert len(rows) == 12
    made = transitions(job)
    kinds = [row["kind"] for row in made]
    assert kinds[::2] == ["borrow"] * (len(kinds) // 2) and kinds[1::2] == ["give_back"] * (len(kinds) // 2)
    assert len(kinds) >= 16  # where evaluation leaves time, a batch is complete before anybody could help
    assert {row["error"] for row in made} <= {"", "rank0: overtaken by give_back", "rank1: overtaken by give_back"}
    assert all(row["ok"] and row["seconds"] < 30.0 for row in made if row["kind"] == "give_back")
    assert made[0]["before"] == "1M" and made[0]["after"] == f"{world}M"
    assert "policy in" in job.output()
