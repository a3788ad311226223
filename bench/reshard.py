"""Claim: a model goes from one layout to another at 0.85 of the raw rate of its messages or more, and no byte moves in vain.

The raw rate is that of the same messages over the same transport. Plans move no byte that is there already, and Qwen3-30B-A3B
is planned for 64 -> 32 ranks in under 2 s, for 1,024 ranks in under 30 s. Planning needs no weights: seconds of the plan and
of one member's part of it, bytes that move against the least that could (added up from the members' tables, independently of
the plan), and the busiest sender and receiver. Then plans are carried out by processes of this machine, one thread each, over
shared memory and over gloo: in every round the bare messages of the plan (same sizes, order and number under way, memory
already there: copied into a slot and out of it, or sent) and the staged exchange (conversion, finiteness, checksums), one
after the other. `ratio` is the median of the rounds' ratios of bare to exchange, `cpu` the same of the processor time of all
members together: where they share too few processors, nothing overlaps, and the ratio cannot be better than that. `value` is
the worst ratio. `write_ms` is how long it takes to make live what was staged, and `streamed_ms` an exchange that writes it at
once. A member that trains and serves copies in its own memory, which is set against a memcpy of as many bytes. `load` is the
machine's load average, since all compete for its processors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from bench.publish import LARGE, timed
from pearl.engine.comm.communicator import GroupCommunicator
from pearl.engine.comm.layout import Layout, cuts, held
from pearl.engine.models.config import DTYPE_BYTES, Experts, ModelConfig
from pearl.engine.models.params import Box
from pearl.engine.weights.exchange import PAUSE_S, WINDOW, Exchange
from pearl.engine.weights.message import Message
from pearl.engine.weights.neighbours import Handed, Neighbours
from pearl.engine.weights.reshard import ReshardPlan, plan_reshard

TARGET = 0.85
TIMEOUT_S = 120.0
DTYPE = "bfloat16"
SHARED, GLOO = "shared memory", "gloo"
SIDES = ("exchange", "raw", "write", "streamed", "memcpy")

QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    rope_theta=1e6,
    rms_eps=1e-6,
    tie_embeddings=False,
    qk_norm=True,
)
QWEN3_30B_A3B = replace(
    QWEN3_8B,
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    experts=Experts(count=128, top_k=8, intermediate_size=768, norm_topk_prob=True, layers=tuple(range(48))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, two layouts, and the most seconds that planning may take."""

    name: str
    model: ModelConfig
    source: Layout
    target: Layout
    limit_s: float = 2.0


def ranks(first: int, last: int, **shape: int) -> Layout:
    return Layout(members=tuple(range(first, last)), **shape)


PLANNED = (
    Case(name="8B, 16 fsdp -> 8 x tp2", model=QWEN3_8B, source=ranks(0, 16, fsdp=16), target=ranks(16, 32, tp=2)),
    Case(name="8B, 16 fsdp -> 8 x tp2, same", model=QWEN3_8B, source=ranks(0, 16, fsdp=16), target=ranks(0, 16, tp=2)),
    Case(name="8B, 2 x 8 fsdp -> 4 x tp4", model=QWEN3_8B, source=ranks(0, 16, fsdp=8), target=ranks(16, 32, tp=4)),
    Case(name="30B, 64 fsdp -> 8 x tp4", model=QWEN3_30B_A3B, source=ranks(0, 64, fsdp=64), target=ranks(64, 96, tp=4)),
    Case(name="30B, fsdp ep8 -> tp4 ep32", model=QWEN3_30B_A3B, source=ranks(0, 64, fsdp=64, ep=8),
         target=ranks(64, 96, tp=4, ep=32)),
    Case(name="30B, 64 fsdp -> 8 x tp4, within", model=QWEN3_30B_A3B, source=ranks(0, 64, fsdp=64),
         target=ranks(0, 32, tp=4)),
    Case(name="30B, 1024 -> 256 x tp4", model=QWEN3_30B_A3B, source=ranks(0, 1024, fsdp=1024, ep=64),
         target=ranks(1024, 2048, tp=4), limit_s=30.0),
    Case(name="30B, 8 x 128 -> 128 x tp8", model=QWEN3_30B_A3B, source=ranks(0, 1024, fsdp=128),
         target=ranks(1024, 2048, tp=8), limit_s=30.0),
)  # fmt: skip

EXECUTED = (
    Case(name="1 -> 1", model=LARGE, source=ranks(0, 1), target=ranks(1, 2)),
    Case(name="2 fsdp -> tp2", model=LARGE, source=ranks(0, 2, fsdp=2), target=ranks(2, 4, tp=2)),
    Case(name="2 fsdp -> 2 x 1, same", model=LARGE, source=ranks(0, 2, fsdp=2), target=ranks(0, 2)),
    Case(name="1 -> itself", model=LARGE, source=ranks(0, 1), target=ranks(0, 1)),
)
LARGE_TP = replace(LARGE, num_heads=8, num_kv_heads=4)
"""Two ranks cannot share nine heads."""


