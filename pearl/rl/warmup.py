"""Examples for format warm-up: the environment's own random valid play, written as rollouts write it.

Owns the making of supervised sequences. It does not know how they are trained. Invariant: the tokens are those that the
same conversation would have in a rollout, with loss mask 1 exactly where a rollout samples (the action and the token that
ends the turn).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pearl.protocol import TrainSequence
from pearl.rl.envs.base import Environment, random_player, system_prompt_of
from pearl.rl.rollout import ChatTokenizer, opening


def warmup_sequences(
    make_env: Callable[[], Environment],
    tokenizer: ChatTokenizer,
    count: int,
    rng: random.Random,
    *,
    max_turns: int,
    max_model_len: int,
) -> list[TrainSequence]:
    """`count` episodes of random valid actions; reward 0, group -1, no log-probs or versions.

    ValueError if the environment offers no `random_valid_action`, or if not even one turn fits in `max_model_len` tokens.
    """
    return [_episode(make_env(), tokenizer, rng, max_turns, max_model_len) for _ in range(count)]


def _episode(
    environment: Environment, tokenizer: ChatTokenizer, rng: random.Random, max_turns: int, max_model_len: int
) -> TrainSequence:
    player = random_player(environment)
    observation, _ = environment.reset(rng.randrange(2**31))
    ids = list(tokenizer.chat_start(opening(system_prompt_of(environment), observation)))
    mask = [0] * len(ids)
    for turn in range(max_turns):
        action = player(rng)
        sampled = [*tokenizer.encode(action), tokenizer.end_of_turn_id]
        given = tokenizer.chat_continue({"role": "user", "content": observation}, ended=True) if turn else []
        if len(ids) + len(given) + len(sampled) > max_model_len:
            break
        ids += given + sampled
        mask += [0] * len(given) + [1] * len(sampled)
        observation, _, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            break
    if not any(mask):
        raise ValueError(f"max_model_len={max_model_len}: not even one turn fits behind a first prompt of {len(ids)} tokens")
    return TrainSequence(
        token_ids=ids, loss_mask=mask, logprobs=[0.0] * len(ids), weight_versions=[-1] * len(ids), reward=0.0, group=-1
    )
