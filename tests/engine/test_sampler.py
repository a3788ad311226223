"""The sampler against transformers' own logits processors, closed-form frequencies and the published Philox vectors."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pearl.engine.philox import derive_seed, philox4x32, uniforms
from pearl.engine.request import Request, SampledToken
from pearl.engine.sampler import sample
from pearl.protocol import SamplingParams

VOCAB = 60


def request(
    params: SamplingParams, *, prompt: list[int] | None = None, output: list[int] | None = None, seed: int = 0, **fields
) -> Request:
    prompt = prompt or [1]
    return Request(
        request_id="r",
        params=params,
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        max_tokens=16,
        seed=seed,
        **fields,
    )


def draw(logits: torch.Tensor, rows: list[Request], positions: list[int] | None = None) -> list[SampledToken]:
    return sample(logits, rows, positions or [row.num_tokens - row.num_prompt_tokens for row in rows])


def frequencies(logits_V: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """Shares of the ids over `count` draws at different output positions of one seed."""
    rows = [request(params, seed=5)] * count
    ids = [token.token_id for token in draw(logits_V.expand(count, -1).contiguous(), rows, list(range(count)))]
    return np.bincount(ids, minlength=logits_V.shape[0]) / count


def assert_frequencies(found: np.ndarray, expected: np.ndarray, count: int) -> None:
    assert (found[expected == 0] == 0).all()
    sigma = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(found - expected) <= 4 * sigma + 1e-12).all(), (found, expected)


# ---------------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def test_uniforms_depend_on_seed_index_and_position_alone() -> None:
    seeds, indices, positions = [0, 1, 2**64 - 1, 2**33], [0, 0, 3, 1], [0, 7, 7, 2**20]
    together = uniforms(seeds, indices, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone
    assert len({*alone, uniforms([2**64 - 1], [2], [7])[0], uniforms([2**32 + 1], [0], [7])[0]}) == 6


def test_uniforms_are_uniform() -> None:
    numbers = uniforms([3] * 20000, [0] * 20000, list(range(20000)))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert_frequencies(np.histogram(numbers, bins=20, range=(0, 1))[0] / 20000, np.full(20, 0.05), 20000)


def test_derived_seeds_are_stable_and_distinct() -> None:
    assert derive_seed(0, "0") == derive_seed(0, "0") == 7120306904099482837
    seeds = {derive_seed(engine_seed, str(name)) for engine_seed in range(10) for name in range(100)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**64 for seed in seeds)


# ---------------------------------------------------------------------------------------------------- filters


def hf_processed(logits_V: torch.Tensor, row: Request) -> torch.Tensor:
    """Log-probs of the distribution to draw from, by transformers' processors in transformers' order."""
    p = row.params
    ids, scores = torch.tensor([row.token_ids]), logits_V[None].clone()
    if p.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    for token_id in range(scores.shape[1]):
        count = row.output_token_ids.count(token_id)
        scores[0, token_id] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    if p.temperature == 0:
        return scores[0].log_softmax(-1)
    scores = scores / p.temperature
    if p.top_k and p.top_k > 0:
        scores = TopKLogitsWarper(p.top_k)(ids, scores)
    if p.top_p < 1.0:
        scores = TopPLogitsWarper(p.top_p)(ids, scores)
    if p.min_p > 0:
        scores = MinPLogitsWarper(p.min_p)(ids, scores)
    return scores[0].log_softmax(-1)


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: float, other: float) -> float:
        return value if rng.random() < 0.5 else other

    return SamplingParams(
        temperature=maybe(rng.choice([0.0, 0.3, 0.7, 2.0]), 1.0),
        top_k=int(maybe(rng.choice([-1, 1, 3, 10, 59, 60, 10**9]), 0)),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(rng.choice([-0.5, 1.0]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.2, 0.7]), 0.0),
        logprobs=VOCAB,
    )


@pytest.mark.parametrize("seed", range(6))
def test_mixed_rows_equal_transformers(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.5, 3.0])
    rows = [
        request(
            random_params(rng),
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))],
            output=[rng.randrange(VOCAB) for _ in range(rng.randrange(12))],
            seed=rng.getrandbits(64),
        )
        for _ in range(40)
    ]
    before = logits.clone()
    for row, token, logits_V in zip(rows, draw(logits, rows), logits, strict=True):
        expected_V = hf_processed(logits_V, row)
        shown = token.top_logprobs
        assert shown is not None and token.error is None
        assert sorted(shown) == (expected_V > -math.inf).nonzero()[:, 0].tolist()
        found_K = torch.tensor([shown[i] for i in sorted(shown)])
        torch.testing.assert_close(found_K, expected_V[sorted(shown)], rtol=0, atol=2e-5)
        assert token.logprob == shown[token.token_id]
        if row.params.temperature == 0:
            assert token.token_id == int(expected_V.argmax())
    assert torch.equal(before, logits)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = random.Random(7)
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(7)) * 2
    rows = [request(random_params(rng), prompt=[3, 4], output=[5, 5], seed=rng.getrandbits(64)) for _ in range(30)]
    together = draw(logits, rows)
    order = list(range(30))
    rng.shuffle(order)
    shuffled = draw(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = draw(logits[i : i + 1], [rows[i]])[0]
        assert alone.token_id == together[i].token_id == shuffled[place].token_id
        assert alone.logprob == pytest.approx(together[i].logprob, abs=1e-6)


def test_a_disabled_filter_stays_disabled_beside_an_enabled_one() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    narrow, wide = request(SamplingParams(top_k=1)), request(SamplingParams(), seed=9)
    for first in (True, False):
        pair = [narrow, wide] if first else [wide, narrow]
        tokens = sample(logits.expand(8000, -1).contiguous(), pair * 4000, [i // 2 for i in range(8000)])
        ids = [token.token_id for token in tokens]
        assert set(ids[0 if first else 1 :: 2]) == {0}
        shares = np.bincount(ids[1 if first else 0 :: 2], minlength=4) / 4000
        assert_frequencies(shares, logits[0].softmax(-1).numpy(), 4000)


def test_top_k_keeps_all_ties_at_the_cut() -> None:
    logits = torch.tensor([0.4, 0.3, 0.3, 1e-9]).log()
    found = frequencies(logits, SamplingParams(top_k=2), 4000)
    assert_frequencies(found, np.array([0.4, 0.3, 0.3, 0.0]), 4000)


@pytest.mark.parametrize(("top_p", "kept"), [(0.9, 2), (0.5, 1), (0.51, 2), (0.92, 3), (1.0, 3), (5e-324, 1)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.41, 0.09]]).log()
    shown = draw(logits, [request(SamplingParams(top_p=top_p, logprobs=3))])[0].top_logprobs
    assert shown is not None and sorted(shown) == list(range(kept))


@pytest.mark.parametrize("top_k", [None, 0, -1, 3, 10**9])
@pytest.mark.parametrize(("min_p", "kept"), [(1.0, 1), (0.82, 2), (0.83, 1), (0.0, 3)])
def test_min_p_is_relative_to_the_best(min_p: float, kept: int, top_k: int | None) -> None:
    logits = torch.tensor([[0.5, 0.41, 0.09]]).log()
    shown = draw(logits, [request(SamplingParams(min_p=min_p, top_k=top_k, logprobs=3))])[0].top_logprobs
    assert shown is not None and sorted(shown) == list(range(kept))


def test_top_k_of_one_with_top_p_is_the_best_token() -> None:
    logits = torch.randn(128, generator=torch.Generator().manual_seed(0)) * 0.3
    assert float(logits.softmax(-1).max()) < 0.03
    assert frequencies(logits, SamplingParams(top_k=1, top_p=0.8), 100)[int(logits.argmax())] == 1.0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=1e-30),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
    ],
)
def test_all_spellings_of_greedy_agree(params: SamplingParams) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(3)) * 4
    tokens = draw(logits, [request(params, seed=seed) for seed in range(20)])
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_of_a_tie_and_keeps_the_unscaled_softmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0]])
    token = draw(logits, [request(SamplingParams(temperature=0.0, top_k=1, top_p=0.1))])[0]
    assert token.token_id == 1
    assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


# ---------------------------------------------------------------------------------------------------- the draw


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(temperature=0.5), [x / 0.365 for x in (0.25, 0.09, 0.0225, 0.0025)]),
        (SamplingParams(top_k=2), [0.625, 0.375, 0, 0]),
        (SamplingParams(top_p=0.85), [x / 0.95 for x in (0.5, 0.3, 0.15)] + [0]),
        (SamplingParams(min_p=0.2), [x / 0.95 for x in (0.5, 0.3, 0.15)] + [0]),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    found = frequencies(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), params, 20000)
    assert_frequencies(found, np.array(expected), 20000)


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5)])
def test_tokens_of_no_probability_are_never_drawn(
    monkeypatch: pytest.MonkeyPatch, number: float, params: SamplingParams
) -> None:
    """Also not when the uniform is the lowest or the highest there is."""
    monkeypatch.setattr("pearl.engine.sampler.uniforms", lambda seeds, *_: np.full(len(seeds), number))
    logits = torch.randn(500, 50, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, :10] = logits[:, 40:] = -2000.0
    ids = [token.token_id for token in draw(logits, [request(params)] * 500)]
    assert min(ids) >= 10 and max(ids) < 40
    if params.top_k == 0:
        assert set(ids) == ({10} if number == 0.0 else {39})


def test_siblings_and_positions_draw_different_numbers() -> None:
    logits = torch.zeros(1, 1000)
    ids = {
        draw(logits, [request(SamplingParams(), seed=1, index=index)], [position])[0].token_id
        for index in range(5)
        for position in range(5)
    }
    assert len(ids) > 20


# ---------------------------------------------------------------------------------------------------- log-probs


def test_raw_and_processed_log_probs_are_of_two_distributions_but_one_draw() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    both = [
        draw(logits, [request(SamplingParams(temperature=0.5, top_k=3, logprobs=5, logprobs_mode=mode), seed=2)])[0]
        for mode in ("processed", "raw")
    ]
    processed, raw = both
    assert processed.token_id == raw.token_id
    assert raw.logprob == pytest.approx(float(logits.log_softmax(-1)[0, raw.token_id]), abs=1e-5)
    best = logits[0].topk(3)
    expected = (best.values / 0.5).log_softmax(-1)
    assert processed.top_logprobs == pytest.approx(dict(zip(best.indices.tolist(), expected.tolist(), strict=True)), abs=1e-5)
    assert raw.top_logprobs is not None and list(raw.top_logprobs)[:5] == logits[0].topk(5).indices.tolist()


def test_log_probs_do_not_underflow() -> None:
    token = draw(torch.tensor([[0.0, -200.0]]), [request(SamplingParams(temperature=0.0, logprobs=2))])[0]
    assert token.top_logprobs == {0: 0.0, 1: -200.0}


def test_top_log_probs_hold_the_sampled_token_and_none_when_not_asked() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0]])
    rows = [request(SamplingParams(temperature=0.0, logprobs=count)) for count in (None, 0, 1)]
    tokens = draw(logits.expand(3, -1).contiguous(), rows)
    assert [token.top_logprobs for token in tokens] == [None, None, {2: 0.0}]
    unlikely = sample(torch.zeros(1, 400), [request(SamplingParams(logprobs=1), seed=3)], [0])[0]
    assert unlikely.token_id != 0 and list(unlikely.top_logprobs or {}) == [0, unlikely.token_id]


# ---------------------------------------------------------------------------------------------------- penalties, masks, errors


def test_presence_and_frequency_count_output_only_and_repetition_counts_both() -> None:
    logits = torch.tensor([[0.5, -0.25, 1.0, -1.0]])
    quiet = request(SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, logprobs=4), prompt=[2, 2, 2])
    plain = request(SamplingParams(logprobs=4), prompt=[2, 2, 2])
    one, other = (draw(logits, [row])[0].top_logprobs for row in (quiet, plain))
    assert one == pytest.approx(other)
    loud = request(SamplingParams(repetition_penalty=2.0, logprobs=4), prompt=[2, 3], output=[3])
    expected = torch.tensor([0.5, -0.25, 0.5, -2.0]).log_softmax(-1)
    assert draw(logits, [loud])[0].top_logprobs == pytest.approx(dict(enumerate(expected.tolist())))


def test_extreme_penalties_leave_finite_numbers() -> None:
    row = request(SamplingParams(repetition_penalty=5e-324, temperature=0.0), prompt=[0, 1])
    token = draw(torch.tensor([[1.0, -1.0, 0.5]]), [row])[0]
    assert (token.token_id, token.error) == (0, None)


def test_min_tokens_masks_eos_and_stop_ids_until_reached() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    row = request(SamplingParams(temperature=0.0, min_tokens=2), eos_token_ids=frozenset({0}), stop_token_ids=frozenset({1}))
    assert [sample(logits, [row], [position])[0].token_id for position in range(4)] == [2, 2, 0, 0]
    rest = sample(logits, [row], [0])[0].logprob
    assert rest == pytest.approx(float(logits[0, 2:].log_softmax(-1)[0]))


def test_masking_everything_is_an_error_of_that_row() -> None:
    row = request(SamplingParams(min_tokens=1), stop_token_ids=frozenset(range(4)))
    tokens = sample(torch.zeros(2, 4), [row, request(SamplingParams())], [0, 0])
    assert "no token is left" in (tokens[0].error or "") and tokens[1].error is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_cost_their_own_row_only(poison: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [request(SamplingParams(temperature=temperature, logprobs=2), seed=seed) for seed in range(3)]
    healthy = draw(logits, rows)
    poisoned = logits.clone()
    poisoned[1, 17] = poison
    tokens = draw(poisoned, rows)
    assert [token.error is None for token in tokens] == [True, False, True]
    assert "not finite" in (tokens[1].error or "")
    assert (tokens[0], tokens[2]) == (healthy[0], healthy[2])
