"""Resuming a run: what is refused and why, what is left behind, and that only one live job has it."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pearl import config as configuration
from pearl.config import AlgorithmOptions, Config, TrainerOptions
from pearl.metrics.jsonl import JsonlWriter, read_jsonl
from pearl.rl.buffer import Buffer
from pearl.rl.checkpoint_folder import MARKER, CheckpointFolder
from pearl.rl.controller_state import ControllerState, capture, restore
from pearl.rl.run_state import ROW_FILES, RunLock, check_settings, how_to_go_on, open_run, rewind_run, write_settings

CONFIG = Config(recipe="quickstart", seed=3, max_steps=10, save_steps=2)


def state_of(step: int) -> ControllerState:
    buffer = Buffer()
    buffer.dispatch(step, 70 + step, [f"{step}-0", f"{step}-1"])
    return capture(buffer, step=step, weight_version=step, started=step + 1, successes=[0.5] * step)


def make_run(run: Path, *steps: int) -> Path:
    run.mkdir(parents=True)
    (run / "config.json").write_text(configuration.to_json(CONFIG))
    folder = CheckpointFolder(run, keep=9)
    for step in steps:
        folder.begin(step)
        folder.commit(step, state_of(step))
    return run


def test_a_run_opens_at_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "quickstart-1", 2, 4, 6)
    (run / "checkpoints" / "step_000006" / MARKER).unlink()
    before = sorted(run.rglob("*"))
    point = open_run(str(run))
    assert sorted(run.rglob("*")) == before
    assert point.run == run and point.config == CONFIG
    assert point.checkpoint == run / "checkpoints" / "step_000004" and point.state == state_of(4)
    assert [(item.path.name, item.reason[:9]) for item in point.skipped] == [("step_000006", "no STABLE")]
    buffer, unplayed = restore(point.state)
    assert [(member.trajectory_id, member.env_seed) for member in unplayed] == [("4-0", 74), ("4-1", 74)]
    assert buffer.counts() == {"dispatched": 4, "trained": 0, "in_flight": 2, "dropped_resume": 2}


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    make_run(tmp_path / "quickstart-1", 2)
    with pytest.raises(ValueError, match=r"resume='.*/quickstart-2': no such directory \(runs in .*: quickstart-1\)"):
        open_run(tmp_path / "quickstart-2")
    with pytest.raises(ValueError, match="no such directory$"):
        open_run(tmp_path / "nowhere" / "quickstart-2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"not a run, config.json cannot be read \(No such file[^()]*\)$"):
        open_run(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"not a run, .* \(runs in .*: quickstart-1\)$"):
        open_run(tmp_path)
    for text in ("{", '{"seed": "three"}', '{"seed": -1}'):
        (tmp_path / "empty" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json is not one of this release"):
            open_run(tmp_path / "empty")


def test_without_a_whole_checkpoint_the_way_to_start_afresh_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"it has no checkpoint \(save_steps=2\), so it would start from step 1; .*: pearl run quick"
    ):
        open_run(run)
    run = make_run(tmp_path / "b", 2)
    (run / "checkpoints" / "step_000002" / MARKER).unlink()
    with pytest.raises(
        ValueError, match=r"none of its checkpoints is whole \(step_000002: no STABLE: .*\), so .*pearl run quickstart"
    ):
        open_run(run)


def test_the_last_line_says_how_to_go_on_or_why_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 2, 4)
    assert how_to_go_on(run, CONFIG, 1) == f"to go on after step 4: pearl run --resume {run}"
    assert how_to_go_on(run, CONFIG, 3) == f"to go on after step 4: pearl run --resume {run} --nproc 3"
    assert how_to_go_on(run, dataclasses.replace(CONFIG, max_steps=4), 1).startswith("all 4 steps are in its last checkpoint")
    (run / "checkpoints" / "step_000004" / MARKER).unlink()
    assert how_to_go_on(run, CONFIG, 1) == f"to go on after step 2: pearl run --resume {run}"
    (run / "checkpoints" / "step_000002" / MARKER).unlink()
    assert how_to_go_on(run, CONFIG, 1).startswith("it cannot go on: none of its checkpoints is whole (step_000004: no STABLE")
    bare = make_run(tmp_path / "b")
    assert how_to_go_on(bare, CONFIG, 1) == ""
    (bare / "metrics.jsonl").write_text("")
    assert how_to_go_on(bare, CONFIG, 1) == ""
    (bare / "metrics.jsonl").write_text('{"step": 1}\n')
    assert how_to_go_on(bare, CONFIG, 1) == "it cannot go on: it has no checkpoint (save_steps=2)"
    never = how_to_go_on(bare, dataclasses.replace(CONFIG, save_steps=0), 1)
    assert never.startswith("it cannot go on: it has no checkpoint (save_steps=0); with --set save_steps=10")


def test_settings_that_a_resumed_run_keeps(tmp_path: Path) -> None:
    point = open_run(make_run(tmp_path / "run", 4))
    check_settings(point, dataclasses.replace(CONFIG, max_steps=5, save_steps=1, eval_steps=3))
    check_settings(point, dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, lr=1e-5)))
    env = dataclasses.replace(CONFIG.env, options={"size": 9})
    for config, message in (
        (dataclasses.replace(CONFIG, seed=4), "seed=4: a resumed run keeps its seed=3"),
        (dataclasses.replace(CONFIG, group_size=4), "group_size=4: a resumed run keeps its group_size=8"),
        (dataclasses.replace(CONFIG, rollout_batch_size=64), "rollout_batch_size=64: .* rollout_batch_size=128"),
        (dataclasses.replace(CONFIG, env=env), "env.options={'size': 9}: .* env.options={}"),
        (dataclasses.replace(CONFIG, max_steps=4), "max_steps=4: step_000004 has trained them all; .* --set max_steps=8"),
    ):
        with pytest.raises(ValueError, match=message):
            check_settings(point, config)


def test_what_the_trainers_state_cannot_become_is_refused_before_anything_starts(tmp_path: Path) -> None:
    point = open_run(make_run(tmp_path / "run", 4))
    measured = dataclasses.replace(CONFIG, algorithm=AlgorithmOptions(kl_coef=0.1))
    check_settings(point, measured)  # no state that says otherwise
    facts = {"version": 1, "dtype": "float32", "shapes": {}, "policy_steps": 4, "updates": {"policy": 4}}

    def held(**more: Any) -> None:
        (point.checkpoint / "trainer").mkdir(exist_ok=True)
        (point.checkpoint / "trainer" / "trainer.json").write_bytes(msgspec.json.encode(facts | more))

    held(reference=False)
    check_settings(point, CONFIG)
    with pytest.raises(ValueError, match=r"algorithm.kl_coef=0.1: must be 0, step_000004 holds no reference policy"):
        check_settings(point, measured)
    held(reference=True, train_layers=0)
    check_settings(point, measured)
    trunk = dataclasses.replace(CONFIG, algorithm=AlgorithmOptions(name="ppo", critic="trunk"))
    with pytest.raises(ValueError, match="algorithm.critic=trunk: name=ppo cannot go on from a policy without a value head"):
        check_settings(point, trunk)
    with pytest.raises(ValueError, match=r"trainer.train_layers=1: a resumed run keeps its trainer.train_layers=None"):
        check_settings(point, dataclasses.replace(CONFIG, trainer=TrainerOptions(train_layers=1)))
    held(reference=False, value_head=True, train_layers=1)
    check_settings(point, dataclasses.replace(trunk, trainer=TrainerOptions(train_layers=1)))
    with pytest.raises(ValueError, match="critic=own: name=ppo cannot go on from a policy with a value head"):
        check_settings(point, dataclasses.replace(CONFIG, algorithm=AlgorithmOptions(name="ppo")))
    with pytest.raises(ValueError, match=r"train_layers=None: a resumed run keeps its trainer.train_layers=1"):
        check_settings(point, trunk)


def test_settings_are_the_old_or_the_new_ones_whatever_the_disk_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            write_settings(run, dataclasses.replace(CONFIG, max_steps=99))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_run(run).config == CONFIG
    write_settings(run, dataclasses.replace(CONFIG, max_steps=99))
    assert open_run(run).config.max_steps == 99


def test_after_rewind_nothing_is_newer_than_the_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, 4, 6)
    rows, episodes = JsonlWriter(run / "metrics.jsonl"), JsonlWriter(run / "trajectories.jsonl")
    for step in range(1, 8):
        rows.write({"step": step, "reward_mean": 0.5})
        episodes.write({"trajectory_id": f"{step}-0", "step": step}, {"trajectory_id": f"eval-{step}"})
    rows.close()
    episodes.close()
    assert rewind_run(run, 4) == {"metrics.jsonl": 3, "trajectories.jsonl": 3, "transitions.jsonl": 0}
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(run / "metrics.lost-1.jsonl")] == [5, 6, 7]
    assert [row["trajectory_id"] for row in read_jsonl(run / "trajectories.lost-1.jsonl")] == ["5-0", "6-0", "7-0"]
    assert len(read_jsonl(run / "trajectories.jsonl")) == 11
    assert open_run(run).checkpoint.name == "step_000004"
    assert rewind_run(run, 4) == dict.fromkeys(ROW_FILES, 0)


HOLDER = """
import subprocess, sys
from pearl.rl.run_state import RunLock
lock = RunLock(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_live_job_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    """The holder is killed while a child that it had started lives on."""
    root = str(Path(__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert holder.stdout is not None and holder.stdin is not None
    child = int(holder.stdout.readline())
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"run='.*': is in use by process {holder.pid} on "):
                RunLock(tmp_path)
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with RunLock(tmp_path) as lock:
            assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")
            lock.release()
    finally:
        holder.kill()
        holder.wait()
        os.kill(child, signal.SIGKILL)
        holder.stdin.close()
        holder.stdout.close()


def test_the_lock_holds_inside_one_process_too(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match="is in use by process"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    with RunLock(tmp_path), pytest.raises(ValueError, match="is in use"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()
    with pytest.raises(ValueError, match="cannot be locked"):
        RunLock(tmp_path / "nowhere")
