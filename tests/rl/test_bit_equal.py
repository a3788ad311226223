"""A deterministic job is the same bits every time, on one rank or two: four steps, and two with two more after resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from job_cases import finish, resume, rows_of, start

SAME = ("loss", "kl", "entropy", "grad_norm", "reward_mean", "logprob_gap", "trained_tokens", "value_loss")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("grpo", 1), ("ppo", 1), ("grpo", 2), ("ppo", 3)])
def test_two_steps_and_two_after_resuming_equal_four(tmp_path: Path, name: str, world: int) -> None:
    """On two ranks one trains and one serves; on three two serve, and which of them a request goes to changes no bit."""
    settings = (f"algorithm.name={name}", "engine.deterministic=true", "max_steps=4", "save_steps=2")
    settings += ("timeouts.join_s=200", "timeouts.silence_s=100")  # where other programs run
    finish(start(tmp_path, *settings, world=world), 240)
    [straight] = (tmp_path / "runs").iterdir()
    rows, policy = rows_of(straight), (straight / "policy" / "model.safetensors").read_bytes()
    assert (rows[0]["value_loss"] is not None) == (name == "ppo")
    halfway = tmp_path / "halfway"
    shutil.copytree(straight, halfway)
    shutil.rmtree(halfway / "policy")
    shutil.rmtree(halfway / "checkpoints" / "step_000004")
    assert "resumed after step 2" in finish(resume(halfway, tmp_path, world=world), 240)
    again = rows_of(halfway)
    assert [row["step"] for row in again] == [1, 2, 3, 4]
    assert [{key: row[key] for key in SAME} for row in again] == [{key: row[key] for key in SAME} for row in rows]
    assert (halfway / "policy" / "model.safetensors").read_bytes() == policy
    assert rows[1]["loss"] != rows[3]["loss"]
