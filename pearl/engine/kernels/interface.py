"""What a set of kernels is: an attention backend and a handful of operations, chosen once, passed as a value.

The decoder (`models/decoder.py`) calls nothing else. `reference` (plain torch, differentiable) is the oracle of all others.
Shapes: T tokens, D hidden, H query heads, G kv heads, B (or _) head_dim, S sequences.

The paged pool is one tensor `kv[layer, 2, block, kv_head, ...]`; the order inside a (block, head) is `kv_layout`, the
kernels' own ("plain" = [token, head_dim]), and part of the layout fingerprint that migration compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pearl.engine.models.config import ModelConfig
from pearl.engine.models.params import Box
from pearl.engine.penalties import PenaltyRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the tokens of one engine step live. All index tensors are on the pool's device.

    Sequence s contributes queries `query_starts[s] .. query_starts[s+1]`, the last of which is its token number
    `context_lens[s] - 1`; its keys are positions 0 .. context_lens[s]-1 of `block_tables[s]`. Decode rows (one query) come
    first: there are `num_decodes` of them.
    """

    positions_T: Tensor          # int64
    slot_mapping_T: Tensor       # int64: block * block_size + offset
    query_starts_S1: Tensor      # int32, S + 1
    context_lens_S: Tensor       # int32
    block_tables_SN: Tensor      # int32, padded with 0
    num_decodes: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Whole sequences laid end to end without a cache, as the trainer sees them."""

    positions_T: Tensor          # int64, counting from 0 in each sequence
    lengths: tuple[int, ...]     # sums to T


class Attend(Protocol):
    """Attention of one layer: takes this step's q_THB, k_TGB, v_TGB (rotated) and returns o_THB."""

    def __call__(self, layer: int, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A decoder as one rank holds it. `config` has the heads of this rank; `parameters` go by their ParamSpec names."""

    config: ModelConfig
    parameters: Mapping[str, Tensor]
    rope_cos: Tensor             # fp32 [positions, head_dim]
    rope_sin: Tensor
    rank: int = 0
    first_expert: int = 0
    """Number of the first of the experts that are here."""


class LayerMark(NamedTuple):
    """An int64 that gets `base` plus the number of layers whose keys and values are in the pool, for those who read along."""

    address: int
    base: int


class PackedWeights(Protocol):
    """Parameters that kernels keep in an order of their own: in memory for the version that is served, and in a spare one.

    Nothing is served before the first `serve` or `load`. A `Box` is a region of a parameter (`models/params.py`).
    """

    names: frozenset[str]
    """The parameters that are kept so; the memory of the others is read as it is."""
    plain_too: frozenset[str]
    """Of `names` those whose own memory is read as well."""

    def plan(self, pieces: Iterable[tuple[str, Box, Tensor]]) -> object:
        """Where tensors of the parameters' dtype, whose rows have no gaps, go: for `write`, as often as wanted, while they
        live."""

    def write(self, plan: Any, *, spare: bool) -> None:
        """Packs what the tensors hold now, into the spare memory or into what is served."""

    def serve(self, *, spare: bool) -> None:
        """From the next step on serves what is in the spare memory, which changes places; or again what was served."""

    def forget(self) -> None:
        """Gives the spare memory back; it is taken again when it is written to."""

    def load(self, *, release: bool) -> None:
        """Packs all from the parameters' own memory, and serves it. `release`: that memory may be given back."""

    def read(self, name: str, box: Box) -> Tensor:
        """What is served of a parameter, bit for bit, as a tensor of its own."""


class ServedDecoder(Protocol):
    """A decoder's steps over one pool, from weights in an order of the kernels' own, without a call for every operation."""

    weights: PackedWeights

    def forward(
        self,
        embedded_TD: Tensor,
        batch: PagedBatch,
        add_up: Callable[[Tensor], None] | None = None,
        mark: LayerMark | None = None,
        last_rows: list[int] | None = None,
    ) -> Tensor:
        """Final-normed hidden states [T, D] of the step; writes its KV. The embeddings are overwritten.

        `last_rows`: [R, D] of these rows alone, in order, each of which is the last of its sequence.
        `add_up` replaces a rank's part by the sum over all ranks; None: the model is not cut. `mark` is set after each layer.
        """

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V] of final-normed hidden states, for this rank's part of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows:
    """How each row of a batch is drawn: temperature (0: the best), top_k (0: all), top_p, min_p, one uniform in [0, 1).

    `raws`: the log-probs are of softmax(logits), not of what was drawn from; `bests`: how many of the likeliest are told.
    """

    temperatures: list[float]
    top_ks: list[int]
    top_ps: list[float]
    min_ps: list[float]
    uniforms: list[float]
    raws: list[bool]
    bests: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChanges:
    """What is done to logits before tokens are drawn from them: first penalties, then ids that may not be drawn.

    `masked`: (row, id), no pair twice. `drawn_ids`: what the step before draws, int64 on the device, for penalties of rows
    whose last id is not known yet.
    """

    penalties: PenaltyRows | None
    masked: list[tuple[int, int]]
    drawn_ids: Tensor | None = None


