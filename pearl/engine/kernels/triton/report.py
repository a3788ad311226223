"""`python -m pearl.engine.kernels.triton.report`: compiles the inventory for each chip and says what came out.

Owns the demands on what was compiled, the table of docs/gpu_kernels.md and the command. No GPU is needed or used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import triton

from pearl.engine.kernels.triton.aot import SHARED_LIMIT, Compiled, Recorder, compile_launch
from pearl.engine.kernels.triton.inventory import Entry, entries

MATRIX = {80: ("HMMA",), 90: ("HGMMA",), 100: ("UTCHMMA", "HMMA")}
MARKER = "<!-- table -->\n"
SMALL = {"combine_kernel", "count_kernel", "sort_kernel", "sum_shares_kernel", "penalise_kernel", "route_kernel"}
"""Kernels beside the main one of an entry, of which only the shared memory is looked at."""


def compiled(chips: Iterable[int], names: Container[str] | None = None) -> Iterator[tuple[Entry, Compiled]]:
    """Every launch of every entry (or of those with these names) for every chip; what compiles to the same, once an entry."""
    for entry in entries():
        if names is not None and entry.name not in names:
            continue
        for chip in chips:
            recorder = Recorder(chip)
            entry.use(recorder)
            for launch in {launch.key(): launch for launch in recorder.launches}.values():
                yield entry, compile_launch(launch, chip)


def complaints(entry: Entry, result: Compiled) -> list[str]:
    """What is not as demanded, in words."""
    found, counts = [], result.counts
    if result.shared_bytes > SHARED_LIMIT[result.chip]:
        found.append(f"shared memory {result.shared_bytes}: at most {SHARED_LIMIT[result.chip]}")
    if result.name in SMALL:
        return found
    if entry.hot and result.local_bytes:
        found.append(f"{result.local_bytes} bytes spilled per thread")
    if entry.matrix and not any(counts.get(name) for name in MATRIX[result.chip]):
        found.append(f"no {' or '.join(MATRIX[result.chip])} among its instructions")
    reads = counts.get("LDG", 0) + counts.get("LDGSTS", 0)
    wide = counts.get("LDG.128", 0) + counts.get("LDGSTS.128", 0)
    if wide < entry.wide * reads:
        found.append(f"only {wide} of {reads} reads are of 16 bytes")
    return found


def table(results: list[tuple[Entry, Compiled]], chips: list[int]) -> list[str]:
    """Markdown: a row per entry and kernel, a column per chip."""
    rows: dict[tuple[str, str], dict[int, list[str]]] = {}
    for entry, result in results:
        cells = rows.setdefault((entry.name, result.name.removesuffix("_kernel")), {})
        cells.setdefault(result.chip, []).append(_cell(result))
    lines = [f"| use | kernel | {' | '.join(f'sm_{chip}' for chip in chips)} |", "|---|---|" + "---|" * len(chips)]
    for (use, kernel), cells in rows.items():
        lines.append(f"| {use} | {kernel} | {' | '.join('; '.join(cells.get(chip, [])) for chip in chips)} |")
    return lines


def _cell(result: Compiled) -> str:
    products = [f"{count} {name}" for name in MATRIX[result.chip] if (count := result.counts.get(name))]
    wide = result.counts.get("LDG.128", 0) + result.counts.get("LDGSTS.128", 0)
    reads = result.counts.get("LDG", 0) + result.counts.get("LDGSTS", 0)
    sizes = [f"{result.registers} r", f"{result.local_bytes} s", f"{result.shared_bytes / 1024:.0f} K", f"{wide}/{reads}"]
    return ", ".join([*sizes, *products])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pearl.engine.kernels.triton.report", description=__doc__)
    parser.add_argument("--chips", type=int, nargs="+", default=sorted(SHARED_LIMIT), choices=sorted(SHARED_LIMIT))
    parser.add_argument("--entries", nargs="+", metavar="NAME", help="only these of the inventory")
    parser.add_argument("--into", type=Path, help="a page whose text after the line `<!-- table -->` the table replaces")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel instead of the table")
    options = parser.parse_args()
    results, bad = [], 0
    for entry, result in compiled(options.chips, options.entries):
        results.append((entry, result))
        wrong = complaints(entry, result)
        bad += len(wrong)
        if options.json:
            print(json.dumps({"use": entry.name, **asdict(result), "complaints": wrong}), flush=True)
        elif wrong:
            print(f"{entry.name}, {result.name}, sm_{result.chip}: {'; '.join(wrong)}", flush=True)
    if options.into is not None:
        before, marker, _ = options.into.read_text().partition(MARKER)
        options.into.write_text(
            "\n".join([before + marker, f"Triton {triton.__version__}.", "", *table(results, options.chips), ""])
        )
    elif not options.json:
        print("\n".join(table(results, options.chips)))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
