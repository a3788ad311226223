"""Claim: publishing weights to two serving ranks of a machine is at least 0.70 times as fast as a bare broadcast of them.

The broadcast is gloo's, of the same bytes. Three processes on this machine, one thread each. In every round the bare broadcast
(one message, memory already there) and the publication (begin to all engines having committed: conversion, finiteness,
checksums, staging, the copy in place), polled as an idle rank does, run one after the other; medians are compared. Within a
machine a publication goes through shared memory (`publish`); `gloo` is what it takes over the network, as between machines.
`value` is the bare time over the publication's, the worst of all cases. `commit` is how long a running request is held up,
`memcpy` what a plain copy of as many warm bytes takes there; `load` is the machine's load average, since everything here
competes for the processors.
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
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from pearl.config import Config, EngineConfig
from pearl.engine.comm.communicator import GroupCommunicator
from pearl.engine.engine import Engine
from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan, SnapshotReader
from pearl.rl.node_publisher import NodeReceiver, NodeSender, SnapshotTaker, SnapshotWriter
from pearl.rl.publisher import RankPublisher

TARGET = 0.70
RANKS = 3
TIMEOUT_S = 120.0

SMALL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
)
LARGE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=512,
    rope_theta=1e5,
    rms_eps=1e-5,
    tie_embeddings=True,
    qk_norm=False,
)
"""The shapes of SmolLM2-135M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the dtype that its engines have; the trainer's weights are fp32."""

    model: ModelConfig
    dtype: str
    rounds: int

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in hf_shapes(self.model).values())


class RandomTrainer:
    """Stands for a trainer: fp32 tensors under the model's names."""

    def __init__(self, model: ModelConfig, config: Config) -> None:
        self.model_config, self.config = model, config
        self._tensors = {name: torch.randn(shape) for name, shape in hf_shapes(model).items()}

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


def member(rank: int, folder: str, cases: list[Case], results: Connection) -> None:
    """One process; rank 0 reports the seconds of each round, the others those of their commits."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    comm = GroupCommunicator(dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=TIMEOUT_S)))
    for case in cases:
        results.send(run(case, comm, store))


def run(case: Case, comm: GroupCommunicator, store: dist.Store) -> dict[str, list[float]]:
    """Seconds of each round but the first two, in which memory is touched for the first time."""
    model = replace(case.model, dtype=case.dtype)
    raw = torch.zeros(case.parameters, dtype=getattr(torch, case.dtype))
    engine_config = EngineConfig(model=model, dtype=case.dtype, device="cpu", num_blocks=64, max_model_len=256)
    by_gloo, by_memory = publishers(model, engine_config, comm, store)
    copy = torch.zeros_like(raw)
    times: dict[str, list[float]] = {"raw": [], "publish": [], "gloo": [], "commit": [], "memcpy": []}
    for turn in range(case.rounds + 2):
        times["raw"].append(timed(comm, partial(comm.broadcast, raw, 0)))
        times["publish"].append(timed(comm, partial(publish, by_memory, 2 * turn, times["commit"])))
        times["gloo"].append(timed(comm, partial(publish, by_gloo, 2 * turn + 1, [])))
        if comm.rank:  # all receivers at once, as they commit
            start = time.perf_counter()
            copy.copy_(raw)
            times["memcpy"].append(time.perf_counter() - start)
    return {name: values[2:] for name, values in times.items()}


def publishers(
    model: ModelConfig, engine_config: EngineConfig, comm: GroupCommunicator, store: dist.Store
) -> tuple[RankPublisher, RankPublisher]:
    """This process's part over gloo, and through shared memory."""
    dtype, key = getattr(torch, model.dtype), f"{model.num_layers} layers, {model.dtype}"
    if comm.rank == 0:
        trainer = RandomTrainer(model, Config(engine=replace(engine_config, model="")))
        snapshot = Snapshot(model, dtype)
        store.set(key, snapshot.address)
        between = NodeSender(trainer, comm, Snapshot(model, dtype), timeout_s=TIMEOUT_S)
        return between, SnapshotWriter(trainer, snapshot, timeout_s=TIMEOUT_S)
    engine = Engine(engine_config, load_weights=False, text=False)
    reader = SnapshotReader.attach(store.get(key).decode(), SnapshotPlan.of(model, dtype))
    between = NodeReceiver(engine, comm, Snapshot(model, dtype), timeout_s=TIMEOUT_S)
    return between, SnapshotTaker(engine, reader, timeout_s=TIMEOUT_S)


def publish(publisher: RankPublisher, version: int, commits: list[float]) -> None:
    publisher.begin(version)
    commits.append(publisher.wait(TIMEOUT_S)["commit_s"])


def timed(comm: GroupCommunicator, work: Callable[[], None]) -> float:
    """Seconds from all members being ready to all being through."""
    comm.barrier(TIMEOUT_S)
    start = time.perf_counter()
    work()
    comm.barrier(TIMEOUT_S)
    return time.perf_counter() - start


def measure(cases: list[Case]) -> list[dict[str, float | str]]:
    """One row per case."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        members = [context.Process(target=member, args=(rank, folder, cases, pipes[rank][1])) for rank in range(RANKS)]
        for process in members:
            process.start()
        try:
            rows = [row(case, [receiver.recv() for receiver, _ in pipes]) for case in cases]
        finally:
            for process in members:
                process.join(10)
                process.kill()
    return rows


def row(case: Case, results: list[dict[str, list[float]]]) -> dict[str, float | str]:
    raw, published, gloo = (statistics.median(results[0][side]) for side in ("raw", "publish", "gloo"))
    commit, memcpy = (
        statistics.median(seconds for result in results[1:] for seconds in result[side]) for side in ("commit", "memcpy")
    )
    return {
        "parameters": case.parameters,
        "dtype": case.dtype,
        "raw_ms": raw * 1e3,
        "publish_ms": published * 1e3,
        "gloo_ms": gloo * 1e3,
        "commit_ms": commit * 1e3,
        "memcpy_ms": memcpy * 1e3,
        "ratio": raw / published,
        "ratio_gloo": raw / gloo,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    cases = [
        Case(model=model, dtype=dtype, rounds=options.rounds * share)
        for model, share in ((SMALL, 20), (LARGE, 1))
        for dtype in ("float32", "bfloat16")
    ]
    load = os.getloadavg()[0]
    rows = measure(cases)
    load = max(load, os.getloadavg()[0])
    sides = ("broadcast ms", "publish ms", "ratio", "gloo ms", "ratio", "commit ms", "memcpy ms")
    print(f"{'parameters':>12} {'dtype':>9} {' '.join(f'{side:>12}' for side in sides)}   load {load:.1f}")
    for r in rows:
        numbers = [r[key] for key in ("raw_ms", "publish_ms", "ratio", "gloo_ms", "ratio_gloo", "commit_ms", "memcpy_ms")]
        print(f"{r['parameters']:>12,} {r['dtype']:>9} {' '.join(f'{number:>12.2f}' for number in numbers)}")
    value = min(float(r["ratio"]) for r in rows)
    if options.json:
        result = {"bench": "publish", "claim": "of a bare broadcast's speed", "value": round(value, 3), "target": TARGET}
        print(json.dumps(result | {"ok": value >= TARGET, "load": load, "cases": rows}))
    else:
        print(f"publishes at {value:.2f} of a bare broadcast's speed or better; target {TARGET:.2f}")


if __name__ == "__main__":
    main()
