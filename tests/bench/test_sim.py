"""The tables of the simulator's bench: what is compared with what, and what is refused instead of a figure without meaning."""

from __future__ import annotations

import argparse
import contextlib
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sim_cases import result_of

from bench import sim
from bench.sim import Report, just
from bench.sim_cases import Printed
from pearl.sched.sim.baselines import OURS, PAPER, RLBOOST, ROLL, System
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import preset_named
from pearl.sched.sim.tables import Run

SPEED = {ROLL.name: 100.0, RLBOOST.name: 55.0, PAPER.name: 50.0, OURS.name: 44.0}
"""Seconds of rollout; training takes 10 and publishing 1, so that steps take 111 to 55 seconds."""


def report(**changes: Any) -> Report:
    options: dict[str, Any] = dict(
        trace_dir=None, minutes=120.0, seeds=1, semantics="barrier", static=False, segments=["S1"], jobs=1
    )
    namespace = argparse.Namespace(**(options | changes))
    return Report(options=namespace, preset=preset_named("qwen3-8b-h800"), fitted=read_fitted()[0])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs take no time; what was asked for."""
    asked: list[dict[str, Any]] = []

    def run_system(system: System, preset: Any, fitted: Any, **options: Any) -> Run:
        asked.append({"policy": system.name} | options)
        steps = 2 if options.get("until_s", 1e9) >= 600 else 0
        result = result_of([SPEED.get(system.name, 70.0)] * steps)
        return Run(policy=system.name, segment=options.get("segment", ""), seed=options["seed"], result=result)

    monkeypatch.setattr(sim, "run_system", run_system)
    return asked


def test_figures_are_shown_beside_the_printed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    one = report()
    one.figure("over ROLL", 2.0, Printed(low=2.17, high=2.37))
    one.figure("over RLBoost+", -0.01, just(0.269))
    shown = capsys.readouterr().out.splitlines()
    assert "2.00x" in shown[0] and "2.17x .. 2.37x" in shown[0] and shown[0].endswith("hit")
    assert "-1.0%" in shown[1] and "+26.9%" in shown[1] and shown[1].endswith("MISSED")
    assert [hit for *_, hit in one.figures] == [True, False]


def test_segments_compare_systems_on_the_same_gpus(runs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    one = report(segments=["S1", "S3"], seeds=2)
    sim.segments(one)
    assert one.value == pytest.approx(61.0 / 55.0 - 1)
    assert {run["policy"] for run in runs} == {*SPEED, "ROLL-Large"} and len(runs) == 2 + 4 * 2 * 2
    alike = {(run["segment"], run["seed"]): run["availability"] for run in runs}
    assert all(run["availability"] == alike[run["segment"], run["seed"]] for run in runs)
    assert "no step kept its shape" in capsys.readouterr().out, "none of these has a prediction"
    assert len(one.figures) == 2 * (1 + 2)


def test_runs_side_by_side_are_those_one_after_the_other() -> None:
    cases = [(ROLL, {"seed": seed, "max_steps": 1, "batch": 16}) for seed in (0, 1)]
    one, two = (list(report(jobs=jobs).map_runs(cases)) for jobs in (1, 2))
    assert one == two and [run.seed for run in one] == [0, 1] and one[0].result.steps


def test_who_gives_up_does_not_wait_for_runs_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Future[Run]] = []
    first = Run(policy="ROLL", segment="", seed=0, result=result_of([100.0]))

    class Pool(contextlib.nullcontext[Any]):
        def submit(self, *arguments: Any, **options: Any) -> Future[Run]:
            asked.append(Future())
            if len(asked) == 1:
                asked[0].set_result(first)
            return asked[-1]

    monkeypatch.setattr(sim, "ProcessPoolExecutor", lambda jobs: Pool(Pool()))
    runs = report(jobs=2).map_runs([(ROLL, {"seed": seed}) for seed in range(4)])
    assert next(runs) is first
    runs.close()
    assert [one.cancelled() for one in asked] == [False, True, True, True]


def test_a_segment_is_cut_to_so_many_minutes(runs: list[dict[str, Any]]) -> None:
    report(minutes=20.0).segment_runs(ROLL, ["S2"])
    report(minutes=1e9).segment_runs(ROLL, ["S2"])
    assert [run["until_s"] for run in runs] == [1200.0, 7200.0]


@pytest.mark.parametrize("section", ["segments", "extensions", "ablation", "costs"])
def test_too_few_minutes_for_a_batch_are_refused(
    section: str, runs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sim.main([section, "--minutes", "5", "--segments", "S1"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "minutes=5: " in said and "trained no batch" in said
    assert len(runs) == 1, "at the first run, not after all of them"


def test_a_whole_bench_ends_with_its_json(
    runs: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert sim.main(["segments", "--segments", "S1", "--page", str(page), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bench"] == "sim" and last["ok"] is True and last["value"] == pytest.approx(61.0 / 55.0 - 1)
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    ("options", "words"), [(["none"], "sections ['none']"), (["segments", "--page", "/no/such/x.html"], "is no folder")]
)
def test_what_cannot_be_is_refused_first(
    options: list[str], words: str, runs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sim.main(options)
    assert ended.value.code == 2 and words in capsys.readouterr().err and not runs


def test_ratios_are_chosen_without_a_run(runs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    one = report()
    sim.ratios(one)
    assert len(one.figures) == len(sim.PICKED) and not runs
    assert all("P" in found and "D" in found for _, found, _, _ in one.figures)
