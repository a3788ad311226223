"""Hand-offs between engines of two processes on one machine, also when the one that hands over is killed."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hf_models
import msgspec
import pytest
from engine_cases import assert_free, assert_greedy, make, model, oracle, run

from pearl.protocol import KVTransfer, Role

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture
def source(folder: Path) -> Iterator[subprocess.Popen]:
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "prefill_process.py"), str(folder)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def tell(process: subprocess.Popen, order: dict) -> str:
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def handed_over(process: subprocess.Popen, seed: int) -> KVTransfer:
    answer = tell(process, {"prompt": hf_models.prompt(9, seed=seed), "id": f"r{seed}"})
    return msgspec.msgpack.decode(base64.b64decode(answer), type=KVTransfer)


def test_requests_come_from_another_process_or_stay_there(folder: Path, source: subprocess.Popen) -> None:
    engine = make(folder, role=Role.DECODE)
    for seed in range(3):
        transfer = handed_over(source, seed)
        assert transfer.source.pid == source.pid
        ok = engine.import_kv(transfer) if seed != 1 else False
        [done, free] = json.loads(tell(source, {"finish": [transfer.transfer_id, ok]}))
        assert ok is (seed != 1) and free
        if ok:
            assert done == []
            assert_greedy(run(engine)[f"r{seed}"][0], 8)
        else:
            assert done == [oracle(tuple(hf_models.prompt(9, seed=1)), 8)[0]]
    assert engine.stats().num_preemptions == 0  # nothing was computed again
    late = handed_over(source, 3)
    tell(source, {"finish": [late.transfer_id, False]})
    assert engine.import_kv(late) is False


def test_who_was_killed_hands_nothing_over_and_costs_nothing(folder: Path, source: subprocess.Popen) -> None:
    engine = make(folder, role=Role.DECODE)
    kept, lost = handed_over(source, 0), handed_over(source, 1)
    assert engine.import_kv(kept)
    os.kill(source.pid, signal.SIGKILL)
    source.wait()
    assert engine.import_kv(lost) is False
    assert_greedy(run(engine)["r0"][0], 8)
    assert_free(engine)
