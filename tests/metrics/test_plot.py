"""The picture of a run: whole, of what there is, and honest at its ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pearl.metrics import plot


def row(step: int, **changes: object) -> dict:
    values = {"step": step, "reward_mean": step / 30, "success_rate": step / 60, "tokens_per_s": 9000.0 + step}
    return values | {"time_s": 1.0, "rollout_s": 0.6, "train_s": 0.4, "elapsed_s": float(step)} | changes


def share_of(path: Path, colour: str) -> float:
    """The share of the picture's pixels that have this very colour."""
    from matplotlib.image import imread

    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    pixels = np.rint(np.asarray(imread(path))[:, :, :3] * 255).astype(int)
    return float((pixels == wanted).all(axis=2).mean())


def test_a_run_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    rows = [row(step, eval_success_rate=0.5 if step % 10 == 0 else None) for step in range(1, 31)]
    plot.plot_run(rows, path, title="quickstart")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path], "nothing is left aside"
    assert min(share_of(path, colour) for colour in (plot.BLUE, plot.GREEN, plot.ORANGE)) > 0
    areas = share_of(path, plot.PART_COLOURS["rollout"]) / share_of(path, plot.PART_COLOURS["train"])
    assert areas == pytest.approx(0.6 / 0.4, rel=0.05), "areas of the time are as large as their parts"


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot.plot_run([{"step": 1, "rollout_s": 1.0, "reward_mean": None, "success_rate": float("nan")}], path)
    assert share_of(path, plot.GREEN) == share_of(path, plot.ORANGE) == 0
    assert share_of(path, plot.PART_COLOURS["rollout"]) > 0.05


def test_no_rows_are_refused_and_an_old_picture_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.png").write_bytes(b"old")
    with pytest.raises(ValueError, match="rows"):
        plot.plot_run([], tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes() == b"old"


def test_the_last_row_of_a_step_counts() -> None:
    rows = [row(2), row(1), row(2, reward_mean=9.0)]
    assert [(found["step"], found["reward_mean"]) for found in plot.last_of_each_step(rows)] == [(1, 1 / 30), (2, 9.0)]


def test_smoothing_keeps_the_ends_and_the_mean() -> None:
    values = [float(step) for step in range(100)]
    assert plot.smoothed(values, keep_ends=True) == pytest.approx(values), "a straight line stays one"
    peak = [0.0] * 50 + [1.0] + [0.0] * 49
    assert sum(plot.smoothed(peak, keep_ends=True)) == pytest.approx(1.0) and max(plot.smoothed(peak, keep_ends=True)) < 0.3
    assert plot.smoothed([0.0] * 99 + [1.0], keep_ends=False)[-1] < 0.5 < plot.smoothed([0.0] * 99 + [1.0], keep_ends=True)[-1]
    assert plot.smoothed([1.0, 5.0, 2.0], keep_ends=True) == [1.0, 5.0, 2.0], "a short run is shown as it is"


def test_the_command_draws_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row(step)) + b"\n" for step in range(1, 4)))
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert plot.main([str(tmp_path / "none")]) == 2
    assert "none: no such directory" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert plot.main([str(tmp_path.parent)]) == 2
    said = capsys.readouterr().err
    assert f"metrics.jsonl is not there (runs in {tmp_path.parent}: " in said and tmp_path.name in said


def test_matplotlib_is_loaded_only_to_draw() -> None:
    script = "import sys, pearl.metrics.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