class Drawn(NamedTuple):
    """One entry per row. `errors`: "", "not_finite" or "nothing_left"; `bests`: (id, log-prob), best first."""

    ids: list[int]
    logprobs: list[float]
    errors: list[str]
    bests: list[list[tuple[int, float]]]


Draw = Callable[[Tensor, Tensor, DrawRows], Drawn]
"""(scores_SV, logits_SV, rows): a token per row of the fp32 scores, which are the logits after penalties and masks, as
`sampler.py` describes it. A row's error is "not_finite" where its logits are not, "nothing_left" where no score is."""


@runtime_checkable
class QueuesDraws(Protocol):
    """Kernels that can draw without waiting for their device, and change the scores for it themselves."""

    def queue_draw(
        self, logits_SV: Tensor, rows: DrawRows, changes: ScoreChanges
    ) -> tuple[Tensor, Callable[[], Drawn]]:
        """As `Draw`, but gives the ids on the device (int64, void where a row has an error), and what waits for the rest.

        `changes` are those that `sampler.py` describes; the logits stay as they are. A row in which all is masked has the
        error "nothing_left".
        """


class Kernels(Protocol):
    """All kernels take and return contiguous tensors in the model's dtype and accumulate in fp32."""

    name: str
    kv_layout: str
    row_invariant: bool
    """A row's bits depend on nothing else in the batch, nor on how a sequence was cut into steps."""
    draw: Draw | None
    """None: the sampler does it itself."""

    def refusal(self, *, device: torch.device, dtype: torch.dtype, model: ModelConfig, block_size: int) -> str | None:
        """Why these kernels cannot serve this combination, or None if they can."""

    def linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual)."""

    def qk_norm_rope(
        self,
        q_THB: Tensor,
        k_TGB: Tensor,
        cos_TB: Tensor,
        sin_TB: Tensor,
        q_weight_B: Tensor | None,
        k_weight_B: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Per-head RMSNorm where weights are given, then rotary embedding (half-split pairs); cos/sin are fp32."""

    def silu_and_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """silu(first half) * second half of the last axis."""

    def moe(
        self,
        x_TD: Tensor,
        router_ED: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        *,
        top_k: int,
        normalise: bool,
        first: int = 0,
    ) -> Tensor:
        """The `top_k` best experts' MLPs, times their shares, added up; the shares (fp32) are a softmax over all experts.

        `normalise`: of those chosen, so that they add up to 1. Ties go to the lowest number. The router has all experts, the
        other two those from number `first` on that are here; what others add is left out.
        """

    def store_kv(self, k_TGB: Tensor, v_TGB: Tensor, kv_2NG__: Tensor, slot_mapping_T: Tensor) -> None:
        """Writes one layer's keys and values to the pool."""

    def paged_attention(
        self, q_THB: Tensor, kv_2NG__: Tensor, batch: PagedBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Causal attention over the pool; never reads a slot at or past `context_lens` (it may hold NaN).

        A query sees the `window` last keys up to its own, its own among them; 0 is all.
        """

    def varlen_attention(
        self, q_THB: Tensor, k_TGB: Tensor, v_TGB: Tensor, batch: PackedBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Causal self-attention inside each packed sequence, in the same window; differentiable where the kernels train."""

    def serve(
        self, model: ServedModel, kv_pool: Tensor, memory: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> ServedDecoder | None:
        """The model's steps over `kv_pool`, for kernels that run them whole; None: operation by operation.

        `memory` gives zeros of a shape and dtype, in memory that is given back and taken again with the model's own.
        """
