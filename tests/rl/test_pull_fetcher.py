"""An external worker's real parts: versions pulled into its own snapshot, served and given on; what fails changes nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_cases
import hf_models
import pytest
import torch
from engine_cases import assert_greedy, named, one

from pearl.config import Config, EngineConfig, OptimizerOptions
from pearl.engine.models.config import from_folder
from pearl.engine.weights.holding import SnapshotHolding
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot
from pearl.rl.external_parts import ExternalParts, build
from pearl.rl.pull_fetcher import PullFetcher, holders_of

LIMIT_S = 60.0
PROMPT = hf_models.prompt(9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(engine_cases.model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture
def trainers(folder: Path) -> Iterator[tuple[Snapshot, PullServer, str]]:
    """The snapshot of the trainers' machine, who gives it, and where; version 1 is the second model."""
    snapshot = Snapshot(from_folder(folder), torch.float32)
    assert snapshot.write(named(1), 1)
    server = PullServer(SnapshotHolding(snapshot.reader(), versions=1))
    yield snapshot, server, f"{server.host}:{server.port}"
    server.close()
    snapshot.close()


@pytest.fixture
def worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ExternalParts]]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = EngineConfig(dtype="float32", block_size=4, num_blocks=64, max_model_len=64)
    config = Config(engine=engine, rollout_batch_size=8, group_size=2, optimizer=OptimizerOptions(mini_batch_size=8))
    with contextlib.ExitStack() as stack:

        def made(name: str) -> ExternalParts:
            parts = build(config, folder, name=name, host="127.0.0.1", start=time.perf_counter())
            return stack.enter_context(contextlib.closing(parts))

        yield made


def through(fetcher: PullFetcher) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while (metrics := fetcher.poll()) is None:
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.001)
    return metrics


def nobody() -> str:
    """An address at which nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_worker_pulls_serves_and_gives_on(
    trainers: tuple[Snapshot, PullServer, str], worker: Callable[[str], ExternalParts]
) -> None:
    snapshot, _, root = trainers
    first, second = worker("first"), worker("second")
    first.fetcher.begin(1, [root])
    assert through(first.fetcher)["bytes"] > 0 and first.engine.weight_version == 1
    assert_greedy(one(first.engine, PROMPT), 8, seed=1)
    second.fetcher.begin(1, [first.pulls])  # the trainers' machine has no part in it
    through(second.fetcher)
    assert_greedy(one(second.engine, PROMPT), 8, seed=1)
    assert snapshot.write(named(0), 2)
    second.fetcher.begin(2, [root, first.pulls])
    through(second.fetcher)
    assert second.engine.weight_version == 2 and first.engine.weight_version == 1
    assert_greedy(one(second.engine, PROMPT), 8)
    second.fetcher.begin(2, [nobody()])
    assert through(second.fetcher)["bytes"] == 0.0  # it has it


def test_who_serves_waits_for_its_parent_and_who_wakes_takes_it_where_it_is(
    trainers: tuple[Snapshot, PullServer, str], worker: Callable[[str], ExternalParts]
) -> None:
    snapshot, server, root = trainers
    parent, child = worker("parent"), worker("child")
    child.fetcher.begin(1, [parent.pulls, root])  # it wakes: the first has nothing yet
    through(child.fetcher)
    assert (server.stats.served, parent.server.stats.refused) == (1, 1)
    parent.fetcher.begin(1, [root])
    through(parent.fetcher)
    assert snapshot.write(named(0), 2)
    child.fetcher.begin(2, [parent.pulls, root])  # both are told of the version; the child is the quicker
    assert child.fetcher.poll() is None
    deadline = time.monotonic() + LIMIT_S
    while parent.server.stats.refused < 3:
        assert time.monotonic() < deadline and child.fetcher.poll() is None, "it did not wait"
        time.sleep(0.001)
    parent.fetcher.begin(2, [root])
    through(parent.fetcher)
    through(child.fetcher)
    assert (child.engine.weight_version, server.stats.served, parent.server.stats.served) == (2, 3, 1)


def test_what_nobody_gives_is_an_error_and_the_next_order_has_its_own(
    trainers: tuple[Snapshot, PullServer, str], worker: Callable[[str], ExternalParts]
) -> None:
    *_, root = trainers
    parts = worker("alone")
    with pytest.raises(ValueError, match="nobody to pull it from"):
        parts.fetcher.begin(1, [])
    with pytest.raises(ValueError, match="host:port"):
        parts.fetcher.begin(1, ["nowhere"])
    parts.fetcher.begin(1, [nobody()])
    with pytest.raises(RuntimeError, match="version"):
        through(parts.fetcher)
    assert parts.engine.weight_version < 0
    parts.fetcher.begin(1, [nobody()])
    assert parts.fetcher.poll() is None
    parts.fetcher.begin(1, [root])  # while the one before it is still under way
    through(parts.fetcher)
    assert parts.engine.weight_version == 1


def test_addresses_name_a_host_and_a_port() -> None:
    [holder] = holders_of(["10.0.0.7:4711"])
    assert (holder.name, holder.host, holder.port) == ("10.0.0.7:4711", "10.0.0.7", 4711)
    assert holders_of([]) == []
    assert [one.port for one in holders_of(["nowhere", "10.0.0.7:4711", "10.0.0.8:x"])] == [4711]
    with pytest.raises(ValueError, match="nowhere.*must be host:port"):
        holders_of(["nowhere"])
