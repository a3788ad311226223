"""`python -m pearl` is `pearl`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """The console script `pearl`. Until a command has a better answer to Ctrl-C it ends the process: an exception raised in a
    callback, as imports have many, would be printed and lost."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pearl.rl.command_line import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
