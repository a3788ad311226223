"""Any environment of gymnasium's registry whose state can be shown as text and whose actions can be named.

Owns the translation: observations that are text stay as they are, else the environment's "ansi" picture is shown, else the
observation in Python's writing; actions are text, or a name or number inside `<answer>` tags. It does not know games.
Invariant: an unreadable turn does not reach the environment.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from pearl.rl.envs.directions import answer_of

LARGEST_SEED = 2**32 - 1
_STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class GymnasiumText:
    """Rewards are the environment's own, `-invalid_penalty` for a turn that could not be read.

    Options: `id` as for `gymnasium.make`, `kwargs` for its constructor; `actions` are names for the numbers of a discrete
    action space, in order (none: the numbers themselves); `system_prompt` says how to answer, by default which actions there
    are. An episode counts as a success if the environment says so in `info["success"]` (or `is_success`), or if it
    terminates with rewards that sum to more than `success_above`. Truncated after `max_turns` turns.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        system_prompt: str | None = None,
        success_above: float = 0.0,
        max_turns: int = 20,
        invalid_penalty: float = 0.1,
    ) -> None:
        self.max_turns, self.invalid_penalty, self.success_above = max_turns, invalid_penalty, success_above
        self._env = _made(id, kwargs or {})
        space = self._env.action_space
        self._is_text = isinstance(space, spaces.Text)
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise ValueError(f"gymnasium option id={id!r}: actions of {space} cannot be named; must be Discrete or Text")
        count = int(space.n) if isinstance(space, spaces.Discrete) else 0
        names = [str(number) for number in range(count)] if actions is None else list(actions)
        if len(names) != count or len({name.lower() for name in names}) != count:
            raise ValueError(f"gymnasium option actions={actions!r}: {id} needs {count} names, all different")
        self._names = names
        self._numbers = {name.lower(): number for number, name in enumerate(names)}
        self.system_prompt = system_prompt if system_prompt is not None else self._rules()
        self._turns, self._total, self._ended = 0, 0.0, True

    @property
    def words(self) -> Sequence[str]:
        """The system prompt, the actions and their tags."""
        return tuple(word for word in (self.system_prompt, *self._names, "<answer>", "</answer>") if word)

    def reset(self, seed: int) -> tuple[str, dict]:
        observation, info = self._env.reset(seed=seed % LARGEST_SEED)
        self._env.action_space.seed(seed % LARGEST_SEED)
        self._turns, self._total, self._ended = 0, 0.0, False
        return self._text(observation), dict(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._ended:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        out = self._turns >= self.max_turns
        chosen = action if self._is_text else self._read(action)
        if chosen is None:
            self._ended = out
            return self._rules(), -self.invalid_penalty, False, out, {"invalid": True, "success": False}
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        self._total += float(reward)
        truncated = bool(truncated or out) and not terminated
        self._ended = bool(terminated) or truncated
        told = info.get("success", info.get("is_success"))
        success = bool(told) if told is not None else bool(terminated) and self._total > self.success_above
        info = info | {"invalid": False, "success": success}
        return self._text(observation), float(reward), bool(terminated), truncated, info

    def random_valid_action(self, rng: random.Random) -> str:
        """Any action, each as likely; of a text space a sample."""
        return str(self._env.action_space.sample()) if self._is_text else f"<answer>{rng.choice(self._names)}</answer>"

    def close(self) -> None:
        self._env.close()

    def _rules(self) -> str:
        return "" if self._is_text else f"Reply <answer>ACTION</answer>, ACTION one of: {', '.join(self._names)}."

    def _read(self, text: str) -> int | None:
        answer = answer_of(text)
        return None if answer is None else self._numbers.get(answer.lower())

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        picture = self._env.render() if self._env.render_mode == "ansi" else None
        return _STYLE.sub("", picture) if isinstance(picture, str) else str(observation)


def _made(id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    """ValueError if gymnasium cannot make it, in its words."""
    try:
        extra = {"render_mode": "ansi"} if "ansi" in _render_modes(id) else {}
        return gymnasium.make(id, **(extra | kwargs))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ValueError(f"gymnasium option id={id!r}: {' '.join(str(error).split())}") from error


def _render_modes(id: str) -> Sequence[str]:
    entry = gymnasium.spec(id).entry_point
    kind = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(kind, "metadata", {}).get("render_modes", [])
