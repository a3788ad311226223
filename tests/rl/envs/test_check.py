"""The check finds what is wrong, and finds nothing in the environments that ship."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from pearl.rl.envs import check, registry
from pearl.rl.envs.check import examine

COUNTER = itertools.count()
OPTIONS = {"gymnasium": ["--option", "id=CliffWalking-v1"], "coding": ["--episodes", "2", "--max-turns", "2"]}


@pytest.mark.parametrize("name", registry.names())
def test_nothing_is_wrong_with_what_ships(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([name, "--episodes", "5", *OPTIONS.get(name, [])]) == 0
    said = capsys.readouterr().out
    assert "no problems found" in said and "played by random_valid_action" in said


class Good:
    """Ends after three turns."""

    def reset(self, seed: int) -> tuple[str, dict]:
        self.turns, self.seed = 0, seed
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        self.turns += 1
        return "on", 0.5, self.turns == 3, False, {"success": True}

    def random_valid_action(self, rng: random.Random) -> str:
        return str(rng.random())


class Chance(Good):
    def reset(self, seed: int) -> tuple[str, dict]:
        super().reset(seed)
        return f"seed {next(COUNTER)}", {}


class Leftover(Good):
    turns = 0

    def reset(self, seed: int) -> tuple[str, dict]:
        return f"turns so far {self.turns}", {}


class NotANumber(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        return "on", float("nan"), True, False, {}


class Bytes(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        return b"on", 0.0, True, False, {}


class Bell(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        return "\x07", 0.0, True, False, {}


class Fragile(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        float(action)
        return super().step(action)


class NoInfo(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        return "on", 0.0, True, False, None


class Leaving(Good):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, Any]:
        raise SystemExit("seed 5 is not for me")


class StaysOpen(Good):
    def close(self) -> None:
        raise OSError("seed 5 is still played")


class CannotBeMade(Good):
    def __init__(self) -> None:
        raise OSError("no display")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Good, None),
        (Chance, "is not the same for one seed"),
        (Leftover, "is not the same after a second reset"),
        (NotANumber, "reward is no finite number"),
        (Bytes, "observation is no text"),
        (Bell, "observation is not printable"),
        (Fragile, "raises ValueError"),
        (NoInfo, "info is no dict"),
        (Leaving, "raises SystemExit"),
        (StaysOpen, "raises OSError when closed"),
    ],
)
def test_each_fault_is_found(kind: type, problem: str | None) -> None:
    report = examine(kind, episodes=3, seed=5, max_turns=10)
    assert problem in report.problems if problem else report.problems == {}
    if problem:
        assert "seed 5" in report.problems[problem] and f"PROBLEM: {problem}" in check.written("x", report, "")


def test_nothing_is_wrong_with_the_environment_of_the_docs() -> None:
    page = Path(__file__).parents[3] / "docs" / "environments.md"
    code: dict[str, Any] = {}
    exec(page.read_text().split("```python\n")[1].split("```")[0], code)
    report = examine(code["NextNumber"], episodes=20, seed=0, max_turns=3)
    assert report.problems == {} and 0 < report.successes < 20


def test_numbers_of_a_run() -> None:
    report = examine(Good, episodes=4, seed=0, max_turns=10)
    assert (report.episodes, report.turns, report.successes, report.cut, report.rewards) == (4, 12, 4, 0, [1.5] * 4)
    assert examine(Good, episodes=4, seed=0, max_turns=2).cut == 4


@pytest.mark.parametrize(
    "argv",
    [
        ["nothing"],
        ["hi_lo", "--option", "hgih=3"],
        ["hi_lo", "--episodes", "0"],
        ["gymnasium"],
        [f"{__name__}:CannotBeMade"],
    ],
)
def test_what_cannot_be_tried_is_said_in_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(argv) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
