"""Requests on their way from one engine to another: what travels beside the KV itself.

Owns the types and nothing else; no tensors, sockets or clocks. Invariant: a KVTransfer holds everything that a request is, so
that its receiver can go on with the same tokens even if not one byte of KV arrives.
"""

from __future__ import annotations

import math

import msgspec

from pearl.sampling_params import SamplingParams


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of a pool kv[layer, 2, block, kv_head, ...] mean. Two pools can exchange blocks if all fields are equal,
    and parts of blocks if only their heads differ.

    `order` is the kernels' order inside a (block, head).
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    order: str


class KVEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pool is. `addresses`: name of a transport -> where that transport finds the pool, in its own words.

    `heads`: which of the model's kv heads, from the first to the one before the second, it has; None: all of them.
    """

    worker: str
    host: str
    pid: int
    num_blocks: int
    addresses: dict[str, str]
    heads: tuple[int, int] | None = None


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """A request between two steps. Fields as in `engine.request.Request`; text is made again from the tokens.

    `request_id` is what its caller knows, `name` the engine's own for one of n siblings. `cacheable`: its KV is all of one
    weight version. `streaming`: its text is given out as it comes.
    """

    request_id: str
    name: str
    index: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    eos_token_ids: list[int]
    cache_salt: str | None
    session_id: str | None
    cacheable: bool
    streaming: bool
    num_cached_tokens: int
    num_preemptions: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    prompt_logprobs: list[float | None]
    weight_versions: list[int]


class KVTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """An offer to go on with a request: all of it, and where the KV of its first `num_written_tokens` tokens lies.

    `blocks` (of the source's pool, in order) are leased for at most `deadline` seconds from when the offer was made; after
    that, or once the offer was finished or withdrawn, they may hold anything. Who reads them checks afterwards that the word
    of the last block (see `migration.transport.LeaseWords`) still is `lease_word`.

    A source of several ranks has `peers` beside `source`, by rank; block ids and words are the same in all of their pools, and
    `layout` has the heads of the whole model. `growing`: this is no offer yet, only leave to read the prompt's KV while it is
    written (`LeaseWords.progress`); the offer will have the same id, word and blocks, if it comes.
    """

    transfer_id: str
    request_id: str
    state: RequestState
    source: KVEndpoint
    blocks: list[int]
    lease_word: int
    num_written_tokens: int
    layout: KVLayout
    weight_version: int
    epoch: int
    deadline: float
    reservation_id: str | None = None
    peers: list[KVEndpoint] = []
    growing: bool = False


def lacking(transfer: KVTransfer) -> str:
    """Why its blocks cannot hold the KV that it speaks of, or are none of its source's, "" if neither is so."""
    size, held, there = transfer.layout.block_size, len(transfer.blocks), transfer.source.num_blocks
    if not all(0 <= block < there for block in transfer.blocks):
        return f"transfer {transfer.transfer_id[:200]!r}: KV in blocks {transfer.blocks[:20]} of a pool of {there}"
    if size > 0 and transfer.num_written_tokens <= held * size:
        return ""
    return f"transfer {transfer.transfer_id[:200]!r}: KV of {transfer.num_written_tokens} tokens in {held} blocks of {size}"


def why_impossible(transfer: KVTransfer) -> str:
    """Why no engine offers this, "" if one can: what could not be gone on with, wherever it is taken in."""
    state, known = transfer.state, len(transfer.state.token_ids)
    name, sampled = f"request {state.request_id[:200]!r}", known - state.num_prompt_tokens
    if transfer.request_id != state.request_id:
        return f"{name}: the transfer of it is one of request {transfer.request_id[:200]!r}"
    if not 0 < state.num_prompt_tokens <= known or state.max_tokens < 1:
        return f"{name}: {known} tokens with a prompt of {state.num_prompt_tokens} and {state.max_tokens} to sample"
    if not 0 <= transfer.num_written_tokens < known:
        return f"{name}: KV of {transfer.num_written_tokens} of its {known} tokens"
    if wrong := lacking(transfer):
        return wrong
    if not len(state.logprobs) == len(state.weight_versions) == sampled:
        return f"{name}: {sampled} sampled tokens, {len(state.logprobs)} log-probs, {len(state.weight_versions)} versions"
    if min(state.index, state.num_cached_tokens, state.num_preemptions, transfer.weight_version + 1) < 0:
        return f"{name}: index, counts and versions are never negative"
    return "" if 0 < transfer.deadline < math.inf else f"{name}: deadline={transfer.deadline}: must be finite and > 0"


class KVReservation(msgspec.Struct, frozen=True, kw_only=True):
    """A credit: room for a prompt and its first token in `destination`, held for `deadline` seconds from when it was given.

    The first `num_cached_tokens` tokens are there already and need not be sent. `layout` has the heads of the whole model.
    """

    reservation_id: str
    request_id: str
    destination: KVEndpoint
    blocks: list[int]
    num_cached_tokens: int
    layout: KVLayout
    weight_version: int
    epoch: int
    deadline: float
