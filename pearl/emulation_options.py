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
    """What a cost profile does not say of an emulated device. `slowdown`: every cost takes so many times as long.

    `turn_tokens`: mean tokens of a turn. `train_token_s`: GPU seconds of training per token; the default is 163.8 s for 64
    trajectories of 28.6 K tokens on 8 GPUs (docs/elasticity.md). `publish_s`: of a new weight version.
    """

    slowdown: float = 1.0
    turn_tokens: float = 148.0
    train_token_s: float = 7.2e-4
    publish_s: float = 4.4

    def __post_init__(self) -> None:
        above_zero(self, "emulation", "slowdown")
        at_least(self, "emulation", 1, "turn_tokens")
        at_least(self, "emulation", 0, "train_token_s", "publish_s")
