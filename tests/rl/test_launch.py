"""A rank's words and files: what goes wrong with them costs nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config import Config, resolve
from pearl.metrics import plot
from pearl.rl.buffer import Buffer
from pearl.rl.command_line import Job
from pearl.rl.controller_state import capture
from pearl.rl.launch import Launch
from pearl.rl.layout import JobLayout
from pearl.rl.run_state import ResumePoint

CONFIG = resolve(Config(recipe="quickstart"), 1)


def rank0(resume: ResumePoint | None = None) -> Launch:
    return Launch(Job(config=CONFIG, layout=JobLayout.of(CONFIG, 1), resume=resume), 0)


def test_a_log_that_cannot_be_written_keeps_no_word_from_people(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    launch = rank0()
    launch.run_directory = tmp_path
    (tmp_path / "logs").write_text("where the folder should be")
    launch._say("the disk is full")
    launch._last_words(1, "failed: no space left on device")
    said = capsys.readouterr().out
    assert "the disk is full" in said and "failed: no space left on device; results in" in said


def test_curves_that_cannot_be_drawn_are_said_and_end_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = rank0()
    launch.run_directory = tmp_path
    rows = tmp_path / "metrics.jsonl"
    rows.write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew\n{"step": 3}\n')
    launch._draw_curves(rows)
    assert "reward.png could not be written" in capsys.readouterr().out

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no fonts")

    rows.write_text('{"step": 1, "reward_mean": 0.5}\n')
    monkeypatch.setattr(plot, "plot_run", fail)
    launch._draw_curves(rows)
    assert "reward.png could not be written: no fonts" in capsys.readouterr().out


def test_a_damaged_line_of_metrics_costs_a_resumed_run_its_display_alone(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    state = capture(Buffer(), step=2, weight_version=2, started=0, successes=[0.5, 0.5])
    point = ResumePoint(run=tmp_path, config=CONFIG, checkpoint=tmp_path, state=state, skipped=())
    rows.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert rank0(point)._history() == [{"step": 1}, {"step": 2}]
    rows.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    assert rank0(point)._history() == []
