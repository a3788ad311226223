"""Publishing within a machine: what engines get, who waits for whom, and what is left when something is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_cases import config, folder

from pearl.config import EngineConfig
from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.engine import Engine
from pearl.engine.models.config import from_folder
from pearl.engine.weights.snapshot import Snapshot, SnapshotReader
from pearl.rl import node_publisher
from pearl.rl.node_publisher import SnapshotTaker, SnapshotWriter
from pearl.rl.trainer import Trainer


class Shifting:
    """A trainer whose weights change with each version: `shift` is added to all of them."""

    def __init__(self, trainer: Trainer) -> None:
        self.model_config, self.config, self._trainer = trainer.model_config, trainer.config, trainer
        self.shift = 0.0

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach() + self.shift) for name, tensor in self._trainer.named_hf_tensors())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder(tmp_path_factory.mktemp("model"))
    Trainer(path, config(seed=3))
    return path


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


def parts(model: Path, dtype: torch.dtype, engines: int) -> tuple[Shifting, Snapshot, list[Engine], list[SnapshotReader]]:
    name = str(dtype).removeprefix("torch.")
    settings = EngineConfig(model=from_folder(model), dtype=name, device="cpu", num_blocks=8, max_model_len=32)
    snapshot = Snapshot(from_folder(model), dtype)
    made = [Engine(settings, load_weights=False) for _ in range(engines)]
    return Shifting(Trainer(model, config())), snapshot, made, [snapshot.reader() for _ in made]


def has(engine: Engine, trainer: Shifting, dtype: torch.dtype) -> bool:
    held = dict(engine.named_hf_tensors())
    return all(torch.equal(held[name], tensor.to(dtype)) for name, tensor in trainer.named_hf_tensors())


def test_each_engine_gets_the_bits_of_each_version_and_keeps_its_addresses(model: Path, dtype: torch.dtype) -> None:
    trainer, snapshot, engines, readers = parts(model, dtype, 2)
    writer, takers = SnapshotWriter(trainer, snapshot), [SnapshotTaker(*pair) for pair in zip(engines, readers, strict=True)]
    places = [[value.data_ptr() for value in engine._decoder.parameters()] for engine in engines]
    for version in range(5):
        trainer.shift = 0.25 * version
        for part in (*takers, writer):
            part.begin(version)
        assert all(taker.poll() is None for taker in takers)
        written = writer.poll()
        assert written is not None and written["bytes"] >= sum(t.nbytes for _, t in engines[0].named_hf_tensors())
        for taker, engine in zip(takers, engines, strict=True):
            taken = taker.poll()
            assert taken is not None and taken["seconds"] >= taken["commit_s"] > 0
            assert engine.weight_version == version and has(engine, trainer, dtype)
    assert places == [[value.data_ptr() for value in engine._decoder.parameters()] for engine in engines]


def test_buckets_are_taken_a_few_at_a_time_between_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on under the old version until it has all of the new one; the version is held as long."""
    monkeypatch.setattr(node_publisher, "PAUSE_TAKING_S", 0.0)
    trainer, _, [engine], _ = parts(model, torch.float32, 1)
    snapshot = Snapshot(from_folder(model), torch.float32, bucket_bytes=1 << 12)
    writer, taker = SnapshotWriter(trainer, snapshot), SnapshotTaker(engine, snapshot.reader())
    for version in range(3):
        trainer.shift = 0.5 * version
        for part in (writer, taker):
            part.begin(version)
        assert writer.poll() is not None
        buckets = len(snapshot.plan.buckets)
        for _ in range(buckets - 1):
            assert taker.poll() is None and engine.weight_version == version - 1
            if version:
                trainer.shift -= 0.5
                assert has(engine, trainer, torch.float32)
                trainer.shift += 0.5
        assert buckets > 3 and snapshot.draft(version + 1, wait_s=0.0).discard() is None
        assert taker.poll() is not None and engine.weight_version == version and has(engine, trainer, torch.float32)


def test_a_bucket_that_changed_after_others_were_taken_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_publisher, "PAUSE_TAKING_S", 0.0)
    trainer, _, [engine], _ = parts(model, torch.float32, 1)
    snapshot = Snapshot(from_folder(model), torch.float32, bucket_bytes=1 << 12)
    writer, taker = SnapshotWriter(trainer, snapshot), SnapshotTaker(engine, snapshot.reader())
    for part in (writer, taker):
        part.begin(0)
    assert writer.poll() is not None and taker.wait(5.0)["bytes"] > 0
    trainer.shift = 1.0
    for part in (writer, taker):
        part.begin(1)
    assert writer.poll() is not None and taker.poll() is None
    slot = snapshot._words[16:18].tolist().index(1)
    snapshot._messages[slot][2].data[5] += 1.0
    with pytest.raises(ValueError, match="snapshot of version 1: bucket 3: the checksum differs"):
        taker.wait(5.0)
    trainer.shift = 0.0
    assert engine.weight_version == 0 and has(engine, trainer, torch.float32)
    for version in (2, 3):  # nothing is held any more
        trainer.shift = float(version)
        for part in (writer, taker):
            part.begin(version)
        assert writer.poll() is not None and taker.wait(5.0)["bytes"] > 0 and has(engine, trainer, torch.float32)


