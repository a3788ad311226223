"""Claim: with all extensions PEARL trains at least 10 % more tokens per second than as the paper describes it, over S1-S3.

    python -m bench.sim [SECTION ...] [--trace-dir FOLDER] [--seeds N] [--preset NAME] [--semantics barrier|slots] [--page FILE]

Sections: `segments` (systems over the availability segments), `extensions` (each of ours off, and each by itself), `ablation`
(splitting and borrowing on 4 to 16 fixed GPUs), `batches` (30B-A3B: batch sizes), `sizes` (batches and lengths that nobody
printed, and what is chosen there), `ratios` (which split is chosen), `costs` (changes of the cluster for nothing), `bounds`
(what workers without end would reach). All sections take hours of one core; `segments` with one seed some ten minutes.

Each figure stands beside the one that arXiv 2609.35158 prints, hit (within 15 %) or missed; gains count as factors and must
have their sign. What was fitted, on other figures, is `bench/sim_fit.py`; its hash is printed. Segments come from recorded
traces in --trace-dir, else they are drawn with the same statistics. `value`: ours over the paper's, mean over segments and
seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.sim_cases import BLOCKS, Printed, fixed, makespan, run_system
from pearl.sched.cost_profile import CHANGES, ChangeCost
from pearl.sched.planner import Budget, plan_allocation
from pearl.sched.predictor import PaperPredictor, Predictor
from pearl.sched.settings import PdSettings
from pearl.sched.sim.availability import SEGMENTS, Segment, segment_gpus
from pearl.sched.sim.baselines import (
    OURS,
    PAPER,
    RLBOOST,
    ROLL,
    STATIC_RATIOS,
    System,
    believed,
    one_less,
    one_more,
    roll_large,
    static,
)
from pearl.sched.sim.command_line import check_writable
from pearl.sched.sim.page import write_page
from pearl.sched.sim.plans import Hardware
from pearl.sched.sim.presets.fitted import Fitted, read_fitted
from pearl.sched.sim.presets.qwen3 import PRESETS, Preset, preset_named
from pearl.sched.sim.tables import (
    Run,
    Spread,
    as_text,
    gain,
    prediction_error,
    prediction_pairs,
    throughput,
    throughput_table,
)

TARGET = 0.10
LARGE = {"S1": 7, "S2": 5, "S3": 6}
"""Workers of ROLL-Large: 14, 10 and 12 GPUs."""

OVER_ROLL = {"qwen3-8b": Printed(low=2.17, high=2.37), "qwen3-30b": Printed(low=2.43, high=2.79)}
OVER_RLBOOST = {
    "qwen3-8b": {"S1": 0.059, "S2": 0.269, "S3": 0.106},
    "qwen3-30b": {"S1": 0.074, "S2": 0.363, "S3": 0.190},
}
SPLIT_ALONE = {"qwen3-8b": Printed(low=0.128, high=0.153), "qwen3-30b": Printed(low=0.078, high=0.089)}
SPLIT_AT_4 = {"qwen3-8b": -0.206, "qwen3-30b": -0.309}
BORROW_AT_4 = {"qwen3-8b": (0.936, 0.923), "qwen3-30b": (1.183, 1.295)}
"""Ungated and gated, both with splitting."""

PICKED = {10: "2P3D", 12: "3P3D", 16: "3P5D", 26: "4P9D", 28: "4P10D", 32: "4P12D"}
BATCHES = {32: 0.097, 80: 0.014, 96: -0.061}
SIZES, LENGTHS = (16, 32, 64, 128, 256), (0.5, 2.0)
"""Trajectories of a batch, and factors on the turns and the limit of tokens."""


Case = tuple[System, dict[str, Any]]
"""Of `run_system`: who, and its options."""


@dataclass(slots=True)
class Report:
    """What a section prints, and the figures that it hit or missed."""

    options: argparse.Namespace
    preset: Preset
    fitted: Fitted
    runs: list[Run] = field(default_factory=list)
    figures: list[tuple[str, str, str, bool]] = field(default_factory=list)
    value: float | None = None

    @property
    def model(self) -> str:
        return "qwen3-30b" if "30b" in self.preset.name else "qwen3-8b"

    def figure(self, name: str, found: float, printed: Printed) -> None:
        """`found` beside what is printed, as gains in per cent below 1.5 and as factors else."""
        factor = abs(printed.high) > 1.5
        ours, low, high = (f"{one:.2f}x" if factor else f"{one:+.1%}" for one in (found, printed.low, printed.high))
        told, hit = low if low == high else f"{low} .. {high}", printed.hit(found)
        self.figures.append((name, ours, told, hit))
        print(f"  {name:<46}{ours:>10}   printed {told:<18}{'hit' if hit else 'MISSED'}", flush=True)

    def check_trained(self, run: Run) -> None:
        """ValueError if it has no throughput to compare."""
        if not run.result.steps:
            where = f"{run.segment or 'fixed GPUs'}, seed {run.seed}"
            raise ValueError(f"minutes={self.options.minutes:g}: {run.policy} ({where}) trained no batch in them; give it more")

    def segment_runs(self, system: System, names: Sequence[str], **more: Any) -> list[Run]:
        """Every segment with every seed; who has the reserved GPUs alone is run once for all segments."""
        chosen = [segment for segment in SEGMENTS if segment.name in names]
        alike = not system.external and system.name != "ROLL-Large"
        cases = [(one, seed) for one in (chosen[:1] if alike else chosen) for seed in range(self.options.seeds)]
        found = []
        for run in self.map_runs([self._case(system, segment, seed, more) for segment, seed in cases]):
            self.check_trained(run)
            told = "any" if alike else run.segment
            print(f"    {run.policy:<28}{told} seed {run.seed}: {throughput(run.result):8.0f} tokens/s", flush=True)
            found += [replace(run, segment=one.name) for one in chosen] if alike else [run]
        self.runs += found
        return found

    def _case(self, system: System, segment: Segment, seed: int, more: dict[str, Any]) -> Case:
        if system.name == "ROLL-Large":
            system = roll_large(LARGE[segment.name])
        gpus, _ = segment_gpus(segment, self.options.trace_dir, tp=2, seed=seed)
        until = 60.0 * min(self.options.minutes, segment.last_minute - segment.first_minute)
        options: dict[str, Any] = {"semantics": self.options.semantics, "until_s": until, "seed": seed}
        return system, {"segment": segment.name, "availability": gpus} | options | more

    def map_runs(self, cases: Sequence[Case]) -> Iterator[Run]:
        """One run per case, in their order, in as many processes as were asked for."""
        if self.options.jobs == 1:
            yield from (run_system(system, self.preset, self.fitted, **options) for system, options in cases)
            return
        with ProcessPoolExecutor(self.options.jobs) as pool:
            waiting = [pool.submit(run_system, system, self.preset, self.fitted, **options) for system, options in cases]
            try:
                yield from (one.result() for one in waiting)
            finally:  # whoever has seen enough does not wait for the others
                for one in waiting:
                    one.cancel()


def just(value: float) -> Printed:
    return Printed(low=value, high=value)


def _percent(value: Spread) -> str:
    return f"{value.mean:+.1%} ± {value.deviation:.1%} ({value.count} runs)"


def segments(report: Report) -> None:
    """Systems over S1-S3, against the printed gains."""
    names = report.options.segments
    for segment in SEGMENTS:
        print(f"  {segment.name}: {segment_gpus(segment, report.options.trace_dir, tp=2, seed=0)[1]}")
    systems = [ROLL, roll_large(0), RLBOOST, PAPER, OURS]
    systems += [static(*ratio) for ratio in STATIC_RATIOS] if report.options.static else []
    runs = {system.name: report.segment_runs(system, names) for system in systems}
    print(as_text(throughput_table([run for rows in runs.values() for run in rows], PAPER.name)))
    for kind, name in (("PEARL as in the paper", PAPER.name), ("ours", OURS.name)):
        over = 1 + gain(runs[name], runs[ROLL.name]).mean
        report.figure(f"{kind} over ROLL, all segments", over, OVER_ROLL[report.model])
        for segment in names:
            mine, theirs = ([run for run in runs[one] if run.segment == segment] for one in (name, RLBOOST.name))
            printed = just(OVER_RLBOOST[report.model][segment])
            report.figure(f"{kind} over RLBoost+, {segment}", gain(mine, theirs).mean, printed)
    for name, rows in runs.items():
        if name != OURS.name:
            print(f"  ours over {name:<16}{_percent(gain(runs[OURS.name], rows))}")
    report.value = gain(runs[OURS.name], runs[PAPER.name]).mean
    found = prediction_error(prediction_pairs(run.result for rows in runs.values() for run in rows))
    if not found.count:
        print("  predicted against simulated makespan: no step kept its shape")
        return
    wanted = f"median {found.median:.1%} (wanted: 10 %), p95 {found.p95:.1%} (25 %)"
    print(f"  predicted against simulated makespan, {found.count} steps: {wanted}")


def extensions(report: Report) -> None:
    """What each of our extensions gains or loses, on the chosen segments."""
    names = report.options.segments
    paper, ours = report.segment_runs(PAPER, names), report.segment_runs(OURS, names)
    print(f"  all of them over the paper's: {_percent(gain(ours, paper))}")
    for more, less in zip(one_more(), one_less(), strict=True):
        by_itself, without = gain(report.segment_runs(more, names), paper), gain(ours, report.segment_runs(less, names))
        name = less.name.removeprefix("ours - ")
        print(f"  {name:<20} by itself {_percent(by_itself)}, on top of the others {_percent(without)}", flush=True)


def ablation(report: Report) -> None:
    """Splitting and borrowing on fixed GPUs, the other systems' parts left out."""
    until_s = 60.0 * report.options.minutes
    for gpus in (8, 12, 16):
        hardware = Hardware(training_gpus=16, reserved_workers=gpus // 2, tp=2)
        mixed, split = (_fixed_run(report, fixed(name, name), hardware, until_s) for name in ("mixed", "split"))
        report.figure(f"splitting at {gpus} GPUs", split / mixed - 1, SPLIT_ALONE[report.model])
    hardware = Hardware(training_gpus=16, reserved_workers=2, tp=2)
    base = _fixed_run(report, fixed("mixed", "mixed"), hardware, until_s)
    forced = _fixed_run(report, fixed("split", "split"), hardware, until_s)
    report.figure("splitting forced at 4 GPUs", forced / base - 1, just(SPLIT_AT_4[report.model]))
    kept = _fixed_run(report, replace(fixed("split", "split"), eviction="keep"), hardware, until_s)
    print(f"  {'the same with caches that keep':<46}{kept / base - 1:>+10.1%}")
    for name, borrow, printed in zip(("ungated", "gated"), ("all", "all_or_none"), BORROW_AT_4[report.model], strict=True):
        found = _fixed_run(report, fixed(name, "auto", borrow=borrow), hardware, until_s)
        report.figure(f"splitting and borrowing at 4 GPUs, {name}", found / base, just(1 + printed))


def _fixed_run(report: Report, system: System, hardware: Hardware, until_s: float) -> float:
    options = {"semantics": report.options.semantics, "until_s": until_s, "hardware": hardware}
    rates = []
    for run in report.map_runs([(system, options | {"seed": seed}) for seed in range(report.options.seeds)]):
        report.check_trained(run)
        rates.append(throughput(run.result))
    return sum(rates) / len(rates)


def batches(report: Report) -> None:
    """30B-A3B on 8 workers: the best of the splits of 8 against colocated. Fitted on these; shown for completeness."""
    preset, seeds = preset_named("qwen3-30b-a3b-h800"), tuple(range(report.options.seeds))
    for batch, printed in BATCHES.items():
        options: dict[str, Any] = {"workers": 8, "batch": batch, "seeds": seeds}
        mixed = makespan(ROLL, preset, report.fitted, **options)
        splits = {ratio: fixed(ratio, "split", ratio) for ratio in ("3:5", "4:4", "5:3", "6:2")}
        times = {ratio: makespan(system, preset, report.fitted, **options) for ratio, system in splits.items()}
        best = min(times, key=lambda ratio: times[ratio])
        report.figure(f"30B-A3B, batch {batch}: best split ({best})", mixed / times[best] - 1, just(printed))


def sizes(report: Report) -> None:
    """Makespans on 8 workers that stay, by batch and by length: mixed, the best split, and what is chosen by itself."""
    family, seeds = report.preset.family, tuple(range(report.options.seeds))
    rows = [(f"batch {batch}", report.preset, batch) for batch in SIZES]
    for factor in LENGTHS:
        turns = replace(family.turns, mean=family.turns.mean * factor, high=family.turns.high * factor)
        longer = replace(family, turns=turns, context_limit=int(family.context_limit * factor))
        rows.append((f"{longer.context_limit // 1024} K tokens at most", replace(report.preset, family=longer), 64))
    systems = {"mixed": fixed("mixed", "mixed"), "chosen": fixed("chosen", "auto")}
    systems |= {f"{p}:{d}": fixed(f"{p}:{d}", "split", f"{p}:{d}") for p, d in STATIC_RATIOS}
    for name, preset, batch in rows:
        room = replace(BLOCKS, max_model_len=max(BLOCKS.max_model_len, preset.family.context_limit + 1))
        options: dict[str, Any] = {"workers": 8, "batch": batch, "seeds": seeds, "engine": room}
        times = {who: makespan(system, preset, report.fitted, **options) for who, system in systems.items()}
        mixed, chosen = times.pop("mixed"), times.pop("chosen")
        best = min(times, key=lambda ratio: times[ratio])
        told = f"mixed {mixed:7.1f} s, best split ({best}) {mixed / times[best] - 1:+6.1%}"
        print(f"  {name:<24}{told}, chosen {chosen:7.1f} s, of the best {min(mixed, times[best]) / chosen:.3f}", flush=True)


def ratios(report: Report) -> None:
    """Which split is chosen: by the closed forms, which is what the paper reports (for 8B), and by ours; no simulation."""
    load, costs = believed(report.fitted.family(report.preset.family), report.fitted, 64, barrier=True), report.preset.costs
    costs = report.fitted.costs(costs)
    for gpus, printed in PICKED.items():
        found = []
        for predictor in (PaperPredictor(load, costs), Predictor(load, costs)):
            best = plan_allocation(predictor, Budget(fixed=gpus // 2), PdSettings(mode="split")).best
            found.append("-" if best is None else str(best.shape))
        told = f"  {gpus:>3} GPUs: closed forms {found[0]:<7} queueing model {found[1]:<7}"
        if report.model != "qwen3-8b":
            print(told)
            continue
        hit = found[0] == printed
        report.figures.append((f"split at {gpus} GPUs", found[0], printed, hit))
        print(f"{told} printed {printed:<7} {'hit' if hit else 'MISSED'}")


def costs(report: Report) -> None:
    """Ours with changes of the cluster for nothing: what all of them cost."""
    paid = report.segment_runs(OURS, report.options.segments)
    free = report.preset.costs
    for kind in CHANGES:
        free = free.with_change(kind, ChangeCost())
    cheap = Report(options=report.options, preset=replace(report.preset, costs=free), fitted=report.fitted)
    print(f"  changes for nothing: {_percent(gain(cheap.segment_runs(OURS, report.options.segments), paid))}")


def bounds(report: Report) -> None:
    """Throughput with so many mixed workers that are always there: what no policy of fewer can pass."""
    until_s = 60.0 * report.options.minutes
    for workers in (16, 64):
        hardware = Hardware(training_gpus=16, reserved_workers=workers, tp=2)
        found = _fixed_run(report, fixed("mixed", "mixed"), hardware, until_s)
        print(f"  {workers} workers that stay: {found:8.0f} tokens/s", flush=True)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "segments": segments,
    "extensions": extensions,
    "ablation": ablation,
    "batches": batches,
    "sizes": sizes,
    "ratios": ratios,
    "costs": costs,
    "bounds": bounds,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for options with which nothing can be compared."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("sections", nargs="*", default=["ratios", "segments"], help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--trace-dir", type=Path, help="folder of recorded traces; drawn ones without it")
    parser.add_argument("--preset", default="qwen3-8b-h800", choices=list(PRESETS))
    parser.add_argument("--segments", nargs="+", default=[one.name for one in SEGMENTS], choices=[one.name for one in SEGMENTS])
    parser.add_argument("--minutes", type=float, default=120.0, help="of each segment, enough for a step of each system")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate side by side")
    parser.add_argument("--semantics", default="barrier", choices=("barrier", "slots"))
    parser.add_argument("--static", action="store_true", help="static ratios too: the best on a segment is its oracle")
    parser.add_argument("--page", type=Path, help="an HTML page of all runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"sections {unknown}: must be of {', '.join(SECTIONS)}")
    try:
        check_writable(options.page)
    except ValueError as wrong:
        parser.error(str(wrong))
    fitted, digest = read_fitted()
    report = Report(options=options, preset=preset_named(options.preset), fitted=fitted)
    print(f"{options.preset}, {options.semantics}, {options.seeds} seeds, fitted numbers {digest}")
    for name in options.sections:
        print(f"{name}: {(SECTIONS[name].__doc__ or '').splitlines()[0]}", flush=True)
        try:
            SECTIONS[name](report)
        except ValueError as wrong:
            parser.exit(2, f"{parser.prog}: {wrong}\n")
    hits = sum(hit for *_, hit in report.figures)
    print(f"{hits} of {len(report.figures)} figures hit")
    if options.page and report.runs:
        title = f"{options.preset}, {options.semantics}"
        base = PAPER.name if any(run.policy == PAPER.name for run in report.runs) else None
        write_page(report.runs, options.page, title=title, base=base, note=f"fitted numbers {digest}")
    if options.json:
        ok = report.value is not None and report.value >= TARGET
        result = {"bench": "sim", "claim": "ours over PEARL as in the paper", "value": report.value, "target": TARGET, "ok": ok}
        print(json.dumps(result | {"hits": hits, "figures": len(report.figures), "fitted": digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
