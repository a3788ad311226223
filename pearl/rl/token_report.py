"""What a serving member's engine has given and the controller has not been told yet: sampled tokens, and sums over steps.

Owns the gathering. It sends nothing and knows no clock. Why it is there: a message costs the controller more than the tokens in
it, and a job has thousands of engine steps per second, of which it needs to hear at once only what ends a request. Invariants:
the tokens of a request come in the order in which they were sampled, each once; what is taken is no longer here; the sums count
every step once. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pearl.protocol import FinishReason, StepSums, TokenUpdate
from pearl.sched.step_samples import told

EARLY_SHARE = 0.5
"""A message that is due for one request takes all others along once this share of the time between two has passed."""


class TokenReport:
    """`add` after every engine step, `due` to ask, `take` for what is to be sent. `every_s`: how long tokens of requests that
    have not ended may stay here; 0: until the next step is done."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told = float("-inf")
        self._open: dict[str, tuple[list[int], list[float], list[int]]] = {}
        self._ready: list[TokenUpdate] = []
        """What is not to wait."""
        self._begun: set[str] = set()
        """Requests with a token, here or before they came here."""
        self._fresh: set[str] = set()
        """Requests that were taken over and have got nothing here yet."""
        self._sums: dict[tuple[bool, bool, int], list[float]] = {}

    def add(self, updates: Iterable[Any]) -> tuple[int, int]:
        """Takes what an engine step gave (`RequestUpdate`s): how many requests got a token, how many their first."""
        count = prompts = 0
        for update in updates:
            count += bool(update.token_ids)
            name = update.request_id
            known = self._open.get(name)
            if known is None:
                known = self._open[name] = [], [], []
            ids, logprobs, versions = known
            ids += update.token_ids
            logprobs += update.logprobs
            versions += update.weight_versions
            if ids and name not in self._begun:
                self._begun.add(name)
                prompts += 1
            end = update.completion
            if end is not None:
                self._end(name, end.finish_reason, end.error, end.num_cached_tokens)
            elif name in self._fresh and ids:
                self._fresh.discard(name)
                self._ready.append(_update(name, self._open.pop(name)))
        return count, prompts

    def add_step(self, *, computed: int, batch: int, prompts: int, context: float, seconds: float) -> None:
        """A step computed so many tokens and gave `batch` requests one, `prompts` of them their first; `context`: tokens of a
        running one, on average."""
        step = told(computed=computed, batch=batch, prompts=prompts)
        if step is None:
            return
        prefill, size, decodes = step
        row = self._sums.setdefault((prefill, decodes > 0, size.bit_length()), [0, 0, 0.0, 0, 0, 0.0])
        for place, value in enumerate((1, size, context, decodes, max(1, prompts), seconds)):
            row[place] += value

    def taken_over(self, request_id: str, *, begun: bool) -> None:
        """The request goes on here; its first token here is told at once: that says how long the hand-over took. `begun`: it
        has got tokens elsewhere."""
        self._fresh.add(request_id)
        if begun:
            self._begun.add(request_id)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """The request ends here without a word of the engine."""
        self._open.setdefault(request_id, ([], [], []))
        self._end(request_id, reason, error, 0)

    def drop(self, request_id: str) -> None:
        """Nobody waits for the request any more."""
        self._open.pop(request_id, None)
        self._begun.discard(request_id)
        self._fresh.discard(request_id)

    def due(self, now: float) -> bool:
        """Whether something should be sent now."""
        return bool(self._ready) or (bool(self._open) and now - self._told >= self._every_s)

    def take(self, now: float, *, everything: bool = False) -> tuple[list[TokenUpdate], list[StepSums]]:
        """What is not to wait, and the others if they have for long enough (`everything`: in any case)."""
        updates, self._ready = self._ready, []
        share = EARLY_SHARE if updates else 1.0
        if everything or now - self._told >= share * self._every_s:
            self._told = now
            updates += [_update(request_id, tokens) for request_id, tokens in self._open.items()]
            self._open = {}
        sums = [
            StepSums(
                prefill=prefill,
                count=int(row[0]),
                size=int(row[1]),
                context=row[2],
                decodes=int(row[3]),
                prompts=int(row[4]),
                seconds=row[5],
            )
            for (prefill, _, _), row in self._sums.items()
        ]
        self._sums = {}
        return updates, sums

    def _end(self, request_id: str, reason: FinishReason, error: str | None, cached: int) -> None:
        self._ready.append(_update(request_id, self._open.pop(request_id), reason, error, cached))
        self._begun.discard(request_id)
        self._fresh.discard(request_id)


def _update(
    request_id: str,
    tokens: tuple[list[int], list[float], list[int]],
    reason: FinishReason | None = None,
    error: str | None = None,
    cached: int = 0,
) -> TokenUpdate:
    return TokenUpdate(
        request_id=request_id,
        token_ids=tokens[0],
        logprobs=tokens[1],
        weight_versions=tokens[2],
        finish_reason=reason,
        error=error,
        num_cached_tokens=cached,
    )
