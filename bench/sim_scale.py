"""Claim: placing a request costs less than 1 ms among 512 workers (1,024 GPUs); what breaks first beyond is in the table.

By number of workers, eight trajectories to each: microseconds to place a request and to take a load report, milliseconds to
re-balance all sessions, to decide on a change of shape (as `bench.cluster_scheduler` does), and, up to --simulate workers,
processor seconds to simulate one RL step. Processor time of one thread. `value`: placing among 512 workers, in ms.
"""

from __future__ import annotations

import argparse
import json
import time

from bench.cluster_scheduler import decide
from bench.sim_cases import makespan
from pearl.protocol import Role
from pearl.sched.router import Router
from pearl.sched.sim.baselines import ROLL
from pearl.sched.sim.plans import EngineSizes
from pearl.sched.sim.presets.fitted import read_fitted
from pearl.sched.sim.presets.qwen3 import preset_named

TARGET_MS, PER_WORKER, CONTEXT = 1.0, 8, 16_000


def router_of(workers: int) -> tuple[Router, list[str]]:
    """A third compute prompts, the others decode; all sessions have a request in flight, spread unevenly."""
    router = Router()
    for number in range(workers):
        router.add_worker(f"w{number}", Role.PREFILL if number % 3 == 0 else Role.DECODE)
        router.on_load(f"w{number}", 0, 4, 10_000)
    sessions = [f"s{number}" for number in range(workers * PER_WORKER)]
    return router, sessions


def router_us(workers: int) -> tuple[float, float, float]:
    """(microseconds to place, microseconds of a report, milliseconds to re-balance)."""
    router, sessions = router_of(workers)
    decoding = [name for name, load in router.loads.items() if load.role is Role.DECODE]
    for number, session in enumerate(sessions):
        router.place(session, CONTEXT)
        router.handed_over(session, decoding[min(number % len(decoding), number % (len(decoding) // 2 + 1))])
    some = sessions[: min(len(sessions), 200)]
    for session in some:
        router.done(session)
    began = time.thread_time()
    for session in some:
        router.place(session, CONTEXT + 600)
    placed = time.thread_time()
    for number in range(200):
        router.on_load(f"w{number % workers}", 1, 5, 9000)
    reported = time.thread_time()
    router.rebalance()
    return (placed - began) / len(some) * 1e6, (reported - placed) / 200 * 1e6, (time.thread_time() - reported) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_scale", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 128, 512, 2048])
    parser.add_argument("--simulate", type=int, default=16, help="largest number of workers of which a step is simulated")
    options = parser.parse_args()
    preset, fitted = preset_named("qwen3-8b-h800"), read_fitted()[0]
    print(f"{'workers':>8}{'GPUs':>7}{'place us':>10}{'report us':>11}{'rebalance ms':>14}{'decide ms':>11}{'simulate s':>12}")
    table = {}
    for workers in options.workers:
        place, report, rebalance = router_us(workers)
        row = {"place_us": place, "report_us": report, "rebalance_ms": rebalance, "decide_ms": decide(workers)[0]}
        if workers <= options.simulate:
            began = time.process_time()
            sizes = EngineSizes(block_size=1024)
            makespan(ROLL, preset, fitted, workers=workers, batch=PER_WORKER * workers, engine=sizes)
            row["simulate_s"] = time.process_time() - began
        table[workers] = row
        simulated = f"{row['simulate_s']:.1f}" if "simulate_s" in row else "-"
        times = f"{place:>10.0f}{report:>11.1f}{rebalance:>14.1f}{row['decide_ms']:>11.1f}{simulated:>12}"
        print(f"{workers:>8}{2 * workers:>7}{times}", flush=True)
    value = table[512]["place_us"] / 1e3 if 512 in table else None
    if options.json:
        result = {"bench": "sim_scale", "claim": "placing a request among 512 workers, ms", "value": value}
        print(json.dumps(result | {"target": TARGET_MS, "ok": value is not None and value < TARGET_MS, "cases": table}))


if __name__ == "__main__":
    main()
