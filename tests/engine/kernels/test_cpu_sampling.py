"""Sampling by the CPU kernels against `pearl.engine.sampler`, the owner of what every parameter means."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from cpu_problems import machine
from torch import Tensor

from pearl import _C
from pearl.engine import sampler
from pearl.engine.philox import uniforms
from pearl.engine.request import Request, SampledToken
from pearl.protocol import SamplingParams

ISAS = _C.cpu.supported_isas()
Sampled = tuple[list[int], list[float], list[str], list[list[tuple[int, float]]]]


def native(logits_RV: Tensor, params: list[SamplingParams], numbers: list[float], scores_RV: Tensor | None = None) -> Sampled:
    scores = logits_RV if scores_RV is None else scores_RV
    rows, vocabulary = logits_RV.shape
    return _C.cpu.sample(
        scores=scores.data_ptr(),
        logits=logits_RV.data_ptr(),
        rows=rows,
        vocabulary=vocabulary,
        temperatures=[p.temperature for p in params],
        top_ks=[p.top_k or 0 for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        uniforms=numbers,
        raws=[p.logprobs_mode == "raw" for p in params],
        bests=[p.logprobs or 0 for p in params],
    )


def request(params: SamplingParams, seed: int) -> Request:
    return Request(request_id="r", params=params, token_ids=[1], num_prompt_tokens=1, max_tokens=16, seed=seed)


def assert_equal(found: Sampled, expected: list[SampledToken], params: list[SamplingParams], tolerance: float) -> None:
    """The same ids, log-probs and lists (which in the sampler's form hold the drawn token too)."""
    for token_id, logprob, error, best, token, p in zip(*found, expected, params, strict=True):
        assert (token_id, error) == (token.token_id, ""), p
        assert logprob == pytest.approx(token.logprob, abs=tolerance)
        if p.logprobs:
            listed = dict(best)
            listed.setdefault(token_id, logprob)
            assert list(listed) == list(token.top_logprobs), p
            assert list(listed.values()) == pytest.approx(list(token.top_logprobs.values()), abs=tolerance)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 0.7, 1.3, 1e-3]),
        top_k=rng.choice([0, 1, 5, 50, 400]),
        top_p=rng.choice([1.0, 0.9, 0.5, 0.99, 0.01]),
        min_p=rng.choice([0.0, 0.05, 0.3, 1.0]),
        logprobs=rng.choice([0, 1, 5, 20]),
        logprobs_mode=rng.choice(["raw", "processed"]),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocabulary", [1, 7, 60, 513, 1000, 5000])
