"""What serving costs on one kind of worker: step times by batch and context, sizes, and what changes of the cluster cost.

Owns the formulae of a step and their file (JSON, keyed by gpu, model, tp and kernels). It does not know workloads or clusters.
Invariant: all coefficients are finite and not negative, so more work never costs less. Seconds, tokens, bytes; one worker is
one engine of `tp` GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


def _not_negative(prefix: str, section: Any) -> None:
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{prefix}.{field.name}={value}: must be a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What a profile is of, e.g. gpu "H800", model "Qwen3-8B", tp 2, kernels "flashinfer"."""

    gpu: str
    model: str
    tp: int = 1
    kernels: str = "auto"

    def __str__(self) -> str:
        return f"{self.gpu}/{self.model}/tp{self.tp}/{self.kernels}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds of one decode step: base + per_seq * n + per_context * n * context + experts * (1 - expert_keep**n).

    The last term is a mixture of experts' weights being read: `expert_keep` is the chance that one sequence needs none of
    another expert (15/16 for 8 of 128); 0 for dense models.
    """

    base_s: float
    per_seq_s: float = 0.0
    per_context_s: float = 0.0
    experts_s: float = 0.0
    expert_keep: float = 0.0

    def __post_init__(self) -> None:
        _not_negative("decode", self)
        if not 0 <= self.expert_keep < 1:
            raise ValueError(f"decode.expert_keep={self.expert_keep}: must be in [0, 1)")

    def seconds(self, batch: Any, context: float) -> Any:
        """One step of `batch` sequences (a number or an array, fractions allowed) of `context` tokens on average."""
        linear = self.base_s + (self.per_seq_s + self.per_context_s * context) * batch
        return linear + self.experts_s * (1.0 - self.expert_keep**batch) if self.experts_s else linear


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of computing n new tokens on a prefix of p: base + per_prompt + per_token * n + per_pair * n * (p + n / 2).

    A step that computes several prompts pays `base_s` once and `per_prompt_s` for each; a prompt that takes several steps pays
    `base_s` in each and `per_prompt_s` once.
    """

    base_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    per_prompt_s: float = 0.0

    def __post_init__(self) -> None:
        _not_negative("prefill", self)
        if self.per_token_s <= 0:
            raise ValueError(f"prefill.per_token_s={self.per_token_s}: must be > 0")

    def seconds(self, new: Any, prefix: Any) -> Any:
        return self.base_s + self.per_prompt_s + self.per_token_s * new + self.per_pair_s * new * (prefix + new / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCost:
    """Seconds that a change of `n` workers takes: `fixed_s` + `per_worker_s` * n."""

    fixed_s: float = 0.0
    per_worker_s: float = 0.0

    def __post_init__(self) -> None:
        _not_negative("cost", self)

    def seconds(self, workers: Any) -> Any:
        """0 for no workers."""
        return np.where(np.asarray(workers) > 0, self.fixed_s + self.per_worker_s * np.asarray(workers), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverCost:
    """Seconds that the hosts of two workers spend on handing one request over, between two of their steps: `give_s` its source,
    `take_s` its target.

    `copies`: the target's host moves the bytes too, and makes no step meanwhile; else they come by themselves.
    """

    give_s: float = 0.0
    take_s: float = 0.0
    copies: bool = False

    def __post_init__(self) -> None:
        _not_negative("hand_over", self)


CHANGES = ("switch", "borrow", "give_back", "prepare", "finalise")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """One kind of worker. `kv_capacity_tokens`: what its pool holds. `step_overhead_s`: host time added to every step.
    `transfer_base_s` and the bytes are waited for while both ends go on; the bytes are not where `hand_over` says otherwise.

    `mixing` says what a prefill costs those who decode on the same worker: 1 all of its time (serial), 0 nothing. `eager` is
    how many times longer the decodes of a step take that computes prompts too: steps of decodes alone are captured graphs,
    others are launched kernel by kernel; 1 where nothing is captured. `switch` is
    a change of role in place, `borrow` and `give_back` swap a trainer for an engine and back, `prepare` is the background
    part of a new worker and `finalise` the part in which no new request is admitted. Up to `max_batch` sequences and
    `max_context` tokens were measured; beyond, predictions say so. `source`: where the figures come from.
    """

    key: CostKey
    decode: DecodeCost
    prefill: PrefillCost
    kv_bytes_per_token: float
    kv_capacity_tokens: float
    transfer_bytes_per_s: float
    transfer_base_s: float = 0.0
    hand_over: HandOverCost = HandOverCost()
    step_overhead_s: float = 0.0
    mixing: float = 1.0
    eager: float = 1.0
    switch: ChangeCost = ChangeCost()
    borrow: ChangeCost = ChangeCost()
    give_back: ChangeCost = ChangeCost()
    prepare: ChangeCost = ChangeCost()
    finalise: ChangeCost = ChangeCost()
    max_batch: float = 256.0
    max_context: float = 32768.0
    source: str = ""

    def __post_init__(self) -> None:
        _not_negative("profile", self)
        for name in ("kv_bytes_per_token", "kv_capacity_tokens", "transfer_bytes_per_s", "max_batch", "max_context"):
            if not getattr(self, name) > 0:
                raise ValueError(f"profile.{name}={getattr(self, name)}: must be > 0")
        if self.mixing > 1:
            raise ValueError(f"profile.mixing={self.mixing}: must be in [0, 1]")
        if self.eager < 1:
            raise ValueError(f"profile.eager={self.eager}: must be >= 1")

    def decode_step_s(self, batch: Any, context: float) -> Any:
        """One decode step with its host time."""
        return self.decode.seconds(batch, context) + self.step_overhead_s

    def prefill_s(self, new: Any, prefix: Any) -> Any:
        """`new` tokens computed on `prefix` cached ones; 0 for none."""
        return np.where(np.asarray(new) > 0, self.prefill.seconds(new, prefix) + self.step_overhead_s, 0.0)

    def prefill_beside_s(self, new: Any, prefix: Any) -> Any:
        """The same in a step that decodes as well: its host time is paid already."""
        return np.where(np.asarray(new) > 0, self.prefill.seconds(new, prefix), 0.0)

    def transfer_s(self, tokens: Any) -> Any:
        """KV of so many tokens on its way, by itself."""
        return self.transfer_base_s + self.moving_s(tokens)

    def moving_s(self, tokens: Any) -> Any:
        """Their bytes alone."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def taking_s(self, tokens: Any) -> Any:
        """What a hand-over of so many tokens of KV costs its target's host."""
        return self.hand_over.take_s + (self.moving_s(tokens) if self.hand_over.copies else 0.0)

    def with_change(self, kind: str, cost: ChangeCost) -> CostProfile:
        """A copy in which `kind`, one of CHANGES, costs `cost`."""
        if kind not in CHANGES:
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(CHANGES)}")
        return replace(self, **{kind: cost})  # type: ignore[arg-type]


def write_profiles(path: Path, profiles: list[CostProfile]) -> None:
    """Writes them aside and renames, so that nobody reads half a file."""
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode({"profiles": profiles})))
    aside.replace(path)


def read_profiles(path: Path) -> list[CostProfile]:
    """ValueError names the file and what is wrong in it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[CostProfile]])["profiles"]
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: not a file of cost profiles: {error}") from None


def find_profile(profiles: list[CostProfile], key: CostKey) -> CostProfile:
    """The profile of exactly this key; a similar one is no substitute. ValueError lists those that are there."""
    for profile in profiles:
        if profile.key == key:
            return profile
    there = ", ".join(str(profile.key) for profile in profiles) or "none"
    raise ValueError(f"key={key}: no cost profile of it; there are: {there}")
