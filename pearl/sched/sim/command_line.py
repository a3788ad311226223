"""`python -m pearl.sched.sim`: runs systems on a segment of external GPUs, and shows what came of it.

Owns the options and how they become runs. What is shown is made by `tables.py` and `page.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pearl.sched.sim.availability import EXTERNAL_GPUS, SEGMENTS, external_gpus, read_trace, segment_gpus, steady
from pearl.sched.sim.baselines import believed, system_named
from pearl.sched.sim.page import write_page
from pearl.sched.sim.plans import Availability, EngineSizes, Hardware, TrajectoryPlan
from pearl.sched.sim.presets.fitted import Fitted, read_fitted
from pearl.sched.sim.presets.qwen3 import PRESETS, Preset, preset_named
from pearl.sched.sim.results import SimResult
from pearl.sched.sim.simulator import Simulation
from pearl.sched.sim.tables import Run, as_text, counts_line, step_table, throughput, throughput_table, transition_table
from pearl.sched.sim.workload import FAMILIES, TaskFamily, family_named, replay, workload_of

Rows = list[list[TrajectoryPlan]]

TOLD_EVERY_S = 60.0
"""How far a simulation is, is said so often, in seconds of this machine."""


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m pearl.sched.sim", description=(__doc__ or "").splitlines()[0])
    parse.add_argument("--preset", default="qwen3-8b-h800", help=f"costs and work: {', '.join(PRESETS)}")
    parse.add_argument("--workload", default="", help=f"another: {', '.join(FAMILIES)}, or a run's trajectories.jsonl")
    parse.add_argument("--policy", default="roll,rlboost,paper,ours", help="systems, by commas; also fixed ratios such as 3:5")
    segments = ", ".join(segment.name for segment in SEGMENTS)
    parse.add_argument("--trace", default="none", help=f"external GPUs: none, a number of workers, {segments}, or a CSV file")
    parse.add_argument("--trace-dir", type=Path, help="where the segments' recorded traces are; else they are drawn")
    parse.add_argument("--gpus", type=int, default=EXTERNAL_GPUS, help="GPUs that a CSV file's most nodes stand for")
    parse.add_argument("--notice", type=float, default=0.0, metavar="S", help="seconds before a GPU goes at which it is told")
    parse.add_argument("--training-gpus", type=int, default=16, help="GPUs that train, and may serve while they do not (16)")
    parse.add_argument("--reserved-workers", type=int, default=2, help="workers that always serve, of --tp GPUs each (2)")
    parse.add_argument("--tp", type=int, default=2, help="GPUs that make one worker (2)")
    parse.add_argument("--batch", type=int, default=64, help="trajectories that a step trains, in whole groups (64)")
    when = "a batch starts when the one before is complete (barrier, the default), or a trajectory when another ends (slots)"
    parse.add_argument("--semantics", choices=("barrier", "slots"), default="barrier", help=when)
    sent = "to a decode worker goes the KV that it lacks (append, the default), or each turn's whole context"
    parse.add_argument("--transfer", choices=("append", "context"), default="append", help=sent)
    parse.add_argument("--block-size", type=int, default=EngineSizes().block_size, help="coarse blocks are faster to simulate")
    parse.add_argument("--hours", type=float, default=2.0, help="of simulated time, at most (2)")
    parse.add_argument("--steps", type=int, help="ends a run after so many steps, if that is earlier")
    parse.add_argument("--seeds", default="0", help="by commas")
    parse.add_argument("--html", type=Path, help="a page with tables and pictures")
    parse.add_argument("--json", type=Path, help="all results")
    parse.add_argument("--details", action="store_true", help="steps and transitions of each run, too")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 for options that cannot be."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        for path in (options.html, options.json):
            check_writable(path)
        runs, note = play(options)
    except (ValueError, OSError) as error:
        parse.exit(2, f"{parse.prog}: error: {error}\n")
    print(note)
    print(as_text(throughput_table(runs, base=runs[0].policy)))
    for run in runs if options.details else ():
        print(f"\n{run.policy}, seed {run.seed}: {counts_line(run.result.counts)}")
        print(as_text(step_table(run.result)))
        print(as_text(transition_table(run.result)))
    if options.html:
        write_page(runs, options.html, title=f"{options.preset} on {options.trace}", base=runs[0].policy, note=note)
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    return 0


def check_writable(path: Path | None) -> None:
    """Before hours of simulation: ValueError if nothing can be written there."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path}: {folder} is no folder")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, must be a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: cannot be written")


