"""Which ids a request has seen, and how often it has drawn each: what penalties go by, kept from step to step.

Owns these counts, of the requests of the last step that had penalties: a step costs what is new in it, whatever the length of
the context. It does not know scores. Invariant: what it says is what counting from the beginning would say. Torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pearl.engine.request import PLACEHOLDER, Request
from pearl.protocol import SamplingParams


def penalised(params: SamplingParams) -> bool:
    """Whether what was said before changes the scores."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class PenaltyRows(NamedTuple):
    """Rows of a batch with penalties (R of them), and the ids that each has seen (E in all), every one once.

    `rows_R4`: row of the batch, its entries' begin and end, and the row of the step before that draws one more id of the
    output (-1: all are known). `counts_E`: how often an id is in the output (0: only in the prompt). `values_R3`:
    repetition, presence and frequency penalty. fp32, the others int32.
    """

    rows_R4: np.ndarray
    ids_E: np.ndarray
    counts_E: np.ndarray
    values_R3: np.ndarray


class _Seen:
    """The ids of one request, in the order in which they were met, and their counts; `end` tokens of it are counted."""

    __slots__ = ("_places", "counts", "end", "ids", "request")

    def __init__(self, request: Request) -> None:
        self.request, self.end = request, request.num_prompt_tokens
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(request.token_ids[: self.end]))}
        self.ids = array("i", self._places)
        self.counts = array("i", bytes(4 * len(self.ids)))

    def count_to(self, end: int) -> None:
        for token_id in self.request.token_ids[self.end : end]:
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
        self.end = end


class SeenTokens:
    """One per runner."""

    def __init__(self) -> None:
        self._kept: dict[int, _Seen] = {}

    def rows(
        self, requests: Sequence[Request], positions: Sequence[int], drawing: Mapping[str, int]
    ) -> PenaltyRows | None:
        """What penalties see before the token number `positions[s]` of each request's output; None if there are none.

        `drawing`: request -> the row of the step before that draws its id, for those whose last one is not known yet.
        """
        members = [row for row, request in enumerate(requests) if penalised(request.params)]
        seen = [self._seen(requests[row], positions[row]) for row in members]
        self._kept = {id(one.request): one for one in seen}
        if not members:
            return None
        ends = np.cumsum([len(one.ids) for one in seen])
        rows_R4 = np.empty((len(members), 4), dtype=np.int32)
        rows_R4[:, 0], rows_R4[:, 2] = members, ends
        rows_R4[0, 1], rows_R4[1:, 1] = 0, ends[:-1]
        rows_R4[:, 3] = [
            -1 if one.end == one.request.num_prompt_tokens + positions[row] else drawing[one.request.request_id]
            for one, row in zip(seen, members, strict=True)
        ]
        values = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (s.request.params for s in seen)]
        ids_E, counts_E = _joined([one.ids for one in seen]), _joined([one.counts for one in seen])
        return PenaltyRows(rows_R4, ids_E, counts_E, np.array(values, dtype=np.float32))

    def _seen(self, request: Request, position: int) -> _Seen:
        end = request.num_prompt_tokens + position
        if position and request.token_ids[end - 1] == PLACEHOLDER:
            end -= 1
        seen = self._kept.get(id(request))
        if seen is None or seen.request is not request or seen.end > end:
            seen = _Seen(request)
        seen.count_to(end)
        return seen


def _joined(parts: list[array[int]]) -> np.ndarray:
    return np.concatenate([np.frombuffer(part, dtype=np.int32) for part in parts])
