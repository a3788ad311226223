"""A side of a comparison: a process of its own that keeps its model loaded and answers questions, when it is its turn.

Owns the process and the conversation: one JSON object per line each way; what else the process prints is passed over, since
libraries log to where the answers go. It knows nothing of what is asked. Invariant: no answer is waited for longer than
`limit_s`, and after `close`, or an error, the process is gone.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800.0
CLOSE_S = 30.0


class SideError(RuntimeError):
    """A side ended, or did not answer in time; the message names it."""


class SideProcess:
    """`about` is what it says of itself once it is loaded."""

    def __init__(
        self, name: str, command: list[str], *, threads: int, limit_s: float = LIMIT_S, variables: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self._limit_s = limit_s
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)} | (variables or {})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=os.environ | own
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._read = b""
        self.about = self._answer()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer. SideError if it ends before, or none comes in time."""
        try:
            self._questions.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise SideError(self._ended()) from None
        return self._answer()

    def close(self) -> None:
        """Ends it: by the end of its questions, else by force."""
        self._questions.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._answers.close()

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit_s
        while True:
            *lines, self._read = self._read.split(b"\n")
            for place, line in enumerate(lines):
                if line.startswith(b"{"):
                    self._read = b"\n".join([*lines[place + 1 :], self._read])
                    return json.loads(line)
            self._read += self._more(deadline)

    def _more(self, deadline: float) -> bytes:
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        if not ready.poll(1000 * max(0.0, deadline - time.monotonic())):
            self._kill()
            raise SideError(f"{self.name}: no answer within {self._limit_s:g} s")
        more = os.read(self._answers.fileno(), 65536)
        if not more:
            raise SideError(self._ended())
        return more

    def _ended(self) -> str:
        try:
            return f"{self.name}: ended with {self._process.wait(CLOSE_S)}"
        except subprocess.TimeoutExpired:
            self._kill()
            return f"{self.name}: closed its output, and was killed"

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
