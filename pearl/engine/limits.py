"""The sizes of one engine, and which requests can never give a token under them.

Pure: it knows a request's tokens and parameters, no blocks and no other requests. Invariant: a request that passes can run
to its end, alone in the pool if need be, so the scheduler never has to wait for what cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from pearl.engine.eviction import Eviction
from pearl.engine.request import Request
from pearl.engine.token_runs import TokenRuns
from pearl.protocol import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Sizes of one engine: `block_size` tokens x `num_blocks` blocks; other sizes in tokens and requests as in EngineConfig.

    `transfer_deadline`: seconds for which an offer, an arrival or a credit is held.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    vocab_size: int
    decode_prefill_tokens: int = 256
    enable_prefix_cache: bool = True
    eviction: Eviction = "keep"
    role: Role = Role.MIXED
    transfer_deadline: float = 30.0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_batch_tokens", "vocab_size", "decode_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        if self.eviction not in get_args(Eviction):
            raise ValueError(f"eviction={self.eviction!r}: must be one of {', '.join(get_args(Eviction))}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}: must be >= 2")

    @property
    def num_slots(self) -> int:
        """Tokens whose KV the pool can hold."""
        return self.num_blocks * self.block_size


def check_request(request: Request, settings: CoreSettings) -> None:
    """Raises ValueError naming the field, its value and the limit. A prompt that fills the whole pool is served: it gives
    one token, whose own KV need not be kept."""
    name, ids, vocab = f"request {request.request_id!r}", request.token_ids, settings.vocab_size
    if request.num_prompt_tokens < 1 or len(ids) < request.num_prompt_tokens:
        raise ValueError(f"prompt of {name} has {min(len(ids), request.num_prompt_tokens)} tokens: must have at least 1")
    least, greatest = ids.bounds() if isinstance(ids, TokenRuns) else (min(ids), max(ids))
    wrong = least if least < 0 else greatest
    if not 0 <= wrong < vocab:
        raise ValueError(f"prompt of {name} holds token id {wrong}: must be in [0, {vocab})")
    if len(ids) > settings.max_model_len - 1:
        limit = f"max_model_len={settings.max_model_len} leaves room for {settings.max_model_len - 1}"
        raise ValueError(f"prompt of {name} has {len(ids)} tokens: {limit}")
    if len(ids) > settings.num_slots:
        pool = f"{settings.num_slots} slots ({settings.num_blocks} blocks of {settings.block_size})"
        raise ValueError(f"prompt of {name} has {len(ids)} tokens: the KV pool has {pool}")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens={request.max_tokens} of {name}: must be >= 1")
    for token_id in sorted(request.stop_token_ids):
        if not 0 <= token_id < vocab:
            raise ValueError(f"stop_token_ids of {name} holds {token_id}: must be in [0, {vocab})")
    if request.params.logprobs is not None and request.params.logprobs > vocab:
        raise ValueError(f"logprobs={request.params.logprobs} of {name}: must be at most the vocabulary, {vocab}")
