"""Whole jobs as a user starts them: real processes, a few small steps, and every way to end one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pearl.config import from_json
from pearl.metrics.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["rollout_batch_size=16", "group_size=4", "optimizer.mini_batch_size=8", "warmup.steps=3", "warmup.episodes=4"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "pearl.rl.launch", "quickstart"]


def settings(run_root, *extra):
    return [part for value in [*SMALL, f"output_dir={run_root}", *extra] for part in ("--set", value)]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def python(*arguments, timeout=120):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    extra = ["max_steps=3", "save_steps=2", "eval_steps=2", "eval_episodes=8"]
    result = python("-c", "from pearl.rl.launch import main; main()", "run", "quickstart", *settings(root, *extra))
    assert result.returncode == 0, result.stdout + result.stderr
    [run] = root.iterdir()
    return result.stdout, run


def test_a_run_prints_a_line_per_step_and_says_where_the_results_are(finished):
    output, run = finished
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    assert all(word in lines[0] for word in ("reward", "success", "tok/s", "rollout", "train", "publish"))
    assert "eval" in lines[1]
    last = output.splitlines()[-1]
    assert last.startswith("done after")
    assert str(run) in last


def test_a_run_leaves_config_metrics_trajectories_logs_and_policy(finished):
    _, run = finished
    assert from_json((run / "config.json").read_bytes()).max_steps == 3
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["dispatched"] == row["trained"] + row["dropped"] + row["in_flight"]
        assert row["trained"] == 16 * row["step"]
        assert row["staleness_max"] == 0
        assert row["logprob_gap"] < 1e-4
        parts = sum(row[f"{name}_s"] for name in ("rollout", "train", "publish", "eval", "other"))
        assert parts == pytest.approx(row["time_s"])
    assert [row["eval_success_rate"] is None for row in rows] == [True, False, True]
    episodes = read_jsonl(run / "trajectories.jsonl")
    assert len(episodes) == 3 * 16 + 8
    assert all(len(episode["token_ids"]) == len(episode["loss_mask"]) for episode in episodes)
    assert {file.name for file in (run / "logs").iterdir()} >= {"controller.log", "rank0.log"}
    assert (run / "checkpoints" / "step_000002" / "STABLE").is_file()
    assert (run / "policy" / "STABLE").is_file()


def test_every_metric_is_documented(finished):
    documented = (ROOT / "docs" / "metrics.md").read_text()
    rows = read_jsonl(finished[1] / "metrics.jsonl")
    assert [key for key in rows[0] if f"`{key}`" not in documented] == []


def test_the_saved_policy_is_the_one_transformers_reads(finished):
    import torch
    from transformers import AutoModelForCausalLM

    from pearl.config import EngineConfig
    from pearl.engine.engine import Engine
    from pearl.protocol import SamplingParams

    folder = finished[1] / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    episode = read_jsonl(finished[1] / "trajectories.jsonl")[0]
    ids = episode["token_ids"][: 1 + episode["loss_mask"].index(1)]
    engine = Engine(EngineConfig(model=str(folder), dtype="float32"))
    engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    completions = []
    while engine.has_unfinished():
        completions += engine.step()
    expected = list(ids)
    with torch.no_grad():
        for _ in range(3):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert completions[0].token_ids == expected[len(ids) :]


def test_print_shows_every_setting_and_starts_nothing(tmp_path):
    code = "import sys; from pearl.rl.launch import main; sys.exit(main())"
    result = python("-c", code, "run", "--print", *settings(tmp_path))
    assert result.returncode == 0
    assert json.loads(result.stdout)["rollout_batch_size"] == 16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nosuch.key=1", ["nosuch.key", "no such key"]),
        ("rollout_batch_size=18", ["rollout_batch_size=18", "group_size=4", "16 or 20"]),
        ("env.name=frozen_lak", ["frozen_lak", "frozen_lake"]),
        ("env.options.depth=3", ["depth"]),
    ],
)
def test_a_bad_setting_is_refused_before_anything_starts(tmp_path, setting, words):
    code = "import sys; from pearl.rl.launch import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    result = python("-c", code, "run", "quickstart", *settings(tmp_path, setting))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


def descendants(pid):
    """Process ids below `pid`, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    below, found = {pid}, set()
    while below:
        below = {child for child, parent in parents.items() if parent in below} - found
        found |= below
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_text(log, text, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if text in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} did not appear in {seconds} s:\n{log.read_text()}")


@pytest.mark.parametrize(
    ("signum", "phase"),
    [(signal.SIGINT, "run directory"), (signal.SIGINT, "warm-up"), (signal.SIGINT, "step "), (signal.SIGTERM, "step ")],
    ids=["ctrl-c while starting", "ctrl-c in warm-up", "ctrl-c in a step", "terminated in a step"],
)
def test_a_signal_ends_everything_in_time_and_leaves_nothing(tmp_path, signum, phase):
    log = tmp_path / "out.txt"
    extra = ["max_steps=1000", "warmup.steps=60" if phase == "warm-up" else "warmup.steps=1"]
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, *TORCHRUN, *settings(tmp_path / "runs", *extra)],
            cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_text(log, phase, 60)
        family = descendants(job.pid)
        started = time.monotonic()
        if signum == signal.SIGINT:
            os.killpg(job.pid, signum)  # as a terminal does
        else:
            os.kill(job.pid, signum)
        code = job.wait(20)
        assert time.monotonic() - started < 15
        assert code != 0
        deadline = time.monotonic() + 3
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if alive(pid)] == []
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["controller", "torchrun"])
def test_a_killed_process_ends_the_job_and_leaves_nothing(tmp_path, victim):
    log = tmp_path / "out.txt"
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, *TORCHRUN, *settings(tmp_path / "runs", "max_steps=1000", "warmup.steps=0")],
            cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_text(log, "step ", 60)
        family = descendants(job.pid)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in family}
        [controller] = [pid for pid, command in commands.items() if "pearl.rl.controller" in command]
        os.kill(controller if victim == "controller" else job.pid, signal.SIGKILL)
        assert job.wait(20) != 0
        deadline = time.monotonic() + 15
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if alive(pid)] == []
        if victim == "controller":
            assert log.read_text().count("the controller ended with exit code -9") == 1
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def test_the_environment_of_the_docs_trains(tmp_path):
    text = (ROOT / "docs" / "environments.md").read_text()
    (tmp_path / "number_search.py").write_text(text.split("```python\n")[1].split("```")[0])
    command = next(line for line in text.splitlines() if line.strip().startswith(".venv/bin/pearl"))
    arguments = [part for part in command.split()[1:] if part]
    extra = settings(tmp_path / "runs", "max_steps=2")
    result = subprocess.run(
        [sys.executable, "-c", "from pearl.rl.launch import main; main()", *arguments, *extra],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    [run] = (tmp_path / "runs").iterdir()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["failed_trajectories"] for row in rows] == [0, 0]
    assert 1 <= rows[-1]["turns_mean"] <= 4
