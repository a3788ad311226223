"""`python -m pearl` is `pearl`."""

from __future__ import annotations

import sys

from pearl.rl.command_line import main

if __name__ == "__main__":
    sys.exit(main())
