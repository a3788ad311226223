"""A process with a PREFILL engine that hands over what it is given, and does as it is told, line by line. For tests."""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from pathlib import Path

import msgspec
import torch

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.host import HostTransport
from pearl.protocol import Role, SamplingParams


def make(folder: Path, role: Role, transport: str) -> tuple[Engine, HostTransport | GlooTransport]:
    """An engine with one way for KV. Its pool is poisoned: what was not written or sent would be NaN."""
    way = HostTransport() if transport == "host" else GlooTransport(timeout_s=1.5)
    config = EngineConfig(model=folder, dtype="float32", block_size=4, num_blocks=200, kv_fill=math.nan, role=role)
    return Engine(config, transports=[way]), way


def main() -> None:
    torch.set_num_threads(1)
    engine, _ = make(Path(sys.argv[1]), Role.PREFILL, sys.argv[2])
    say("ready")
    while True:
        for line in lines():
            task = json.loads(line)
            if "ids" in task:
                engine.add_request(task["ids"], msgspec.convert(task["params"], SamplingParams), request_id=task["name"])
            elif "finish" in task:
                engine.finish_export(task["finish"], ok=task["ok"])
            else:
                stats = engine.stats()
                say(json.dumps([stats.total_blocks - stats.free_blocks - stats.cached_blocks, engine.has_unfinished()]))
        for completion in engine.step() if engine.has_unfinished() else ():
            say(json.dumps({"finished": completion.token_ids}))
        for transfer in engine.take_handoffs():
            say(msgspec.json.encode(transfer).decode())
        time.sleep(0.001)


def lines() -> list[bytes]:
    """Those that are there to be read; this process ends with its parent."""
    if not select.select([0], [], [], 0)[0]:
        return []
    text = os.read(0, 1 << 16)
    if not text:
        sys.exit()
    return text.splitlines()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
