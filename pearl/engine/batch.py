"""From a decision to tensors: SchedulerOutput -> ForwardBatch.

Owns the layout of one step: decode rows first, then longer chunks, tokens of a request side by side. It decides nothing and
knows no model. Invariant: row t of the batch is a token whose KV goes to exactly the slot that the request's block table
gives for its position (slots are int64: block * block_size + offset).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pearl.engine.kernels.interface import PagedBatch
from pearl.engine.kernels.upload import on_device
from pearl.engine.request import PLACEHOLDER, Request, ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows `[first, first + len(targets))` predict these prompt tokens of a request that asked for their log-probs."""

    request_id: str
    first: int
    targets: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's input. `sample_rows` (R of the T rows) give a token each to `sampled`, in that order.

    `positions_R` counts the tokens each of them sampled before. `unknown` lists rows whose input id is not known yet, with
    the request that draws it in the step before.
    """

    input_ids_T: Tensor          # int64
    paged: PagedBatch
    sample_rows: list[int]
    sampled: list[Request]
    positions_R: list[int]
    prompt_rows: list[PromptRows]
    unknown: list[tuple[int, str]]


def build_batch(
    output: SchedulerOutput, requests: Mapping[str, Request], block_size: int, device: torch.device | None = None
) -> ForwardBatch:
    """Lays out the tokens of a non-empty `output` on `device` (None: CPU). Reads the requests and changes nothing."""
    decodes = [scheduled for scheduled in output.requests if scheduled.num_tokens == 1]
    ordered = decodes + [scheduled for scheduled in output.requests if scheduled.num_tokens > 1]
    members = [requests[scheduled.request_id] for scheduled in ordered]
    ids, positions = _tokens(ordered, members, len(decodes))
    lengths_S = np.array([scheduled.num_tokens for scheduled in ordered], dtype=np.int32)
    starts_S1 = np.zeros(len(ordered) + 1, dtype=np.int32)
    np.cumsum(lengths_S, out=starts_S1[1:])
    starts = starts_S1.tolist()
    sampling = [row for row, scheduled in enumerate(ordered) if scheduled.samples]
    return ForwardBatch(
        input_ids_T=on_device(np.array(ids, dtype=np.int64), device),
        paged=_paged(members, np.array(positions, dtype=np.int64), lengths_S, starts_S1, len(decodes), block_size, device),
        sample_rows=[starts[row + 1] - 1 for row in sampling],
        sampled=[members[row] for row in sampling],
        positions_R=[ordered[row].start + ordered[row].num_tokens - members[row].num_prompt_tokens for row in sampling],
        prompt_rows=[
            _prompt_rows(scheduled, members[row], starts[row])
            for row, scheduled in enumerate(ordered)
            if scheduled.wants_prompt_logprobs
        ],
        unknown=_unknown(ids, ordered, starts) if PLACEHOLDER in ids else [],
    )


def _tokens(ordered: list[ScheduledRequest], members: list[Request], num_decodes: int) -> tuple[list[int], list[int]]:
    """Ids and positions of all rows."""
    positions = [scheduled.start for scheduled in ordered[:num_decodes]]
    ids = [members[row].token_ids[position] for row, position in enumerate(positions)]
    for scheduled, request in zip(ordered[num_decodes:], members[num_decodes:], strict=True):
        end = scheduled.start + scheduled.num_tokens
        ids.extend(request.token_ids[scheduled.start : end])
        positions.extend(range(scheduled.start, end))
    return ids, positions


def _paged(
    members: list[Request],
    positions_T: np.ndarray,
    lengths_S: np.ndarray,
    starts_S1: np.ndarray,
    num_decodes: int,
    block_size: int,
    device: torch.device | None,
) -> PagedBatch:
    tables_SN = _block_tables(members)
    rows_T = np.repeat(np.arange(len(members)), lengths_S)
    blocks_T = tables_SN[rows_T, positions_T // block_size].astype(np.int64)
    context_S = (positions_T[starts_S1[1:] - 1] + 1).astype(np.int32)
    return PagedBatch(
        positions_T=on_device(positions_T, device),
        slot_mapping_T=on_device(blocks_T * block_size + positions_T % block_size, device),
        query_starts_S1=on_device(starts_S1, device),
        context_lens_S=on_device(context_S, device),
        block_tables_SN=on_device(tables_SN, device),
        num_decodes=num_decodes,
        max_query_len=int(lengths_S.max()),
        max_context_len=int(context_S.max()),
    )


def _block_tables(members: list[Request]) -> np.ndarray:
    """Block tables side by side, padded with 0: int32 [S, N]."""
    lengths = [len(request.block_table) for request in members]
    flat = np.fromiter(chain.from_iterable([request.block_table for request in members]), np.int32, sum(lengths))
    tables_SN = np.zeros((len(members), max(lengths)), dtype=np.int32)
    tables_SN[np.arange(max(lengths)) < np.array(lengths)[:, None]] = flat
    return tables_SN


def _prompt_rows(scheduled: ScheduledRequest, request: Request, first: int) -> PromptRows:
    end = min(scheduled.start + scheduled.num_tokens + 1, request.num_prompt_tokens)
    return PromptRows(request_id=request.request_id, first=first, targets=request.token_ids[scheduled.start + 1 : end])


def _unknown(ids: list[int], ordered: list[ScheduledRequest], starts: list[int]) -> list[tuple[int, str]]:
    """A request's last row of the step is the only one whose id an unfinished step may still be drawing."""
    last = [(starts[row + 1] - 1, scheduled.request_id) for row, scheduled in enumerate(ordered)]
    return [(row, request_id) for row, request_id in last if ids[row] == PLACEHOLDER]
