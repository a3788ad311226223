"""Claim: gathering and scattering scattered 16-token KV blocks with `pearl._C` is at least 1.5 times as fast as torch's
index_select / index_copy, and near one memcpy of the same bytes once blocks are larger than a few pages.

All sides run in one process on warm memory, one after the other in every round, on one thread each; medians are compared.
`value` is torch's time over ours, gather and scatter together, in the worst case; `of_memcpy` is the worst share of memcpy's
speed. Pools are larger than the caches; ids are random, so hardly two blocks are neighbours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pearl.engine.migration.blocks import backend, gather_blocks, scatter_blocks

TARGET = 1.5
BLOCK_TOKENS = 16
POOL_BYTES = 512 << 20
MOVED_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pool's sizes, bf16."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * BLOCK_TOKENS * self.head_dim * 2


CASES = (
    Case(name="2 heads x 64", layers=24, kv_heads=2, head_dim=64),
    Case(name="4 heads x 128", layers=36, kv_heads=4, head_dim=128),
    Case(name="8 heads x 128", layers=36, kv_heads=8, head_dim=128),
)


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of each side for the same bytes."""
    rows = case.layers * 2
    num_blocks = POOL_BYTES // rows // case.block_bytes
    count = MOVED_BYTES // rows // case.block_bytes
    pool = torch.zeros(case.layers, 2, num_blocks, case.kv_heads, BLOCK_TOKENS, case.head_dim, dtype=torch.bfloat16)
    ids = random.Random(0).sample(range(num_blocks), count)
    index = torch.tensor(ids)
    buffer = gather_blocks(pool, ids)
    flat, flat_copy = torch.ones_like(buffer), torch.ones_like(buffer)
    sides: dict[str, Callable[[], object]] = {
        "gather": lambda: gather_blocks(pool, ids, buffer),
        "torch_gather": lambda: torch.index_select(pool, 2, index, out=buffer),
        "scatter": lambda: scatter_blocks(pool, ids, buffer),
        "torch_scatter": lambda: pool.index_copy_(2, index, buffer),
        "memcpy": lambda: flat.copy_(flat_copy),
    }
    seconds = interleaved(sides, rounds)
    return {**seconds, "bytes": float(buffer.nbytes), "block_bytes": float(case.block_bytes), "blocks": float(count)}


def interleaved(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Runs all sides once per round, after one round that is not counted; medians in seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def gigabytes_per_second(result: dict[str, float], side: str) -> float:
    """Bytes moved (counted once) over the side's time."""
    return result["bytes"] / result[side] / 1e9


def table(results: dict[str, dict[str, float]]) -> str:
    sides = ("gather", "torch_gather", "scatter", "torch_scatter", "memcpy")
    lines = [f"{'GB/s':16}{'block':>10}" + "".join(f"{side:>15}" for side in sides)]
    for name, result in results.items():
        numbers = "".join(f"{gigabytes_per_second(result, side):15.2f}" for side in sides)
        lines.append(f"{name:16}{result['block_bytes'] / 1024:7.0f}KiB" + numbers)
    return "\n".join(lines)


def verdict(results: dict[str, dict[str, float]]) -> dict[str, object]:
    """The JSON line: the worst case decides."""
    against_torch = [(r["torch_gather"] + r["torch_scatter"]) / (r["gather"] + r["scatter"]) for r in results.values()]
    against_memcpy = [2 * r["memcpy"] / (r["gather"] + r["scatter"]) for r in results.values()]
    value = min(against_torch)
    return {
        "bench": "migration",
        "claim": "gather + scatter of scattered 16-token blocks: torch's time over ours, worst case",
        "value": round(value, 3),
        "target": TARGET,
        "ok": value >= TARGET and backend() == "pearl._C",
        "of_memcpy": round(min(against_memcpy), 3),
        "backend": backend(),
        "cases": {
            name: {side: round(gigabytes_per_second(r, side), 2) for side in ("gather", "scatter", "memcpy")}
            for name, r in results.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {case.name: measure(case, args.rounds) for case in CASES}
    print(f"blocks are moved by {backend()}; bytes counted once; one thread")
    print(table(results))
    outcome = verdict(results)
    print(json.dumps(outcome) if args.json else f"torch / ours: {outcome['value']}, ours / memcpy: {outcome['of_memcpy']}")


if __name__ == "__main__":
    main()
