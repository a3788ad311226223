"""Repair a small repository: read its files, edit them, run its tests, submit.

Owns the tools and the verdict. Tests run in a process with limits (`sandbox.py`), the repository is a temporary folder of
this episode. Invariants: the verdict runs the tests as they were given, and hidden ones, whatever the agent made of the
files; an episode plays the same way again; no tool reaches a file outside the repository.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.rl.envs import coding_tasks, sandbox
from pearl.rl.envs.coding_tasks import CodingTask
from pearl.rl.envs.sandbox import Limits
from pearl.rl.envs.tool_calls import TAGS, Call, Tool, ToolCallError, described, read_call, response, written

TOOLS = (
    Tool(name="list_files", description="Lists the files of the repository."),
    Tool(
        name="read_file",
        description="Shows a file, or its lines from first_line on, at most 200.",
        arguments={"path": "string", "first_line": "integer"},
        optional=("first_line",),
    ),
    Tool(
        name="replace",
        description="Replaces the only place in a file that reads exactly as old by new.",
        arguments={"path": "string", "old": "string", "new": "string"},
    ),
    Tool(
        name="write_file",
        description="Writes a whole file, a new one or over an old one.",
        arguments={"path": "string", "content": "string"},
    ),
    Tool(name="run_tests", description="Runs the repository's unit tests (python -m unittest discover tests)."),
    Tool(name="submit", description="Ends the work; the repository is judged by its tests and by hidden ones."),
)
RULES = "You repair a small Python repository. Each reply calls one tool. Change the code, not its tests; then submit."
LINES_SHOWN = 200
LARGEST_FILE = 100_000
MOST_FILES = 100
RUNNER = Path(__file__).with_name("run_tests.py")


class Coding:
    """Reward 1 if all tests pass at the end (submit, or the last turn), else 0; `-invalid_penalty` for an unreadable turn.

    Options: `tasks` names those that are played (None: all of `coding_tasks.names()`), seed s playing number s % count;
    `test_timeout_s` bounds one run of the tests, `memory_mib` their address space; truncated after `max_turns` turns.
    `info` at the end: `success`, `task`, `tests_passed`, `tests_total`, `isolated` (see `sandbox.py`).
    """

    def __init__(
        self,
        *,
        tasks: Sequence[str] | None = None,
        max_turns: int = 20,
        test_timeout_s: float = 10.0,
        memory_mib: int = 512,
        invalid_penalty: float = 0.0,
    ) -> None:
        self.check_options(tasks=tasks, max_turns=max_turns, test_timeout_s=test_timeout_s, memory_mib=memory_mib)
        self.tasks = tuple(tasks) if tasks is not None else coding_tasks.names()
        self.num_tasks = len(self.tasks)
        self.max_turns, self.invalid_penalty = max_turns, invalid_penalty
        self.system_prompt = f"{RULES}\n\n{described(TOOLS)}"
        self._limits = Limits(wall_s=test_timeout_s, cpu_s=max(1, round(test_timeout_s)), memory_mib=memory_mib)
        self._task: CodingTask | None = None
        self._folder: Path | None = None
        self._turns = 0

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError naming the first option of a bad value and the valid ones."""
        tasks = options.get("tasks")
        if tasks is not None and (isinstance(tasks, str) or not tasks):
            raise ValueError(f"coding option tasks={tasks!r}: must be a list of names out of {', '.join(coding_tasks.names())}")
        for name in tasks or ():
            coding_tasks.load(name)
        for name, low in (("max_turns", 1), ("memory_mib", 64)):
            value = options.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"coding option {name}={value!r}: must be an integer >= {low}")
        timeout_s = options.get("test_timeout_s", 1)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 600:
            raise ValueError(f"coding option test_timeout_s={timeout_s!r}: must be in (0, 600]")

    @property
    def words(self) -> Sequence[str]:
        """What calls are made of."""
        return (self.system_prompt, *TAGS, *(tool.name for tool in TOOLS))

    def reset(self, seed: int) -> tuple[str, dict]:
        self.close()
        self._task = task = coding_tasks.load(self.tasks[seed % len(self.tasks)])
        self._folder = Path(tempfile.mkdtemp(prefix="pearl-coding-"))
        self._turns = 0
        _write(self._folder, task.files)
        return f"{task.issue}\n\nFiles:\n{self._list_files()}", {"task": task.name}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._folder is None or self._task is None:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        out, penalty = self._turns >= self.max_turns, 0.0
        info: dict[str, Any] = {"invalid": False, "success": False, "task": self._task.name}
        submitted = False
        try:
            call = read_call(action, TOOLS)
            submitted = call.name == "submit"
            said = "" if submitted else self._answer(call)
        except ToolCallError as error:
            said, penalty, info["invalid"] = f"error: {error}", self.invalid_penalty, True
        if not (submitted or out):
            return response(said), -penalty, False, False, info
        info |= self._verdict()
        self.close()
        return response(said) if said else "", float(info["success"]) - penalty, submitted, out and not submitted, info

    def random_valid_action(self, rng: random.Random) -> str:
        """Any tool; reading is as likely as all others together, and running the tests, which takes its time, is rare."""
        files = self._files()
        if rng.random() < 0.5 and files:
            return written("read_file", path=rng.choice(files))
        weights = {"list_files": 4, "write_file": 2, "run_tests": 1, "submit": 1}
        name = rng.choices(list(weights), list(weights.values()))[0]
        return written(name, path="notes.txt", content="nothing yet\n") if name == "write_file" else written(name)

    def close(self) -> None:
        """Removes the repository."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ------------------------------------------------------------------------------------------------- tools

    def _answer(self, call: Call) -> str:
        match call.name:
            case "list_files":
                return self._list_files()
            case "read_file":
                return self._read_file(**call.arguments)
            case "replace":
                return self._replace(**call.arguments)
            case "write_file":
                return self._write_file(**call.arguments)
        assert self._folder is not None
        ran = sandbox.run(self._folder, RUNNER, limits=self._limits)
        late = f"stopped after {self._limits.wall_s:g} s\n" if ran.timed_out else ""
        return late + ran.output.replace(str(self._folder), ".").strip()

    def _list_files(self) -> str:
        return "\n".join(self._files())

    def _read_file(self, path: str, first_line: int = 1) -> str:
        lines = self._text(path).splitlines()
        start = max(1, first_line) - 1
        shown = lines[start : start + LINES_SHOWN]
        rest = len(lines) - start - len(shown)
        return "\n".join([*shown, *([f"... {rest} more lines"] if rest > 0 else [])])

    def _replace(self, path: str, old: str, new: str) -> str:
        text = self._text(path)
        if not old or text.count(old) != 1:
            return f"error: old must stand in {path} exactly once, it stands there {text.count(old) if old else 'everywhere'}"
        return self._write_file(path, text.replace(old, new))

    def _write_file(self, path: str, content: str) -> str:
        target = self._inside(path)
        if len(content) > LARGEST_FILE:
            return f"error: a file may have {LARGEST_FILE} characters"
        try:
            if target.exists() and not target.is_file():  # a pipe would be waited for, and a folder is none
                return f"error: {path} is no file"
            if not target.exists() and len(self._files()) >= MOST_FILES:
                return f"error: a repository may have {MOST_FILES} files"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
        except (OSError, ValueError) as error:
            return f"error: {path} cannot be written ({type(error).__name__})"
        return f"wrote {path}"

    def _text(self, path: str) -> str:
        target = self._inside(path)
        try:
            if not target.is_file():  # a pipe, that a test may have made, would be waited for
                raise FileNotFoundError(path)
            with target.open(encoding="utf-8") as file:
                return file.read(LARGEST_FILE)
        except (OSError, ValueError):
            raise ToolCallError(f"no text file {path!r}; there are: {', '.join(self._files())}") from None

    def _inside(self, path: str) -> Path:
        assert self._folder is not None
        root = self._folder.resolve()
        try:
            target = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise ToolCallError(f"no such path: {path!r}") from None
        if not target.is_relative_to(root) or target == root:
            raise ToolCallError(f"path {path!r} leads out of the repository")
        return target

    def _files(self) -> list[str]:
        assert self._folder is not None
        found = [path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return sorted(path.relative_to(self._folder).as_posix() for path in found)

    def _verdict(self) -> dict[str, Any]:
        """Runs the given and the hidden tests over the repository as it stands."""
        assert self._folder is not None and self._task is not None
        tests = self._folder / "tests"
        if tests.is_dir() and not tests.is_symlink():
            shutil.rmtree(tests, ignore_errors=True)
        else:  # whatever the agent has put in its place
            tests.unlink(missing_ok=True)
        _write(self._folder, self._task.tests)
        ran = sandbox.run(self._folder, RUNNER, limits=self._limits)
        counts = [int(word) for word in ran.report.split() if word.isascii() and word.isdigit()]
        total, bad = counts if len(counts) == 2 else (0, 0)
        solved = total > 0 and bad == 0 and ran.code == 0 and not ran.timed_out
        return {"success": solved, "tests_passed": max(0, total - bad), "tests_total": total, "isolated": ran.isolated}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
