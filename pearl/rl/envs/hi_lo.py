"""Hi-lo: find a hidden number; after each guess one is told whether it is higher or lower.

Owns the game and its text. A policy that halves what is left finds one of `high - low + 1` numbers in about log2 of that many
turns; one that does not listen needs as many turns as there are numbers. Invariant: the same options, seed and guesses give
the same episode.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

_INTEGER = re.compile(r"(?<![\w.])-?\d+(?![\w]|\.\d)")
MOST_WORDS = 200
"""Up to so many numbers each is a word of a fresh tokenizer."""


class HiLo:
    """Reward 1 for the right guess, 0 for another, `-invalid_penalty` for a reply without exactly one number in range.

    Options: the number is in `low`..`high`, drawn by the seed; the episode is truncated after `max_turns` guesses. With
    `example` one game by halves is shown before the first turn: a small pretrained model needs one to reply with numbers.
    """

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 10,
        max_turns: int = 4,
        invalid_penalty: float = 0.1,
        example: bool = True,
        system_prompt: str | None = None,
    ) -> None:
        self.check_options(low=low, high=high, max_turns=max_turns)
        self.low, self.high, self.max_turns, self.invalid_penalty = low, high, max_turns, invalid_penalty
        self.num_tasks = high - low + 1
        self.system_prompt = system_prompt if system_prompt is not None else f"Find the hidden number. {self._unreadable()}"
        self.example = _game(self._question(), low, high) if example else ()
        self._hidden = low
        self._turns = 0
        self._ended = True

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """ValueError naming the first option of a bad value and the valid ones."""
        for name in ("low", "high", "max_turns"):
            value = options.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"hi_lo option {name}={value!r}: must be an integer")
        if options.get("max_turns", 1) < 1:
            raise ValueError(f"hi_lo option max_turns={options['max_turns']}: must be >= 1")
        low, high = options.get("low", 1), options.get("high", 10)
        if high <= low:
            raise ValueError(f"hi_lo option high={high}: must be above low={low}")

    @property
    def words(self) -> Sequence[str]:
        """The system prompt, what the game says, and the numbers if they are not too many."""
        numbers = range(self.low, self.high + 1) if self.high - self.low < MOST_WORDS else ()
        return (self.system_prompt, self._question(), "Higher.", "Lower.", "Right.", self._unreadable(), *map(str, numbers))

    def reset(self, seed: int) -> tuple[str, dict]:
        self._hidden = random.Random(f"hi-lo/{seed}").randint(self.low, self.high)
        self._turns, self._ended = 0, False
        return self._question(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if self._ended:
            raise RuntimeError("step after the end of the episode: reset first")
        self._turns += 1
        guess = read_number(action)
        right, out = guess == self._hidden, self._turns >= self.max_turns
        self._ended = right or out
        if guess is None or not self.low <= guess <= self.high:
            return self._unreadable(), -self.invalid_penalty, False, out, {"invalid": True, "success": False}
        says = "Right." if right else "Higher." if guess < self._hidden else "Lower."
        return says, float(right), right, out and not right, {"invalid": False, "success": right}

    def random_valid_action(self, rng: random.Random) -> str:
        """Any of the numbers, each as likely: it does not listen."""
        return str(rng.randint(self.low, self.high))

    def _question(self) -> str:
        return f"Guess the number from {self.low} to {self.high}."

    def _unreadable(self) -> str:
        return f"Reply with one number from {self.low} to {self.high}."


def read_number(text: str) -> int | None:
    """The only integer in a reply, whatever stands around it; None if there is none or more than one."""
    numbers = _INTEGER.findall(text)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 20 else None


def _game(question: str, low: int, high: int) -> tuple[str, ...]:
    """The messages of one game by halves, in which both answers come if there is room for them: lower, then higher."""
    first = (low + high) // 2
    second = (low + first - 1) // 2
    hidden = (second + first) // 2 if low <= second < first - 1 else high
    said = [question]
    while (guess := (low + high) // 2) != hidden:
        said += [str(guess), "Higher." if guess < hidden else "Lower."]
        low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
    return (*said, str(hidden), "Right.")