def test_a_slow_engine_is_waited_for_so_long_and_never_written_under(model: Path) -> None:
    trainer, snapshot, [engine], [reader] = parts(model, torch.float32, 1)
    writer, taker = SnapshotWriter(trainer, snapshot, timeout_s=0.05), SnapshotTaker(engine, reader)
    leases = []
    for version in range(2):
        writer.begin(version)
        assert writer.poll() is not None
        leases.append(reader.lease(version))
    writer.begin(2)
    assert writer.poll() is None
    with pytest.raises(CollectiveError, match=r"version 2: waited 0.05 s for engines to be through with an older one"):
        writer.wait(5.0)
    leases[0].close()
    writer.begin(2)
    assert writer.poll() is not None
    taker.begin(2)
    assert taker.poll() is not None and has(engine, trainer, torch.float32)
    leases[1].check()


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 8 << 20], ids=["buckets", "one bucket"])
def test_a_version_that_has_to_wait_is_gathered_once(model: Path, bucket_bytes: int) -> None:
    """Each time would be a collective of all training ranks, which take part in one."""
    trainer, _, _, _ = parts(model, torch.float32, 0)
    snapshot = Snapshot(from_folder(model), torch.float32, bucket_bytes=bucket_bytes)
    writer, reader, gathered = SnapshotWriter(trainer, snapshot), snapshot.reader(), []
    tensors = trainer.named_hf_tensors

    def counted() -> Iterator[tuple[str, Tensor]]:
        gathered.append(writer.version)
        yield from tensors()

    trainer.named_hf_tensors = counted  # type: ignore[method-assign]
    held = []
    for version in range(2):
        writer.begin(version)
        assert writer.poll() is not None
        held.append(reader.lease(version))
    writer.begin(2)
    assert [writer.poll(), writer.poll(), writer.poll()] == [None] * 3
    held[0].close()
    assert writer.poll() is not None and snapshot.versions == (1, 2)
    assert gathered == [0, 1, 2]


def test_a_version_that_does_not_come_is_waited_for_so_long(model: Path) -> None:
    _, _, [engine], [reader] = parts(model, torch.float32, 1)
    taker = SnapshotTaker(engine, reader, timeout_s=0.05)
    taker.begin(3)
    with pytest.raises(CollectiveError, match=r"version 3: waited 0.05 s for it to be in the snapshot"):
        taker.wait(5.0)


def test_weights_that_are_not_finite_reach_nobody(model: Path) -> None:
    trainer, snapshot, [engine], [reader] = parts(model, torch.float32, 1)
    writer, taker = SnapshotWriter(trainer, snapshot), SnapshotTaker(engine, reader)
    for part in (writer, taker):
        part.begin(0)
        assert part.poll() is not None
    trainer.shift = float("nan")
    writer.begin(1)
    taker.begin(1)
    with pytest.raises(ValueError, match="values are not finite"):
        writer.poll()
    assert taker.poll() is None
    trainer.shift = 0.0
    assert engine.weight_version == 0 and has(engine, trainer, torch.float32)
    with pytest.raises(ValueError, match="version=0: must be greater than 0, the present version"):
        taker.begin(0)


def test_a_version_can_be_had_as_soon_as_it_is_seen(model: Path) -> None:
    """The writer is in another thread; a reader looks all the time and must never be refused what it has seen."""
    trainer, snapshot, _, [reader] = parts(model, torch.float32, 1)
    tensors, enough = list(trainer.named_hf_tensors()), threading.Event()
    limit = time.monotonic() + 60.0

    def write() -> None:
        version = 0
        while not enough.is_set():
            assert snapshot.write(tensors, version, wait_s=10.0)
            version += 1

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while thread.is_alive() and seen <= 100:
        assert time.monotonic() < limit
        newest = reader.newest
        if newest >= 0:
            try:
                reader.lease(newest).close()
            except ValueError as error:
                assert f"version={newest}: the snapshot has" in str(error) and reader.newest > newest, error
            seen += 1
    enough.set()
    thread.join()
    assert seen > 100 and snapshot.skipped == 0
