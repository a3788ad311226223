"""A checkpoint is whole or not there: kills at every operation and at random moments, damage, rotation, order on the disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import kill_points
import msgspec
import pytest

from pearl.rl.buffer import Buffer
from pearl.rl.checkpoint_folder import MARKER, STATE_FILE, CheckpointFolder, load
from pearl.rl.controller_state import ControllerState, capture
from pearl.rl.types import Trajectory


def state_of(step: int) -> ControllerState:
    buffer = Buffer()
    buffer.dispatch(step, step, [f"{step}-0"])
    buffer.finish(Trajectory(trajectory_id=f"{step}-0", group_id=step, env_seed=step, token_ids=[step] * 500, outcome="done"))
    return capture(buffer, step=step, weight_version=step, started=step + 1, successes=[0.5, 1.0])


def write_trainer(aside: Path, step: int) -> None:
    """Stands for the training ranks: two files, one in a folder, whose bytes depend on the step."""
    (aside / "trainer").mkdir()
    (aside / "trainer" / "rank0.bin").write_bytes(b"%d " % step * 2000)
    (aside / "index.json").write_bytes(b'{"step": %d}' % step)


def save(folder: CheckpointFolder, step: int) -> Path:
    aside = folder.begin(step)
    write_trainer(aside, step)
    return folder.commit(step, state_of(step))


def check_whole(path: Path) -> int:
    """Reads all of a checkpoint with fresh eyes; returns its step."""
    step = load(path).step
    assert path.name == f"step_{step:06d}" and load(path) == state_of(step)
    assert (path / "trainer" / "rank0.bin").read_bytes() == b"%d " % step * 2000
    assert (path / "index.json").read_bytes() == b'{"step": %d}' % step
    return step


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(os.listdir(folder.path))


def test_a_checkpoint_exists_from_commit_on(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep=2)
    assert folder.latest() is None and folder.find().skipped == ()
    aside = folder.begin(4)
    assert aside == tmp_path / "run" / "checkpoints" / ".step_000004.new" and aside.is_dir()
    write_trainer(aside, 4)
    assert folder.latest() is None
    path = folder.commit(4, state_of(4))
    assert path == folder.latest() == tmp_path / "run" / "checkpoints" / "step_000004"
    assert check_whole(path) == 4
    assert sorted(os.listdir(path)) == [MARKER, STATE_FILE, "index.json", "trainer"]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for keep in (1, 2, 3):
        folder = CheckpointFolder(tmp_path / str(keep), keep=keep)
        for step in (2, 4, 6, 1_000_000, 1_000_001):
            save(folder, step)
        kept = ["step_000004", "step_000006", "step_1000000", "step_1000001"][-keep:]
        assert names(folder) == sorted(kept)
        assert folder.latest() == folder.path / "step_1000001"
    with pytest.raises(ValueError, match="keep_checkpoints=0"):
        CheckpointFolder(tmp_path, keep=0)


def test_steps_rise_and_begin_comes_first(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 4)
    for step in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"step={step}: must be >= 0 and newer than"):
            folder.begin(step)
    with pytest.raises(ValueError, match="step=6: was not begun"):
        folder.commit(6, state_of(6))
    (folder.begin(6) / "left_over").touch()
    assert list(folder.begin(6).iterdir()) == []
    with pytest.raises(ValueError, match="step=6: the state is of step 5"):
        folder.commit(6, state_of(5))
    assert folder.latest() == folder.path / "step_000004"


def test_a_failed_commit_costs_no_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 2)
    state = state_of(4)
    state.holdings.ready[0].trajectories[0].error = object()  # type: ignore[assignment]
    folder.begin(4)
    with pytest.raises(TypeError):
        folder.commit(4, state)
    assert folder.latest() == folder.path / "step_000002"

    left, real = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    outcomes = []
    for working in range(1, 30):
        left = 0
        write_trainer(folder.begin(4), 4)
        left = working
        with pytest.raises(OSError, match="No space"):
            folder.commit(4, state_of(4))
        outcomes.append(check_whole(folder.latest()))
        if outcomes[-1] == 4:
            break
    assert outcomes == [2] * 7 + [4]
    save(folder, 6)
    assert names(folder) == ["step_000006"]


def test_killed_before_each_of_its_operations(tmp_path: Path) -> None:
    """Two checkpoints are there, the third replaces a damaged folder of its own name, and the first has to go."""
    outcomes: set[tuple[bool, int]] = set()
    for kill_before in range(1000):
        folder = CheckpointFolder(tmp_path / str(kill_before), keep=2)
        for step in (2, 4):
            save(folder, step)
        damaged = folder.path / "step_000006"
        damaged.mkdir()
        (damaged / "old.bin").touch()
        returned = folder.path.parent / "returned"
        pid = kill_points.start(lambda folder=folder, returned=returned: (save(folder, 6), returned.touch()), kill_before)
        survived = kill_points.survived(pid)
        latest = check_whole(CheckpointFolder(folder.path.parent).latest())
        assert latest == 6 or not returned.exists()
        assert latest == 6 or check_whole(folder.path / "step_000002") == 2
        outcomes.add((survived, latest))
        save(folder, 8)
        kept = ["step_000006", "step_000008"] if latest == 6 else ["step_000004", "step_000008"]
        assert names(folder) == kept and [check_whole(folder.path / name) for name in kept]
        if survived:
            break
        shutil.rmtree(folder.path.parent)
    assert kill_before > 30
    assert outcomes == {(False, 4), (False, 6), (True, 6)}


def save_for_ever(run: Path, returned: int) -> None:
    folder = CheckpointFolder(run, keep=2)
    latest = folder.latest()
    step = load(latest).step if latest else 0
    while True:
        step += 1
        save(folder, step)
        os.write(returned, b"%d\n" % step)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A process saves in a loop and notes each commit that returned; SIGKILL; the next one goes on from what is there."""
    rng = random.Random(7)
    notes, run, last = tmp_path / "returned", tmp_path / "run", 0
    descriptor = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    left_overs = 0
    for _ in range(40):
        pid = kill_points.start(lambda: save_for_ever(run, descriptor))
        deadline = time.monotonic() + 10
        while (size := notes.stat().st_size) == last:
            assert time.monotonic() < deadline, "no commit returned"
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.015))
        os.kill(pid, signal.SIGKILL)
        assert not kill_points.survived(pid)
        last = notes.stat().st_size
        assert last >= size
        steps = [int(line) for line in notes.read_text().split()]
        latest = check_whole(CheckpointFolder(run).latest())
        assert latest - steps[-1] in (0, 1)
        assert steps == sorted(set(steps))
        left_overs += any(name.startswith(".") for name in os.listdir(run / "checkpoints"))
    os.close(descriptor)
    assert left_overs > 0, "no kill fell into a save"


