"""Claim: an RL step on SmolLM2-135M takes at most half of the time that TRL's GRPOTrainer needs for it on the same threads.

The step: 16 answers of 64 tokens to two prompts of 64, in groups of 8, sampled at temperature 1 in bf16, one GRPO update of
all weights (fp32 with bf16 products), and the new weights in the engine. Every side is a process of its own that keeps its
model loaded; they take turns, in an order that turns with every round, and medians are compared: wall seconds, and processor
seconds, which a busy machine changes less. `--trl PYTHON` names the Python of an environment with TRL; without it, plain
torch and transformers make the same step as a stand-in, and the result says so. `value` is PEARL's seconds over the other's,
in processor seconds with `--busy`.

    python -m bench.rl --model FOLDER --trl VENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from bench.peers import rl_workload as work
from bench.side_process import SideProcess

ROOT = Path(__file__).parent
TARGET = 0.5
TOKENS = work.GROUPS * work.SIBLINGS * (work.PROMPT + 2 * work.ANSWER)
"""Tokens generated and trained in a step, as `tokens_per_s` of a run counts them."""


class Side(SideProcess):
    """A process that makes a step when asked; `rows` has what those took that count."""

    def __init__(self, name: str, python: str, script: str, model: str, threads: int) -> None:
        command = [python, str(ROOT / "peers" / script), "--model", model, "--threads", str(threads)]
        passive = {"OMP_WAIT_POLICY": "passive"}  # threads that spin would count as processor time
        super().__init__(name, command, threads=threads, variables=passive)
        self.rows: list[dict] = []

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)

    def parts(self) -> dict[str, float]:
        """Medians of the parts' seconds."""
        return {name: statistics.median(row["parts"][name] for row in self.rows) for name in self.rows[0]["parts"]}


def measure(options: argparse.Namespace) -> dict:
    """Both sides, `rounds` steps each after one that is not counted."""
    name, python, script = ("trl", options.trl, "train_trl.py")
    if python is None:
        name, python, script = "stand-in", sys.executable, "train_transformers.py"
    sides = [Side("pearl", sys.executable, "train_pearl.py", options.model, options.threads)]
    sides.append(Side(name, python, script, options.model, options.threads))
    try:
        for turn in range(options.rounds + 1):
            for side in sides if turn % 2 else reversed(sides):
                row = side.ask({"seed": turn})
                side.rows += [row] if turn else []
    finally:
        for side in sides:
            side.close()
    key = "cpu_s" if options.busy else "seconds"
    value = sides[0].median(key) / sides[1].median(key)
    return {
        "bench": "rl",
        "claim": f"a step takes at most {TARGET:.2f} of {name}'s time",
        "value": value,
        "target": TARGET,
        "ok": value <= TARGET,
        "measured": "processor seconds" if options.busy else "wall seconds",
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "sides": {
            side.name: {
                "about": side.about["about"],
                "seconds": side.median("seconds"),
                "cpu_s": side.median("cpu_s"),
                "tokens_per_s": TOKENS / side.median("seconds"),
                "parts": side.parts(),
            }
            for side in sides
        },
    }


def table(result: dict) -> str:
    """The result for people."""
    lines = [f"{'':12}{'wall s':>9}{'cpu s':>9}{'tok/s':>9}  parts (wall s)"]
    for name, side in result["sides"].items():
        parts = "  ".join(f"{part} {seconds:.2f}" for part, seconds in side["parts"].items())
        numbers = f"{side['seconds']:9.2f}{side['cpu_s']:9.2f}{side['tokens_per_s']:9.0f}"
        lines.append(f"{name:12}{numbers}  {parts}")
    verdict = "ok" if result["ok"] else "missed"
    lines.append(f"{result['measured']}: {result['value']:.2f} of the other's, target {result['target']:.2f}: {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rl", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=os.environ.get("PEARL_SMOLLM2", "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of an environment that has TRL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="compare processor seconds: other programs run here")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    result = measure(options)
    print(table(result))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
