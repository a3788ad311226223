"""What penalties count, from step to step: always what counting from the beginning gives."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from pearl.engine.penalties import PenaltyRows, SeenTokens
from pearl.engine.request import PLACEHOLDER, Request
from pearl.protocol import SamplingParams


def request(name: str, rng: random.Random, **params: float) -> Request:
    prompt = [rng.randrange(20) for _ in range(rng.randint(1, 9))]
    return Request(
        request_id=name, params=SamplingParams(**params), token_ids=prompt, num_prompt_tokens=len(prompt), max_tokens=99, seed=0
    )


def position(one: Request) -> int:
    return one.num_tokens - one.num_prompt_tokens


def counted(rows: PenaltyRows, number: int) -> dict[int, int]:
    _, begin, end, _ = rows.rows_R4[number]
    ids = rows.ids_E[begin:end].tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, rows.counts_E[begin:end].tolist(), strict=True))


def expected(one: Request) -> dict[int, int]:
    counts = Counter(one.output_token_ids)
    return {token_id: counts[token_id] for token_id in [*one.token_ids[: one.num_prompt_tokens], *one.output_token_ids]}


def test_random_lives() -> None:
    """Requests come, go, wait, are computed one ahead, and take places of others; some have no penalties."""
    rng, seen = random.Random(0), SeenTokens()
    alive = [request(f"r{n}", rng, presence_penalty=float(n % 3)) for n in range(9)]
    for step in range(200):
        if step % 20 == 19:
            alive[rng.randrange(9)] = request("r1", rng, frequency_penalty=1.5)
        members = rng.sample(alive, rng.randint(1, 9))
        for one in members:
            if one.token_ids[-1] == PLACEHOLDER:
                one.token_ids[-1] = rng.randrange(20)
            one.token_ids.append(rng.choice([PLACEHOLDER, rng.randrange(20)]))
        drawing = {one.request_id: row for row, one in enumerate(members) if one.token_ids[-1] == PLACEHOLDER}
        rows = seen.rows(members, [position(one) for one in members], drawing)
        with_penalties = [row for row, one in enumerate(members) if one.params.presence_penalty or one.params.frequency_penalty]
        if rows is None:
            assert not with_penalties
            continue
        assert rows.rows_R4[:, 0].tolist() == with_penalties
        assert {part.dtype for part in rows} == {np.dtype(np.int32), np.dtype(np.float32)}
        for number, row in enumerate(with_penalties):
            one = members[row]
            assert counted(rows, number) == expected(one)
            assert rows.rows_R4[number, 3] == (drawing[one.request_id] if one.token_ids[-1] == PLACEHOLDER else -1)
            assert rows.values_R3[number].tolist() == [1.0, one.params.presence_penalty, one.params.frequency_penalty]


def test_an_earlier_position_is_counted_anew() -> None:
    """A step that has not happened takes tokens back."""
    one, seen = request("r", random.Random(1), presence_penalty=1.0), SeenTokens()
    one.token_ids += [3, 3, 5]
    prompt = set(one.token_ids[: one.num_prompt_tokens])
    assert counted(seen.rows([one], [3], {}), 0) == dict.fromkeys(prompt, 0) | {3: 2, 5: 1}
    assert counted(seen.rows([one], [1], {}), 0) == dict.fromkeys(prompt, 0) | {3: 1}


def test_only_the_last_step_s_requests_are_kept() -> None:
    rng, seen = random.Random(2), SeenTokens()
    first, second = (request(name, rng, repetition_penalty=2.0) for name in "ab")
    seen.rows([first, second], [0, 0], {})
    seen.rows([second], [0], {})
    assert [one.request for one in seen._kept.values()] == [second]
    assert seen.rows([], [], {}) is None and not seen._kept
