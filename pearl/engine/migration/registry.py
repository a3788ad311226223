"""Which transports of KV an engine has.

Owns the order in which "auto" tries them, the cheapest first. It knows nothing of engines.
"""

from __future__ import annotations

import torch

from pearl.engine.migration.cuda_ipc import CudaIpcTransport
from pearl.engine.migration.gloo import GlooTransport
from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.nccl import NcclTransport
from pearl.engine.migration.transport import Transport


def all_transports() -> list[Transport]:
    """New ones, for one engine: within a process, a machine, its GPUs, between GPUs, and between any two processes."""
    gpu = [CudaIpcTransport(), NcclTransport()] if torch.cuda.is_available() else []
    return [LocalTransport(), HostTransport(), *gpu, GlooTransport()]
