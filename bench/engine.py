"""Claim: on a CPU the engine serves four workloads at least as fast as whatever else serves them there.

A batch that decodes, long prompts, conversations, one request; beside vLLM, OpenVINO GenAI, llama.cpp and transformers. Every
side is a process of its own (`bench/peers/`) that keeps its model loaded; they take turns on the same token ids, in an order
that turns with every round, and medians are compared: processor seconds on one thread (a busy machine hardly changes them),
wall seconds on more. `value` is the least of (fastest peer's seconds / ours) over the workloads; which peers took part is in
the result. Beside: the machine's limits, measured in the same run, and how long each workload would take at them; the targets
for SmolLM2-135M in bf16. `--profile` shows where our steps' time goes.

    python -m bench.engine --model FOLDER --peer vllm=VENV/bin/python --peer openvino=VENV/bin/python --peer llama=BUILD
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.workload import WORKLOADS, Workload, seed_of
from bench.side_process import SideProcess

ROOT = Path(__file__).parent
TARGETS_S = {1: {"W1": 4.0, "W2": 9.0, "W3": 6.4, "W4": 0.47}, 2: {"W1": 2.5, "W2": 5.0, "W3": 4.1, "W4": 0.40}}
"""SmolLM2-135M in bf16 on the machine the kernels were made for (EPYC with AVX512-BF16, quiet), by threads."""
PEERS = ("vllm", "openvino", "llama", "transformers")
RATIO = 1.0


class Side(SideProcess):
    """A process that serves workloads when asked; `rows` has what each took."""

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        super().__init__(name, command, threads=threads)
        self.rows: dict[str, list[dict]] = {}

    def serve(self, workload: str, seed: int) -> None:
        self.rows.setdefault(workload, []).append(self.ask({"workload": workload, "seed": seed}))

    def seconds(self, workload: str, measure: str) -> float:
        return statistics.median(row[measure] for row in self.rows[workload])


def command_of(name: str, place: str, options: argparse.Namespace) -> list[str]:
    """What starts a side. `place` is the Python of its environment; of llama the folder of its build."""
    script = ROOT / "peers" / ("serve_llama_cpp.py" if name == "llama" else f"serve_{name}.py")
    command = [sys.executable if name == "llama" else place, str(script), "--model", options.model]
    command += ["--dtype", options.dtype, "--threads", str(options.threads)]
    if name in ("llama", "openvino"):
        if options.gguf is None:
            raise SystemExit(f"--peer {name}: needs --gguf, a folder with the model as {Path(options.model).name}-*.gguf")
        command += ["--gguf", options.gguf]
    return command + {"llama": ["--build", place], "pearl": ["--kernels", options.kernels]}.get(name, [])


# ---------------------------------------------------------------------------------------------------- the machine's limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """GB/s of reading and GFLOP/s of multiply-adds in the dtype, of so many threads together."""

    gb_s: float
    gflop_s: float


def machine_limits(threads: int, dtype: str) -> Limits | None:
    """Measured now by a small C program; None where there is no compiler for it."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limits")
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
        try:
            subprocess.run([compiler, *flags, str(ROOT / "machine_limits.c"), "-o", program], check=True, capture_output=True)
            done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no machine limits: {error}", file=sys.stderr)
            return None
    read, fp32, bf16 = map(float, done.stdout.split())
    return Limits(gb_s=read, gflop_s=bf16 if dtype == "bf16" and bf16 else fp32)


def least_s(workload: Workload, model: dict, dtype: str, limits: Limits) -> float:
    """Seconds at the machine's limits: every product at the peak rate, decode steps no faster than weights and KV are read."""
    size = 2 if dtype == "bf16" else 4
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    dim = model.get("head_dim") or hidden // heads
    kv_width = model["num_key_value_heads"] * dim
    matrices = layers * (hidden * (2 * heads * dim + 2 * kv_width) + 3 * hidden * model["intermediate_size"])
    head = model["vocab_size"] * hidden
    total, context = 0.0, 0
    for _ in range(workload.turns):
        # Attention: two products over, on average, half of the new tokens and all of those before.
        seen = context + workload.prompt / 2
        flop = 2 * workload.prompt * (matrices + 2 * layers * heads * dim * seen) + 2 * head
        total += workload.sequences * flop / limits.gflop_s / 1e9
        context += workload.prompt
        for _ in range(workload.output - 1):
            context += 1
            flop = 2 * workload.sequences * (matrices + head + 2 * layers * heads * dim * context)
            read = size * (matrices + head + 2 * layers * kv_width * context * workload.sequences)
            total += max(flop / limits.gflop_s, read / limits.gb_s) / 1e9
        context += 1
    return total


