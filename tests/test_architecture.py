"""The rules of the house: who may import whom, what stays free of torch and clocks, how long files and functions may be.

The import contracts and the list of torch-free modules are in pyproject.toml; the other lists are here. An exception goes
into an allow-list with its reason.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in SETTINGS["tool"]["importlinter"]["contracts"]}

SOURCES = sorted((ROOT / "pearl").rglob("*.py"))
CODE = [*SOURCES, *sorted((ROOT / "bench").rglob("*.py")), ROOT / "setup.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))

PLANNERS = [
    "pearl/engine/request.py",
    "pearl/engine/prefix_cache.py",
    "pearl/engine/block_manager.py",
    "pearl/engine/role.py",
    "pearl/engine/limits.py",
    "pearl/engine/ending.py",
    "pearl/engine/scheduler.py",
    "pearl/engine/core.py",
    "pearl/engine/steady.py",
    "pearl/engine/token_runs.py",
    "pearl/engine/moving.py",
    "pearl/engine/travel.py",
    "pearl/engine/migration/planner.py",
    "pearl/engine/models/config.py",
    "pearl/engine/models/params.py",
    "pearl/engine/comm/layout.py",
    "pearl/engine/weights/overlap.py",
    "pearl/engine/weights/parcels.py",
    "pearl/engine/weights/reshard.py",
    "pearl/engine/weights/fanout.py",
    "pearl/rl/buffer.py",
    "pearl/rl/packing.py",
    "pearl/rl/rollout.py",
]
CLOCKS = {"time", "asyncio", "random", "datetime", "secrets", "uuid", "sched", "threading"}
NOT_PLANNERS_IN_SCHED = ("service.py", "sim/")

MAX_FILE = 400
FILE_LIMITS = {"pearl/protocol.py": 350}
LONG_FILES: dict[str, str] = {}
"""Path -> why it may be longer than MAX_FILE."""

MAX_FUNCTION, MAX_KERNEL = 60, 120
LONG_FUNCTIONS: dict[str, str] = {}
"""path:name -> why it may be longer than MAX_FUNCTION."""

MAX_LINE = 128
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name imported from it or None), wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside pearl are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def module_path(module: str) -> Path | None:
    """The file of a module of ours, a package's `__init__.py`, or None."""
    base = ROOT / module.replace(".", "/")
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return next((path for path in candidates if path.is_file()), None)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def torch_free_modules() -> list[str]:
    """The modules of the contract, packages expanded."""
    listed = CONTRACTS["torch-free"]["source_modules"]
    inside = [dotted(path) for path in SOURCES]
    return sorted({module for module in inside for top in listed if module == top or module.startswith(top + ".")})


def test_import_contracts_hold() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


def test_import_contracts_can_break(tmp_path: Path) -> None:
    """The torch-free contract, turned on a module that does import torch, must fail: it sees external packages."""
    (tmp_path / "contracts.toml").write_text(
        "[tool.importlinter]\nroot_packages = ['pearl']\ninclude_external_packages = true\n"
        "[[tool.importlinter.contracts]]\nname = 'x'\ntype = 'forbidden'\n"
        "source_modules = ['pearl.engine.sampler']\nforbidden_modules = ['torch']\n"
    )
    run = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", run, "--no-cache", "--config", str(tmp_path / "contracts.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "pearl.engine.sampler -> torch" in done.stdout


