"""Examples for format warm-up: the environment's own random valid play, written as rollouts write it.

Owns the making of supervised sequences. It does not know how they are trained. Invariants: the tokens are those that the
same conversation would have in a rollout, with loss mask 1 exactly where a rollout samples (the action and the token that
ends the turn); an environment that raises costs its episode, as in a rollout.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from pearl.protocol import TrainSequence
from pearl.rl.envs.base import Environment, example_of, random_player, system_prompt_of
from pearl.rl.rollout import ChatTokenizer, opening

FAILURES_IN_A_ROW = 8
"""So many episodes that raise, with no other in between, mean that the environment can only fail."""


class _EpisodeFailed(Exception):
    """The environment raised; the message is one line, the cause what it raised."""


def warmup_sequences(
    make_env: Callable[[], Environment],
    tokenizer: ChatTokenizer,
    count: int,
    rng: random.Random,
    *,
    max_turns: int,
    max_model_len: int,
    between: Callable[[], None] = lambda: None,
) -> list[TrainSequence]:
    """`count` episodes of random valid actions; reward 0, group -1, no log-probs or versions.

    Another episode is played for one in which the environment raises. `between` is called before each turn. ValueError if the
    environment raises FAILURES_IN_A_ROW times, if it offers no `random_valid_action`, or if not even one turn fits in
    `max_model_len` tokens.
    """
    sequences: list[TrainSequence] = []
    failed = 0
    while len(sequences) < count:
        try:
            sequences.append(_episode(make_env, tokenizer, rng, max_turns, max_model_len, between))
            failed = 0
        except _EpisodeFailed as failure:
            failed += 1
            if failed >= FAILURES_IN_A_ROW:
                reason = f"{failed} episodes of the environment in a row failed in the warm-up, the last with {failure}"
                raise ValueError(reason) from failure.__cause__
    return sequences


@contextlib.contextmanager
def _theirs() -> Iterator[None]:
    """Around the environment's own code: whatever it raises is the episode's end."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise _EpisodeFailed(" ".join(f"{type(error).__name__}: {error}".split())) from error


def _episode(
    make_env: Callable[[], Environment],
    tokenizer: ChatTokenizer,
    rng: random.Random,
    max_turns: int,
    max_model_len: int,
    between: Callable[[], None],
) -> TrainSequence:
    with _theirs():
        environment = make_env()
    try:
        return _played(environment, tokenizer, rng, max_turns, max_model_len, between)
    finally:
        with contextlib.suppress(Exception, SystemExit):  # the episode itself is whole
            getattr(environment, "close", lambda: None)()


def _played(
    environment: Any,
    tokenizer: ChatTokenizer,
    rng: random.Random,
    max_turns: int,
    max_model_len: int,
    between: Callable[[], None],
) -> TrainSequence:
    player = random_player(environment)
    with _theirs():
        observation, _ = environment.reset(rng.randrange(2**31))
    ids = list(tokenizer.chat_start(opening(system_prompt_of(environment), observation, example_of(environment))))
    mask = [0] * len(ids)
    for turn in range(max_turns):
        between()
        with _theirs():
            action = player(rng)
        sampled = [*tokenizer.encode(action), tokenizer.end_of_turn_id]
        given = tokenizer.chat_continue({"role": "user", "content": observation}, ended=True) if turn else []
        if len(ids) + len(given) + len(sampled) > max_model_len:
            break
        ids += given + sampled
        mask += [0] * len(given) + [1] * len(sampled)
        with _theirs():
            observation, _, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            break
    if not any(mask):
        raise ValueError(f"max_model_len={max_model_len}: not even one turn fits behind a first prompt of {len(ids)} tokens")
    return TrainSequence(
        token_ids=ids, loss_mask=mask, logprobs=[0.0] * len(ids), weight_versions=[-1] * len(ids), reward=0.0, group=-1
    )
