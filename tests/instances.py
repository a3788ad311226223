"""Tensor-parallel instances whose ranks are threads of this process. Fixtures only, no tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gloo_members import run_members

from pearl.config import EngineConfig
from pearl.engine.comm.communicator import GroupCommunicator
from pearl.engine.leader import Leader
from pearl.engine.worker import follow

FIXED = {"dtype": "float32", "block_size": 4, "num_blocks": 200, "kv_fill": math.nan}


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=folder, **(FIXED | settings))


def outcomes(folder: Path, drive: Callable[[Leader], object], size: int = 2, **settings: Any) -> list:
    """What `drive` made of the first rank's engine, then what became of the others (None, or what they raised)."""
    config = config_of(folder, tensor_parallel=size, **settings)

    def member(comm: GroupCommunicator) -> object:
        if comm.rank:
            return follow(config, comm)
        engine = Leader(config, comm=comm, check_ranks=True)
        try:
            return drive(engine)
        finally:
            engine.close()

    return run_members(size, member)


def led(folder: Path, drive: Callable[[Leader], Any], size: int = 2, **settings: Any) -> Any:
    """What `drive` made of an instance all of whose ranks ended well; an error of the first rank is raised."""
    first, *others = outcomes(folder, drive, size, **settings)
    if isinstance(first, BaseException):
        raise first
    assert others == [None] * (size - 1)
    return first