LOAD_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"importing {module} loads torch")
"""


def test_torch_free_modules_do_not_load_torch() -> None:
    """One process imports them in turn, so the first that loads torch, even through another package, is named."""
    command = [sys.executable, "-c", LOAD_EACH, *torch_free_modules()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_free_modules_are_type_checked() -> None:
    settings = SETTINGS["tool"]["mypy"]
    assert sorted(settings["packages"] + settings["modules"]) == sorted(CONTRACTS["torch-free"]["source_modules"])


def test_lists_name_what_exists() -> None:
    listed = [entry.split(":")[0] for entry in (*PLANNERS, *FILE_LIMITS, *LONG_FILES, *LONG_FUNCTIONS)]
    assert [path for path in listed if not (ROOT / path).is_file()] == []
    assert [module for module in CONTRACTS["torch-free"]["source_modules"] if module_path(module) is None] == []


def planners() -> list[str]:
    """The listed ones and all of sched but its drivers."""
    inside = [name(path) for path in SOURCES if path.is_relative_to(ROOT / "pearl" / "sched")]
    rest = [path for path in inside if not path.removeprefix("pearl/sched/").startswith(NOT_PLANNERS_IN_SCHED)]
    return [*PLANNERS, *(path for path in rest if path not in PLANNERS)]


def test_planners_know_no_clock_and_no_chance() -> None:
    problems = []
    for path in planners():
        tree = parse(ROOT / path)
        modules = {module for module, _ in imports(tree)}
        used = {module for module in modules if module.split(".")[0] in CLOCKS or module == "pearl.clock"}
        problems += [f"{path} imports {module}: `now` and generators are parameters" for module in sorted(used)]
        drawn = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "default_rng"]
        problems += [f"{path}:{node.lineno} makes its own generator" for node in drawn]
    assert problems == []


def test_imports_come_from_modules_not_package_roots() -> None:
    """`from pearl.x import name` is for users where x is a package; a submodule by its name is seen by the contracts."""
    problems = []
    for path in CODE:
        for module, imported in imports(parse(path)):
            if imported is None or module.split(".")[0] != "pearl" or (module, imported) == ("pearl", "_C"):
                continue
            source = module_path(module)
            if source is not None and source.name == "__init__.py" and module_path(f"{module}.{imported}") is None:
                problems.append(f"{name(path)}: from {module} import {imported}: name the module instead")
    assert problems == []


def test_modules_say_what_they_own() -> None:
    written = [path for path in CODE if path.name != "__init__.py" or path.read_text().strip()]
    assert [name(path) for path in written if not ast.get_docstring(parse(path))] == []


def test_files_are_short() -> None:
    problems = []
    for path in (*CODE, *NATIVE):
        lines = path.read_text().splitlines()
        limit = FILE_LIMITS.get(name(path), MAX_FILE)
        if len(lines) > limit and name(path) not in LONG_FILES:
            problems.append(f"{name(path)}: {len(lines)} lines, at most {limit}")
        wide = [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE]
        problems += [f"{name(path)}:{number} is longer than {MAX_LINE} characters" for number in wide]
    assert problems == []


def test_functions_are_short() -> None:
    problems = []
    for path in CODE:
        limit = MAX_KERNEL if "/kernels/" in name(path) else MAX_FUNCTION
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > limit and f"{name(path)}:{node.name}" not in LONG_FUNCTIONS:
                    problems.append(f"{name(path)}: {node.name} has {length} lines, at most {limit}")
    assert problems == []


def test_files_have_telling_names() -> None:
    vague = [name(path) for path in (*CODE, *NATIVE, *TESTS) if NAMES_THAT_SAY_NOTHING & {path.stem, path.parent.name}]
    assert vague == []


def test_package_roots_hold_a_lazy_getattr_at_most() -> None:
    problems = []
    for path in SOURCES:
        if path.name != "__init__.py":
            continue
        tree = parse(path)
        if not {module for module, _ in imports(tree)} <= {"__future__", "importlib", "typing"}:
            problems.append(f"{name(path)} imports more than the lazy look-up needs")
        for node in tree.body:
            lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
            value = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Expr)
            if not lazy and not value:
                problems.append(f"{name(path)}:{node.lineno} is neither a value nor a lazy look-up")
    assert problems == []


def test_caught_errors_are_named() -> None:
    handlers = [(path, node) for path in CODE for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler)]
    assert [f"{name(path)}:{node.lineno}" for path, node in handlers if node.type is None] == []


@pytest.mark.parametrize("module", ["pearl.config", "pearl.engine.models.config", "pearl.engine.models.params"])
def test_configurations_cannot_be_changed(module: str) -> None:
    loaded = importlib.import_module(module)
    values = [item for item in vars(loaded).values() if isinstance(item, type) and item.__module__ == module]
    classes = [item for item in values if dataclasses.is_dataclass(item)]
    assert classes
    for item in classes:
        parameters = item.__dataclass_params__  # type: ignore[attr-defined]
        assert parameters.frozen and hasattr(item, "__slots__"), f"{module}.{item.__name__} must be frozen and slotted"
        assert all(field.kw_only for field in dataclasses.fields(item)), f"{module}.{item.__name__} must be kw_only"


def test_tests_stand_where_their_subject_stands() -> None:
    rooms = {path.parent.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")}
    assert [str(room) for room in rooms if not ((ROOT / "pearl" / room).is_dir() or room == Path("bench"))] == []


def test_every_module_is_in_the_architecture_page_and_every_entry_exists():
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Modules")[1]
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
    modules = {str(path.relative_to(ROOT / "pearl")) for path in (ROOT / "pearl").rglob("*.py") if path.name != "__init__.py"}
    assert named == modules
