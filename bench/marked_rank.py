"""A rank of a real job that also writes down what it is doing: `torchrun -m bench.marked_rank` instead of pearl.rl.launch.

Lines "SECONDS rankN PHASE begin|end" (of the system-wide monotonic clock) go to the file named by PEARL_MARKS, one write
each. Everything else is the job's own. Phases: start, warm-up, rollout, train, publish, checkpoint.
"""

from __future__ import annotations

import os
import time
from typing import Any

from pearl.protocol import TrainStep
from pearl.rl import launch, process
from pearl.rl.rank import RankLoop

MARKS = "PEARL_MARKS"


class Marks:
    """The file; several processes append to it."""

    def __init__(self, path: str, rank: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rank = rank

    def write(self, phase: str, what: str) -> None:
        os.write(self._file, f"{time.monotonic():.4f} rank{self._rank} {phase} {what}\n".encode())


class Wrapped:
    """Another object with some methods of its own."""

    def __init__(self, inner: Any, marks: Marks) -> None:
        self._inner, self._marks = inner, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class MarkedTrainer(Wrapped):
    def train_step(self, command: TrainStep) -> dict[str, Any]:
        phase = "warm-up" if command.objective == "sft" else "train"
        self._marks.write(phase, "begin")
        metrics = self._inner.train_step(command)
        self._marks.write(phase, "end")
        return metrics

    def save_state(self, path: str) -> None:
        self._marks.write("checkpoint", "begin")
        self._inner.save_state(path)
        self._marks.write("checkpoint", "end")


class MarkedEngine(Wrapped):
    """A rollout begins with the first request after a publication."""

    playing = False

    def add_request(self, *arguments: Any, **options: Any) -> str:
        if not self.playing:
            self._marks.write("rollout", "begin")
            self.playing = True
        return self._inner.add_request(*arguments, **options)


class MarkedPublisher(Wrapped):
    engine: MarkedEngine | None = None

    def begin(self, version: int) -> None:
        if self.engine is not None and self.engine.playing:
            self._marks.write("rollout", "end")
            self.engine.playing = False
        self._marks.write("publish", "begin")
        self._inner.begin(version)

    def poll(self) -> dict[str, Any] | None:
        return self._ended(self._inner.poll())

    def wait(self, timeout_s: float) -> dict[str, Any]:
        return self._ended(self._inner.wait(timeout_s))

    def _ended(self, metrics: Any) -> Any:
        if metrics is not None:
            self._marks.write("publish", "end")
        return metrics


def main() -> int:
    marks = Marks(os.environ[MARKS], os.environ["RANK"])
    marks.write("start", "begin")

    class MarkedLoop(RankLoop):
        def __init__(self, **parts: Any) -> None:
            marks.write("start", "end")
            publisher = parts["publisher"] = MarkedPublisher(parts["publisher"], marks)
            if parts["trainer"] is not None:
                parts["trainer"] = MarkedTrainer(parts["trainer"], marks)
            if parts["engine"] is not None:
                parts["engine"] = publisher.engine = MarkedEngine(parts["engine"], marks)
            super().__init__(**parts)

    launch.RankLoop = MarkedLoop  # type: ignore[misc]
    return launch.rank_main()


if __name__ == "__main__":
    process.leave(main())
