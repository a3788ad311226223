"""The section of a job's configuration about devices that are not there: what a cost profile does not say of them.

Owns the fields, what they may be and their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.field_checks import above_zero, at_least

EMULATED = "emulated:"
"""What the name of a device that is not there begins with; the rest says what it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """Of devices that are not there. `slowdown`: everything takes so many times as long as it costs.

    `turn_tokens`: mean tokens of a turn (no more than `rollout.max_tokens`). `train_token_s`: GPU seconds of training per
    token, `publish_s`: seconds until a new weight version is everywhere; None: what the cost profile's preset says.
    """

    slowdown: float = 1.0
    turn_tokens: float = 148.0
    train_token_s: float | None = None
    publish_s: float | None = None

    def __post_init__(self) -> None:
        above_zero(self, "emulation", "slowdown")
        at_least(self, "emulation", 1, "turn_tokens")
        for name in ("train_token_s", "publish_s"):
            if getattr(self, name) is not None:
                at_least(self, "emulation", 0, name)
