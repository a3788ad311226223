"""Decode steps as captured graphs: one launch instead of some hundreds, for a few sizes of batch and context.

Owns the sizes (buckets), the memory that every captured step reads its input from, and which buckets have a graph. How a step
is captured is a function that is given (`cuda_capture`, or a stand-in in tests); it knows no requests, roles or weights.
Invariants: a graph is captured the first time that its bucket is met, after that very step has run without one (which compiles
what is to be compiled), so no step is run twice; a bucket that cannot be captured stays eager for good, and says why; what is
captured reads nothing but its input memory, the parameters and the pool, none of which ever move: a graph is good for as long
as the engine lives, whatever happens to roles, versions and sleep. Rows that a bucket has too many are the last row once more:
the same numbers to the same slot, and no weights or blocks read but those that are read anyway.

Not run on a GPU yet. Shapes: T rows (one token each), D hidden, N blocks of a table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pearl.engine.kernels.interface import PagedBatch

Forward = Callable[[Tensor, PagedBatch], Tensor]
"""(input ids, batch) -> hidden states [T, D]; queues work and waits for nothing."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""What replays the work that a function queues, and gives what that gave. RuntimeError if it cannot be captured."""

GRAPHED = ("triton",)
"""Kernels whose launches follow from sizes that the host knows. FlashInfer plans on the host for every batch."""
SMALLEST_CONTEXT = 1024
_log = logging.getLogger(__name__)


class Bucket(NamedTuple):
    """Graphs serve batches of up to `rows` rows with contexts of up to `context` tokens."""

    rows: int
    context: int


def row_bucket(rows: int, most: int) -> int:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, of 32 up to 256, and so on: at most a quarter more from 28 on."""
    if rows <= 4:
        return min(most, 1 << (rows - 1).bit_length())
    step = max(8, (1 << (rows - 1).bit_length()) // 8)
    return min(most, -(-rows // step) * step)


def context_bucket(context: int, most: int) -> int:
    """Powers of two: a kernel that splits long contexts is launched for all splits of the longest, and those past a row's end
    cost next to nothing."""
    return min(most, max(SMALLEST_CONTEXT, 1 << (context - 1).bit_length()))


def bucket_of(batch: PagedBatch, *, max_rows: int, max_context: int) -> Bucket | None:
    """The bucket of a batch of nothing but rows with one token; None for others and for what is too large."""
    rows = batch.positions_T.shape[0]
    if not 0 < rows == batch.num_decodes == batch.context_lens_S.shape[0] or rows > max_rows:
        return None
    if batch.max_context_len > max_context:
        return None
    return Bucket(row_bucket(rows, max_rows), context_bucket(batch.max_context_len, max_context))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """Memory for the input of the largest batch; a graph reads the beginning of it."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    starts_T1: Tensor
    contexts_T: Tensor
    tables_TN: Tensor
    numbers_T: Tensor

    @classmethod
    def on(cls, device: torch.device, rows: int, width: int) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            ids_T=zeros(rows, dtype=torch.int64),
            positions_T=zeros(rows, dtype=torch.int64),
            slots_T=zeros(rows, dtype=torch.int64),
            starts_T1=torch.arange(rows + 1, dtype=torch.int32, device=device),
            contexts_T=zeros(rows, dtype=torch.int32),
            tables_TN=zeros(rows, width, dtype=torch.int32),
            numbers_T=torch.arange(rows, device=device),
        )

    def fill(self, ids_T: Tensor, batch: PagedBatch, rows: int) -> None:
        """Copies a batch, and its last row into what is left of `rows`. Blocks past a row's context keep what was there."""
        row_T = self.numbers_T[:rows].clamp_max(ids_T.shape[0] - 1)
        pairs = (
            (self.ids_T, ids_T),
            (self.positions_T, batch.positions_T),
            (self.slots_T, batch.slot_mapping_T),
            (self.contexts_T, batch.context_lens_S),
        )
        for memory, values in pairs:
            memory[:rows].copy_(values[row_T])
        self.tables_TN[:rows, : batch.block_tables_SN.shape[1]].copy_(batch.block_tables_SN[row_T])

    def batch(self, bucket: Bucket) -> PagedBatch:
        """The bucket's input as a batch, at addresses that stay."""
        rows = bucket.rows
        return PagedBatch(
            positions_T=self.positions_T[:rows],
            slot_mapping_T=self.slots_T[:rows],
            query_starts_S1=self.starts_T1[: rows + 1],
            context_lens_S=self.contexts_T[:rows],
            block_tables_SN=self.tables_TN[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_context_len=bucket.context,
        )


class DecodeGraphs:
    """Graphs of decode steps: batches of at most `max_rows` rows, `max_context` tokens in each, tables of `width` blocks.

    `failures` are the buckets that stay eager, with the reasons.
    """

    def __init__(
        self, capture: Capture, *, device: torch.device, max_rows: int, max_context: int, width: int
    ) -> None:
        self._capture = capture
        self._max_rows, self._max_context = max_rows, max_context
        self._inputs = _Inputs.on(device, max_rows, width)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}
        self.failures: dict[Bucket, str] = {}

    @property
    def captured(self) -> list[Bucket]:
        """Those that have a graph, in the order in which they were met."""
        return list(self._replays)

    def run(self, forward: Forward, ids_T: Tensor, batch: PagedBatch) -> Tensor | None:
        """Hidden states [T, D] of the batch, good until the next call; None if it has to be run without a graph.

        `forward` is what is captured: the same in every call.
        """
        bucket = bucket_of(batch, max_rows=self._max_rows, max_context=self._max_context)
        if bucket is None or bucket in self.failures or batch.block_tables_SN.shape[1] > self._inputs.tables_TN.shape[1]:
            return None
        rows = ids_T.shape[0]
        self._inputs.fill(ids_T, batch, bucket.rows)
        replay = self._replays.get(bucket)
        return self._first(forward, bucket)[:rows] if replay is None else replay()[:rows]

    def _first(self, forward: Forward, bucket: Bucket) -> Tensor:
        """Runs the step, and captures one like it."""
        ids_T, batch = self._inputs.ids_T[: bucket.rows], self._inputs.batch(bucket)
        hidden_TD = forward(ids_T, batch)
        try:
            self._replays[bucket] = self._capture(lambda: forward(ids_T, batch))
        except RuntimeError as error:
            self.failures[bucket] = str(error)
            _log.warning("decode steps of %s stay without a graph: %s", bucket, error)
        return hidden_TD


def cuda_capture(device: torch.device) -> Capture:
    """Captures on `device`. All graphs share one pool for what is between their input and their output: they run in turn."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Only what this thread does can spoil the capture: others may be moving KV or weights.
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture
