"""Three processes over gloo, a trainer and two engines, that publish as the ranks of a job do. Fixtures only, no tests.

Each phase of `member` sends one dict to the test, which does the asserting.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import command, config, sequences

from pearl.config import EngineConfig
from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.weights.snapshot import Snapshot
from pearl.protocol import SamplingParams
from pearl.rl.node_publisher import NodeReceiver, NodeSender
from pearl.rl.trainer import Trainer

RANKS = 3
TIMEOUT_S = 10.0
BUCKET_BYTES = 2048
ENGINE = EngineConfig(dtype="float32", device="cpu", max_model_len=180, block_size=4, num_blocks=100)


def member(rank: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    comm = GroupCommunicator(dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60)))
    part = TrainingMember(comm, Path(folder)) if rank == 0 else ServingMember(comm, Path(folder))
    for phase in (part.first, part.busy, part.fifty_more, part.not_finite, part.not_newer, part.afterwards, part.killed):
        pipe.send(phase())
        if phase != part.killed:
            comm.barrier(30.0)


class Member:
    """What both kinds do alike: publish versions one after another."""

    publisher: NodeSender | NodeReceiver
    version = 0

    def publish(self) -> dict[str, Any]:
        self.publisher.begin(self.version)
        metrics = self.publisher.wait(TIMEOUT_S)
        self.version += 1
        return {**metrics, "weights": self.digest()}

    def refused(self, version: int) -> dict[str, Any]:
        before = self.digest()
        try:
            self.publisher.begin(version)
            self.publisher.wait(TIMEOUT_S)
        except ValueError as error:
            return {"error": str(error), "unchanged": self.digest() == before}
        return {"error": None}

    def first(self) -> dict[str, Any]:
        return self.publish()

    def fifty_more(self) -> dict[str, Any]:
        sizes = []
        for _ in range(50):
            result = self.publish()
            sizes.append(resident_kib())
        return {**result, "grown_kib": sizes[-1] - sizes[4]}

    def digest(self) -> str:
        raise NotImplementedError


class TrainingMember(Member):
    def __init__(self, comm: GroupCommunicator, folder: Path) -> None:
        self.trainer = Trainer(folder, config(engine=ENGINE, seed=3, optimizer={"lr": 0.01}))
        snapshot = Snapshot(self.trainer.model_config, torch.float32, bucket_bytes=BUCKET_BYTES)
        self.publisher = NodeSender(self.trainer, comm, snapshot, timeout_s=TIMEOUT_S)

    def first(self) -> dict[str, Any]:
        result = self.publish()
        self.trainer.train_step(command(sequences(), objective="sft"))
        return result

    def busy(self) -> dict[str, Any]:
        return self.publish()

    def not_finite(self) -> dict[str, Any]:
        weight = dict(self.trainer.decoder.named_parameters())["layers.1.down.weight"]
        with torch.no_grad():
            kept, weight[2, 3] = float(weight[2, 3]), math.nan
            result = self.refused(self.version)
            weight[2, 3] = kept
        return result

    def not_newer(self) -> dict[str, Any]:
        """Nothing is sent: what a receiver refuses to begin ends a job."""
        return {}

    def afterwards(self) -> dict[str, Any]:
        self.trainer.train_step(command(sequences(), objective="sft"))
        return self.publish()

    def killed(self) -> dict[str, Any]:
        self.publisher.begin(self.version)
        try:
            self.publisher.wait(TIMEOUT_S)
        except CollectiveError as error:
            return {"error": str(error)}
        return {"error": None}

    def digest(self) -> str:
        return digest(self.trainer.named_hf_tensors())


class ServingMember(Member):
    def __init__(self, comm: GroupCommunicator, folder: Path) -> None:
        self.engine = Engine(replace(ENGINE, model=from_folder(folder)), load_weights=False, text=False)
        snapshot = Snapshot(self.engine.model_config, torch.float32, bucket_bytes=BUCKET_BYTES)
        self.publisher = NodeReceiver(self.engine, comm, snapshot, timeout_s=TIMEOUT_S)
        self.rank = comm.rank

    def busy(self) -> dict[str, Any]:
        """Publishes while a request runs: one poll after each step."""
        self.engine.add_request([1, 2, 3], SamplingParams(max_tokens=170, ignore_eos=True, seed=5))
        self.engine.step()
        self.publisher.begin(self.version)
        made, metrics = [1], None
        while metrics is None and self.engine.has_unfinished():
            made.append(sum(len(update.token_ids) for update in self.engine.step_updates()))
            metrics = self.publisher.poll()
        self.version += 1
        weights = self.digest()
        (completion,) = [done for _ in range(200) for done in self.engine.step()]
        return {**(metrics or {}), "made": made, "versions": completion.weight_versions, "weights": weights}

    def not_finite(self) -> dict[str, Any]:
        return self.refused(self.version)

    def not_newer(self) -> dict[str, Any]:
        return self.refused(self.version - 1)

    def afterwards(self) -> dict[str, Any]:
        result = self.publish()
        self.engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
        while self.engine.has_unfinished():
            for completion in self.engine.step():
                result["versions"] = completion.weight_versions
        self.engine.check_integrity()
        return result

    def killed(self) -> dict[str, Any]:
        """The last rank dies with some buckets in; the other says what it has heard."""
        self.publisher.begin(self.version)
        try:
            while self.publisher.poll() is None:
                if self.rank == RANKS - 1 and self.publisher._receiver._ready:
                    os.kill(os.getpid(), signal.SIGKILL)
        except CollectiveError as error:
            return {"error": str(error), "version": self.engine.weight_version}
        return {"error": None}

    def digest(self) -> str:
        return digest(self.engine.named_hf_tensors())


def digest(named: Any) -> str:
    state = hashlib.sha256()
    for name, tensor in named:
        state.update(name.encode())
        state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def resident_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
