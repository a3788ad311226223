"""A receiver, or a holder, in a process of its own, which may end or stop at a given bucket. Fixtures only, no tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import torch

from pearl.engine.weights import pull
from pearl.engine.weights.holding import SnapshotHolding, _SlotSender
from pearl.engine.weights.pull import Holder, SnapshotReceiver, fetch
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot, SnapshotPlan

TIMEOUT_S = 2.0

Failure = tuple[signal.Signals, int] | None
"""What it does to itself, at which bucket (0: before the first)."""


class PullMember:
    """Such a process, ended with the block: a receiver of `version` from `port`, or without a port a holder of `tensors`.

    `pipe`: a receiver says "ready", waits for a word (or the port, if that was not known), and says the digest that it has got;
    a holder says its port.
    """

    def __init__(
        self, plan: SnapshotPlan, name: str, version: int, *, port: int = 0, tensors: list | None = None, fails: Failure = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        work = (receive, port) if tensors is None else (hold, [(key, value.numpy()) for key, value in tensors])
        self.process = context.Process(target=_main, args=(theirs, plan, name, version, work, fails), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> object:
        assert self.pipe.poll(60), "the process has said nothing"
        return self.pipe.recv()

    def __enter__(self) -> PullMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(10)


def _main(pipe: Connection, plan: SnapshotPlan, name: str, version: int, work: tuple, fails: Failure) -> None:
    torch.set_num_threads(1)
    snapshot = Snapshot(plan.config, plan.dtype, bucket_bytes=plan.bucket_bytes)
    do, given = work
    do(pipe, snapshot, name, version, given, fails)


def receive(pipe: Connection, snapshot: Snapshot, name: str, version: int, port: int, fails: Failure) -> None:
    if fails is not None and fails[1] == 0:
        pull.pair_over = lambda *_: os.kill(os.getpid(), fails[0])  # it has asked, and was answered
    elif fails is not None:
        SnapshotReceiver.poll = _failing(SnapshotReceiver.poll, *fails)
    pipe.send("ready")
    word = pipe.recv()
    port = word if isinstance(word, int) else port
    report = fetch(snapshot, [Holder(name="server", port=port)], name=name, version=version, timeout_s=TIMEOUT_S)
    with snapshot.reader().lease(report.version) as lease:
        lease.check()
        pipe.send(lease.digest)


def hold(pipe: Connection, snapshot: Snapshot, name: str, version: int, arrays: list, fails: Failure) -> None:
    snapshot.write([(key, torch.from_numpy(array)) for key, array in arrays], version)
    if fails is not None:
        _SlotSender._broadcast = _failing(_SlotSender._broadcast, *fails)
    pipe.send(PullServer(SnapshotHolding(snapshot.reader()), timeout_s=TIMEOUT_S).port)
    pipe.recv()


def _failing(call, fail: signal.Signals, bucket: int):
    """The method, which at its `bucket`-th call that does anything ends or stops this process."""
    count = 0

    def called(self, *arguments):
        nonlocal count
        result = call(self, *arguments)
        count += result is None or bool(result)
        if count == bucket:
            os.kill(os.getpid(), fail)
        return result

    return called
