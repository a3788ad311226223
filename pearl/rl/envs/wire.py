"""What the environment pool and its host processes say to each other.

Owns the message types and the fingerprint of an observation. Invariant: items carry serial numbers that rise by one per
host process, and an item other than `Discard` is answered exactly once unless its process is lost.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from pearl.engine.plain_tokenizer import Joint

if TYPE_CHECKING:
    from pearl.engine.tokenizer import Tokenizer


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    serial: int
    episode_id: str
    seed: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    serial: int
    episode_id: str
    action: str


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Bring a new instance to where a lost one was; `fingerprints` are those of the first and each later observation."""

    serial: int
    episode_id: str
    seed: int
    actions: list[str]
    fingerprints: list[str]


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    episode_id: str


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Work, in order. An empty one says that the pool is alive."""

    items: list[Reset | Step | Replay | Discard]


class Words(msgspec.Struct, frozen=True, tag="words"):
    """How the model reads: from now on answers come with the ids of their observations. Answered by `Ready`.

    `tokenizer` is for `PlainTokenizer.from_json`, `joint` what stands around an observation.
    """

    tokenizer: str
    joint: Joint


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process is up, or has understood `Words`, and wants work."""

    pid: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """To a Reset, Step or Replay. With `error` the instance is gone and the other fields mean nothing.

    `token_ids`: of what follows an ended reply (`Joint.ids`), after a step that ended nothing; None: whoever needs them has to
    make them.
    """

    serial: int
    episode_id: str
    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}
    error: str | None = None
    token_ids: list[int] | None = None


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """`seconds` is the time that the environments took for them."""

    answers: list[Answer]
    seconds: float = 0.0


ToHost = Batch | Words
ToPool = Ready | Answers


def words_for(tokenizer: Tokenizer) -> Words | None:
    """What to tell of a tokenizer; None where only itself can make the ids of a turn."""
    try:
        joint = tokenizer.joint_of("user")
        return Words(tokenizer=tokenizer.to_json(), joint=joint) if joint is not None else None
    except ValueError:  # if turns cannot be made at all, the first to need one is told
        return None


def fingerprint(observation: str) -> str:
    """Equal for equal texts in any process; 8 bytes in hex."""
    return hashlib.blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
