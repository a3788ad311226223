"""A process that owns a KV pool, offers some of its blocks and then does as it is told, line by line. For tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import msgspec
import torch
from fake_nccl import HostNccl
from host_regions import HostGpu, make_region_pool
from migration_cases import make_pool, offer

from pearl.engine.migration.cuda_ipc import CudaIpcTransport
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.transport import Transport
from pearl.kv_transfer import KVLayout


def main() -> None:
    torch.set_num_threads(1)
    task = json.loads(sys.argv[1])
    transports: dict[str, Callable[[], Transport]] = {
        "gloo": GlooTransport,
        "host": HostTransport,
        "cuda_ipc": CudaIpcTransport,
        "regions": lambda: CudaIpcTransport(HostGpu()),
        "nccl": lambda: HostNccl(os.environ["FAKE_NCCL"]),
    }
    transport = transports[task["transport"]]()
    device = "cuda:0" if transport.name == "cuda_ipc" else "cpu"
    shape = msgspec.convert(task["layout"], KVLayout)
    make = make_region_pool if task["transport"] == "regions" else make_pool
    pool = make(shape, task["num_blocks"], task["seed"], device)
    transfer = offer(pool, task["blocks"], transport)
    say(msgspec.json.encode(transfer).decode())
    for line in sys.stdin:
        if line.strip() == "end":  # the lease ends, and the blocks are another's
            pool.leases.close(transfer.blocks[-1])
            transport.withdraw(transfer.transfer_id)
            pool.tensor[:, :, transfer.blocks] = 9
        elif line.strip() == "again":
            transfer = offer(pool, task["blocks"], transport)
        elif line.strip() == "give_back":
            pool.memory.give_back()
        elif line.strip() == "take":
            pool.memory.take()
            pool.tensor.copy_(make_pool(shape, task["num_blocks"], task["seed"] + 1).tensor)
        say(msgspec.json.encode(transfer).decode())


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
