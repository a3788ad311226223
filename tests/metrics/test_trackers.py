"""Event files read back, by hand and with the known checksums of their format; a stand-in for the package wandb."""

from __future__ import annotations

import struct
import sys
import types
from pathlib import Path

import pytest

from pearl.config import Config
from pearl.metrics.jsonl import JsonlWriter, rewind_rows
from pearl.metrics.trackers import EventFile, WandbRun, crc32c, read_events, trackers_of


def only_file(folder: Path) -> Path:
    [path] = folder.glob("events.out.tfevents.*")
    return path


def test_checksums_are_those_of_rfc_3720() -> None:
    """Its appendix B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43 and crc32c(bytes(range(32))) == 0x46DD794E


def test_an_event_byte_by_byte(tmp_path: Path) -> None:
    writer = EventFile(tmp_path)
    writer.write({"step": 300, "loss": 0.5})
    writer.close()
    data = only_file(tmp_path).read_bytes()
    (first,) = struct.unpack_from("<Q", data, 0)
    assert data[12 + 9 : 12 + first] == b"\x1a\x0dbrain.Event:2"
    second = data[16 + first + 12 : -4]
    assert second[0] == 0x09 and second[9:12] == b"\x10\xac\x02"  # the time, step=300 as a varint
    assert second[12:] == b"\x2a\x0d" + b"\x0a\x0b" + b"\x0a\x04loss" + b"\x15" + struct.pack("<f", 0.5)


def test_numbers_come_back_and_others_stay_away(tmp_path: Path) -> None:
    writer = EventFile(tmp_path)
    writer.write({"step": 1, "reward_mean": -0.25, "kl": None, "serving_shape": "4M", "trained": 128})
    writer.write({"step": 70000, "reward_mean": 1e-3})
    writer.write({"step": 70001, "grad_norm": 1e300, "advantage_mean": -1e40})
    writer.close()
    events = read_events(only_file(tmp_path))
    assert [step for step, _ in events] == [1, 70000, 70001]
    assert events[2][1] == {"grad_norm": float("inf"), "advantage_mean": float("-inf")}, "too large for fp32"
    assert events[0][1] == {"reward_mean": -0.25, "trained": 128.0} and events[1][1]["reward_mean"] == pytest.approx(1e-3)


def test_a_damaged_file_is_found_out(tmp_path: Path) -> None:
    EventFile(tmp_path, [{"step": 1, "loss": 1.0}]).close()
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum of the record at byte"):
        read_events(path)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    config = Config(tensorboard=True)
    rows = JsonlWriter(tmp_path / "metrics.jsonl")
    [tracker] = trackers_of(config, tmp_path)
    for step in (1, 2, 3):
        row = {"step": step, "loss": float(step)}
        rows.write(row)
        tracker.write(row)
    rewind_rows(tmp_path / "metrics.jsonl", 2)  # a checkpoint of step 2
    [tracker] = trackers_of(config, tmp_path)
    tracker.write({"step": 3, "loss": 30.0})
    tracker.close()
    events = read_events(only_file(tmp_path / "tensorboard"))
    assert [(step, values["loss"]) for step, values in events] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert trackers_of(Config(), tmp_path) == []


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict] = []
        self.defined: list[tuple] = []
        self.finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict, step: int | None = None) -> None:
        assert step is None, "the service drops points whose counter went back"
        self.logged.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_goes_by_the_rows_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), {}
    package = types.ModuleType("wandb")
    package.init = lambda **options: asked.update(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    [tracker] = trackers_of(Config(wandb="pearl"), tmp_path)
    for step in (4, 5, 4):  # the last one after a resume
        tracker.write({"step": step, "loss": 0.5, "serving_shape": "4M"})
    tracker.close()
    assert (asked["project"], asked["name"], asked["resume"]) == ("pearl", tmp_path.name, "allow")
    assert run.defined == [("*", "step")] and run.finished
    assert run.logged == [{"step": step, "loss": 0.5} for step in (4, 5, 4)]
    known = asked["id"]
    trackers_of(Config(wandb="pearl"), tmp_path)
    assert asked["id"] == known and len(known) == 16
    (tmp_path / "other").mkdir()
    trackers_of(Config(wandb="pearl"), tmp_path / "other")
    assert asked["id"] != known


def test_a_service_that_has_gone_costs_its_point_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, package = FakeRun(), types.ModuleType("wandb")
    package.init = lambda **options: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = WandbRun("pearl", tmp_path, {})
    real = run.log
    run.log = lambda row: (_ for _ in ()).throw(BrokenPipeError("its process is gone"))  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="wandb: step 4 was not taken: its process is gone"):
        tracker.write({"step": 4, "loss": 0.5})
    run.log = real  # type: ignore[method-assign]
    tracker.write({"step": 5, "loss": 0.25})
    assert run.logged == [{"step": 5, "loss": 0.25}]


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb='pearl': must be empty, the package wandb is not installed"):
        WandbRun("pearl", tmp_path, {})
