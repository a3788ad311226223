"""How much of their context turns find cached where their prompts are computed: what `Workload.miss_share` means.

Owns the sums between two RL steps. Live jobs and simulated ones are counted here alike; it knows neither caches nor workers.

Tokens are counted, not turns: the predictions charge the share of a mean context (`turn_model.py`), so the share has to be the
one whose product with it is what was computed again. A share of turns is that only if turns that miss are as long as the others
and miss everything; caches that run full give up a part, and the longest contexts first. Invariant: what nobody there can have
is not missed, which is an observation, a first prompt, and what was generated elsewhere since the worker's last prompt of the
session: that is priced as part of each prompt that is computed apart from its decodes.
"""

from __future__ import annotations


class FoundPrefixes:
    """`add` every turn but a trajectory's first, once it is complete; `take` the share since the last time."""

    def __init__(self) -> None:
        self._there = self._found = 0

    def add(self, *, known: int, generated: int, cached: int, apart: bool) -> None:
        """`known` tokens of the prompt had KV when the turn before ended, the last `generated` of them drawn in that turn;
        `cached` were found. `apart`: by a worker that computes prompts and decodes nothing."""
        there = known - generated if apart else known
        if there > 0:
            self._there += there
            self._found += min(max(0, cached), there)

    def take(self) -> float | None:
        """The share that was missed; None if there was nothing to find."""
        there, found = self._there, self._found
        self._there = self._found = 0
        return 1 - found / there if there else None
