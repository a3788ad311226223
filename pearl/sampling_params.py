"""How tokens of one request are drawn and when it ends: `SamplingParams`, and the check of every field.

Owns the names, ranges and defaults. It does not know models or requests. Invariant: a value that exists is valid, whether it
was constructed or decoded.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec


def _number(field: str, value: object, low: float, high: float, *, integer: bool, valid: str) -> None:
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{field}={value!r}: must be {'an integer' if integer else 'a number'}, {valid}")
    if not low <= value <= high:  # false for nan too, and inf is above every high
        raise ValueError(f"{field}={value!r}: must be {valid}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are drawn and when it ends.

    Order of the filters: penalties, temperature, top_k, top_p, min_p (as transformers). `temperature=0` is greedy (lowest id
    on ties) and its log-probs are those of the unscaled softmax. `top_k` of None, 0, -1 or more than the vocabulary keeps all.
    `max_tokens=None` means up to the engine's `max_model_len`. `logprobs=k` adds the k best beside the sampled token,
    `logprobs=None` returns none at all. Raises ValueError naming the field, its value and the valid ones.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = 0
    prompt_logprobs: bool = False
    logprobs_mode: Literal["processed", "raw"] = "processed"

    def __post_init__(self) -> None:
        tiny = math.ulp(0.0)
        _number("temperature", self.temperature, 0, 1e6, integer=False, valid="a finite number >= 0")
        _number("top_p", self.top_p, tiny, 1, integer=False, valid="in (0, 1]")
        _number("min_p", self.min_p, 0, 1, integer=False, valid="in [0, 1]")
        _number("repetition_penalty", self.repetition_penalty, tiny, 1e6, integer=False, valid="a finite number > 0")
        _number("presence_penalty", self.presence_penalty, -1e6, 1e6, integer=False, valid="a finite number")
        _number("frequency_penalty", self.frequency_penalty, -1e6, 1e6, integer=False, valid="a finite number")
        _number("n", self.n, 1, 4096, integer=True, valid="between 1 and 4096")
        _number("min_tokens", self.min_tokens, 0, 2**31, integer=True, valid=">= 0")
        if self.top_k is not None:
            _number("top_k", self.top_k, -1, 2**62, integer=True, valid="None, -1, 0 (all) or a positive count")
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, 2**31, integer=True, valid="None or >= 1")
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}")
        if self.seed is not None:
            _number("seed", self.seed, 0, 2**64 - 1, integer=True, valid="None or an integer in [0, 2**64)")
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, 2**31, integer=True, valid="None or >= 0")
        if self.logprobs_mode not in ("processed", "raw"):
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r}: must be 'processed' or 'raw'")
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a list")
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r}: must be a list of non-empty strings")
        for token_id in self.stop_token_ids:
            _number("stop_token_ids", token_id, 0, 2**31, integer=True, valid="token ids >= 0")

    @classmethod
    def from_dict(cls, values: dict) -> SamplingParams:
        """Builds from untrusted keys; an unknown one raises ValueError with the valid names."""
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}: must be one of {', '.join(cls.__struct_fields__)}")
        return cls(**values)
