"""The four ways of a grid world, and how a reply names one.

Owns their names, their order (gymnasium's: the index is the action number) and the reading of a reply. Invariant: a reply is
read only if it holds exactly one answer; anything else is no move at all.
"""

from __future__ import annotations

import re

ACTIONS = ("Left", "Down", "Right", "Up")
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(rows, columns) of each action."""
INVALID = "Invalid action.\n"
"""Put before the grid after a turn that could not be read."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_NUMBER_OF = {name.lower(): number for number, name in enumerate(ACTIONS)}


def answer_of(text: str) -> str | None:
    """What stands in the only `<answer>...</answer>` (any case) of a reply, stripped; None if there is not exactly one."""
    if [tag.group(1) for tag in _TAG.finditer(text)] != ["", "/"]:
        return None
    answer = _ANSWER.search(text)
    return answer.group(1).strip() if answer else None


def read_answer(text: str) -> int | None:
    """The action number of a reply with exactly one answer; None for anything else."""
    answer = answer_of(text)
    return None if answer is None else _NUMBER_OF.get(answer.lower())
