"""A synchronous job on one rank is the same bits every time: four steps, and two with two more after resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from job_cases import finish, resume, rows_of, start

SAME = ("loss", "kl", "entropy", "grad_norm", "reward_mean", "logprob_gap", "trained_tokens", "value_loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_steps_and_two_after_resuming_equal_four(tmp_path: Path, name: str) -> None:
    finish(start(tmp_path, f"algorithm.name={name}", "max_steps=4", "save_steps=2"), 240)
    [straight] = (tmp_path / "runs").iterdir()
    rows, policy = rows_of(straight), (straight / "policy" / "model.safetensors").read_bytes()
    assert (rows[0]["value_loss"] is not None) == (name == "ppo")
    halfway = tmp_path / "halfway"
    shutil.copytree(straight, halfway)
    shutil.rmtree(halfway / "policy")
    shutil.rmtree(halfway / "checkpoints" / "step_000004")
    assert "resumed after step 2" in finish(resume(halfway, tmp_path), 240)
    again = rows_of(halfway)
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    assert [{key: row[key] for key in SAME} for row in again] == [{key: row[key] for key in SAME} for row in rows]
    assert (halfway / "policy" / "model.safetensors").read_bytes() == policy
    assert rows[1]["loss"] != rows[3]["loss"]
