"""The other ranks of a tensor-parallel instance: they do what is called on the first (`leader.Leader`).

Owns the loop of such a rank, and its process when an LLM starts it (`python -m pearl.engine.worker`). It decides nothing and
answers nothing: it takes the same decisions as the first rank since it hears of the same calls. Invariant: it ends when the
first rank lets it go, dies or breaks the connection, and with an error when it cannot keep up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from pearl.clock import WallClock
from pearl.config import EngineConfig
from pearl.engine.assembly import choose_parts, with_pool
from pearl.engine.calls import (
    Call,
    Close,
    CommitWeights,
    HeldClock,
    ImportKV,
    ReadAlong,
    StageWeights,
    Step,
    StreamWeights,
    arguments,
    arriving,
    receive_calls,
)
from pearl.engine.comm.agreement import agreed, check_same
from pearl.engine.comm.communicator import CollectiveError, Communicator
from pearl.engine.comm.groups import connect, join_store, leave_word, meet
from pearl.engine.engine import Engine
from pearl.engine.migration.transport import TransferError, Transport
from pearl.engine.transfers import Way

PARENT_POLL_S = 0.3


def follow(
    config: EngineConfig,
    comm: Communicator,
    *,
    load_weights: bool = True,
    text: bool = True,
    transports: Sequence[Transport] | None = None,
) -> None:
    """Serves as rank `comm.rank` until the first rank closes the instance. Arguments as the Leader's.

    ValueError if the instance cannot be built (the first rank gets it too), CollectiveError when a rank is lost, RuntimeError
    when this one cannot do what the first could.
    """
    clock = HeldClock(WallClock())
    config = with_pool(config, comm)
    with agreed(comm):
        engine = _Follower(config, clock, comm, load_weights=load_weights, text=text, transports=transports)
    engine.meet(comm)
    while True:
        for call in receive_calls(comm):
            if isinstance(call, Close):
                engine.close()
                return
            try:
                with clock.held(call.now):
                    engine.apply(call)
            except ValueError as error:  # it was accepted by the first rank, which knows nothing of this
                raise RuntimeError(f"{call.__struct_config__.tag}: {error}") from error


class _Follower(Engine):
    """An Engine that is called by Call. Most calls are known to be accepted, since the first rank has accepted them."""

    def apply(self, call: Call) -> None:
        if isinstance(call, Step):
            self.step_updates()
            if call.check:
                check_same(self.comm, self._runner.last_ids)
        elif isinstance(call, StageWeights):
            self._take(lambda tensors: self.stage_weights(tensors, call.version))
        elif isinstance(call, StreamWeights):
            self._take(lambda tensors: self._stream(tensors, call.version, call.mode))
        elif isinstance(call, CommitWeights):
            self._commit(call)
        elif isinstance(call, ImportKV):
            self._import(call)
        elif isinstance(call, ReadAlong):
            self._read_along(call.transfer, self._ways(call))
        else:
            getattr(self, call.__struct_config__.tag)(**arguments(call))

    def _take(self, use: Callable[[Iterator[tuple]], None]) -> None:
        """Uses the tensors that follow. When a rank cannot, its caller hears of it, and the first says what becomes of them."""
        tensors = arriving(self.comm, self._runner.kv_pool.device)
        with _told_elsewhere(), agreed(self.comm):
            try:
                use(tensors)
            finally:
                for _ in tensors:  # what follows an error is on its way, and must be out of it before anything else is said
                    pass

    def _import(self, call: ImportKV) -> None:
        """Books what the first rank has taken in, or tried to; this rank's part of the KV may be lost all the same."""
        ways = self._ways(call)
        arrival = self._book(call.transfer, self._checked(call.transfer))
        if arrival is None:
            return
        self._begin(arrival, ways)
        if not call.taken:
            self._refuse(arrival)

    def _ways(self, call: ImportKV | ReadAlong) -> list[Way] | TransferError:
        try:
            return self._transfers.ways(call.transfer, self._whole_layout, call.transport)
        except ValueError as error:
            return TransferError(call.transfer.transfer_id, str(error))

    def _commit(self, call: CommitWeights) -> None:
        with _told_elsewhere():
            with agreed(self.comm):
                self._store.check()
            self.commit_weights(call.version, call.mode)


@contextlib.contextmanager
def _told_elsewhere() -> Iterator[None]:
    """Errors inside, other than a lost rank, have been raised on the first rank."""
    try:
        yield
    except CollectiveError:
        raise
    except Exception:
        pass


def main(arguments: list[str] | None = None) -> NoReturn:
    """One rank as a process; its EngineConfig comes pickled on stdin from the process that started it."""
    parser = argparse.ArgumentParser(prog="python -m pearl.engine.worker")
    for name in ("rank", "size", "port", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("start", "collective"):
        parser.add_argument(f"--{name}", type=float, required=True, help="seconds")
    options = parser.parse_args(arguments)
    threading.Thread(target=_watch, args=(options.parent,), name="parent", daemon=True).start()
    config = pickle.load(sys.stdin.buffer)
    code = 0
    store = None
    try:
        device = choose_parts(config, options.rank).device
        store = join_store(options.port, options.start)
        meet(store, options.rank, options.size, options.start)
        follow(config, connect(store, options.rank, options.size, device, options.collective))
    except ValueError:
        code = 1  # the first rank has been told and says so
    except CollectiveError as error:
        code = 1
        print(f"rank {options.rank} of {options.size} ends: {error}", file=sys.stderr)
    except Exception as error:
        code = 1  # the first rank sees that the connection is gone, and asks here for the reason
        if store is not None:
            leave_word(store, options.rank, f"{type(error).__name__}: {error}")
        traceback.print_exc()
    _leave(code)


def _watch(parent: int) -> None:
    """Ends this process when the one that started it is gone, whatever the main thread is doing.

    The kernel's own signal for this (prctl, PR_SET_PDEATHSIG) comes when the starting thread ends, which is too early where
    an LLM is made in a thread.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends at once: taking torch's threads and groups down in order can wait for peers that are gone."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
