"""What the control plane knows of an episode: turns, trajectories, groups. Torch-free values and records.

A Trajectory is token in, token out: its ids are the prompt's, the sampled ones and the tokenised observations, in the order
in which the model saw them; nothing is ever re-tokenised. Example of two turns (o = observation, s = sampled):

    token_ids   o o o s s o o s s s
    loss_mask   0 0 0 1 1 0 0 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Turn:
    """One exchange: the model's reply, and what the environment said to it. `reward` is of this turn alone."""

    text: str
    num_sampled: int
    observation: str = ""
    reward: float = 0.0
    info: dict = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One episode. Lists run in parallel over tokens; `weight_versions` is -1 and `logprobs` 0.0 on tokens not sampled.

    `outcome` is "running" until the episode ends: "done" (terminated or truncated), "failed" (the environment or the
    request failed; `error` says how).
    """

    trajectory_id: str
    group_id: int
    env_seed: int
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    outcome: str = "running"
    error: str | None = None

    @property
    def oldest_version(self) -> int:
        """The smallest weight version that a token was sampled with; -1 if none was sampled."""
        return min(set(self.weight_versions) - {-1}, default=-1)


@dataclass(slots=True, kw_only=True)
class Group:
    """Siblings: trajectories that start from one state (`env_seed`), whose rewards are compared with each other."""

    group_id: int
    env_seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
