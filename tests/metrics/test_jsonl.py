"""Rows survive a kill, and a resumed run's steps never go back in a file."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import kill_points
import pytest

from pearl.metrics.jsonl import JsonlWriter, read_jsonl, rewind_rows, runs_near


def steps(path: Path) -> list[int | None]:
    return [row.get("step") for row in read_jsonl(path)]


def written(path: Path, *rows: dict) -> bytes:
    writer = JsonlWriter(path)
    writer.write(*rows)
    writer.sync()
    writer.close()
    return path.read_bytes()


def test_the_newest_runs_are_named_and_no_model_folder(tmp_path: Path) -> None:
    assert runs_near(tmp_path) == runs_near(tmp_path / "none" / "x") == ""
    for age in range(7):
        (tmp_path / f"run-{age}").mkdir()
        (tmp_path / f"run-{age}" / "config.json").write_text("{}")
        os.utime(tmp_path / f"run-{age}" / "config.json", (1e9 - age, 1e9 - age))
    (tmp_path / "run-0" / "model.safetensors").touch()
    assert runs_near(tmp_path) == runs_near(tmp_path / "x") == f" (runs in {tmp_path}: run-1, run-2, run-3, run-4, run-5)"


def test_rows_are_on_disk_when_written_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1}, {"step": 2, "note": "a\nb"})
    writer.write()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "note": "a\nb"}]
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"step": 3, "no')
    assert steps(path) == [1, 2]


def test_a_disk_that_is_full_in_the_middle_of_a_row_keeps_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            writer.write({"step": 2, "note": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    writer.write({"step": 3})
    writer.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]


def test_rewind_moves_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, *({"step": step, "reward": step / 2, "nested": {"step": 99}} for step in range(1, 8)))
    assert rewind_rows(path, 4) == 3
    assert steps(path) == [1, 2, 3, 4]
    assert read_jsonl(tmp_path / "metrics.lost-1.jsonl")[0] == {"step": 5, "reward": 2.5, "nested": {"step": 99}}
    written(path, {"step": 5}, {"step": 6})
    assert rewind_rows(path, 4) == 2
    assert steps(tmp_path / "metrics.lost-2.jsonl") == [5, 6]
    assert steps(tmp_path / "metrics.lost-1.jsonl") == [5, 6, 7]
    written(path, {"step": 5})
    assert steps(path) == [1, 2, 3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "metrics.lost-1.jsonl", "metrics.lost-2.jsonl"]


def test_rewind_leaves_a_file_alone_that_has_nothing_to_move(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    assert rewind_rows(path, 0) == 0 and not path.exists()
    before = written(path, {"id": "a"}, {"id": "b", "step": None}, {"id": "c", "step": "five"}, {"id": "d", "step": 5})
    inode = path.stat().st_ino
    assert rewind_rows(path, 5) == 0
    assert path.read_bytes() == before and path.stat().st_ino == inode
    assert os.listdir(tmp_path) == ["trajectories.jsonl"]
    assert rewind_rows(path, 4) == 1
    assert [row["id"] for row in read_jsonl(path)] == ["a", "b", "c"]


def test_rewind_cuts_off_a_half_line_so_that_the_next_row_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, {"step": 1}, {"step": 2})
    for cut in (b'{"step": 3, "rew', b'{"step": 2}'):
        with path.open("ab") as file:
            file.write(cut)
        assert rewind_rows(path, 2) == 0
        written(path, {"step": 3})
        assert steps(path) == [1, 2, 3]
        assert rewind_rows(path, 2) == 1
    assert (tmp_path / "metrics.lost-1.jsonl").read_bytes() == b'{"step": 3, "rew\n'


def test_rewind_killed_before_each_of_its_operations_loses_no_row(tmp_path: Path) -> None:
    killed, path = 0, tmp_path / "metrics.jsonl"
    while True:
        written(path, *({"step": step} for step in range(1, 7)))
        done = kill_points.survived(kill_points.start(lambda: rewind_rows(path, 4), kill_before=killed))
        everything = {step for name in tmp_path.glob("metrics*.jsonl") for step in steps(name)}
        assert everything == {1, 2, 3, 4, 5, 6}
        assert steps(path) in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
        rewind_rows(path, 4)
        assert steps(path) == [1, 2, 3, 4]
        assert not done or sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "metrics.lost-1.jsonl"]
        if done:
            break
        killed += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert killed >= 5