def planned(case: Case) -> dict[str, float | str | bool]:
    """One row of the first table."""
    cuts.cache_clear()
    start = time.perf_counter()
    plan = plan_reshard(case.model, case.source, case.target, dtype=DTYPE)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    plan.of(case.target.members[-1])
    part = time.perf_counter() - start
    least = least_bytes(case)
    return {
        "name": case.name,
        "plan_s": seconds,
        "part_s": part,
        "gb": plan.nbytes / 1e9,
        "least_gb": least / 1e9,
        "sender_gb": float(plan.sent.max()) / 1e9,
        "receiver_gb": float(plan.received.max()) / 1e9,
        "ok": seconds < case.limit_s and plan.nbytes == least,
    }


def least_bytes(case: Case) -> int:
    """What the members of the target layout hold, without what they hold already."""
    both = [member for member in case.target.members if member in set(case.source.members)]
    places = max(case.target.grid().size, case.target.grid(experts=True).size)
    numbers = 0
    for member in case.target.members[:places]:
        numbers += sum(prod(spec.shape) for spec in held(case.model, case.target, member))
    numbers *= len(case.target.members) // places
    for member in both:
        present = dict(tensor_boxes(case.model, case.source, member))
        for name, box in tensor_boxes(case.model, case.target, member):
            if name in present:
                sides = zip(box, present[name], strict=True)
                numbers -= prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in sides)
    return numbers * DTYPE_BYTES[DTYPE]


def tensor_boxes(model: ModelConfig, layout: Layout, member: int) -> Iterator[tuple[str, Box]]:
    """Hugging Face tensor and the region of it that a member holds."""
    return ((part.hf_name, part.source) for spec in held(model, layout, member) for part in spec.parts)


def member(rank: int, folder: str, case: Case, dtype: str, way: str, rounds: int, results: Connection) -> None:
    """One process; sends the seconds of each round, and the processor's."""
    torch.set_num_threads(1)
    plan = plan_reshard(case.model, case.source, case.target, dtype=DTYPE)
    size = len(plan.members)
    store = dist.FileStore(f"{folder}/store", size)
    comm = GroupCommunicator(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S)))
    source = local(case, case.source, rank, getattr(torch, dtype))
    target = local(case, case.target, rank, getattr(torch, DTYPE))
    exchange = Exchange(comm, plan, timeout_s=TIMEOUT_S, shared_memory=way == SHARED)
    bare = BareMessages(comm, plan, exchange)
    flat = torch.zeros(int(plan.kept.max()) or 1, dtype=torch.uint8)
    copy = torch.zeros_like(flat)
    times: dict[str, list[float]] = {name: [] for name in (*SIDES, *(f"{side}_cpu" for side in SIDES))}
    work: dict[str, Callable[[], None]] = {
        "exchange": partial(exchange.wait, TIMEOUT_S),
        "raw": bare.run,
        "write": partial(exchange.write, target),
        "streamed": partial(exchange.wait, TIMEOUT_S),
        "memcpy": partial(copy.copy_, flat),
    }
    for turn in range(rounds + 2):
        for side, run in work.items():
            if side in ("exchange", "streamed"):
                exchange.begin(2 * turn + (side == "streamed"), source, target if side == "streamed" else None)
            used = time.process_time()
            times[side].append(timed(comm, run))
            times[f"{side}_cpu"].append(time.process_time() - used)
    results.send({name: values[2:] for name, values in times.items()})


