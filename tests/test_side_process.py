"""A side of a comparison: what it prints beside its answers is passed over, and no answer is waited for without end."""

from __future__ import annotations

import sys

import pytest

from bench.side_process import SideError, SideProcess

SIDE = """
import json, sys, time
print("loading {...}")
print(json.dumps({"name": "side"}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question.get("end"):
        sys.exit(3)
    if question.get("stall"):
        time.sleep(600)
    print("noise\\n" + json.dumps({"heard": question}) + "\\nmore noise", flush=True)
"""


def side(limit_s: float = 60.0) -> SideProcess:
    return SideProcess("side", [sys.executable, "-c", SIDE], threads=1, limit_s=limit_s)


def test_it_answers_what_it_is_asked_whatever_else_it_prints() -> None:
    process = side()
    try:
        assert process.about == {"name": "side"}
        assert [process.ask({"n": number})["heard"]["n"] for number in range(3)] == [0, 1, 2]
    finally:
        process.close()
    assert process._process.returncode == 0


def test_one_that_ends_is_named_with_its_exit_code() -> None:
    process = side()
    with pytest.raises(SideError, match="side: ended with 3"):
        process.ask({"end": True})
    with pytest.raises(SideError, match="side: ended with 3"):
        process.ask({"n": 1})
    process.close()


def test_one_that_does_not_answer_in_time_is_killed() -> None:
    process = side()
    process._limit_s = 0.2
    with pytest.raises(SideError, match=r"side: no answer within 0.2 s"):
        process.ask({"stall": True})
    assert process._process.returncode is not None
    process.close()
