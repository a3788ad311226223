"""The torch side of an external worker: its engine, its own snapshot of the weights, and the server that gives them on.

Owns which parts there are. Invariant: nothing of WORLD is touched; all groups are of two, with a number.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pearl.config import Config
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.weights.holding import SnapshotHolding
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot
from pearl.rl.pull_fetcher import PullFetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalParts:
    """What an external worker works with; `pulls` is where others can have its versions, `seconds` what building took."""

    engine: Engine
    fetcher: PullFetcher
    server: PullServer
    snapshot: Snapshot
    pulls: str
    seconds: float

    def close(self) -> None:
        self.server.close()
        self.engine.close()
        self.snapshot.close()


def build(config: Config, folder: Path, *, name: str, host: str, start: float) -> ExternalParts:
    """An engine without weights; they come with the first order."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine_config = dataclasses.replace(config.engine, model=from_folder(folder), seed=config.seed)
    engine = Engine(engine_config, load_weights=False, text=False)
    snapshot = Snapshot(engine.model_config, getattr(torch, config.engine.dtype))
    server = PullServer(SnapshotHolding(snapshot.reader(), versions=1), host=host)
    return ExternalParts(
        engine=engine,
        fetcher=PullFetcher(engine, snapshot, name),
        server=server,
        snapshot=snapshot,
        pulls=f"{server.host}:{server.port}",
        seconds=time.perf_counter() - start,
    )