def local(case: Case, layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    table = held(case.model, layout, rank) if rank in layout.members else ()
    return {spec.name: torch.randn(spec.shape).to(dtype) for spec in table}


class BareMessages:
    """The messages of a plan without what they are for, from and into memory of their own, as the weights have too."""

    def __init__(self, comm: GroupCommunicator, plan: ReshardPlan, exchange: Exchange) -> None:
        """They go the way that the exchange's go, which has been through once before `run`."""
        part = plan.of(comm.rank)
        self._comm, self._exchange = comm, exchange
        self._lane = sorted((*part.sends, *part.receives), key=lambda parcel: parcel.key)
        self._memory = [torch.ones(Message.size(parcel.bucket), dtype=torch.uint8) for parcel in self._lane]
        self._round = 1 << 22

    def run(self) -> None:
        if self._exchange._neighbours is None:
            self._send()
        else:
            self._round += 1
            self._hand(self._exchange._neighbours)

    def _send(self) -> None:
        works: list[dist.Work] = []
        group = self._comm.group
        for index, (parcel, memory) in enumerate(zip(self._lane, self._memory, strict=True)):
            if index >= WINDOW:
                works[index - WINDOW].wait()
            if parcel.sender == self._comm.rank:
                works.append(group.send([memory], parcel.receiver, parcel.key[0]))
            else:
                works.append(group.recv([memory], parcel.sender, parcel.key[0]))
        for work in works[-WINDOW:]:
            work.wait()

    def _hand(self, neighbours: Neighbours) -> None:
        lane, free = [*zip(self._lane, self._memory, strict=True)][::-1], [*range(WINDOW)]
        flying: list[tuple[Handed, Tensor | None, int]] = []
        while lane or flying:
            worked = bool(lane and free)
            if lane and free:
                (parcel, memory), slot = lane.pop(), free.pop()
                ticket = self._round << 40 | parcel.key[0] << 20 | parcel.key[1]
                if parcel.sender == self._comm.rank:
                    neighbours.slot(slot)[: len(memory)].copy_(memory)
                    flying.append((neighbours.give(slot, ticket), None, slot))
                else:
                    flying.append((neighbours.expect(parcel.sender, ticket), memory, slot))
            for flight in [flight for flight in flying if flight[0].done()]:
                handed, memory, slot = flight
                if memory is not None and handed.memory is not None:
                    memory.copy_(handed.memory[: len(memory)])
                    handed.release()
                flying.remove(flight)
                free.append(slot)
                worked = True
            if not worked:
                time.sleep(PAUSE_S)


def executed(case: Case, dtype: str, way: str, rounds: int) -> dict[str, float | str | bool]:
    """One row of the second table."""
    case = replace(case, model=LARGE_TP)
    size = len({*case.source.members, *case.target.members})
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        given = (folder, case, dtype, way, rounds)
        members = [context.Process(target=member, args=(rank, *given, pipes[rank][1])) for rank in range(size)]
        for process in members:
            process.start()
        try:
            results = [receiver.recv() for receiver, _ in pipes]
        finally:
            for process in members:
                process.join(10)
                process.kill()
    plan = plan_reshard(case.model, case.source, case.target, dtype=DTYPE)
    row: dict[str, float | str | bool] = {"name": case.name, "way": way if plan.nbytes else "copy", "dtype": dtype}
    row |= {"mb": plan.nbytes / 1e6, "kept_mb": float(plan.kept.sum()) / 1e6}
    row |= {f"{side}_ms": statistics.median(results[0][side]) * 1e3 for side in SIDES}
    bare, whole = ("raw", "exchange") if plan.nbytes else ("memcpy", "streamed")
    used = {side: [sum(turn) for turn in zip(*(r[f"{side}_cpu"] for r in results), strict=True)] for side in (bare, whole)}
    return row | {"ratio": ratio(results[0], bare, whole), "cpu": ratio(used, bare, whole)}


def ratio(times: dict[str, list[float]], first: str, second: str) -> float:
    """The median of what two sides took in the same round."""
    return statistics.median(a / b for a, b in zip(times[first], times[second], strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m bench.reshard", description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    plans = [planned(case) for case in PLANNED]
    print(f"{'plan':>32} {'plan s':>8} {'part s':>8} {'GB':>10} {'least GB':>10} {'sender GB':>10} {'receiver GB':>12}")
    for r in plans:
        numbers = f"{r['plan_s']:>8.2f} {r['part_s']:>8.2f} {r['gb']:>10.2f} {r['least_gb']:>10.2f}"
        print(f"{r['name']:>32} {numbers} {r['sender_gb']:>10.2f} {r['receiver_gb']:>12.2f}{'' if r['ok'] else '   MISSED'}")
    runs = [
        executed(case, dtype, way, options.rounds)
        for case in EXECUTED
        for way in ((SHARED, GLOO) if case.source != case.target else (SHARED,))
        for dtype in (DTYPE, "float32")
    ]
    load = max(load, os.getloadavg()[0])
    sides = ("mb", "kept_mb", "raw_ms", "exchange_ms", "write_ms", "streamed_ms", "memcpy_ms", "ratio", "cpu")
    print(f"{'executed':>24} {'way':>13} {'from':>9} {' '.join(f'{side:>11}' for side in sides)}   load {load:.1f}")
    for r in runs:
        print(f"{r['name']:>24} {r['way']:>13} {r['dtype']:>9} {' '.join(f'{float(r[side]):>11.2f}' for side in sides)}")
    value = min(float(r["ratio"]) for r in runs if r["mb"])
    if options.json:
        result = {"bench": "reshard", "claim": "of the raw rate", "value": round(value, 3), "target": TARGET}
        ok = value >= TARGET and all(bool(r["ok"]) for r in plans)
        print(json.dumps(result | {"ok": ok, "load": load, "plans": plans, "cases": runs}))
    else:
        print(f"moves at {value:.2f} of the raw rate or better; target {TARGET:.2f}")


if __name__ == "__main__":
    main()
