"""An engine in a process of its own that computes prompts and hands them over, line by line. For tests."""

from __future__ import annotations

import base64
import json
import sys

import msgspec

from pearl.config import EngineConfig
from pearl.engine.engine import Engine
from pearl.protocol import Role, SamplingParams


def main() -> None:
    """Reads {"prompt": ids} or {"finish": [transfer_id, ok]}; answers with a transfer in base64, or with its own tokens."""
    config = EngineConfig(model=sys.argv[1], dtype="float32", block_size=4, num_blocks=64, role=Role.PREFILL)
    engine = Engine(config, text=False)
    for line in sys.stdin:
        order = json.loads(line)
        if "prompt" in order:
            engine.add_request(order["prompt"], SamplingParams(temperature=0.0, max_tokens=8), request_id=order["id"])
            engine.step()
            [transfer] = engine.take_handoffs()
            answer = base64.b64encode(msgspec.msgpack.encode(transfer)).decode()
        else:
            engine.finish_export(*order["finish"])
            done = [completion.token_ids for _ in range(8) if engine.has_unfinished() for completion in engine.step()]
            stats = engine.stats()
            answer = json.dumps([done, stats.free_blocks + stats.cached_blocks == stats.total_blocks])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
