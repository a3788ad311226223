"""Prefill in one process, decode in another: the tokens of one engine, and both pools free afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hf_models
import msgspec
import pytest
from engine_cases import GREEDY, assert_greedy, model, run
from kv_worker import make
from migration_cases import CHILD, ROOT

from pearl.engine.engine import Engine
from pearl.engine.migration.gloo import GlooTransport
from pearl.protocol import KVTransfer, Role

NAMES = ("host", "gloo")


class Prefill:
    """The other process (`tests/kv_worker.py`)."""

    def __init__(self, folder: Path, transport: str) -> None:
        command = [sys.executable, str(ROOT / "tests" / "kv_worker.py"), str(folder), transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=CHILD, text=True)
        assert self.hear() == "ready"

    def tell(self, **task: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def hand_over(self, name: str, ids: list[int]) -> KVTransfer:
        self.tell(name=name, ids=ids, params=msgspec.to_builtins(GREEDY))
        return msgspec.json.decode(self.hear(), type=KVTransfer)

    def used(self) -> list[int]:
        self.tell()
        return json.loads(self.hear())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.save(model(), tmp_path_factory.mktemp("dense"))


@pytest.fixture(params=NAMES)
def ends(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Prefill, Engine, str]]:
    prefill = Prefill(folder, request.param)
    engine, transport = make(folder, Role.DECODE, request.param)
    yield prefill, engine, request.param
    prefill.close()
    if isinstance(transport, GlooTransport):
        transport.close()


def test_the_tokens_are_those_of_one_engine_whatever_becomes_of_the_other(ends: tuple[Prefill, Engine, str]) -> None:
    """First all goes well; then the other process is stopped in the middle of an offer, and then it is killed."""
    prefill, decode, name = ends
    for turn, length in enumerate((1, 3, 4, 9, 17)):
        transfer = prefill.hand_over(f"r{turn}", hf_models.prompt(length, seed=length))
        assert decode.import_kv(transfer, transport=name)
        assert_greedy(run(decode)[f"r{turn}"][0], 8)
        prefill.tell(finish=transfer.transfer_id, ok=True)
    assert prefill.used() == [0, False]
    assert decode.stats().num_generated_tokens == 5 * 7  # the first token of each came with it

    for way in (signal.SIGSTOP, signal.SIGKILL):
        transfer = prefill.hand_over(way.name, hf_models.prompt(9, seed=int(way)))
        prefill.process.send_signal(way)
        if way == signal.SIGKILL:
            prefill.process.wait(10)
        start = time.monotonic()
        if decode.import_kv(transfer, transport=name):  # its KV comes all the same, or is computed again
            assert_greedy(run(decode)[way.name][0], 8)
        else:
            assert way == signal.SIGKILL and not decode.has_unfinished()
        assert time.monotonic() - start < 10
        assert not decode._core.arrivals and not decode._tickets
        prefill.process.send_signal(signal.SIGCONT)
