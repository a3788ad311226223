"""Sampling without a sort against the engine's sampler, row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, NAN, normal

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine import sampler
from pearl.engine.kernels.interface import DrawRows
from pearl.engine.kernels.triton import sampling
from pearl.engine.kernels.triton.kernels import TritonKernels
from pearl.engine.request import Request
from pearl.protocol import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets inf

KERNELS = TritonKernels()

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_p": 0.5, "top_k": 2, "min_p": 0.5},
    {"temperature": 1e-6},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    {"top_k": 5, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.3, "logprobs_mode": "raw"},
    {"temperature": 0.0, "logprobs_mode": "raw"},
    {"temperature": 0.7, "top_k": 3, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 4},
    {"temperature": 0.5, "top_p": 0.8, "logprobs": 4, "logprobs_mode": "raw"},
]


def requests(params: list[SamplingParams], prompt: list[int] | None = None, output: list[int] | None = None) -> list[Request]:
    prompt, output = prompt or [1], output or []
    return [
        Request(
            request_id="r", params=one, token_ids=prompt + output, num_prompt_tokens=len(prompt), max_tokens=99, seed=seed
        )
        for seed, one in enumerate(params)
    ]  # fmt: skip


def assert_same(scores: torch.Tensor, params: list[SamplingParams], found_by: list[Request] | None = None) -> None:
    """The engine's sampler gives the same tokens with these kernels and without them."""
    rows = found_by or requests(params)
    found = sampler.sample(scores, rows, [0] * len(rows), KERNELS.draw)
    for token, expected in zip(found, sampler.sample(scores, rows, [0] * len(rows)), strict=True):
        assert (token.token_id, token.error) == (expected.token_id, expected.error)
        assert token.logprob == pytest.approx(expected.logprob, abs=2e-5, nan_ok=True)
        assert (token.top_logprobs is None) == (expected.top_logprobs is None)
        if expected.top_logprobs is not None:
            assert list(token.top_logprobs) == list(expected.top_logprobs)
            assert list(token.top_logprobs.values()) == pytest.approx(list(expected.top_logprobs.values()), abs=2e-5)


def asked(count: int, uniforms: list[float], **fields) -> DrawRows:
    """`count` rows that ask for the same, with uniforms of their own."""
    params = SamplingParams(**fields)
    return DrawRows(
        temperatures=[params.temperature] * count, top_ks=[params.top_k] * count, top_ps=[params.top_p] * count,
        min_ps=[params.min_p] * count, uniforms=uniforms, raws=[False] * count, bests=[0] * count,
    )  # fmt: skip


@pytest.mark.parametrize("tile", [32, 4096])
@pytest.mark.parametrize("vocab", [1, 100])
def test_every_filter(vocab: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone and some together, the row in one tile and in several."""
    monkeypatch.setattr(sampling, "TILE", tile)
    params = [SamplingParams(**fields) for fields in FILTERS]
    logits = normal(len(params), vocab, scale=3.0)
    assert_same(logits, params)


def test_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the cut top_k keeps all of equal tokens and top_p the lowest ids that it needs; a flat row is one large tie."""
    monkeypatch.setattr(sampling, "TILE", 16)
    params = [SamplingParams(**fields) for fields in FILTERS]
    for logits in (normal(len(params), 40, scale=2.0).round(), torch.zeros(len(params), 40, device=DEVICE)):
        assert_same(logits, params)


def test_random_parameters() -> None:
    rng = random.Random(0)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 2, 7, 30]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
            min_p=rng.choice([0.0, 0.0, 0.1, 0.4]),
        )
        for _ in range(40)
    ]
    logits = normal(len(params), 50, scale=4.0)
    logits[::2] = logits[::2].round()
    assert_same(logits, params)


def test_uniforms_at_both_ends() -> None:
    """0 takes the first token that is kept, the greatest uniform the last one."""
    logits = normal(2, 30)
    logits[:, [0, 29]] = -100.0
    ends = [0.0, 1.0 - 2.0**-53]
    best = logits.topk(5).indices.sort(-1).values
    assert KERNELS.draw(logits, logits, asked(2, ends, top_k=5)).ids == [int(best[0, 0]), int(best[1, -1])]


def test_rows_that_cannot_be_drawn_are_marked() -> None:
    """NaN, infinities, everything masked; the rows beside them are drawn as ever."""
    logits = normal(6, 20)
    logits[0, 3], logits[1, 19], logits[2, 0], logits[3] = NAN, float("inf"), -float("inf"), NAN
    assert_same(logits, [SamplingParams(top_p=0.9, logprobs=2)] * 6)


def test_masked_tokens_are_never_drawn() -> None:
    """Below min_tokens the best token is masked, under every filter; one row has nothing left."""
    params = [SamplingParams(**(fields | {"min_tokens": 2})) for fields in FILTERS]
    logits, chosen = normal(len(params), 30, scale=2.0), requests(params)
    for request, best in zip(chosen, logits.argmax(-1).tolist(), strict=True):
        request.stop_token_ids = frozenset({best})
    chosen[0].stop_token_ids = frozenset(range(30))
    assert_same(logits, params, chosen)


def test_frequencies_follow_the_distribution() -> None:
    """Uniforms on a grid hit every token as often as its probability says."""
    logits = normal(1, 8, scale=1.5)
    count = 64
    grid = ((np.arange(count) + 0.5) / count).tolist()
    scores = logits.expand(count, -1)
    ids = KERNELS.draw(scores, scores, asked(count, grid, temperature=0.7)).ids
    found = torch.bincount(torch.tensor(ids), minlength=8) / count
    assert float((found - torch.softmax(logits[0].cpu() / 0.7, -1)).abs().max()) <= 1.0 / count
