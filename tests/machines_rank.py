"""A rank of a real job that takes itself to be on machine NODES[rank] ("aab": ranks 0 and 1 on a, rank 2 on b).

With `check_weights` rank 0 leaves the checksums of each version in RECORD.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pearl.rl import launch, process, weight_check, world
from pearl.rl.publisher import Metrics

RANK = int(os.environ.get("RANK", "0"))
poll = weight_check.CheckedPublisher.poll


def recording_poll(self: weight_check.CheckedPublisher) -> Metrics | None:
    metrics = poll(self)
    if metrics is not None and RANK == 0:
        path = Path(os.environ["RECORD"]) / f"{self.version}.json"
        sums = {name: value for name, value in metrics.items() if name.startswith(weight_check.TRAINER)}
        path.with_suffix(".new").write_text(json.dumps(sums))
        path.with_suffix(".new").rename(path)
    return metrics


def main() -> int:
    world.node = lambda: f"machine {os.environ['NODES'][RANK]}"  # type: ignore[assignment]
    weight_check.CheckedPublisher.poll = recording_poll  # type: ignore[method-assign]
    return launch.rank_main()


if __name__ == "__main__":
    process.leave(main())
