"""One trajectory under way: where it is in its plan, its tokens, and what happened to it.

Owns the state of one trajectory. It does not know workers, the scheduler or time; `dispatch.py` and `rollout.py` move it on.
Invariant: `ids` holds every token that was drawn or answered, whoever drew it, so it can go on anywhere from its last one.

Tokens are not made up one by one: the first prompt is the group's own number again and again, what follows the trajectory's
own. So siblings share their prompt in the prefix cache and nothing else, a trajectory's turns share all of their prefix, and
both are found by the real hash chains; a trajectory is a session, whose chain each pool keeps from turn to turn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

from pearl.engine.request import Request
from pearl.engine.token_runs import TokenRuns
from pearl.protocol import SamplingParams
from pearl.sched.sim.plans import TrajectoryPlan, TurnPlan

PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


@dataclass(slots=True, eq=False)
class Episode:
    """`chance` is this trajectory's own. `drawn`: tokens of the present turn. `oldest` and `versions`: of the drawn tokens."""

    plan: TrajectoryPlan
    chance: random.Random
    ids: TokenRuns = field(init=False)
    turn: int = 0
    drawn: int = 0
    requests: int = 0
    request_id: str = ""
    """Of the request under way; empty when it is with its environment."""
    prompted: bool = False
    """The request under way has got no token yet."""
    waiting: bool = False
    """Its request has not been placed yet."""
    answered: bool = True
    """Its environment is not under way: the prompt of the present turn is complete."""
    oldest: int = -1
    salt: str | None = None
    again: bool = False
    """The present turn was asked for before."""
    apart: bool = False
    """Its prompt is computed by a worker that decodes nothing."""
    known: int = 0
    """Tokens whose KV was somewhere before this turn: what a full hit would find."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Everything is played again."""
        self.ids = TokenRuns.of(2 * self.plan.group, self.plan.first_prompt)
        self.turn = self.drawn = self.known = 0
        self.prompted = self.again = False
        self.oldest, self.request_id, self.waiting, self.answered, self.salt = -1, "", False, True, None

    @property
    def name(self) -> str:
        """What the router calls its session."""
        return str(self.plan.trajectory)

    @property
    def token(self) -> int:
        return 2 * self.plan.trajectory + 1

    @property
    def current(self) -> TurnPlan:
        return self.plan.turns[self.turn]

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return sum(turn.generated for turn in self.plan.turns[: self.turn]) + self.drawn

    @property
    def length(self) -> int:
        """What `ids` must hold."""
        last = 0 if self.is_over or not self.answered else self.current.appended
        before = self.plan.turns[: self.turn]
        return self.plan.first_prompt + sum(turn.appended for turn in before) + last + self.generated

    @property
    def is_over(self) -> bool:
        return self.turn == len(self.plan.turns)

    def next_request(self, now: float, most_computed: int | None = None) -> Request:
        """For what is left of the present turn; given back at most once."""
        self.requests += 1
        self.prompted = True
        self.request_id = f"{self.name}.{self.requests}"
        return Request(
            request_id=self.request_id,
            params=PARAMS,
            token_ids=cast(Any, self.ids.copy()),
            num_prompt_tokens=len(self.ids),
            max_tokens=self.current.generated - self.drawn,
            seed=self.token,
            cache_salt=self.salt,
            session_id=self.name,
            most_computed=None if self.again else most_computed,
            arrival=now,
        )

    def draw(self, count: int, version: int) -> None:
        """Takes in tokens of weights of `version`, the oldest of them."""
        self.ids.repeat(self.token, count)
        self.drawn += count
        self.prompted = False
        if self.oldest < 0:
            self.oldest = version

    def end_turn(self) -> float:
        """The turn's tokens are complete; returns the seconds that its environment takes."""
        if self.drawn != self.current.generated:
            raise RuntimeError(f"trajectory {self.name}: turn {self.turn} drew {self.drawn} of {self.current.generated} tokens")
        env_s = self.current.env_s
        self.known = len(self.ids) - 1
        self.turn, self.drawn, self.request_id, self.answered = self.turn + 1, 0, "", False
        self.again = False
        return env_s

    def answer(self, miss_share: float) -> None:
        """The environment has answered: the next turn's prompt is there. By chance its prefix is found nowhere."""
        self.ids.repeat(self.token, self.current.appended)
        self.answered = True
        if miss_share and self.chance.random() < miss_share:
            self.salt = f"{self.turn}"
