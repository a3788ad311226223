"""The calculator: exact, bounded, and no way to run what a model wrote; the environment around it."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.rl.envs.calculator import Calculator, evaluate
from pearl.rl.envs.tool_calls import written


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("1 / 4", "0.25"),
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 64", "18446744073709551616"),
        ("2 ** -1", "0.5"),
        ("123456789 * 987654321", "121932631112635269"),
        (" +5 ", "5"),
    ],
)
def test_values_are_exact(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "exponent"),
        ("2 ** 0.5", "exponent"),
        ("10 ** 60 * 10 ** 60 * 10 ** 60", "too large"),
        ("1e400", "too large"),
        ("9" * 201, "at most 200"),
        ("(" * 100 + "1" + ")" * 99, "not an arithmetic expression"),
        ("", "not an arithmetic"),
        ("2 +", "not an arithmetic"),
        ("x", "not an arithmetic"),
        ("True", "not an arithmetic"),
        ("'a' * 3", "not an arithmetic"),
        ("__import__('os').getcwd()", "not an arithmetic"),
        ("(1).__class__", "not an arithmetic"),
        ("[1][0]", "not an arithmetic"),
        ("1 if 1 else 2", "not an arithmetic"),
        ("1 < 2", "not an arithmetic"),
        ("2 << 3", "not an arithmetic"),
        ("1 + \x00", "not an arithmetic"),
    ],
)
def test_everything_else_is_refused_at_once(expression: str, reason: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)
    assert time.process_time() - began < 0.5


@given(st.lists(st.integers(0, 999), min_size=2, max_size=8), st.lists(st.sampled_from("+-*"), min_size=7, max_size=7))
def test_it_agrees_with_python(numbers: list[int], signs: list[str]) -> None:
    text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=False))
    assert Fraction(evaluate(text)) == eval(text)


def problem(game: Calculator, seed: int) -> str:
    return game.reset(seed)[0].removeprefix("What is ").removesuffix("?")


def test_asking_and_answering_wins() -> None:
    game = Calculator()
    for seed in range(20):
        expression = problem(game, seed)
        said, reward, terminated, truncated, info = game.step(written("calculator", expression=expression))
        assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, False)
        assert said == f"<tool_response>\n{evaluate(expression)}\n</tool_response>"
        value = said.split("\n")[1]
        assert game.step(f"It is <answer>{value}</answer>.") == ("", 1.0, True, False, {"invalid": False, "success": True})
        problem(game, seed)
        assert game.step(f"<answer>{int(value) + 1}</answer>")[1:3] == (0.0, True)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("42", "Solve the problem."),
        ("<tool_call>nonsense</tool_call>", "error: the call is not JSON"),
        (written("abacus", expression="1"), "error: no tool 'abacus'; there are: calculator"),
        (written("calculator", formula="1"), "error: calculator takes expression, not 'formula'"),
        (written("calculator"), r"error: calculator needs expression"),
        (written("calculator", expression=3), "error: calculator: expression must be of type string"),
        (written("calculator", expression="1") * 2, "error: a reply must hold exactly one"),
        ("<tool_call>" + written("calculator", expression="1"), "error: a reply must hold exactly one"),
        ("<tool_call>[]</tool_call>", "error: the call must look like"),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "error: the call is not JSON"),
    ],
)
def test_what_is_no_call_and_no_answer_is_told_why(reply: str, said: str) -> None:
    game = Calculator(max_turns=5)
    game.reset(0)
    text, reward, terminated, _, info = game.step(reply)
    assert said in text and reward == -0.1 and not terminated and info["invalid"]


def test_a_failing_call_is_a_turn_like_others() -> None:
    game = Calculator(max_turns=2)
    game.reset(0)
    said, reward, *_ = game.step(written("calculator", expression="1/0"))
    assert (said, reward) == ("<tool_response>\nerror: division by zero\n</tool_response>", 0.0)
    assert game.step(written("calculator", expression="1"))[3] is True
    with pytest.raises(RuntimeError, match="after the end"):
        game.step("")


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="terms=1: must be an integer from 2 to 20"):
        Calculator(terms=1)
