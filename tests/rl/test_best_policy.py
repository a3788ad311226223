"""Which policy counts as the best, also after a resume and a crash between folder and note."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pearl.rl.best_policy import BestPolicy
from pearl.rl.checkpoint import is_stable, save_policy


def test_the_first_counts_and_then_only_better_ones(tmp_path: Path) -> None:
    best = BestPolicy(tmp_path)
    assert best.is_better(0.0)
    best.note(2, 0.25)
    assert (best.is_better(0.25), best.is_better(0.26), best.is_better(0.1)) == (False, True, False)


def test_a_resumed_run_goes_on_with_what_it_had(tmp_path: Path) -> None:
    BestPolicy(tmp_path).note(4, 0.5)
    assert not BestPolicy(tmp_path).is_better(0.5) and BestPolicy(tmp_path).is_better(0.6)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_replacement_that_ends_between_its_renames_costs_no_policy(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is written last, so it may speak of the one before."""
    best = BestPolicy(tmp_path)
    save_policy(lambda folder: (folder / "weights").write_text("good"), best.path)
    best.note(4, 0.5)
    rename, left = Path.rename, [renames]

    def until_killed(path: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", until_killed)
    with contextlib.suppress(KeyboardInterrupt):
        save_policy(lambda folder: (folder / "weights").write_text("better"), best.path)
    monkeypatch.undo()
    assert is_stable(BestPolicy(tmp_path).path)
    assert (best.path / "weights").read_text() == ("better" if renames > 1 else "good")
    save_policy(lambda folder: (folder / "weights").write_text("best"), best.path)
    assert (best.path / "weights").read_text() == "best"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "best.json"]


def test_a_note_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 4, "eval_succ')
    assert BestPolicy(tmp_path).is_better(0.0)
