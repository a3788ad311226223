"""The coding environment: every task fails as it ships and passes once repaired; tools, verdict and paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pearl.rl.envs import coding_tasks
from pearl.rl.envs.coding import Coding
from pearl.rl.envs.tool_calls import written

DURATION = '''
import re

PATTERN = re.compile(r"(?:(\\d+)d)? *(?:(\\d+)h)? *(?:(\\d+)m)? *(?:(\\d+)s)?", re.ASCII)


def parse(text):
    match = PATTERN.fullmatch(text)
    if match is None or not any(match.groups()):
        raise ValueError(f"no duration: {text!r}")
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), (86400, 3600, 60, 1)))
'''
EDITOR = '''
class Editor:
    def __init__(self, text=""):
        self.text, self.before, self.after = text, [], []

    def _change(self, text):
        self.before.append(self.text)
        self.after.clear()
        self.text = text

    def append(self, more):
        self._change(self.text + more)

    def delete(self, count):
        self._change(self.text[: max(0, len(self.text) - count)])

    def _go(self, source, target):
        if not source:
            return False
        target.append(self.text)
        self.text = source.pop()
        return True

    def undo(self):
        return self._go(self.before, self.after)

    def redo(self):
        return self._go(self.after, self.before)
'''
PAIRS = '''
from collections import Counter


def count_pairs(numbers, total):
    seen, count = Counter(), 0
    for number in numbers:
        count += seen[total - number]
        seen[number] += 1
    return count
'''
PAGES = """\
    if size < 1:
        raise ValueError(f"size={size}: must be at least 1")
    count = -(-len(items) // size)
"""
READING = '{"day": row["day"], "celsius": float(text) if (text := row.get("celsius", row.get("temp"))) else None}'
MEANS = """\
    known = {day: [value for value in values if value is not None] for day, values in days.items()}
    return {day: sum(values) / len(values) if values else None for day, values in known.items()}
"""


def replace(path: str, old: str, new: str) -> str:
    return written("replace", path=path, old=old, new=new)


REPAIRS = {
    "duration_text": [written("write_file", path="duration.py", content=DURATION)],
    "last_page": [replace("pages.py", "    count = len(items) // size\n", PAGES)],
    "lost_errors": [
        replace(
            "loader.py",
            "        values[name] = load(text)\n",
            "        try:\n            values[name] = load(text)\n        except (ValueError, KeyError) as error:\n"
            '            errors[name] = f"{type(error).__name__}: {error}"\n',
        )
    ],
    "missing_undo": [written("write_file", path="editor.py", content=EDITOR)],
    "renamed_column": [
        replace("weather/reader.py", '{"day": row["day"], "celsius": float(row["temp"])}', READING),
        replace("weather/report.py", 'row["temp"]', 'row["celsius"]'),
        replace("weather/report.py", "    return {day: sum(values) / len(values) for day, values in days.items()}\n", MEANS),
    ],
    "shared_basket": [
        replace("basket.py", "items=[]", "items=()"),
        replace("basket.py", "self.items = items", "self.items = list(items)"),
        replace("basket.py", "for _, cents, count in self.items])", "for _, cents, count in self.items], 0)"),
    ],
    "slow_pairs": [written("write_file", path="pairs.py", content=PAIRS)],
    "wrong_layer": [
        replace("shop/money.py", "return float(text)", "return round(float(text) * 100)"),
        replace("shop/money.py", "return str(amount)", 'return f"{amount // 100}.{amount % 100:02d}"'),
        replace("shop/invoice.py", "amount <= parse", "amount < parse"),
    ],
}
SUBMIT = written("submit")


def test_there_is_a_repair_for_every_task() -> None:
    assert sorted(REPAIRS) == list(coding_tasks.names()) and len(REPAIRS) >= 6


@pytest.mark.parametrize("name", coding_tasks.names())
def test_a_task_fails_as_it_ships_and_passes_once_repaired(name: str) -> None:
    game = Coding(tasks=[name], test_timeout_s=60.0 if name != "slow_pairs" else 20.0)
    first, info = game.reset(0)
    assert info == {"task": name} and coding_tasks.load(name).issue in first and "hidden" not in first
    assert "FAILED" in game.step(written("run_tests"))[0] if name != "slow_pairs" else True
    for repair in REPAIRS[name]:
        said = game.step(repair)
        assert "<tool_response>\nwrote " in said[0] and not said[4]["invalid"]
    assert "\nOK" in game.step(written("run_tests"))[0]
    said, reward, terminated, truncated, info = game.step(SUBMIT)
    assert (said, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["success"] and info["tests_passed"] == info["tests_total"] > 3


@pytest.mark.parametrize("name", [name for name in coding_tasks.names() if name != "slow_pairs"])
def test_an_untouched_repository_is_no_success(name: str) -> None:
    game = Coding(tasks=[name], test_timeout_s=60.0)
    game.reset(0)
    _, reward, terminated, _, info = game.step(SUBMIT)
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert 0 <= info["tests_passed"] < info["tests_total"]


@pytest.mark.parametrize(
    "trick",
    [
        [written("write_file", path="tests/test_pages.py", content="")],
        [written("write_file", path="unittest.py", content="print('OK')")],
        [written("write_file", path="pages.py", content="import os\nos._exit(0)\n")],
        [written("write_file", path="pages.py", content="import sys\nsys.exit(0)\n")],
        [written("write_file", path="pages.py", content="import unittest\nraise unittest.SkipTest('not today')\n")],
        [written("write_file", path="tests/__init__.py", content="raise SystemExit(0)\n")],
        [written("write_file", path="pages.py", content="while True: pass\n")],
    ],
)
def test_tricks_do_not_pass(trick: list[str]) -> None:
    game = Coding(tasks=["last_page"], test_timeout_s=3.0)
    game.reset(0)
    for reply in trick:
        game.step(reply)
    _, reward, _, _, info = game.step(SUBMIT)
    assert (reward, info["success"]) == (0.0, False)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", ".", "", "pages.py/../../x", "a\x00b", "x" * 5000])
def test_no_tool_leaves_the_repository(path: str) -> None:
    game = Coding(tasks=["last_page"])
    game.reset(0)
    for reply in (written("read_file", path=path), written("write_file", path=path, content="x")):
        assert "error: " in game.step(reply)[0]
    assert game._folder is not None
    (game._folder / "out").symlink_to("/etc")
    assert "leads out" in game.step(written("read_file", path="out/passwd"))[0]
    game.close()


def test_what_is_no_file_is_no_file_and_keeps_nobody_waiting() -> None:
    """Tests that an agent writes can leave anything in the repository: to open a pipe is to wait for its other end."""
    game = Coding(tasks=["last_page"])
    game.reset(0)
    assert game._folder is not None
    os.mkfifo(game._folder / "pipe")
    for call in (
        written("read_file", path="pipe"),
        written("write_file", path="pipe", content="x"),
        written("replace", path="pipe", old="a", new="b"),
        written("write_file", path="tests", content="x"),
    ):
        said, _, terminated, truncated, _ = game.step(call)
        assert "error: " in said and not terminated and not truncated
    assert (game._folder / "pipe").is_fifo()
    game.close()


@pytest.mark.parametrize("kind", ["pipe", "file", "link", "dangling link", "nothing"])
def test_whatever_stands_in_the_place_of_the_tests_the_verdict_is_spoken(kind: str) -> None:
    game = Coding(tasks=["last_page"])
    game.reset(0)
    assert game._folder is not None
    tests = game._folder / "tests"
    shutil.rmtree(tests)
    if kind == "pipe":
        os.mkfifo(tests)
    elif kind == "file":
        tests.write_text("x")
    elif kind != "nothing":
        tests.symlink_to("/etc" if kind == "link" else "/nowhere")
    _, reward, terminated, _, info = game.step(SUBMIT)
    assert (reward, terminated, info["success"]) == (0.0, True, False) and info["tests_total"] > 1


def test_reading_and_editing() -> None:
    game = Coding(tasks=["last_page"], max_turns=50, invalid_penalty=0.5)
    game.reset(0)
    assert game.step(written("list_files"))[0] == "<tool_response>\npages.py\ntests/test_pages.py\n</tool_response>"
    game.step(written("write_file", path="long.txt", content="".join(f"{number}\n" for number in range(500))))
    assert game.step(written("read_file", path="long.txt"))[0].endswith("199\n... 300 more lines\n</tool_response>")
    assert game.step(written("read_file", path="long.txt", first_line=499))[0] == "<tool_response>\n498\n499\n</tool_response>"
    assert "exactly once, it stands there 0" in game.step(replace("pages.py", "no such text", ""))[0]
    assert "exactly once" in game.step(replace("pages.py", "size", "x"))[0]
    said, reward, *_, info = game.step(written("read_file", path="none.py"))
    assert "no text file 'none.py'; there are: long.txt, pages.py" in said and reward == -0.5 and info["invalid"]
    game.close()


def test_the_last_turn_is_judged_and_the_folder_is_gone() -> None:
    game = Coding(tasks=["last_page"], max_turns=2, test_timeout_s=60.0)
    game.reset(0)
    folder = game._folder
    assert folder is not None and folder.is_dir()
    game.step(REPAIRS["last_page"][0])
    _, reward, terminated, truncated, info = game.step(written("list_files"))
    assert (reward, terminated, truncated, info["success"]) == (1.0, False, True, True)
    assert not folder.exists()
    with pytest.raises(RuntimeError, match="after the end"):
        game.step(SUBMIT)


def test_seeds_choose_tasks_in_turn() -> None:
    game = Coding(tasks=["slow_pairs", "last_page"])
    assert [game.reset(seed)[1]["task"] for seed in range(3)] == ["slow_pairs", "last_page", "slow_pairs"]
    game.close()
    with pytest.raises(ValueError, match="must be one of duration_text, last_page"):
        Coding(tasks=["none"])
    with pytest.raises(ValueError, match="tasks='last_page': must be a list"):
        Coding(tasks="last_page")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("issue\n-- ../a.py --\nx\n", "leads out"),
        ("issue\n-- /a.py --\nx\n", "leads out"),
        ("issue\n-- a.py --\nx\n", "needs an issue, files below tests/"),
        ("\n-- tests/test_a.py --\nx\n-- hidden/test_b.py --\ny\n", "needs an issue"),
        ("issue\n-- hidden/test_b.py --\ny\n", "files below tests/"),
    ],
)
def test_bad_task_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coding_tasks.parse("x", text)


def test_tasks_ship_with_the_package() -> None:
    import tomllib

    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pearl.rl.envs"]
    assert data == [f"{coding_tasks.FOLDER.name}/*.txt"] and coding_tasks.FOLDER.parent == Path(coding_tasks.__file__).parent
