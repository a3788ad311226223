"""Ranks of WORLD that have died or answer no more: what that explains, and ending them.

Owns no state. Invariant: only processes that said hello in this job are ever killed: a pid is looked up only on the machine
that it is of, which a hello names as `node()` does, since machines may have the same host name. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pearl.engine.node import node
from pearl.protocol import Hello, Kill
from pearl.rl import process

LONGEST_ECHO = 90


def first_cause(reason: str, hellos: Iterable[Hello]) -> str:
    """A rank that has died explains whatever its peers or the launcher say afterwards, of which the beginning will do."""
    here = node()
    dead = [hello for hello in hellos if hello.host == here and not process.is_alive(hello.pid)]
    if not dead:
        return reason
    print(reason, flush=True)
    then = reason if len(reason) <= LONGEST_ECHO else reason[:LONGEST_ECHO] + "..."
    return f"{', '.join(f'rank {hello.rank} (pid {hello.pid}) died' for hello in dead)}; then {then}"


def kill_ranks(silent: list[int], hellos: Mapping[int, Hello], send: Callable[[int, Any], None]) -> None:
    """Ends ranks that answer no more: here, or through another one on their host."""
    here = node()
    for rank in silent:
        hello = hellos[rank]
        if hello.host == here:
            process.kill(hello.pid)
            continue
        others = [other.rank for other in hellos.values() if other.host == hello.host and other.rank not in silent]
        if others:
            send(min(others), Kill(pid=hello.pid))
