"""The processes of an instance's other ranks: they serve, they are named when they do not come, and none is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import engine_cases
import hf_models
import pytest
import torch
from engine_cases import GREEDY, named
from instances import FIXED, config_of

from pearl.config import Config, EngineConfig
from pearl.engine import ranks
from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.llm import LLM
from pearl.engine.models.config import from_folder
from pearl.engine.ranks import Ranks
from pearl.protocol import SamplingParams

CPU = torch.device("cpu")
GONE_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(engine_cases.model(), tmp_path_factory.mktemp("dense"))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int], within_s: float = GONE_S) -> None:
    deadline = time.monotonic() + within_s
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, f"still there after {within_s} s: {[pid for pid in pids if runs(pid)]}"
        time.sleep(0.02)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids of the processes that were started."""
    pids: list[int] = []
    plain = Ranks._start

    def start(self: Ranks, *arguments) -> subprocess.Popen:
        process = plain(self, *arguments)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(Ranks, "_start", start)
    return pids


def test_an_llm_over_two_processes(folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Same results as on one, also after a Ctrl-C. That a rank was killed while nothing was served, the next step notices."""
    prompts = [hf_models.prompt(n, seed=n) for n in (3, 9, 14)]
    params = [GREEDY, SamplingParams(max_tokens=20, n=2), SamplingParams(seed=3, max_tokens=9, top_k=50, prompt_logprobs=True)]
    torch.manual_seed(5)  # the other rank's is another one: torch's own random numbers have no part in it
    monkeypatch.setenv("PEARL_CHECK_RANKS", "1")
    one, several = LLM(config_of(folder)), LLM(config_of(folder), tensor_parallel=2)
    pids = [pid for pid in started if runs(pid)]
    try:
        for llm in (one, several):
            llm.engine.update_weights(named(1), 1)
        pairs = list(zip(one.generate(prompts, params), several.generate(prompts, params), strict=True))
        assert len(pairs) == 4
        for left, right in pairs:
            assert (left.token_ids, left.index, left.weight_versions) == (right.token_ids, right.index, right.weight_versions)
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
        assert several.score(prompts[2]) == pytest.approx(one.score(prompts[2]), abs=1e-4)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                several.generate(prompts, params)
        assert not several.engine.has_unfinished()
        assert several.generate(prompts, params)[3].token_ids == pairs[3][0].token_ids
        os.kill(pids[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(CollectiveError):
            several.generate(prompts, params)
        assert time.monotonic() - start < GONE_S
        with pytest.raises(RuntimeError, match="the instance of 2 ranks serves nothing any more"):
            several.generate(prompts, params)
    finally:
        several.close()
    assert_gone(pids, 1.0)


def test_a_rank_that_cannot_do_what_the_first_could_says_why(folder: Path, started: list[int], capfd) -> None:
    """It is told of a request twice, which the first rank never was."""
    with LLM(config_of(folder), tensor_parallel=2) as llm:
        llm.engine.add_request([1, 2, 3], GREEDY, request_id="twice")
        llm.engine._noted *= 2
        said = "rank 1 of 2 ended: RuntimeError: add_request: request_id='twice': is in use"
        with pytest.raises(CollectiveError, match=said):
            llm.engine.step()
        with pytest.raises(RuntimeError, match=f"the instance of 2 ranks serves nothing any more: {said}"):
            llm.engine.step()
    assert_gone(started, 1.0)
    assert "RuntimeError: add_request: request_id='twice': is in use" in capfd.readouterr().err


def test_a_model_config_goes_to_the_other_rank_and_close_ends_it(folder: Path, started: list[int]) -> None:
    config = dataclasses.replace(config_of(from_folder(folder)), load_format="dummy", tensor_parallel=2)
    with LLM(config) as llm:
        pids = list(started)
        assert len(pids) == 1 and runs(pids[0])
        [completion] = llm.generate([[1, 2, 3]], GREEDY)
    assert_gone(pids, 1.0)
    assert completion.token_ids == LLM(config, tensor_parallel=1).generate([[1, 2, 3]], GREEDY)[0].token_ids
    with pytest.raises(RuntimeError, match="it was closed"):
        llm.generate([[1, 2, 3]], GREEDY)
    llm.close()


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda", "device='cuda', tensor_parallel=2: needs 2 CUDA devices, of 1 here"), ("cuda:0", "must be auto, cpu or cuda")],
)
def test_every_rank_needs_a_gpu_of_its_own(
    folder: Path, device: str, said: str, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=said):
        LLM(folder, tensor_parallel=2, device=device)
    assert not started


def test_what_can_be_refused_is_refused_before_a_process_is_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="num_heads=4: must be a multiple of tensor_parallel=3"):
        LLM(folder, dtype="float32", tensor_parallel=3)
    with pytest.raises(ValueError, match="num_kv_heads=6: must be a multiple or a divisor of tensor_parallel=4"):
        LLM(dataclasses.replace(from_folder(folder), num_heads=12, num_kv_heads=6), tensor_parallel=4, load_format="dummy")
    with pytest.raises(ValueError, match="model="):
        LLM(tmp_path / "nothing", tensor_parallel=2)
    with pytest.raises(ValueError, match="max_model_len=999"):
        LLM(folder, dtype="float32", tensor_parallel=2, max_model_len=999)
    with pytest.raises(ValueError, match="tensor_parallel=0: must be an integer >= 1"):
        LLM(folder, tensor_parallel=0)
    with pytest.raises(ValueError, match=r"engine.tensor_parallel=2: a job serves with engines of 1 rank"):
        Config(engine=EngineConfig(tensor_parallel=2))


def test_weights_that_cannot_be_read_are_a_value_error_and_leave_no_process(tmp_path: Path, started: list[int]) -> None:
    folder = hf_models.save(engine_cases.model(), tmp_path)
    (folder / "model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match="a weight file is damaged"):
        LLM(folder, tensor_parallel=2, **FIXED)
    assert len(started) == 1
    assert_gone(started, 1.0)


def test_a_rank_that_ends_before_it_came_is_named_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    started = Ranks(config_of(folder, tensor_parallel=3))
    try:
        with pytest.raises(RuntimeError, match=r"rank \d of 3 ended with exit code 1 before it could be reached"):
            started.connect(CPU)
    finally:
        started.kill()


def test_a_rank_that_hangs_at_the_start_is_named_and_killed(
    folder: Path, tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(program))
    monkeypatch.setattr(ranks, "START_S", 0.5)
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 did not come within 0.5 s"):
        LLM(folder, tensor_parallel=2, **FIXED)
    assert_gone(started, 1.0)


SCRIPT = """
import os, signal, sys, threading, time
from pearl.engine.llm import LLM
from pearl.engine.ranks import Ranks

kind, folder = sys.argv[1:]
plain = Ranks._start
def start(self, *arguments):
    process = plain(self, *arguments)
    print(process.pid, flush=True)
    if kind == "interrupt":
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    return process
Ranks._start = start
llm = LLM(folder, dtype="float32", num_blocks=50, tensor_parallel=2)
print("serving", flush=True)
llm.generate([[1, 2, 3]])
if kind == "raise":
    raise OSError("in main")
time.sleep(60)
"""


@pytest.fixture(params=[("kill", "interrupt"), pytest.param(("terminate", "raise"), marks=pytest.mark.slow)], ids="-".join)
def parents(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen]]:
    script = tmp_path / "serves.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(ranks.__file__).parents[2])
    started = {
        kind: subprocess.Popen(
            [sys.executable, str(script), kind, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
        for kind in request.param
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()
        process.stdout.close()


def test_no_rank_outlives_the_process_that_started_it(parents: dict[str, subprocess.Popen]) -> None:
    """Killed, terminated, ended by an exception, interrupted by Ctrl-C while it loads."""
    pids = {kind: int(process.stdout.readline()) for kind, process in parents.items()}
    for kind, end in (("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)):
        if kind in parents:
            assert parents[kind].stdout.readline() == "serving\n"
            assert runs(pids[kind])
            parents[kind].send_signal(end)
    codes = {kind: process.wait(30) for kind, process in parents.items()}
    assert_gone(list(pids.values()))
    expected = {"kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, "raise": 1, "interrupt": -signal.SIGINT}
    assert codes == {kind: expected[kind] for kind in parents}
    if "interrupt" in parents:
        assert "serving" not in parents["interrupt"].stdout.read()
