"""`python -m pearl.sched.sim`."""

from __future__ import annotations

import sys

from pearl.sched.sim.command_line import main

if __name__ == "__main__":
    sys.exit(main())
