"""Ranks without devices: what a cost profile means for them, where they meet, and a whole job of them, in which no torch is."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from job_cases import python, rows_of

from bench.elastic_job import QUICK, profile
from bench.job_process import JobProcess
from pearl.config import Config, resolve
from pearl.engine.models.config import from_folder
from pearl.engine.request import ScheduledRequest, SchedulerOutput
from pearl.overrides import override
from pearl.protocol import PackingPlan, TrainSequence, TrainStep
from pearl.rl.emulated import EmulatedPublisher, EmulatedTrainer, Meeting, ProfileCosts, alphabet_of, build_engine, pace_of
from pearl.rl.fresh_model import write_model_folder
from pearl.rl.plain_launcher import MEETING
from pearl.rl.recipes.quickstart import recipe
from pearl.sched.cost_profile import write_profiles
from pearl.sched.published import qwen3_8b_h800


def config(*settings: str, world: int = 3) -> Config:
    return resolve(override(recipe(), list(settings)), world)


def test_a_preset_brings_its_training_and_publishing_and_settings_come_first() -> None:
    pace = pace_of(config("device=emulated:qwen3-30b-a3b-h800", "emulation.slowdown=2"))
    other = pace_of(config("device=emulated:qwen3-30b-a3b-h800", "emulation.train_token_s=0.5", "emulation.publish_s=3"))
    assert pace.profile.key.model == "Qwen3-30B-A3B" and pace.publish_s > 2 and pace.train_token_s > 0
    assert (other.train_token_s, other.publish_s) == (0.5, 3.0)


def test_a_profile_may_be_a_file_of_one_and_what_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_profiles(path, [qwen3_8b_h800()])
    assert pace_of(config(f"device=emulated:{path}")).profile == qwen3_8b_h800()
    write_profiles(path, [qwen3_8b_h800(), qwen3_8b_h800()])
    with pytest.raises(ValueError, match="has 2 cost profiles"):
        pace_of(config(f"device=emulated:{path}"))
    with pytest.raises(ValueError, match="qwen3-8b-h800"):
        pace_of(config("device=emulated:nonsense"))


def test_what_makes_no_sense_without_devices_is_refused_or_left_out() -> None:
    with pytest.raises(ValueError, match="check_weights"):
        config("device=emulated:qwen3-8b-h800", "check_weights=true")
    with pytest.raises(ValueError, match="emulated:PROFILE"):
        config("device=emulated:")
    assert config("device=emulated:qwen3-8b-h800").warmup.steps == 0 < config().warmup.steps


def test_costs_are_those_of_the_profile_times_the_slowdown() -> None:
    profile = qwen3_8b_h800()
    costs = ProfileCosts(pace_of(config("device=emulated:qwen3-8b-h800", "emulation.slowdown=3")))
    entry = ScheduledRequest(request_id="r", start=999, num_tokens=1, samples=True)
    step = costs.step_s(SchedulerOutput(step=0, requests=(entry,)))
    assert step == pytest.approx(3 * profile.decode_step_s(1, 1000))
    assert costs.transfer_s(1000) == pytest.approx(3 * 1000 * profile.kv_bytes_per_token / profile.transfer_bytes_per_s)
    assert costs.change_s("borrow") == pytest.approx(3 * 6.3)


def test_training_takes_its_tokens_time_over_the_ranks_and_is_written_and_read(tmp_path: Path) -> None:
    pauses: list[float] = []
    trainer = EmulatedTrainer(0.01, 4, pauses.append)
    sequence = TrainSequence(
        token_ids=[1] * 50, loss_mask=[0] * 30 + [1] * 20, logprobs=[0.0] * 50, weight_versions=[-1] * 50, reward=0, group=0
    )
    step = TrainStep(
        number=0, step=1, objective="policy", sequences=[sequence] * 2, plan=PackingPlan(updates=[]), weight_version=0
    )
    assert trainer.train_step(step) == {"tokens": 100, "trained_tokens": 40} and pauses == [0.25]
    trainer.save_state(str(tmp_path / "state"))
    again = EmulatedTrainer(0.01, 4)
    again.load_state(str(tmp_path / "state"))
    assert again.steps == 1


def test_an_engine_speaks_the_environment_s_words_and_has_the_profile_s_room(tmp_path: Path) -> None:
    words = ["left", "right"]
    asked = config("device=emulated:qwen3-8b-h800", "engine.block_size=32")
    folder = write_model_folder(tmp_path, asked.model, words)
    model = from_folder(folder)
    assert alphabet_of(folder, model) == (256, 257)
    assert set(alphabet_of(write_model_folder(tmp_path / "none", asked.model, []), model)) >= set(range(256))
    engine = build_engine(asked, pace_of(asked), folder)
    assert engine.stats().total_blocks == 811_000 // 32 and engine.max_model_len == 512
    publisher = EmulatedPublisher(engine, 0.0)
    publisher.begin(4)
    assert publisher.wait(1.0)["bytes"] == 0.0 and engine.weight_version == 4
    assert build_engine(asked, pace_of(asked), folder, asleep=True).asleep


@pytest.mark.parametrize("least", [3, 1500], ids=["few descriptors", "many"])
def test_ranks_meet_by_pipes_and_hear_of_the_end_of_the_first(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= least:
        pytest.skip(f"this system allows no descriptor {least}")
    low, writer = os.pipe()
    reader = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(low)
    monkeypatch.setenv(MEETING, str(writer))
    first = Meeting(0, 5.0)
    monkeypatch.setenv(MEETING, str(reader))
    second = Meeting(1, 5.0)
    first.set("controller", "tcp://here")
    first.set("run", "runs/x\nwith a line break")
    assert first.get("controller") == second.get("controller") == b"tcp://here"
    assert second.get("run") == b"runs/x\nwith a line break"
    with pytest.raises(RuntimeError, match=r"timeouts.start_s=0.01 s for rank 0 to say 'more'"):
        slow = Meeting(1, 0.01)
        slow.get("more")
    os.close(writer)
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        second.get("more")
    os.close(reader)


def settings(folder: Path, *extra: str) -> list[str]:
    values = [f"device=emulated:{profile(folder)}", *QUICK, f"output_dir={folder / 'runs'}", *extra]
    return [part for value in values for part in ("--set", value)]


def test_a_whole_job_runs_without_torch_and_its_books_add_up(tmp_path: Path) -> None:
    command = ["-m", "pearl", "run", "quickstart", "--nproc", "3", *settings(tmp_path, "max_steps=3", "save_steps=2")]
    with JobProcess.command(tmp_path, command) as job:
        job.wait_for("step ", 90)
        maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in job.family()}
        assert len(maps) >= 6 and not any("libtorch" in text for text in maps.values())
        assert job.wait_until_gone(90) is not None and job.process.wait() == 0, job.output()
    [run] = (tmp_path / "runs").iterdir()
    rows = rows_of(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3] and all(row["lost_tokens"] == 0 for row in rows)
    assert rows[-1]["dispatched"] == rows[-1]["trained"] + rows[-1]["dropped"] + rows[-1]["in_flight"]
    assert json.loads((run / "policy" / "emulated.json").read_text()) == {"steps": 3}


def test_who_interrupts_an_update_that_takes_longer_than_the_end_may_hears_where_the_results_are(tmp_path: Path) -> None:
    extra = ("emulation.train_token_s=100", "timeouts.stop_s=1")
    command = ["-m", "pearl", "run", "quickstart", "--nproc", "3", *settings(tmp_path, *extra)]
    with JobProcess.command(tmp_path, command) as job:
        job.wait_for("ready after", 90)
        assert "nothing is learned" in job.output()
        [run] = (tmp_path / "runs").iterdir()
        played, deadline = run / "trajectories.jsonl", time.monotonic() + 90
        while not played.exists() or played.read_text().count("\n") < 32:
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.2)
        time.sleep(1)  # by now the trainer is at it, most likely; without that the end is the usual one
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait_until_gone(30) is not None and job.process.wait() == 130, job.output()
        last = job.output().splitlines()[-6:]
    assert any("ended after" in line and str(run) in line for line in last), last


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank1", "rank0", "controller"])
def test_a_rank_that_dies_ends_the_job_and_it_goes_on_from_its_checkpoint(tmp_path: Path, victim: str) -> None:
    command = ["-m", "pearl", "run", "quickstart", "--nproc", "3", *settings(tmp_path, "max_steps=500", "save_steps=1")]
    with JobProcess.command(tmp_path, command) as job:
        job.wait_for("step    2", 90)
        pid = job.pid_of(victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert job.wait_until_gone(30) is not None, job.output()
        assert job.process.wait() != 0
    [run] = (tmp_path / "runs").iterdir()
    done = len(rows_of(run))
    resumed = python("-m", "pearl", "run", "--resume", str(run), "--nproc", "3", "--set", f"max_steps={done + 2}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [row["step"] for row in rows_of(run)] == list(range(1, done + 3))
