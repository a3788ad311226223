"""What the members of a group find out together: whether all have done well, the least of a number, whether all drew alike.

Owns small exchanges on the CPU, whatever the group is for. Invariant: every member comes to the same conclusion.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch

from pearl.engine.comm.communicator import CollectiveError, Communicator

PROBLEM_BYTES = 1024
"""How much of what went wrong with one member the others are told."""


@contextlib.contextmanager
def agreed(comm: Communicator) -> Iterator[None]:
    """What is done inside is done well by all members, or fails on all of them, each with its own error or a ValueError.

    A failed collective is not talked about any more: whoever was in it with us has it too, or is gone.
    """
    failure: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        failure = error
    problems = gather_texts(comm, "" if failure is None else str(failure) or repr(failure))
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem:
            raise ValueError(f"rank {rank}: {problem}")


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """Every member's text, by rank; no more than PROBLEM_BYTES of it."""
    mine = bytearray(text.encode(errors="replace")[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0"))
    output = torch.empty((comm.size, PROBLEM_BYTES), dtype=torch.uint8)
    comm.all_gather(output, torch.frombuffer(mine, dtype=torch.uint8))
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in output.numpy()]


def check_same(comm: Communicator, ids: Mapping[str, int]) -> None:
    """RuntimeError, on every member, unless all have drawn the same `ids` (request -> token id)."""
    digest = hashlib.blake2b(repr(sorted(ids.items())).encode(), digest_size=8).digest()
    mine = torch.tensor(int.from_bytes(digest, "little", signed=True))
    output = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(output, mine)
    others = [rank for rank, value in enumerate(output.tolist()) if value != output[0]]
    if others:
        raise RuntimeError(f"rank {', '.join(map(str, others))} of {comm.size} drew other tokens than rank 0, of {sorted(ids)}")


def least(comm: Communicator, value: int) -> int:
    """The least of all members' values."""
    output = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(output, torch.tensor(value))
    return int(output.min())


def greatest(comm: Communicator, values: list[int]) -> list[int]:
    """The greatest of all members' values, one by one; all give equally many."""
    output = torch.empty((comm.size, len(values)), dtype=torch.int64)
    comm.all_gather(output, torch.tensor(values))
    return output.amax(0).tolist()


def gather_bytes(comm: Communicator, payload: bytes) -> list[bytes]:
    """Every member's bytes, by rank, however many they are."""
    sizes = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(sizes, torch.tensor(len(payload)))
    mine = torch.frombuffer(bytearray(payload.ljust(max(1, int(sizes.max())), b"\0")), dtype=torch.uint8)
    output = torch.empty((comm.size, len(mine)), dtype=torch.uint8)
    comm.all_gather(output, mine)
    return [row.tobytes()[:size] for row, size in zip(output.numpy(), sizes.tolist(), strict=True)]
