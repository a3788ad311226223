"""The adapter: gymnasium's own games in text, and a game whose observations and actions are text already."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from pearl.rl.envs import registry
from pearl.rl.envs.gymnasium_text import GymnasiumText

SIGNS = string.printable
CLIFF = "CliffWalking-v1"


class Echo(gymnasium.Env):
    """Wants its own words back."""

    observation_space = spaces.Text(50, charset=SIGNS)
    action_space = spaces.Text(50, charset=SIGNS)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self.word = f"word{self.np_random.integers(100)}"
        return f"say {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        right = action == self.word
        return "thanks" if right else f"say {self.word}", float(right), right, False, {}


@pytest.fixture(autouse=True)
def echo_is_registered():
    gymnasium.register("pearl_test/Echo-v0", Echo)
    yield
    gymnasium.registry.pop("pearl_test/Echo-v0")


def test_text_goes_through_as_it_is() -> None:
    game = GymnasiumText(id="pearl_test/Echo-v0", max_turns=3)
    first, _ = game.reset(7)
    assert first == game.reset(7)[0] and game.system_prompt == ""
    assert game.step("what?")[:4] == (first, 0.0, False, False)
    observation, reward, terminated, truncated, info = game.step(first.removeprefix("say "))
    assert (observation, reward, terminated, truncated, info["success"]) == ("thanks", 1.0, True, False, True)
    with pytest.raises(RuntimeError, match="after the end"):
        game.step("")


def test_named_actions_are_the_games_own() -> None:
    game = GymnasiumText(id=CLIFF, actions=["Up", "Right", "Down", "Left"], max_turns=50, success_above=-100)
    oracle = gymnasium.make(CLIFF, render_mode="ansi")
    oracle.reset(seed=3)
    observation, _ = game.reset(3)
    assert "\x1b" not in observation and "x" in observation
    for name, number in [("up", 0), *[("Right", 1)] * 11, ("Down", 2)]:
        observation, reward, terminated, _, info = game.step(f"I go <answer>{name}</answer>")
        _, expected, ended, _, _ = oracle.step(number)
        assert (reward, terminated) == (expected, ended)
    assert terminated and info["success"]


def test_an_unreadable_turn_does_not_reach_the_game() -> None:
    game = GymnasiumText(id=CLIFF, max_turns=2)
    game.reset(0)
    assert game.step("up")[1:] == (-0.1, False, False, {"invalid": True, "success": False})
    _, reward, _, truncated, info = game.step("<answer>0</answer>")
    assert (reward, truncated, info["invalid"], info["success"]) == (-1.0, True, False, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "NoSuchGame-v0"}, "id='NoSuchGame-v0'"),
        ({"id": CLIFF, "actions": ["a", "b"]}, "needs 4 names"),
        ({"id": CLIFF, "actions": ["a", "A", "b", "c"]}, "all different"),
        ({"id": "Pendulum-v1"}, "must be Discrete or Text"),
        ({"id": CLIFF, "kwargs": {"colour": 1}}, "colour"),
    ],
)
def test_what_cannot_be_played_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.make("gymnasium", **options)


def test_the_id_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"env\.options\.id: gymnasium needs it"):
        registry.check("gymnasium", {})
