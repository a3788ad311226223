"""What is said between who has a weight version and who wants it, in this order, over one connection.

Owns the words. It does not know how they (`comm/conversation.py`) or weights travel.

    receiver: Ask -> holder: Answer -> both: Address -> (weights, over a group of the two) -> receiver: Report
"""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Wants `version`, or with None the newest, if that is newer than `present`. `plan`: fingerprint of the buckets."""

    name: str
    version: int | None
    present: int
    dtype: str
    plan: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`version` comes, over a group of the number `generation`. Or a refusal; then `later`: whether to ask again."""

    version: int = -1
    generation: int = 0
    refusal: str = ""
    later: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver has: the sum of all checksums of `version` as it came; or why it has nothing."""

    version: int
    generation: int
    digest: int = 0
    problem: str = ""
