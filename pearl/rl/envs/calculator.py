"""Arithmetic with a calculator tool: ask the tool, then give the answer.

Owns the problems and the calculator, which reads its own small language and never runs what a model wrote. Invariants: the
calculator ends in no time whatever it is given (lengths, exponents and sizes are bounded) and is exact; the same options,
seed and actions give the same episode.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from pearl.rl.envs.directions import answer_of
from pearl.rl.envs.tool_calls import TAGS, Tool, ToolCallError, described, has_call, read_call, response, written

LONGEST_EXPRESSION = 200
LARGEST_EXPONENT = 64
LARGEST_BITS = 512
"""Numerator and denominator of every intermediate result stay below 2 to this power."""

TOOL = Tool(
    name="calculator",
    description="Evaluates an arithmetic expression of numbers, + - * / // % ** and parentheses.",
    arguments={"expression": "string"},
)
RULES = "Solve the problem. Reply with one call of the calculator, or with the result: <answer>42</answer>."

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """Reward 1 for the right answer, 0 for a wrong one (both end the episode), `-invalid_penalty` for what is neither an
    answer nor one call of the tool. A call that fails (1 / 0) is a turn like others: the model is told why.

    Options: a problem joins `terms` numbers of up to `digits` digits by +, - and *; truncated after `max_turns` turns.
    """

    def __init__(self, *, terms: int = 3, digits: int = 3, max_turns: int = 3, invalid_penalty: float = 0.1) -> None:
        self.check_options(terms=terms, digits=digits, max_turns=max_turns)
        self.terms, self.digits, self.max_turns, self.invalid_penalty = terms, digits, max_turns, invalid_penalty
        self.system_prompt = f"{RULES}\n\n{described([TOOL])}"
        self._expression = ""
        self._last = ""
        self._turns = 0
        self._ended = True

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError naming the first option of a bad value and the valid ones."""
        for name, low, high in (("terms", 2, 20), ("digits", 1, 8), ("max_turns", 1, 1000)):
            value = options.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"calculator option {name}={value!r}: must be an integer from {low} to {high}")

    @property
    def words(self) -> Sequence[str]:
        """What a call and an answer are made of."""
        start, _, end = written(TOOL.name, expression="|").partition("|")
        return (self.system_prompt, start, end, *TAGS, "<answer>", "</answer>", "What is ", *"0123456789")

    def reset(self, seed: int) -> tuple[str, dict]:
        rng = random.Random(f"calculator/{seed}")
        numbers = [str(rng.randint(1, 10**self.digits - 1)) for _ in range(self.terms)]
        signs = [rng.choice("+-*") for _ in numbers[1:]]
        self._expression = numbers[0] + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True))
        self._last, self._turns, self._ended = "", 0, False
        return f"What is {self._expression}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._ended:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        out = self._turns >= self.max_turns
        answer = answer_of(action)
        if answer is not None and not has_call(action):
            self._ended = True
            right = answer.replace(",", "") == evaluate(self._expression)
            return "", float(right), True, False, {"invalid": False, "success": right}
        self._ended = out
        try:
            call = read_call(action, [TOOL])
        except ToolCallError as error:
            text = response(f"error: {error}") if has_call(action) else RULES
            return text, -self.invalid_penalty, False, out, {"invalid": True, "success": False}
        try:
            self._last = evaluate(call.arguments["expression"])
            said = self._last
        except ValueError as error:
            said = f"error: {error}"
        return response(said), 0.0, False, out, {"invalid": False, "success": False}

    def random_valid_action(self, rng: random.Random) -> str:
        """A call with the problem, or an answer: the tool's last word, or any number."""
        if not self._last and rng.random() < 0.5:
            return written(TOOL.name, expression=self._expression)
        return f"<answer>{self._last or rng.randint(1, 10**self.digits)}</answer>"


def evaluate(expression: str) -> str:
    """The exact value of an arithmetic expression, as a model reads it: an integer, or a decimal of 12 digits.

    ValueError, in a few words, for anything that is no such expression, divides by zero or grows too large.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"at most {LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if value.denominator == 1:
        return str(value.numerator)
    return f"{value.numerator / value.denominator:.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("not an arithmetic expression")
        case ast.Constant(value=int() | float()):
            text = repr(node.value)
            if text == "inf":
                raise ValueError("too large")
            return _bounded(Fraction(text))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right))))
    raise ValueError("not an arithmetic expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > LARGEST_EXPONENT:
        raise ValueError(f"an exponent must be an integer of at most {LARGEST_EXPONENT}")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ValueError("too large")
    return value
