"""A run goes on with another number of ranks: the same groups, versions and books, another split."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_cases import finish, resume, rows_of, start

from pearl import config as configuration
from pearl.metrics.jsonl import read_jsonl


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    with start(tmp_path, "max_steps=2", "save_steps=2", "algorithm.kl_coef=0.01", world=before) as job:
        finish(job)
    [run] = (tmp_path / "runs").iterdir()
    with resume(run, tmp_path, "max_steps=4", world=after) as job:
        output = finish(job)
    assert "resumed after step 2 with weight version 2" in output
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"] for row in rows)
    assert rows[-1]["trained"] == 4 * 16
    groups = {}
    for episode in read_jsonl(run / "trajectories.jsonl"):
        groups.setdefault(int(episode["trajectory_id"].split("-")[0]), set()).add(episode["env_seed"])
    assert all(seeds == {group} for group, seeds in groups.items()) and set(range(16)) <= set(groups)
    config = configuration.from_json((run / "config.json").read_bytes())
    assert config.max_staleness == (0 if after == 1 else 1) and config.cluster.train_ranks == 1
