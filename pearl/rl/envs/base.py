"""What an environment is: gymnasium's convention, in text.

Owns the protocol, the names of its optional capabilities and the value that one exchange gives. It does not know processes,
tokens or rewards' use. Invariant: an environment's course is a function of its options, its seed and the actions it was
given, so that an episode can be played again (the pool does so after it lost a process; one that cannot be played again
still works, and costs its episodes when that happens).

Optional attributes and methods, read with the functions below:

    system_prompt: str                              how to answer, put before the first observation; default none
    example: Sequence[str]                          an episode shown before the first observation, by turns what the
                                                    environment says and what the model replies; default none
    words: Sequence[str]                            strings that a fresh tokenizer should hold as single tokens; default none
    num_tasks: int                                  how many different tasks its seeds lead to, if they can be counted (fixed
                                                    maps, levels, repositories); default 0: uncounted
    random_valid_action(rng: random.Random) -> str  an action it can read; for format warm-up and play without a model
    check_options(**options) -> None                class method; ValueError for options of bad values, without side effects
    close() -> None                                 frees what the instance holds; called once, at the end of its episode
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Environment(Protocol):
    """One episode at a time. Text in, text out; rewards are per turn and add up to the episode's."""

    def reset(self, seed: int) -> tuple[str, dict]:
        """Begins the episode of `seed` (>= 0) and returns its first observation and an info dict."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays one turn: (observation, reward of this turn, terminated, truncated, info).

        `action` is the model's whole reply, special tokens removed. `info["invalid"]` is True when it could not be read;
        `info["success"]` says at the end whether the task was solved. An exception ends this episode alone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOutcome:
    """The answer to a reset or a step. With `error` (one line) the episode is over and the other fields mean nothing.

    `token_ids`: what the observation is to the model after a reply that ended (`Joint.ids`), if the process that played it
    made them.
    """

    episode_id: str
    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    token_ids: list[int] | None = None

    @property
    def ended(self) -> bool:
        """Nothing more can be asked of this episode."""
        return self.terminated or self.truncated or self.error is not None


def system_prompt_of(environment: Any) -> str:
    """The environment's system prompt; "" if it has none."""
    return str(getattr(environment, "system_prompt", ""))


def example_of(environment: Any) -> Sequence[str]:
    """The environment's example episode; none by default. ValueError for one text in place of a list of texts."""
    example = getattr(environment, "example", ())
    if isinstance(example, str):
        raise ValueError(f"environment {type(environment).__name__}: example must be a list of texts, not {example!r:.50}")
    return tuple(map(str, example))


def words_of(environment: Any) -> Sequence[str]:
    """The strings a fresh tokenizer should hold as single tokens; none by default."""
    return tuple(getattr(environment, "words", ()))


def tasks_of(environment: Any) -> int:
    """How many different tasks its seeds lead to; 0 if nobody has counted them."""
    count = getattr(environment, "num_tasks", 0)
    return count if isinstance(count, int) else 0


def has_random_player(kind: type) -> bool:
    """Whether environments of a class may offer `random_valid_action` (one that passes attributes on may, who knows)."""
    return hasattr(kind, "random_valid_action") or hasattr(kind, "__getattr__")


def random_player(environment: Any) -> Callable[[random.Random], str]:
    """The environment's `random_valid_action`; ValueError if it does not offer one."""
    player = getattr(environment, "random_valid_action", None)
    if player is None:
        raise ValueError(
            f"environment {type(environment).__name__} has no random_valid_action(rng) -> str, "
            "which format warm-up and play without a model need"
        )
    return player
