"""The GPU suite without a GPU: its problems in Triton's interpreter, a tiny engine, what it does about failures."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from bench import gpu_suite
from bench.gpu_cases import Case, Problem, attention_cases
from bench.gpu_engine import EngineBench, qwen3_8b, tiny
from bench.gpu_measure import Ceiling, Outcome, floor_ms, table
from bench.gpu_row_cases import kept_logprobs, row_cases
from bench.gpu_trial import interpreted

ROOT = Path(__file__).parents[1]
CEILING = Ceiling(bytes_per_s=1e9, flop_per_s=1e12)
CASES = [*attention_cases(), *row_cases()]
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the suite itself runs on this machine")


def options(**changes: object) -> argparse.Namespace:
    fixed: dict[str, object] = dict(seed=1, bandwidth=1e9, matrix=1e12, chips=[90], only=list(gpu_suite.SECTIONS), dry_run=True)
    return argparse.Namespace(**(fixed | changes))


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_problems_agree_with_float64(case: Case) -> None:
    (row,) = interpreted(case, np.random.default_rng(7), CEILING, [])
    assert row.ok, row.note


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("spoil", [lambda x: x * 1.02 + 0.01, lambda x: x * math.nan], ids=["off", "nan"])
def test_a_kernel_that_is_wrong_is_found(case: Case, spoil) -> None:
    """Each problem with outputs that are two percent off, or NaN."""

    def make(*arguments, **sizes) -> Problem:
        problem = case.make(*arguments, **sizes)

        def run(launch) -> tuple[Tensor, ...]:
            outputs = problem.run(launch)
            # Ids and marks are integers; what is known of them shows in the log-probs beside them.
            return tuple(spoil(output) if output.is_floating_point() else output for output in outputs)

        return Problem(run=run, check=problem.check, nbytes=problem.nbytes, flop=problem.flop)

    broken = Case(section=case.section, name=case.name, make=make, small=case.small, real=case.real)
    (row,) = interpreted(broken, np.random.default_rng(7), CEILING, [])
    assert row.ok is False


def test_the_oracle_of_the_filters() -> None:
    scores = torch.log(torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]], dtype=torch.float64)) * 0.7
    assert kept_logprobs(scores, 0, 1.0, 0.0).exp()[0].tolist() == pytest.approx([0.5, 0.2, 0.15, 0.1, 0.05])
    assert kept_logprobs(scores, 2, 1.0, 0.0).exp()[0].tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
    assert kept_logprobs(scores, 0, 0.8, 0.0).exp()[0].tolist() == pytest.approx([0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0])
    assert kept_logprobs(scores, 0, 1.0, 0.35).exp()[0].tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])


def test_the_floor_is_the_greater_of_both() -> None:
    assert floor_ms(10**9, 0, CEILING) == pytest.approx(1000)
    assert floor_ms(10**9, 2 * 10**12, CEILING) == pytest.approx(2000)


@needs_interpreter
def test_a_tiny_engine_goes_through_every_part() -> None:
    bench = EngineBench(tiny(), CEILING, np.random.default_rng(1))
    for name, measure in bench.parts().items():
        rows = measure()
        assert rows and all(row.ok is not False for row in rows), name
        assert all(row.ms is None or row.ms > 0 for row in rows), name
    bench.engine.check_integrity()
    assert not bench.engine.has_unfinished()


def test_the_real_engine_fits_the_requests_that_it_is_given() -> None:
    """Blocks for the largest batch and for the prompts, and the sizes of the model's own config.json."""
    scale = qwen3_8b()
    tokens = max(scale.batches) * (scale.context + 2 * scale.steps + 8)
    assert scale.num_blocks * 16 > max(tokens, scale.prompts * scale.prompt_tokens) * 1.02
    assert scale.model.kv_bytes_per_token == 147456 or scale.model.dtype == "float32"


def test_what_raises_is_a_row_and_the_rest_goes_on() -> None:
    def broken() -> Iterator[Outcome]:
        yield Outcome(section="rows", name="first", ok=True)
        raise ValueError("no such thing")

    rows = list(gpu_suite._guarded("rows", "second", broken))
    assert rows == [
        {"section": "rows", "name": "first", "ok": True},
        {"section": "rows", "name": "second", "ok": False, "note": "ValueError: no such thing"},
    ]


def test_a_section_that_takes_too_long_or_dies_is_a_row() -> None:
    (row,) = gpu_suite.run_section("engine", "tiny", 1, options())
    assert (row["ok"], row["note"]) == (False, "stopped after 1 s")
    (row,) = gpu_suite.run_section("rows", "no such mode", 60, options())
    assert row["ok"] is False and row["note"].startswith("exit code 1") and "KeyError" in row["note"]


def test_rows_are_json_and_a_table() -> None:
    rows = [
        Outcome(section="rows", name="a", ok=False, gap=math.nan, ms=1.5, of_ceiling=0.5, target=0.85, others={"torch": 2.0}),
        Outcome(section="engine", name="b", value=12345.0, unit="GB/s", note="as it is"),
    ]
    dumped = json.loads(json.dumps([row.as_json() for row in rows], allow_nan=False))
    lines = table(dumped)
    assert lines[1].split() == ["rows", "a", "NO", "nan", "1.5", "0.5", "(>=", "0.85)", "torch", "2"]
    assert lines[2].split() == ["engine", "b", "1.23e+04", "GB/s", "as", "it", "is"]
    result = gpu_suite.summary(dumped, options(), 1.0)
    assert (result["value"], result["target"], result["ok"]) == (0, 1, False)
    assert not gpu_suite.summary([], options(), 1.0)["ok"]


def test_the_plan_of_time_is_under_eight_minutes() -> None:
    assert sum(gpu_suite.SECTIONS.values()) <= gpu_suite.MOST_SECONDS < 480


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "bench.gpu_suite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "use --dry-run" in done.stderr


WITHOUT = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"msgspec", "zmq", "gguf", "gymnasium", "flashinfer"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
sys.argv = ["gpu_suite", "--section", "engine", "--mode", "tiny", "--bandwidth", "1e9", "--matrix", "1e12", "--seed", "1"]
from bench.gpu_suite import main
sys.exit(main())
"""


@needs_interpreter
def test_an_image_that_lacks_packages_is_enough() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows[0]["name"] == "msgspec is not installed" and len(rows) > 10
    assert [row for row in rows if row.get("ok") is False] == []


@needs_interpreter
@pytest.mark.slow
def test_the_dry_run() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_suite", "--dry-run", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert result["ok"] and result["target"] >= 2 * len(CASES)
    assert {row["section"] for row in result["rows"]} >= set(gpu_suite.SECTIONS)
