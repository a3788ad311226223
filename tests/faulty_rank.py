"""A rank of a real job with a fault in it: `torchrun -m faulty_rank`, FAULT="raise:0" or "stick:1" (what, on which rank).

At its fifth command or batch of requests it raises, or its main thread goes into C and does not come back.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from pearl.rl import launch, process
from pearl.rl.rank import RankLoop

WHAT, _, WHO = os.environ["FAULT"].partition(":")


class FaultyLoop(RankLoop):
    _applied = 0

    def _apply(self, message: Any) -> None:
        self._applied += 1
        if self.rank == int(WHO) and self._applied == 5:
            if WHAT == "raise":
                raise FloatingPointError("loss is nan")
            _stick()
        super()._apply(message)


def _stick() -> None:
    """Waits in C for ever, without the interpreter's lock: a mutex that it holds itself."""
    libc = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(64)  # a zeroed pthread_mutex_t
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def main() -> int:
    launch.RankLoop = FaultyLoop  # type: ignore[misc]
    return launch.rank_main()


if __name__ == "__main__":
    process.leave(main())