def play(options: argparse.Namespace) -> tuple[list[Run], str]:
    """The runs, system by system, and a sentence that says what they rest on. ValueError for what cannot be."""
    preset, (fitted, digest) = preset_named(options.preset), read_fitted()
    systems = [system_named(name) for name in options.policy.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    recorded, family, told = _work(options, preset, fitted)
    hardware = Hardware(training_gpus=options.training_gpus, reserved_workers=options.reserved_workers, tp=options.tp)
    more: dict[str, Any] = dict(
        semantics=options.semantics,
        transfer=options.transfer,
        engine=EngineSizes(block_size=options.block_size),
        max_steps=options.steps,
        until_s=3600 * options.hours,
    )
    runs, sources = [], {}
    for system in systems:
        for seed in seeds:
            gpus, sources[seed] = _external(options, seed)
            settings = system.settings(preset, fitted, hardware=hardware, batch=options.batch, seed=seed, **more, **told)
            plans = _plans(recorded, family, settings.group, seed)
            began = time.monotonic()
            simulation = Simulation(settings, plans, gpus if system.external else None)
            result = _watched(simulation, f"{system.name}, seed {seed}")
            runs.append(Run(policy=system.name, segment=options.trace, seed=seed, result=result))
            found = f"{throughput(result):.0f} tokens/s over {len(result.steps)} steps ({time.monotonic() - began:.0f} s)"
            print(f"{system.name}, seed {seed}: {found}", file=sys.stderr, flush=True)
    about = f"{options.preset}, fitted numbers {digest}, external GPUs: {'; '.join(dict.fromkeys(sources.values()))}"
    until = f"{options.hours:g} h" if options.steps is None else f"{options.steps} steps, {options.hours:g} h at most"
    return runs, f"{about}; {options.semantics}, {until}"


def _watched(simulation: Simulation, name: str) -> SimResult:
    """Runs it to its end, and says on standard error that it begins and, once in a while, how far it is."""
    print(f"{name}: begins", file=sys.stderr, flush=True)
    told = time.monotonic()
    while simulation.step():
        if time.monotonic() - told >= TOLD_EVERY_S:
            told = time.monotonic()
            far = f"{len(simulation.steps)} steps and {simulation.agenda.now / 60:.0f} min are simulated"
            print(f"{name}: {far}", file=sys.stderr, flush=True)
    return simulation.result()


def _work(options: argparse.Namespace, preset: Preset, fitted: Fitted) -> tuple[Rows, TaskFamily, dict[str, Any]]:
    """(recorded groups, if there are any; the kind of work; what of it goes into the settings)."""
    name, batch = options.workload, options.batch
    if name.endswith(".jsonl"):
        rows, known = replay(Path(name)), {"overhead_s": fitted.overhead_s, "miss_share": fitted.miss_share}
        load = workload_of([plan for members in rows for plan in members], batch, **known)
        return rows, preset.family, {"workload": load, "group": statistics.mode(len(members) for members in rows)}
    family = fitted.family(family_named(name) if name else preset.family)
    return [], family, {"workload": believed(family, fitted, batch, barrier=options.semantics == "barrier")}


def _plans(recorded: Rows, family: TaskFamily, group: int, seed: int) -> Iterator[TrajectoryPlan]:
    for members in recorded or family.groups(group, seed):
        yield from members


def _external(options: argparse.Namespace, seed: int) -> tuple[Availability, str]:
    """(external GPUs, where they come from)."""
    name = options.trace
    if name == "none" or name.isdecimal():
        count = 0 if name == "none" else int(name)
        return steady(count, options.tp), f"{count} workers all the time"
    segment = next((segment for segment in SEGMENTS if segment.name == name), None)
    if segment is not None:
        gpus, source = segment_gpus(segment, options.trace_dir, tp=options.tp, seed=seed)
        return Availability(events=gpus.events, notice_s=options.notice), source
    if not Path(name).is_file():
        known = ", ".join(one.name for one in SEGMENTS)
        raise ValueError(f"trace={name!r}: must be one of {known}, none, a number of workers, or a file")
    trace = read_trace(Path(name))
    most = max(count for _, count in trace.counts())
    rng = np.random.default_rng(seed)
    gpus = external_gpus(trace, most_nodes=most, gpus=options.gpus, tp=options.tp, rng=rng, notice_s=options.notice)
    return gpus, Path(name).name
