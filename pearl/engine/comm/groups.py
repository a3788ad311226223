"""Groups of processes that are no part of any job-wide WORLD: where they meet, and how they become a Communicator.

Owns the store of such a group (on this machine alone) and how long one waits for whom. It does not know who starts the
members or what they do. Invariants: the store's port is chosen by binding it, never looked for first; no wait is without a
limit, and its error names the ranks that did not come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from pearl.engine.comm.communicator import CollectiveError, GroupCommunicator

LOCAL = "127.0.0.1"
MEET_POLL_S = 0.02
JOIN_TRY_S = 5.0
"""How long one try to reach a store may take: a thousand times what it takes."""


def open_store(timeout_s: float) -> dist.TCPStore:
    """A store that other processes of this machine reach at its `port`."""
    listener = socket.create_server((LOCAL, 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(LOCAL, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process of this machine has opened. TimeoutError if that is not through within `timeout_s`.

    Of clients that connect at the same moment a few in a hundred are never answered (torch 2.13), and wait until their own
    timeout; so a try that takes long is left alone, and another one is made.
    """
    deadline, tries = time.monotonic() + timeout_s, 0
    while (left := deadline - time.monotonic()) > 0:
        tries += 1
        found: list[dist.TCPStore | Exception] = []
        thread = threading.Thread(target=_connect_to, args=(port, timeout_s, found), name="store", daemon=True)
        thread.start()
        thread.join(min(JOIN_TRY_S, left))
        if found and isinstance(found[0], Exception):
            raise found[0]
        if found:
            return found[0]
    raise TimeoutError(f"the store at port {port} of this machine did not answer any of {tries} tries within {timeout_s:g} s")


def _connect_to(port: int, timeout_s: float, found: list[dist.TCPStore | Exception]) -> None:
    try:
        found.append(dist.TCPStore(LOCAL, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False))
    except Exception as error:
        found.append(error)


def meet(
    store: dist.Store, rank: int, size: int, timeout_s: float, watch: Callable[[list[int]], None] = lambda missing: None
) -> None:
    """Returns once all ranks have called this. Meanwhile `watch` is told who is missing, again and again, and may raise.

    TimeoutError names the ranks that did not come.
    """
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + timeout_s
    missing = list(range(size))
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        watch(missing)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {', '.join(map(str, missing))} of {size} did not come within {timeout_s:g} s")
        time.sleep(MEET_POLL_S)


def leave_word(store: dist.Store, rank: int, word: str) -> None:
    """Why a rank ends, for those who find it gone."""
    with contextlib.suppress(RuntimeError):  # who has opened the store is gone
        store.set(f"gone/{rank}", word)


def last_words(store: dist.Store, size: int) -> dict[int, str]:
    """What ranks have said as they ended; none for those that said nothing."""
    return {rank: store.get(f"gone/{rank}").decode() for rank in range(size) if store.check([f"gone/{rank}"])}


def connect(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, host: str = LOCAL
) -> GroupCommunicator:
    """The group of all ranks, which have met; a collective in it may take `timeout_s`, as may this. CollectiveError.

    The others reach this rank at `host`, an address of its machine.
    Tensors of the CPU go by gloo, those of a GPU by NCCL (that part has not run on several GPUs yet).
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} could not connect to all {size} ranks within {timeout_s:g} s: {error}") from error
    if device.type == "cpu":
        return GroupCommunicator(gloo)
    torch.cuda.set_device(device)
    both = dist.ProcessGroup(store, rank, size)
    both._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, timedelta(seconds=timeout_s))
    both._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    return GroupCommunicator(both)
