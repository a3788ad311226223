"""Pools, offers and plans for tests of KV transports, and a second process that owns a pool. Fixtures only, no tests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from pearl.engine.arena import Arena
from pearl.engine.migration.planner import CopyPlan, plan_copy
from pearl.engine.migration.transport import LeaseWords, Pool, Ticket, Transport
from pearl.kv_transfer import KVEndpoint, KVLayout, KVTransfer, RequestState
from pearl.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
CHILD = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
"""The environment of a process that imports pearl and the fixtures here."""

STATE = RequestState(
    request_id="r", name="r", index=0, params=SamplingParams(), token_ids=[1], num_prompt_tokens=1, max_tokens=4, seed=0,
    stop_token_ids=[], eos_token_ids=[], cache_salt=None, session_id=None, cacheable=True, streaming=False,
    num_cached_tokens=0, num_preemptions=0, logprobs=[], top_logprobs=[], prompt_logprobs=[], weight_versions=[],
)  # fmt: skip


def layout(**changes: object) -> KVLayout:
    sizes = {"dtype": "float32", "block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "order": "plain"}
    return KVLayout(**(sizes | changes))  # type: ignore[arg-type]


def make_pool(shape: KVLayout, num_blocks: int, seed: int | None, device: str = "cpu") -> Pool:
    """A pool in an arena: random bits, or without a seed all ones."""
    arena, dtype = Arena(torch.device(device)), getattr(torch, shape.dtype)
    size = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    tensor = arena.shared_zeros(size, dtype)
    if seed is None:
        tensor.fill_(1)
    else:
        bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, tensor.nbytes, np.uint8))
        tensor.view(-1).copy_(bits.view(dtype))
    return Pool(tensor=tensor, memory=arena, layout=shape, leases=LeaseWords.zeros(num_blocks))


def offer(
    pool: Pool, blocks: list[int], transport: Transport, num_tokens: int | None = None, transfer_id: str = "t"
) -> KVTransfer:
    """Offers these blocks, as an engine does."""
    address = transport.address(pool)
    num_blocks = pool.tensor.shape[2]
    addresses = {} if address is None else {transport.name: address}
    transfer = KVTransfer(
        transfer_id=transfer_id,
        request_id="r",
        state=STATE,
        source=KVEndpoint(worker="w0", host="here", pid=0, num_blocks=num_blocks, addresses=addresses),
        blocks=blocks,
        lease_word=pool.leases.open(blocks[-1]),
        num_written_tokens=len(blocks) * pool.layout.block_size if num_tokens is None else num_tokens,
        layout=pool.layout,
        weight_version=0,
        epoch=0,
        deadline=60.0,
    )
    transport.offer(transfer, pool)
    return transfer


def plan_of(transfer: KVTransfer, pool: Pool, destination: list[int], **how: object) -> CopyPlan:
    return plan_copy(
        transfer.layout,
        transfer.blocks,
        pool.layout,
        destination,
        num_tokens=transfer.num_written_tokens,
        **how,  # type: ignore[arg-type]
    )


def wait(ticket: Ticket, timeout_s: float = 20.0) -> None:
    """Polls to the end, which must come in time."""
    deadline = time.monotonic() + timeout_s
    while not ticket.done():
        assert time.monotonic() < deadline, "the ticket did not end in time"
        time.sleep(0.0002)


def some_blocks(rng: random.Random, num_blocks: int, count: int) -> list[int]:
    """Scattered, with some neighbours among them."""
    ids = rng.sample(range(num_blocks), count)
    return sorted(ids) if rng.random() < 0.3 else ids


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class Owner:
    """A second process with a pool, made from `seed`; it offers `blocks` by the transport of that name, and obeys."""

    def __init__(self, transport: str, shape: KVLayout, num_blocks: int, seed: int, blocks: list[int]) -> None:
        task = {"transport": transport, "layout": msgspec.to_builtins(shape), "num_blocks": num_blocks, "seed": seed}
        command = [sys.executable, str(ROOT / "tests" / "kv_owner.py"), json.dumps({**task, "blocks": blocks})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=CHILD)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner did not start"
        self.transfer = msgspec.json.decode(line, type=KVTransfer)

    def tell(self, word: str) -> str:
        """Has it do something (`tests/kv_owner.py`); what it answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
