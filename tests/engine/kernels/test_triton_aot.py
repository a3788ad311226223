"""The Triton kernels compiled for GPUs that are not here: what the assembler says of them, and that it is really looked at."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine.kernels import triton as package
from pearl.engine.kernels.triton.aot import SHARED_LIMIT, Compiled, Recorder
from pearl.engine.kernels.triton.inventory import EVERY_CHIP, HOPPER, Entry, entries
from pearl.engine.kernels.triton.report import complaints

ROOT = Path(__file__).parents[3]


def compiled(*options: str) -> list[dict]:
    """The report's lines, from a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "ignore", "-m", "pearl.engine.kernels.triton.report", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f"{line['use']}, {line['name']}: {line['complaints']}" for line in lines if line["complaints"]] == []
    assert done.returncode == 0, done.stderr
    return lines


@pytest.mark.parametrize(("chip", "chips"), [(80, EVERY_CHIP), (90, EVERY_CHIP), (100, EVERY_CHIP), (90, HOPPER)])
def test_kernels_of_large_models(chip: int, chips: tuple[int, ...]) -> None:
    """At the sizes of models that they are meant for; those with products on every chip."""
    names = [entry.name for entry in entries() if entry.core == chips]
    lines = compiled("--chips", str(chip), "--entries", *names)
    assert sorted({line["use"] for line in lines}) == sorted(names)
    assert {line["chip"] for line in lines} == {chip}


def test_every_kernel_is_compiled_by_the_tests() -> None:
    recorder = Recorder(90)
    for entry in entries():
        if entry.core:
            entry.use(recorder)
    assert {launch.kernel.__name__ for launch in recorder.launches} == kernel_names()


AT_ONCE = 6
"""Entries to a test: each has minutes of its own, on a machine that is busy too."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(entries()), AT_ONCE))
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_all_kernels(chip: int, first: int) -> None:
    names = [entry.name for entry in entries()[first : first + AT_ONCE]]
    lines = compiled("--chips", str(chip), "--entries", *names)
    assert {line["use"] for line in lines} == set(names)


def kernel_names() -> set[str]:
    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


GOOD = Compiled(
    name="attention_kernel",
    chip=90,
    num_warps=4,
    registers=128,
    local_bytes=0,
    shared_bytes=1000,
    counts={"LDGSTS": 10, "LDGSTS.128": 8, "HGMMA": 4},
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"local_bytes": 8}, ["8 bytes spilled per thread"]),
        ({"shared_bytes": SHARED_LIMIT[90] + 1}, ["shared memory 232449: at most 232448"]),
        ({"chip": 80, "shared_bytes": SHARED_LIMIT[80] + 1, "counts": {"HMMA": 1}}, ["shared memory 166913: at most 166912"]),
        ({"counts": {"LDGSTS": 10, "LDGSTS.128": 8, "HMMA": 4}}, ["no HGMMA among its instructions"]),
        ({"counts": {"LDG": 10, "LDG.128": 3, "HGMMA": 4}}, ["only 3 of 10 reads are of 16 bytes"]),
    ],
)
def test_every_demand_can_fail(fields: dict, said: list[str]) -> None:
    entry = Entry(name="chunk", use=lambda launch: None, matrix=True)
    assert complaints(entry, dataclasses.replace(GOOD, **fields)) == said


def test_the_page_lists_every_use() -> None:
    page = (ROOT / "docs" / "gpu_kernels.md").read_text()
    assert [entry.name for entry in entries() if f"| {entry.name} |" not in page] == []