# ---------------------------------------------------------------------------------------------------- the comparison


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All sides' seconds per workload, and what they are held against."""

    sides: list[Side]
    measure: str
    least: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)

    def ratios(self) -> dict[str, float]:
        """Workload -> seconds of the fastest peer over ours."""
        ours, *peers = self.sides
        names = ours.rows if peers else ()
        return {w: min(peer.seconds(w, self.measure) for peer in peers) / ours.seconds(w, self.measure) for w in names}

    def print_table(self) -> None:
        names = list(self.sides[0].rows)
        print(f"{self.measure}: medians of {len(self.sides[0].rows[names[0]])}; output tokens per second in brackets")
        print(f"{'':>14}" + "".join(f"{name + ' ' + WORKLOADS[name].what:>24}" for name in names))
        for side in self.sides:
            seconds = [side.seconds(name, self.measure) for name in names]
            cells = [f"{s:.2f} ({WORKLOADS[name].output_tokens / s:.0f})" for name, s in zip(names, seconds, strict=True)]
            print(f"{side.name:>14}" + "".join(f"{cell:>24}" for cell in cells))
        for what, numbers in (("at the limits", self.least), ("target", self.targets)):
            if numbers:
                print(f"{what:>14}" + "".join(f"{numbers[name]:>24.2f}" for name in names))
        others = [row["other_cores"] for side in self.sides for rows in side.rows.values() for row in rows]
        print(f"cores busy with something else meanwhile: {statistics.median(others):.2f} (median), {max(others):.2f} (most)")
        checks = {side.name: side.about["check"] for side in self.sides}
        if len({tuple(check) for check in checks.values()}) > 1:
            print(f"sides answer the check prompt differently: {checks}")


def compare(options: argparse.Namespace) -> Comparison:
    places = dict(peer.split("=", 1) for peer in options.peer)
    if unknown := sorted(places.keys() - set(PEERS)):
        raise SystemExit(f"--peer {unknown[0]}: must be one of {', '.join(PEERS)}")
    limits = machine_limits(options.threads, options.dtype)
    sides: list[Side] = []
    try:
        for name, place in {"pearl": sys.executable, **places}.items():
            sides.append(Side(name, command_of(name, place, options), options.threads))
            print(f"{name}: {sides[-1].about}", file=sys.stderr)
        for repetition in range(options.reps):
            for workload in options.workloads.split(","):
                turn = repetition % len(sides)
                for side in sides[turn:] + sides[:turn]:
                    side.serve(workload, seed_of(workload, options.seed, repetition))
    finally:
        for side in sides:
            side.close()
    model = json.loads((Path(options.model) / "config.json").read_text())
    names = options.workloads.split(",")
    is_smollm2 = (model["hidden_size"], model["num_hidden_layers"], options.dtype) == (576, 30, "bf16")
    return Comparison(
        sides=sides,
        measure="cpu_s" if options.threads == 1 else "wall_s",
        least={name: least_s(WORKLOADS[name], model, options.dtype, limits) for name in names} if limits else {},
        targets=TARGETS_S.get(options.threads, {}) if is_smollm2 else {},
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PLACE", help=f"NAME: {', '.join(PEERS)}")
    parser.add_argument("--gguf", help="folder with the model as NAME-f16.gguf (openvino) and NAME-DTYPE.gguf (llama)")
    parser.add_argument("--profile", action="store_true", help="only ours: where a step's time goes")
    options = parser.parse_args()
    if options.profile:
        from bench.engine_profile import profile

        profile(options)
        return
    began = time.perf_counter()
    result = compare(options)
    result.print_table()
    ratios = result.ratios()
    value = min(ratios.values(), default=None)
    if value is not None:
        print(f"fastest peer's seconds / ours: {', '.join(f'{w} {ratio:.2f}' for w, ratio in ratios.items())}")
    if options.json:
        seconds = {side.name: {w: round(side.seconds(w, result.measure), 3) for w in side.rows} for side in result.sides}
        about = {side.name: side.about["version"] for side in result.sides}
        facts = {"bench": "engine", "claim": "seconds of the fastest peer / ours, the worst workload", "value": value}
        facts |= {"target": RATIO, "ok": value is not None and value >= RATIO, "measure": result.measure}
        facts |= {"threads": options.threads, "dtype": options.dtype, "seconds": seconds, "sides": about}
        facts |= {"least_s": result.least, "target_s": result.targets, "took_s": round(time.perf_counter() - began)}
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
