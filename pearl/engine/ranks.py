"""The processes of the other ranks of a tensor-parallel instance, started by the first.

Owns their start, the limits on it, and their end. It knows nothing of requests or weights. Invariant: no process outlives the
one that started it: each watches its parent, and is killed when the instance is closed or its start fails.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch

import pearl.config
from pearl.config import EngineConfig
from pearl.engine.comm.communicator import GroupCommunicator
from pearl.engine.comm.groups import connect, last_words, meet, open_store

START_S = 120.0
"""Until all ranks have come: they have loaded their code, not yet the model."""
COLLECTIVE_S = 300.0
"""A rank may be so much later than another in one collective; the last to have loaded its weights is the latest."""


class Ranks:
    """The ranks 1 to `config.tensor_parallel` - 1 of an instance. Starts them at once, all the rest is to be called."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.tensor_parallel
        self._store = open_store(START_S)
        self._processes: list[subprocess.Popen] = []
        try:
            for rank in range(1, self._size):
                self._processes.append(self._start(rank))
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # one that has ended is named in `connect`
                    pipe.write(pickle.dumps(config))
        except BaseException:
            self.kill()
            raise

    def connect(self, device: torch.device) -> GroupCommunicator:
        """The group of the instance, as its rank 0. RuntimeError names a rank that ended, TimeoutError one that is missing."""
        meet(self._store, 0, self._size, START_S, self._watch)
        return connect(self._store, 0, self._size, device, COLLECTIVE_S)

    def last_words(self) -> str:
        """Why ranks that ended did, as far as they said so; empty if none has."""
        words = last_words(self._store, self._size)
        return "; ".join(f"rank {rank} of {self._size} ended: {word}" for rank, word in words.items())

    def kill(self) -> None:
        """Ends all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _start(self, rank: int) -> subprocess.Popen:
        """It is in a process group of its own: a terminal's Ctrl-C is for the first rank, which then lets the others go.

        Unless OMP_NUM_THREADS is set it gets its share of this process's threads.
        """
        settings = {
            "rank": rank, "size": self._size, "port": self._store.port, "parent": os.getpid(),
            "start": START_S, "collective": COLLECTIVE_S,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in settings.items()]
        root = str(Path(pearl.config.__file__).parents[1])
        threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // self._size))}
        paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH")) if path)
        return subprocess.Popen(
            [sys.executable, "-m", "pearl.engine.worker", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # what this process prints may be read by a program
            env=threads | os.environ | {"PYTHONPATH": paths},
            process_group=0,
        )

    def _watch(self, missing: list[int]) -> None:
        for rank in missing:
            code = self._processes[rank - 1].poll()
            if code is not None:
                raise RuntimeError(f"rank {rank} of {self._size} ended with exit code {code} before it could be reached")
