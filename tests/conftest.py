"""Before any test imports Triton: off a GPU its kernels run in Triton's interpreter, which must be chosen that early.

Processes that compile for a GPU that is not there take the variable out of their environment again.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
