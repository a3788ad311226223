"""The doing half of a step: SchedulerOutput -> StepResult. Decoder, pool and sampler meet here, decisions do not.

Owns the forward pass over the paged pool, which rows of it reach the vocabulary, and the ids of its last step (a following
step that was scheduled before they were known reads them from here). It does not know queues, blocks or when a request ends.
Invariant: it changes no Request; all it writes is the KV slots that its input names.
Shapes: T tokens of the step, R rows that give a token, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pearl.engine.batch import ForwardBatch, PromptRows, build_batch
from pearl.engine.cuda_graph import DecodeGraphs
from pearl.engine.kernels.interface import Kernels, LayerMark, PagedBatch, QueuesDraws, ServedDecoder
from pearl.engine.kernels.upload import on_device
from pearl.engine.migration.transport import LAYER_BITS, LeaseWords
from pearl.engine.models.decoder import Decoder, paged_attend
from pearl.engine.penalties import SeenTokens, penalised
from pearl.engine.request import PLACEHOLDER, Request, SampledToken, SchedulerOutput, StepResult
from pearl.engine.sampler import Before, queue_sample

LOGITS_AT_ONCE = 1 << 24
"""Numbers of fp32 logits held at one time while prompt positions are scored (64 MiB)."""


class Queued(NamedTuple):
    """What the newest step draws: the ids on the device (None: nothing), the row of each request, and what waits for them."""

    ids_R: Tensor | None
    rows: dict[str, int]
    tokens: Callable[[], dict[str, SampledToken]]

    def ids_of(self, rows_U: Tensor) -> Tensor:
        """The ids of some rows, on the device; a row that failed has one that is void, as its output will be."""
        assert self.ids_R is not None
        return self.ids_R[rows_U]


class ModelRunner:
    """Runs steps of one decoder over one pool. `kv_pool` is kv[layer, 2, block, kv_head, ...] as `kernels` lay it out.

    `served` are the decoder's steps as the kernels run them whole, where they do.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, kv_pool: Tensor, *, block_size: int, served: ServedDecoder | None = None
    ) -> None:
        self.decoder = decoder
        self.kernels = kernels
        self._served = served
        self.kv_pool = kv_pool
        self.block_size = block_size
        self.progress: LeaseWords | None = None
        """Where it says how many layers of a step are written, while others read along."""
        self.graphs: DecodeGraphs | None = None
        """Graphs of `operations`, for steps that nobody reads along with."""
        self._step = 0
        self._last = Queued(None, {}, dict)
        self._seen = SeenTokens()

    @property
    def last_ids(self) -> dict[str, int]:
        """Request -> the id that the newest step drew for it."""
        return {request_id: token.token_id for request_id, token in self._last.tokens().items()}

    def execute(self, output: SchedulerOutput, requests: Mapping[str, Request], *, weight_version: int) -> StepResult:
        """Runs one step; `weight_version` is the version of the weights it runs with. An empty output gives an empty result."""
        return self.launch(output, requests, weight_version=weight_version)()

    @torch.inference_mode()
    def launch(
        self, output: SchedulerOutput, requests: Mapping[str, Request], *, weight_version: int
    ) -> Callable[[], StepResult]:
        """Queues a step on the device, whose last one may still be running; what is returned waits for its result.

        It waits itself where prompts are scored, and with kernels that do not queue their draws.
        """
        if not output.requests:
            return lambda: StepResult(sampled={}, weight_version=weight_version)
        batch = self.prepare(output, requests)
        self._step = output.step
        hidden_TD = self.forward(batch)
        before = self._last
        try:
            sampled = self.queue_draw(batch, hidden_TD)
            scores = {rows.request_id: self._prompt_logprobs(hidden_TD, rows) for rows in batch.prompt_rows}
        except BaseException:
            self._last = before  # this step has not happened; the one before may still be waited for
            raise
        return lambda: StepResult(sampled=sampled(), prompt_logprobs=scores, weight_version=weight_version)

    def prepare(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> ForwardBatch:
        """The step's tensors, with ids that the last step drew filled in: on the device, known or not."""
        batch = build_batch(output, requests, self.block_size, self.kv_pool.device)
        if batch.unknown:
            rows, names = zip(*batch.unknown, strict=True)
            index_2U = on_device(np.array([rows, [self._last.rows[name] for name in names]]), self.kv_pool.device)
            batch.input_ids_T.index_copy_(0, index_2U[0], self._last.ids_of(index_2U[1]))
        return batch

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, D], or [R, D] of `sample_rows` alone if no others are needed; writes the step's KV."""
        if self._served is not None:
            add_up = None if self.decoder.comm is None else self.decoder.comm.all_reduce_sum
            words = self.progress
            mark = None if words is None else LayerMark(words.layer_address, self._step << LAYER_BITS)
            rows = None if batch.prompt_rows else batch.sample_rows
            return self._served.forward(self.decoder.embedded(batch.input_ids_T), batch.paged, add_up, mark, rows)
        if self.progress is not None:
            written = functools.partial(self.progress.layer_done, self._step)
            return self.operations(batch.input_ids_T, batch.paged, written)
        hidden_TD = None if self.graphs is None else self.graphs.run(self.operations, batch.input_ids_T, batch.paged)
        return self.operations(batch.input_ids_T, batch.paged) if hidden_TD is None else hidden_TD

    def operations(self, input_ids_T: Tensor, paged: PagedBatch, written: Callable[[int], None] | None = None) -> Tensor:
        """The step operation by operation; `written` is told in how many layers its KV is."""
        attend = paged_attend(self.kernels, self.kv_pool, paged, self.decoder.config, written)
        return self.decoder(input_ids_T, paged.positions_T, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V]."""
        return self.decoder.logits(hidden_ND, None if self._served is None else self._served.logits)

    @torch.inference_mode()
    def draw(self, batch: ForwardBatch, hidden_TD: Tensor) -> dict[str, SampledToken]:
        """Logits of the sampling rows only, and a token for each."""
        return self.queue_draw(batch, hidden_TD)()

    @torch.inference_mode()
    def queue_draw(self, batch: ForwardBatch, hidden_TD: Tensor) -> Callable[[], dict[str, SampledToken]]:
        """As `draw`; what is returned waits for the tokens."""
        if not batch.sampled:
            self._last = Queued(None, {}, dict)
            return dict
        everything = len(batch.sample_rows) == hidden_TD.shape[0]  # all that there are, or that are needed
        logits_RV = self.logits(hidden_TD if everything else hidden_TD[batch.sample_rows])
        members = batch.sampled
        if not isinstance(self.kernels, QueuesDraws):
            members = [self._known(*pair) for pair in zip(members, batch.positions_R, strict=True)]
        before = Before(self._last.ids_R, self._last.rows, self._seen)
        ids_R, tokens = queue_sample(logits_RV, members, batch.positions_R, self.kernels, before)
        names = [request.request_id for request in batch.sampled]
        drawn = functools.cache(lambda: dict(zip(names, tokens(), strict=True)))
        self._last = Queued(ids_R, {name: row for row, name in enumerate(names)}, drawn)
        return drawn

    def _known(self, request: Request, position: int) -> Request:
        """The request as penalties must see it: with the id that the last step drew, where finishing it is still due."""
        last = request.num_prompt_tokens + position - 1
        if request.token_ids[last] != PLACEHOLDER or not penalised(request.params):
            return request
        ids = [*request.token_ids[:last], max(self._last.tokens()[request.request_id].token_id, 0)]
        return dataclasses.replace(request, token_ids=ids)

    def _prompt_logprobs(self, hidden_TD: Tensor, rows: PromptRows) -> list[float]:
        """Log-probs (of the model's own softmax) of the prompt tokens that these rows predict, a slice of rows at a time."""
        values: list[float] = []
        count = max(1, LOGITS_AT_ONCE // self.decoder.config.vocab_size)
        for start in range(0, len(rows.targets), count):
            targets = rows.targets[start : start + count]
            first = rows.first + start
            scores_NV = self.logits(hidden_TD[first : first + len(targets)]).log_softmax(-1)
            index_N1 = torch.tensor(targets, dtype=torch.int64, device=scores_NV.device)[:, None]
            values.extend(scores_NV.gather(1, index_N1)[:, 0].tolist())
        return values
