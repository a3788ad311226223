"""The doing half of a step: SchedulerOutput -> StepResult. Decoder, pool and sampler meet here, decisions do not.

Owns the forward pass over the paged pool, which rows of it reach the vocabulary, and the ids of its last step (a following
step that was scheduled before they were known reads them from here). It does not know queues, blocks or when a request ends.
Invariant: it changes no Request; all it writes is the KV slots that its input names.
Shapes: T tokens of the step, R rows that give a token, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from pearl.engine.batch import ForwardBatch, PromptRows, build_batch
from pearl.engine.kernels.interface import Kernels, LayerMark, ServedDecoder
from pearl.engine.migration.transport import LAYER_BITS, LeaseWords
from pearl.engine.models.decoder import Decoder, paged_attend
from pearl.engine.request import PLACEHOLDER, Request, SampledToken, SchedulerOutput, StepResult
from pearl.engine.sampler import sample

LOGITS_AT_ONCE = 1 << 24
"""Numbers of fp32 logits held at one time while prompt positions are scored (64 MiB)."""


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
        self._step = 0
        self._last_ids: dict[str, int] = {}

    @property
    def last_ids(self) -> dict[str, int]:
        """Request -> the id that the newest step drew for it."""
        return self._last_ids

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, requests: Mapping[str, Request], *, weight_version: int) -> StepResult:
        """Runs one step; `weight_version` is the version of the weights it runs with. An empty output gives an empty result."""
        if not output.requests:
            return StepResult(sampled={}, weight_version=weight_version)
        batch = self.prepare(output, requests)
        self._step = output.step
        hidden_TD = self.forward(batch)
        return StepResult(
            sampled=self.draw(batch, hidden_TD),
            prompt_logprobs={rows.request_id: self._prompt_logprobs(hidden_TD, rows) for rows in batch.prompt_rows},
            weight_version=weight_version,
        )

    def prepare(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> ForwardBatch:
        """The step's tensors, with ids that the last step drew filled in."""
        batch = build_batch(output, requests, self.block_size, self.kv_pool.device)
        for row, request_id in batch.unknown:
            batch.input_ids_T[row] = max(self._last_ids[request_id], 0)  # a failed row's id is -1; its output is void
        return batch

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, D]; writes the step's KV."""
        if self._served is not None:
            add_up = None if self.decoder.comm is None else self.decoder.comm.all_reduce_sum
            words = self.progress
            mark = None if words is None else LayerMark(words.layer_address, self._step << LAYER_BITS)
            return self._served.forward(self.decoder.embedded(batch.input_ids_T), batch.paged, add_up, mark)
        written = None if self.progress is None else functools.partial(self.progress.layer_done, self._step)
        attend = paged_attend(self.kernels, self.kv_pool, batch.paged, self.decoder.config, written)
        return self.decoder(batch.input_ids_T, batch.paged.positions_T, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V]."""
        return self.decoder.logits(hidden_ND, None if self._served is None else self._served.logits)

    @torch.inference_mode()
    def draw(self, batch: ForwardBatch, hidden_TD: Tensor) -> dict[str, SampledToken]:
        """Logits of the sampling rows only, and a token for each."""
        if not batch.sampled:
            self._last_ids = {}
            return {}
        everything = len(batch.sample_rows) == hidden_TD.shape[0]
        logits_RV = self.logits(hidden_TD if everything else hidden_TD[batch.sample_rows])
        members = [self._known(*pair) for pair in zip(batch.sampled, batch.positions_R, strict=True)]
        tokens = sample(logits_RV, members, batch.positions_R, self.kernels.draw)
        drawn = {request.request_id: token for request, token in zip(batch.sampled, tokens, strict=True)}
        self._last_ids = {request_id: token.token_id for request_id, token in drawn.items()}
        return drawn

    def _known(self, request: Request, position: int) -> Request:
        """The request as penalties must see it: with the id that the last step drew, where finishing it is still due."""
        last = request.num_prompt_tokens + position - 1
        if request.token_ids[last] != PLACEHOLDER:
            return request
        ids = [*request.token_ids[:last], max(self._last_ids[request.request_id], 0)]
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
