"""Hi-lo: what is said, who wins, and how a number is read."""

from __future__ import annotations

import pytest

from pearl.rl.envs.hi_lo import HiLo, read_number


def halve(game: HiLo, seed: int) -> tuple[int, bool]:
    """Plays by halves; turns and success."""
    low, high, turns = game.low, game.high, 0
    game.reset(seed)
    while True:
        guess, turns = (low + high) // 2, turns + 1
        said, reward, terminated, truncated, info = game.step(f"{guess}")
        assert info["success"] == terminated == (reward == 1.0) == (said == "Right.")
        if terminated or truncated:
            return turns, info["success"]
        low, high = (guess + 1, high) if said == "Higher." else (low, guess - 1)


def test_halving_always_wins_in_four_turns_and_not_in_three() -> None:
    results = [halve(HiLo(), seed) for seed in range(200)]
    assert all(won for _, won in results) and max(turns for turns, _ in results) == 4
    assert not all(halve(HiLo(max_turns=3), seed)[1] for seed in range(200))


def test_all_numbers_are_hidden_about_as_often() -> None:
    game = HiLo(low=3, high=7)
    counts = dict.fromkeys(range(3, 8), 0)
    for seed in range(1000):
        game.reset(seed)
        counts[game._hidden] += 1
    assert min(counts.values()) > 150


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("My guess is 7.", 7),
        (" 7\n", 7),
        ("**7**", 7),
        ("-3", -3),
        ("", None),
        ("seven", None),
        ("7 or 8", None),
        ("7.5", None),
        ("x7", None),
        ("1" * 30, None),
    ],
)
def test_exactly_one_number_is_read(text: str, number: int | None) -> None:
    assert read_number(text) == number


def test_unreadable_turns_cost_and_count() -> None:
    game = HiLo(max_turns=2)
    game.reset(0)
    assert game.step("eleven")[1:] == (-0.1, False, False, {"invalid": True, "success": False})
    assert game.step("11")[1:] == (-0.1, False, True, {"invalid": True, "success": False})
    with pytest.raises(RuntimeError, match="after the end"):
        game.step("1")


def test_the_example_is_a_game_that_halving_would_play() -> None:
    question = "Guess the number from 1 to 10."
    assert HiLo().example == (question, "5", "Lower.", "2", "Higher.", "3", "Right.")
    assert HiLo(low=1, high=2).example[1:] == ("1", "Higher.", "2", "Right.")
    assert set(HiLo().example) <= set(HiLo().words)
    assert HiLo(example=False).example == ()
    assert HiLo(system_prompt="Guess.").system_prompt == "Guess."


@pytest.mark.parametrize(
    ("options", "named"),
    [({"low": 5, "high": 5}, "high"), ({"low": 1.0}, "low"), ({"max_turns": 0}, "max_turns"), ({"high": True}, "high")],
)
def test_bad_options_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"hi_lo option {named}="):
        HiLo(**options)
