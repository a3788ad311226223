"""A trainer's state in a folder: what a training run needs to go on as if it had not been interrupted.

Owns the files: tensors by name through torch.distributed.checkpoint, each rank writing and reading what it holds, and
`trainer.json`, written last, which says what they are. It does not know what the tensors mean, nor when to save; the folder
becomes visible as a checkpoint by a rename that is not done here.
Invariant: a folder is read only if it is of the same model and dtype, and all its files have the sizes they were written
with; a state can be read by another number of ranks than wrote it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pearl.engine.comm.communicator import Communicator
from pearl.rl.checkpoint_folder import TRAINER_FACTS as FACTS

INDEX = ".metadata"
"""The index that torch.distributed.checkpoint writes: which file holds which rows of which tensor."""

VERSION = 1


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a state beside tensors. `updates`: optimizer updates made, by objective; `files`: name -> bytes.

    `shapes` are those of the policy's parameters, `reference` whether a reference is held, `policy_steps` where the
    learning-rate schedule stands. `train_layers`: how many layers were trained, whose moments alone are there (0: all; None:
    an older state does not say).
    """

    version: int = VERSION
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    reference: bool
    policy_steps: int
    updates: dict[str, int]
    train_layers: int | None = None
    value_head: bool = False
    files: dict[str, int] = {}


class StateError(ValueError):
    """A folder that holds no whole trainer state, or one of another model."""


def write_state(path: Path, tensors: Mapping[str, Tensor], facts: Facts, comm: Communicator, timeout_s: float) -> None:
    """Writes the state into the folder `path`. A collective of the communicator's ranks, which share a file system.

    OSError, on every rank, if any of them could not write its part.
    """
    if comm.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        for name in (FACTS, INDEX):  # what says that a state is here goes first
            (path / name).unlink(missing_ok=True)
    comm.barrier(timeout_s)
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, overwrite=True), **_members(comm))
    except CheckpointException as error:
        raise OSError(f"{path}: cannot be written: {error}") from error
    if comm.rank == 0:
        files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.name != FACTS}
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(facts, files=files)))
        with (path / FACTS).open("wb") as out:
            out.write(text + b"\n")
            out.flush()
            os.fsync(out.fileno())
    comm.barrier(timeout_s)


def read_facts(path: Path, expected: Facts) -> Facts:
    """The facts of a whole state that fits `expected` (in version, dtype and shapes); StateError says what does not."""
    try:
        facts = msgspec.json.decode((path / FACTS).read_bytes(), type=Facts)
    except FileNotFoundError:
        raise StateError(f"{path}: no trainer state (it has no {FACTS}, which is written last)") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"{path / FACTS}: damaged, or not a trainer state: {error}") from None
    if facts.version != expected.version:
        raise StateError(f"{path}: a state of version {facts.version}; this release reads version {expected.version}")
    if facts.dtype != expected.dtype:
        raise StateError(f"{path}: the state is in {facts.dtype}, the trainer in {expected.dtype}")
    if facts.value_head != expected.value_head:
        with_it = "with" if facts.value_head else "without"
        raise StateError(f"{path}: algorithm.critic: the state was written {with_it} a value head on the policy's trunk")
    if facts.train_layers not in (None, expected.train_layers):
        theirs, ours = ("all" if count == 0 else count for count in (facts.train_layers, expected.train_layers))
        raise StateError(f"{path}: trainer.train_layers={ours}: must be {theirs} as when the state was written")
    for name in sorted(facts.shapes.keys() | expected.shapes.keys()):
        theirs, ours = facts.shapes.get(name), expected.shapes.get(name)
        if theirs != ours:
            raise StateError(f"{path}: a state of another model: {name} is {theirs or 'absent'} there, {ours or 'absent'} here")
    for name, size in facts.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise StateError(f"{path / name}: {'missing' if found is None else f'has {found} bytes'}: must have {size} bytes")
    return facts


def read_tensors(path: Path, tensors: Mapping[str, Tensor], comm: Communicator) -> None:
    """Reads these tensors, in place, from a folder that `read_facts` accepted. A collective, like `write_state`.

    StateError if one is not there or cannot be read; some of the tensors may have been overwritten then.
    """
    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(path), **_members(comm))
    except (CheckpointException, RuntimeError, OSError, ValueError, KeyError) as error:
        raise StateError(f"{path}: cannot be read: {error}") from error


def _members(comm: Communicator) -> dict:
    """Alone, nothing is asked of anybody, whatever groups the process is in."""
    return {"no_dist": True} if comm.size == 1 else {"process_group": comm.group}  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a process alone saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
