"""Transcripts of episodes, and finding the last of them in a large file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.metrics import text


def record(name: str = "7-3", **changes: object) -> dict:
    unread = {"invalid": True, "success": False}
    turns = [
        {"text": "<answer>Up", "num_sampled": 3, "observation": "what?\n", "reward": -0.1, "info": unread},
        {"text": "a\nb", "num_sampled": 4, "observation": "FP\nFG\n", "reward": 1.0, "info": {"success": True, "hole": 2}},
    ]
    values = {"trajectory_id": name, "env_seed": 17, "outcome": "done", "error": None, "reward": 0.9, "success": True}
    tokens = {"token_ids": [1] * 12, "loss_mask": [1] * 7 + [0] * 5, "weight_versions": [3, 4]}
    return values | {"turns": turns} | tokens | changes


def test_a_transcript_turn_by_turn() -> None:
    assert text.trajectory_text(record()).splitlines() == [
        "trajectory 7-3   seed 17, 2 turns, 7 of 12 tokens sampled, weights v3-4",
        "  turn 1  reward -0.1  3 tokens  INVALID",
        "    > <answer>Up",
        "    < what?",
        "  turn 2  reward +1  4 tokens  {'hole': 2}",
        "    > a",
        "    > b",
        "    < FP",
        "    < FG",
        "  done: success, reward +0.9",
    ]


def test_a_lost_episode_says_why() -> None:
    lost = record(outcome="failed", error="environment: timeout", turns=[], weight_versions=[-1, -1], token_ids=[])
    lines = text.trajectory_text(lost).splitlines()
    assert "0 turns" in lines[0] and "no token sampled" in lines[0] and lines[-1] == "  LOST: environment: timeout"


def test_a_prompt_is_shown_where_the_record_has_one() -> None:
    assert text.trajectory_text(record(prompt="PF\nFG")).splitlines()[1:4] == ["  it begins", "    < PF", "    < FG"]


def test_what_a_model_wrote_cannot_steer_the_terminal() -> None:
    turn = {"text": "\x1b[2Jhi\r\x07 é 好", "observation": "\x1b]0;t\x07", "info": {"k": "\x1b"}}
    shown = text.trajectory_text(record(turns=[turn], error="\x1b"))
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert r"\x1b[2Jhi\r\x07 é 好" in shown


# ------------------------------------------------------------------------------------------------------------- the file


def write(path: Path, *records: dict, cut: bytes = b"") -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records) + cut)
    return path


def test_the_last_ones_oldest_first(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[record(str(index)) for index in range(10)], cut=b'{"trajectory_id": "cu')
    assert [found["trajectory_id"] for found in text.last_records(path, 3)] == ["7", "8", "9"]
    assert len(text.last_records(path, 99)) == 10


def test_only_those_that_failed(tmp_path: Path) -> None:
    kinds = {"good": {}, "bad": {"success": False}, "lost": {"outcome": "failed", "success": True}, "fine": {}}
    path = write(tmp_path / "t.jsonl", *[record(name, **changes) for name, changes in kinds.items()])
    assert [found["trajectory_id"] for found in text.last_records(path, 5, failed=True)] == ["bad", "lost"]


@settings(max_examples=150, deadline=None)
@given(
    names=st.lists(st.text("ab", max_size=12), max_size=8),
    cut=st.sampled_from([b"", b"{", b'{"x": "long"']),
    block=st.integers(1, 40),
)
def test_any_file_read_backwards_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], cut: bytes, block: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "t.jsonl", *[{"trajectory_id": name} for name in names], cut=cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK", block)
        assert [found["trajectory_id"] for found in text.last_records(path, 5)] == names[-5:]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "trajectories.jsonl", record("one"), record("two", success=False), record("three"))
    assert text.main([str(tmp_path), "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert "trajectory two" in out and "trajectory three" in out and "trajectory one" not in out
    assert text.main([str(tmp_path / "trajectories.jsonl"), "--failed"]) == 0
    out = capsys.readouterr().out
    assert "trajectory two" in out and "trajectory three" not in out
    write(tmp_path / "trajectories.jsonl", record())
    assert text.main([str(tmp_path), "--failed"]) == 0 and capsys.readouterr().out == "no such episode\n"


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "broken.jsonl").write_bytes(b"not json\n")
    for arguments in ([str(tmp_path)], [str(tmp_path / "broken.jsonl")], [str(tmp_path), "--last", "0"]):
        assert text.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("pearl.metrics.text: error: ") and str(tmp_path) in error and error.count("\n") == 1


def test_where_there_are_no_episodes_the_runs_nearby_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run" / "config.json").write_text("{}")
    for name, what in (("nope", "no such directory or file"), ("", "no episodes yet, trajectories.jsonl is not there")):
        assert text.main([str(tmp_path / name)]) == 2
        assert f"{tmp_path / name}: {what} (runs in {tmp_path}: a-run)\n" in capsys.readouterr().err
