"""How a job ends before its time, and which errors must not end it: what an external worker's message led to. Torch-free."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

from pearl.channel import ChannelError


class JobFailed(RuntimeError):
    """The job cannot go on; the message is its one-line reason."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@contextlib.contextmanager
def contained(blame: Callable[[str], None]) -> Iterator[None]:
    """What is done with a message of an external worker: an error that nobody foresaw is printed whole, and told to `blame`.

    JobFailed passes, and so does ChannelError, which is about a rank of WORLD (who cannot reach an external one goes on).
    """
    try:
        yield
    except (JobFailed, ChannelError):
        raise
    except Exception as error:
        traceback.print_exc()
        blame(f"what it said led to {type(error).__name__}: {error}")
