"""The command: a small run from options to tables, page and file, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pearl.sched.sim import command_line
from pearl.sched.sim.command_line import check_writable, main

SMALL = ["--preset", "quickstart-cpu", "--batch", "16", "--training-gpus", "2", "--tp", "1", "--steps", "2"]


def test_systems_are_run_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data, trace = tmp_path / "page.html", tmp_path / "runs.json", tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n60000,remove,b\n")
    options = [*SMALL, "--policy", "roll,ours", "--trace", str(trace), "--gpus", "2", "--details"]
    assert main([*options, "--html", str(page), "--json", str(data)]) == 0
    shown, told = capsys.readouterr()
    assert "barrier, 2 steps, 2 h at most" in shown and told.splitlines()[0] == "ROLL, seed 0: begins"
    assert "ROLL" in shown and "PEARL (ours)" in shown and "trace.csv" in shown and "barrier" in shown
    runs = json.loads(data.read_text())
    assert [run["policy"] for run in runs] == ["ROLL", "PEARL (ours)"]
    assert all(len(run["result"]["steps"]) == 2 and run["result"]["counts"]["tokens_lost"] == 0 for run in runs)
    assert "<html" in page.read_text()


def test_a_run_s_own_trajectories_are_played_in_its_own_groups(tmp_path: Path) -> None:
    """Of eight, but for one that a retry made larger: two of them make a batch of 16."""
    path, data = tmp_path / "trajectories.jsonl", tmp_path / "runs.json"
    sizes = [8, 8, 9, 8]
    rows = [{"env_seed": group, "loss_mask": [0] * 20 + [1] * 5} for group, size in enumerate(sizes) for _ in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*SMALL, "--policy", "roll", "--workload", str(path), "--json", str(data)]) == 0
    [run] = json.loads(data.read_text())
    assert [step["trajectories"] for step in run["result"]["steps"]] == [16, 17]


def test_how_far_a_simulation_is_is_told_meanwhile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "TOLD_EVERY_S", 0.0)
    assert main([*SMALL, "--policy", "roll", "--hours", "0.5"]) == 0
    begins, *far, last = capsys.readouterr().err.splitlines()
    assert begins == "ROLL, seed 0: begins" and "tokens/s over 2 steps" in last
    assert far[0] == "ROLL, seed 0: 0 steps and 0 min are simulated" and far[-1].startswith("ROLL, seed 0: 2 steps and ")


def test_every_option_has_words() -> None:
    assert all(action.help for action in command_line.parser()._actions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "x"], "preset='x'"),
        (["--policy", "roll,x"], "policy='x'"),
        (["--trace", "/no/such.csv"], "must be one of S1, S2, S3, none, a number of workers, or a file"),
        (["--workload", "x"], "workload='x'"),
        (["--batch", "17"], "batch=17"),
    ],
)
def test_what_cannot_be_is_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, *options])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_where_nothing_can_be_written_is_said_before_anything_is_run(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*arguments: object) -> None:
        raise AssertionError("a run was begun")

    monkeypatch.setattr(command_line, "Simulation", ran)
    (tmp_path / "file").write_text("")
    cases = {tmp_path / "none" / "x": "is no folder", tmp_path / "file" / "x": "is no folder", tmp_path: "is a folder"}
    for path, words in cases.items():
        with pytest.raises(SystemExit, match="2"):
            main([*SMALL, option, str(path)])
        assert f"{path}: " in (said := capsys.readouterr().err) and words in said


def test_what_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    check_writable(None)
    check_writable(Path("relative.html"))
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable(tmp_path / "x.json")
    old = tmp_path / "old.json"
    old.write_text("{}")
    check_writable(old)