def test_every_filter_as_the_sampler(isa: str, vocabulary: int) -> None:
    """Random parameters over flat, peaked and tied logits."""
    rng, draw = random.Random(vocabulary), np.random.default_rng(vocabulary)
    with machine(isa):
        for scale, step in ((1.0, 0.0), (4.0, 0.0), (0.01, 0.0), (2.0, 0.5), (1.0, 1.0)):
            logits = torch.from_numpy((scale * draw.standard_normal((24, vocabulary))).astype(np.float32))
            if step:
                logits = (logits / step).round() * step  # many equal logits: ties at every cut
            params = [random_params(rng) for _ in logits]
            seeds, positions = [rng.getrandbits(64) for _ in logits], [rng.randrange(1000) for _ in logits]
            rows = [request(p, seed) for p, seed in zip(params, seeds, strict=True)]
            numbers = uniforms(seeds, [0] * len(seeds), positions).tolist()
            # At a temperature of 0.001 log-probs have thousands of units, and as many last digits less.
            assert_equal(native(logits, params, numbers), sampler.sample(logits, rows, positions), params, 2e-3)
            mild = [i for i, p in enumerate(params) if p.temperature != 1e-3]
            found = tuple([part[i] for i in mild] for part in native(logits, params, numbers))
            expected = sampler.sample(logits, rows, positions)
            assert_equal(found, [expected[i] for i in mild], [params[i] for i in mild], 1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_draws_from_a_whole_vocabulary(isa: str) -> None:
    """Many draws from tens of thousands of tokens, flat and peaked: the same ids as sums in float64 give."""
    draw = np.random.default_rng(0)
    params = [SamplingParams(temperature=1.0)] * 32
    with machine(isa):
        for round_, scale in enumerate((0.1, 1.0, 3.0, 6.0)):
            logits = torch.from_numpy((scale * draw.standard_normal((32, 32003))).astype(np.float32))
            seeds = [100 * round_ + i for i in range(32)]
            rows = [request(p, seed) for p, seed in zip(params, seeds, strict=True)]
            numbers = uniforms(seeds, [0] * 32, [0] * 32).tolist()
            assert_equal(native(logits, params, numbers), sampler.sample(logits, rows, [0] * 32), params, 1e-5)


def test_the_ends_of_the_distribution() -> None:
    """A uniform of 0 takes the first token that can be, the greatest one the last; tokens of no share are never drawn."""
    logits = torch.zeros(2, 1500)
    scores = logits.clone()
    scores[:, :700], scores[:, 1200:] = -math.inf, -math.inf
    params = [SamplingParams(temperature=1.0)] * 2
    ids, logprobs, errors, _ = native(logits, params, [0.0, 1 - 2**-53], scores)
    assert ids == [700, 1199] and errors == ["", ""]
    assert logprobs == pytest.approx([-math.log(500)] * 2, abs=1e-6)


def test_log_probs_before_and_after_masks() -> None:
    """`raw` is of the model's logits, also of those that a mask took away."""
    logits = torch.tensor([[3.0, 1.0, 0.0, 2.0]])
    scores = logits.clone()
    scores[0, 0] = -math.inf
    for mode, of in (("raw", logits), ("processed", scores)):
        params = [SamplingParams(temperature=0.0, logprobs=4, logprobs_mode=mode)]
        ids, logprobs, _, best = native(logits, params, [0.0], scores)
        expected = of.log_softmax(-1)[0]
        assert ids == [3] and logprobs == pytest.approx([float(expected[3])])
        order = [0, 3, 1, 2] if mode == "raw" else [3, 1, 2]
        assert [token for token, _ in best[0]] == order
        assert [value for _, value in best[0]] == pytest.approx([float(expected[token]) for token in order])


def test_errors_stay_in_their_row() -> None:
    logits = torch.zeros(5, 40)
    logits[0, 39], logits[1, 3], logits[2, 17] = math.nan, math.inf, -math.inf
    scores = logits.clone()
    scores[3] = -math.inf
    for params in ([SamplingParams(temperature=0.0, logprobs=2)] * 5, [SamplingParams(temperature=1.0)] * 5):
        ids, logprobs, errors, best = native(logits, params, [0.5] * 5, scores)
        assert errors == ["not_finite"] * 3 + ["nothing_left", ""]
        assert ids[:4] == [-1] * 4 and ids[4] >= 0
        assert all(math.isnan(value) for value in logprobs[:4]) and logprobs[4] == pytest.approx(-math.log(40))
        assert best[:4] == [[]] * 4


def test_rows_threads_and_places_change_nothing() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((33, 3000)).astype(np.float32))
    rng = random.Random(2)
    params = [random_params(rng) for _ in logits]
    numbers = [rng.random() for _ in logits]
    with machine(threads=1):
        whole = native(logits, params, numbers)
        for row in (0, 5, 32):
            lone = native(logits[row : row + 1].clone(), params[row : row + 1], numbers[row : row + 1])
            assert [part[0] for part in lone] == [part[row] for part in whole]
    with machine(threads=3):
        assert native(logits, params, numbers) == whole
    assert native(logits[:0], [], []) == ([], [], [], [])


def test_uniforms_are_those_of_philox() -> None:
    seeds = [0, 1, 2**64 - 1, 0x0123456789ABCDEF]
    for index, position in ((0, 0), (3, 7), (2**31, 2**32 - 1)):
        expected = uniforms(seeds, [index] * 4, [position] * 4)
        assert [_C.cpu.philox_uniform(seed, index, position) for seed in seeds] == expected.tolist()


def test_refusals() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="temperatures: has 1 entries, must have 2"):
        native(logits, [SamplingParams()], [0.0])
    with pytest.raises(ValueError, match="vocabulary=0: must be >= 1"):
        native(torch.zeros(2, 0), [SamplingParams()] * 2, [0.0] * 2)
