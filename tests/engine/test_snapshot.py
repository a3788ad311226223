"""Versions in shared memory: nobody reads half of one, nobody writes over a reader, and nothing is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_models
import pytest
import torch
from weight_cases import Q, config_of, tensors_of

from pearl.engine import host_memory
from pearl.engine.weights.snapshot import MAGIC, Snapshot, SnapshotPlan, SnapshotReader, digest_of

MODEL = hf_models.dense()
CONFIG, TENSORS = config_of(MODEL), tensors_of(MODEL)
ROOT = Path(__file__).parent.parent.parent


def new_snapshot(slots: int = 2) -> Snapshot:
    return Snapshot(CONFIG, torch.float32, slots=slots, bucket_bytes=4096)


def shifted(by: float) -> list:
    return [(name, value + by) for name, value in TENSORS]


def test_a_version_comes_out_as_it_went_in() -> None:
    kept = new_snapshot()
    assert kept.write(TENSORS, 4) and kept.versions == (4,)
    with kept.reader().lease() as lease:
        lease.check()
        seen: dict[str, list] = {}
        for name, rows, start in lease.rows():
            assert start == sum(len(part) for part in seen.get(name, []))
            seen.setdefault(name, []).append(rows)
        assert (lease.version, lease.digest) == (4, digest_of(lease.messages))
        assert all(torch.equal(torch.cat(seen[name]), value) for name, value in TENSORS) and len(seen) == len(TENSORS)


def test_a_leased_version_is_never_written_to() -> None:
    kept = new_snapshot()
    reader = kept.reader()
    kept.write(TENSORS, 0)
    lease = reader.lease(0)
    assert all(kept.write(shifted(0.1 * version), version, wait_s=0.02) for version in range(1, 4))
    assert kept.versions == (0, 3) and reader.newest == 3  # the newest gave way, since the other was being read
    second = reader.lease(3)
    start = time.monotonic()
    assert not kept.write(shifted(1.0), 4, wait_s=0.1) and kept.skipped == 1
    assert 0.1 <= time.monotonic() - start < 2.0
    lease.check()
    second.check()
    assert torch.equal(next(lease.rows())[1], TENSORS[0][1][: len(next(lease.rows())[1])])
    lease.close()
    assert kept.write(shifted(2.0), 5) and kept.versions == (3, 5)
    second.check()


def test_the_writer_waits_for_the_older_slot_before_the_newest_gives_way() -> None:
    kept = new_snapshot()
    kept.write(TENSORS, 0)
    kept.write(TENSORS, 1)
    with kept.reader().lease(0):
        draft = kept.draft(2, wait_s=0.02)
        assert draft is not None and kept.versions == (0,)
        draft.discard()
    assert kept.write(TENSORS, 2) and kept.versions == (0, 2)


def test_nothing_is_seen_of_a_version_before_it_is_whole() -> None:
    kept = new_snapshot()
    reader = kept.reader()
    kept.write(TENSORS, 0)

    def watched():
        for pair in TENSORS:
            assert reader.newest == 0 and kept.versions == (0,)
            with pytest.raises(ValueError, match="version=1: the snapshot has 0"):
                reader.lease(1)
            with pytest.raises(RuntimeError, match="another version is being written"):
                kept.draft(2)
            yield pair

    kept.write(watched(), 1)
    assert reader.newest == 1

    def broken():
        yield from TENSORS[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        kept.write(broken(), 2)
    bad = [(name, value.clone()) for name, value in TENSORS]
    dict(bad)[Q][0, 0] = float("inf")
    with pytest.raises(ValueError, match=f"{Q}: 1 of"):
        kept.write(bad, 2)
    assert kept.versions == (1,) and kept.write(TENSORS, 2)


def test_a_changed_bit_is_found() -> None:
    kept = new_snapshot()
    kept.write(TENSORS, 0)
    kept._messages[0][3].whole[100] ^= 1
    with pytest.raises(ValueError, match="version 0: bucket 4: the checksum differs"):
        kept.reader().lease().check()


def test_readers_cannot_do_harm() -> None:
    kept = new_snapshot()
    kept.write(TENSORS, 0)
    first, second = kept.reader().lease(), kept.reader().lease()
    next(first.rows())[1].fill_(7.0)
    second.check()
    assert not torch.equal(next(first.rows())[1], next(second.rows())[1])


def test_another_plan_is_refused() -> None:
    kept = new_snapshot()
    with pytest.raises(ValueError, match=f"has .magic, plan, dtype, slot bytes. .{MAGIC}"):
        SnapshotReader.attach(kept.address, SnapshotPlan.of(CONFIG, torch.bfloat16, 4096))
    with pytest.raises(ValueError, match="must be one of"):
        SnapshotPlan.of(CONFIG, torch.int8)
    with pytest.raises(ValueError, match="slots=0: must be 1 to 32"):
        new_snapshot(slots=0)


def test_too_little_memory_is_said_before_any_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match=r"needs \d+ bytes of host memory, \d+ are available"):
        host_memory.reserve("x", 1 << 50)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="needs .* 1000 are available"):
        new_snapshot()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plenty = host_memory.available_bytes()
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 1500000\n")
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    assert host_memory.available_bytes() == 2_500_000 < plenty
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() > 2_500_000


def test_its_memory_cannot_shrink_under_a_reader() -> None:
    kept = new_snapshot()
    with pytest.raises(PermissionError):
        os.ftruncate(kept._fd, 0)


OTHER = """
import pickle, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan, SnapshotReader
role, folder = sys.argv[1:]
config, tensors, address = pickle.loads((Path(folder) / "given").read_bytes())
if role == "owner":
    kept = Snapshot(config, torch.float32, bucket_bytes=4096)
    kept.write(tensors, 6)
    print(kept.address, flush=True)
else:
    lease = SnapshotReader.attach(address, SnapshotPlan.of(config, torch.float32, 4096)).lease()
    lease.check()
    print(lease.version, flush=True)
sys.stdin.readline()
"""


class other_process:
    """An owner or a reader, ended with the block."""

    def __init__(self, role: str, folder: Path, address: str = "") -> None:
        (folder / "given").write_bytes(pickle.dumps((CONFIG, TENSORS, address)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", OTHER, role, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def __enter__(self) -> subprocess.Popen:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_reader_outlives_the_owner_and_nothing_is_left(tmp_path: Path) -> None:
    there = set(os.listdir("/dev/shm"))
    plan = SnapshotPlan.of(CONFIG, torch.float32, 4096)
    with other_process("owner", tmp_path) as owner:
        address = owner.stdout.readline().strip()
        reader = SnapshotReader.attach(address, plan)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        with reader.lease(6) as lease:
            lease.check()
            assert torch.equal(next(lease.rows())[1][:2], TENSORS[0][1][:2])
    with pytest.raises(ValueError, match=f"snapshot {address}: its owner has gone"):
        SnapshotReader.attach(address, plan)
    assert set(os.listdir("/dev/shm")) == there


def test_a_reader_that_is_killed_gives_its_lease_back(tmp_path: Path) -> None:
    kept = new_snapshot(slots=1)
    kept.write(TENSORS, 0)
    with other_process("reader", tmp_path, kept.address) as reader:
        assert reader.stdout.readline() == "0\n"
        assert not kept.write(TENSORS, 1, wait_s=0.05)
        reader.send_signal(signal.SIGKILL)
        reader.wait(10)
        assert kept.write(TENSORS, 1) and kept.skipped == 1
