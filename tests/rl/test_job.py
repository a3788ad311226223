"""Whole jobs as a user starts them: real processes, a few small steps, and every way to end one."""

import json
import os
import signal
import subprocess
import sys

import pytest
from job_cases import ROOT, environment, python, settings, start

from pearl.config import from_json
from pearl.metrics.jsonl import read_jsonl


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    extra = ["max_steps=3", "save_steps=2", "eval_steps=2", "eval_episodes=8"]
    result = python("-c", "from pearl.rl.command_line import main; main()", "run", "quickstart", *settings(root, *extra))
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


def test_every_file_of_a_run_is_documented(finished):
    documented = (ROOT / "docs" / "run_folder.md").read_text()
    found = [*finished[1].iterdir(), *(finished[1] / "logs").iterdir()]
    assert [path.name for path in found if f"`{path.name}" not in documented] == []


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
    code = "import sys; from pearl.rl.command_line import main; sys.exit(main())"
    result = python("-c", code, "run", "--print", *settings(tmp_path))
    assert result.returncode == 0
    assert json.loads(result.stdout)["rollout_batch_size"] == 16
    assert list(tmp_path.iterdir()) == []


def test_print_into_a_pipe_that_nobody_reads_is_silent(tmp_path):
    command = [sys.executable, "-m", "pearl", "run", "--print"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_the_module_is_the_command_and_knows_its_version():
    result = python("-m", "pearl", "--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "pearl")
    result = python("-m", "pearl")
    assert result.returncode == 2 and "--version" in result.stdout


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nosuch.key=1", ["nosuch.key", "no such key"]),
        ("rollout_batch_size=18", ["rollout_batch_size=18", "group_size=4", "16 or 20"]),
        ("env.name=frozen_lak", ["frozen_lak", "frozen_lake"]),
        ("env.options.depth=3", ["depth"]),
        ("optimizer.lr=fast", ["optimizer.lr='fast'", "a number"]),
        ("engine.max_model_len=12", ["engine.max_model_len=12", "first prompt", "rollout.max_tokens=8"]),
        ("model.path=/no/such/folder", ["model.path='/no/such/folder'", "config.json"]),
    ],
)
def test_a_bad_setting_is_refused_before_anything_starts(tmp_path, setting, words):
    code = "import sys; from pearl.rl.command_line import main; c = main(); assert 'torch' not in sys.modules; sys.exit(c)"
    result = python("-c", code, "run", "quickstart", *settings(tmp_path, setting))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("signum", "phase"),
    [(signal.SIGINT, "run directory"), (signal.SIGINT, "warm-up"), (signal.SIGINT, "step "), (signal.SIGTERM, "step ")],
    ids=["ctrl-c while starting", "ctrl-c in warm-up", "ctrl-c in a step", "terminated in a step"],
)
def test_a_signal_ends_everything_in_time_and_leaves_nothing(tmp_path, signum, phase):
    steps = "warmup.steps=60" if phase == "warm-up" else "warmup.steps=1"
    with start(tmp_path, "max_steps=1000", steps) as job:
        job.wait_for(phase, 60)
        if signum == signal.SIGINT:
            os.killpg(job.process.pid, signum)  # as a terminal does
        else:
            os.kill(job.process.pid, signum)
        assert job.wait_until_gone(15) is not None, job.family()
        assert job.process.wait() != 0
        assert job.output().count(f"interrupted by {signum.name}") == 1


@pytest.mark.parametrize("victim", ["controller", "torchrun"])
def test_a_killed_process_ends_the_job_and_leaves_nothing(tmp_path, victim):
    with start(tmp_path, "max_steps=1000", "warmup.steps=0") as job:
        job.wait_for("step ", 60)
        os.kill(job.pid_of(victim), signal.SIGKILL)
        assert job.wait_until_gone(15) is not None, job.family()
        assert job.process.wait() != 0
        reason = "the controller ended with exit code -9" if victim == "controller" else "the launcher is gone"
        assert job.output().count(reason) == 1, job.output()


def train_on_the_docs_environment(folder, *extra):
    """The command of docs/environments.md on its environment, in `folder`; the rows of metrics.jsonl."""
    text = (ROOT / "docs" / "environments.md").read_text()
    (folder / "next_number.py").write_text(text.split("```python\n")[1].split("```")[0])
    command = next(line for line in text.splitlines() if line.strip().startswith("pearl run"))
    output = ["--set", f"output_dir={folder / 'runs'}"]
    result = subprocess.run(
        [sys.executable, "-m", "pearl", *command.split()[1:], *output, *extra],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    [run] = (folder / "runs").iterdir()
    return read_jsonl(run / "metrics.jsonl")


def test_the_environment_of_the_docs_trains(tmp_path):
    rows = train_on_the_docs_environment(tmp_path, *settings(tmp_path / "runs", "max_steps=2"))
    assert [row["failed_trajectories"] for row in rows] == [0, 0]
    assert 1 <= rows[-1]["turns_mean"] <= 2


@pytest.mark.slow
def test_the_environment_of_the_docs_is_learnt(tmp_path):
    success = [row["success_rate"] for row in train_on_the_docs_environment(tmp_path)]
    assert sum(success[:3]) / 3 < 0.5 and sum(success[-10:]) / 10 > 0.85