def test_damaged_ones_are_skipped_with_a_reason(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=9)
    for step in range(1, 9):
        save(folder, step)
    path = {step: folder.path / f"step_{step:06d}" for step in range(1, 9)}
    (path[8] / MARKER).unlink()
    (path[7] / "trainer" / "rank0.bin").unlink()
    with (path[6] / "index.json").open("ab") as file:
        file.write(b" ")
    data = bytearray((path[5] / STATE_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (path[5] / STATE_FILE).write_bytes(data)
    (path[4] / MARKER).write_bytes((path[4] / MARKER).read_bytes()[:-5])
    shutil.rmtree(path[3])
    shutil.copytree(path[2], path[3])
    (folder.path / "step_000009").write_text("a file")
    (folder.path / "notes").mkdir()
    found = folder.find()
    assert found.path == path[2] == folder.latest()
    reasons = {int(item.path.name[5:]): item.reason for item in found.skipped}
    assert reasons[8] == "no STABLE: its writing was cut short"
    assert reasons[7] == "rank0.bin cannot be read (No such file or directory)"
    assert reasons[6] == "index.json has 12 bytes, 11 were written"
    assert reasons[5] == "controller.msgpack is damaged (checksum)"
    assert reasons[4].startswith("STABLE is damaged")
    assert reasons[3] == "STABLE is of step 2"
    assert len(reasons) == 6
    with pytest.raises(ValueError, match="checksum"):
        load(path[5])


def test_a_damaged_one_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 2)
    save(folder, 4)
    (folder.path / "step_000004" / "index.json").unlink()
    save(folder, 6)
    assert names(folder) == ["step_000002", "step_000006"]


def test_rewind_hides_what_is_newer_until_the_next_commit(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (2, 4, 6):
        save(folder, step)
    assert folder.rewind(6) == []
    assert [path.name for path in folder.rewind(2)] == ["step_000006", "step_000004"]
    assert folder.latest() == folder.path / "step_000002"
    assert names(folder) == [".step_000004.lost", ".step_000006.lost", "step_000002"]
    save(folder, 4)
    assert names(folder) == ["step_000002", "step_000004"]


def test_what_cannot_be_removed_does_not_fail_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = CheckpointFolder(tmp_path, keep=1), os.rmdir

    def busy(path: str, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "trainer":
            raise OSError(16, "Device or resource busy")
        real(path, dir_fd=dir_fd)

    save(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        save(folder, 4)
        assert names(folder) == [".step_000002.old", "step_000004"]
    save(folder, 6)
    assert names(folder) == ["step_000006"]


def test_the_order_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps only what was synced: files before the rename, the rename before the marker, removal last."""
    calls: list[str] = []
    real_sync, real_rename, real_rmtree = os.fsync, Path.rename, shutil.rmtree

    def sync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        real_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        calls.append(f"rename {self.name} {target.name}")
        return real_rename(self, target)

    def rmtree(path: Path, **options: bool) -> None:
        calls.append(f"remove {path.name}")
        real_rmtree(path, **options)

    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 2)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(folder, 4)
    before, after = calls[: calls.index("rename .step_000004.new step_000004")], calls
    assert before[0] == "sync ." and sorted(before[1:]) == [
        "sync checkpoints/.step_000004.new",
        "sync checkpoints/.step_000004.new/controller.msgpack",
        "sync checkpoints/.step_000004.new/index.json",
        "sync checkpoints/.step_000004.new/trainer",
        "sync checkpoints/.step_000004.new/trainer/rank0.bin",
    ]
    assert before[-1] == "sync checkpoints/.step_000004.new"
    assert before.index("sync checkpoints/.step_000004.new/trainer/rank0.bin") < before.index(
        "sync checkpoints/.step_000004.new/trainer"
    )
    assert after[len(before) + 1 :] == [
        "sync checkpoints",
        "sync checkpoints/step_000004/.STABLE.new",
        "rename .STABLE.new STABLE",
        "sync checkpoints/step_000004",
        "rename step_000002 .step_000002.old",
        "remove .step_000002.old",
        "sync checkpoints",
    ]


def test_another_format_is_skipped_not_misread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    folder.begin(2)
    folder_state = msgspec.structs.replace(state_of(2), format=2)
    with pytest.raises(ValueError, match="format=2: this release reads 1"):
        folder.commit(2, folder_state)
    found = folder.find()
    assert found.path == folder.path / "step_000001"
    assert [item.reason for item in found.skipped] == ["format=2: this release reads 1"]
