"""Ranks of WORLD that have died or answer no more: what that explains, and ending them.

Owns no state. Invariant: only processes that said hello in this job are ever killed. Torch-free.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pearl.protocol import Hello, Kill
from pearl.rl import process

LONGEST_ECHO = 90


def first_cause(reason: str, hellos: Iterable[Hello]) -> str:
    """A rank that has died explains whatever its peers or the launcher say afterwards, of which the beginning will do."""
    here = socket.gethostname()
    dead = [hello for hello in hellos if hello.host == here and not process.is_alive(hello.pid)]
    if not dead:
        return reason
    print(reason, flush=True)
    then = reason if len(reason) <= LONGEST_ECHO else reason[:LONGEST_ECHO] + "..."
    return f"{', '.join(f'rank {hello.rank} (pid {hello.pid}) died' for hello in dead)}; then {then}"


def kill_ranks(silent: list[int], hellos: Mapping[int, Hello], send: Callable[[int, Any], None]) -> None:
    """Ends ranks that answer no more: here, or through another one on their host."""
    here = socket.gethostname()
    for rank in silent:
        hello = hellos[rank]
        if hello.host == here:
            process.kill(hello.pid)
            continue
        others = [other.rank for other in hellos.values() if other.host == hello.host and other.rank not in silent]
        if others:
            send(min(others), Kill(pid=hello.pid))
