"""Which policy counts as the best, also after a resume and a crash between folder and note."""

from __future__ import annotations

from pathlib import Path

from pearl.rl.best_policy import BestPolicy


def test_the_first_counts_and_then_only_better_ones(tmp_path: Path) -> None:
    best = BestPolicy(tmp_path)
    assert best.is_better(0.0)
    best.note(2, 0.25)
    assert (best.is_better(0.25), best.is_better(0.26), best.is_better(0.1)) == (False, True, False)


def test_a_resumed_run_goes_on_with_what_it_had(tmp_path: Path) -> None:
    BestPolicy(tmp_path).note(4, 0.5)
    assert not BestPolicy(tmp_path).is_better(0.5) and BestPolicy(tmp_path).is_better(0.6)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


def test_a_note_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 4, "eval_succ')
    assert BestPolicy(tmp_path).is_better(0.0)
