"""Penalties and masks on the device against the engine's sampler, over steps and with ids that only the device knows."""

from __future__ import annotations

import random

import pytest
import torch
from triton_cases import DEVICE, NAN, normal

pytest.importorskip("triton", reason="the Triton kernels need the package triton (extras cuda and dev)")

from pearl.engine import sampler
from pearl.engine.kernels.triton import penalties
from pearl.engine.kernels.triton.kernels import TritonKernels
from pearl.engine.penalties import SeenTokens
from pearl.engine.request import PLACEHOLDER, Request, SampledToken
from pearl.engine.sampler import Before
from pearl.protocol import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets inf

KERNELS = TritonKernels()
FILTERS = [
    {"top_k": 5, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.3, "logprobs_mode": "raw"},
    {"temperature": 0.0, "logprobs_mode": "raw"},
    {"temperature": 0.7, "top_k": 3, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 4},
]


def requests(params: list[SamplingParams], prompt: list[int], output: list[int]) -> list[Request]:
    return [
        Request(
            request_id=f"r{seed}", params=one, token_ids=prompt + output, num_prompt_tokens=len(prompt), max_tokens=99,
            seed=seed,
        )
        for seed, one in enumerate(params)
    ]  # fmt: skip


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.8},
    {},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 0.3},
]


def queued(logits: torch.Tensor, rows: list[Request], positions: list[int], before: Before) -> list[SampledToken]:
    return sampler.queue_sample(logits, rows, positions, KERNELS, before)[1]()


def nothing_before() -> Before:
    return Before(None, {}, SeenTokens())


def assert_alike(found: list[SampledToken], expected: list[SampledToken]) -> None:
    for token, right in zip(found, expected, strict=True):
        assert (token.token_id, token.error) == (right.token_id, right.error)
        assert token.logprob == pytest.approx(right.logprob, abs=2e-5, nan_ok=True)
        assert token.top_logprobs == (right.top_logprobs and pytest.approx(right.top_logprobs, abs=2e-5))


@pytest.mark.parametrize("tile", [2, 512])
@pytest.mark.parametrize("vocab", [13, 200])
def test_penalties(vocab: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps, as the sampler counts them from the beginning: prompts, outputs, ids in both, rows without any."""
    monkeypatch.setattr(penalties, "TILE", tile)
    rng = random.Random(vocab)
    rows = requests([SamplingParams(temperature=0.0, logprobs=9, **one) for one in PENALTIES], [1], [])
    for length, request in enumerate(rows, 1):
        request.token_ids = [rng.randrange(vocab) for _ in range(2 * length)]
        request.num_prompt_tokens = 2 * length
    before = nothing_before()
    for step in range(6):
        logits = normal(len(rows), vocab, scale=2.0, seed=step)
        positions = [request.num_tokens - request.num_prompt_tokens for request in rows]
        expected = sampler.sample(logits, rows, positions)
        assert_alike(queued(logits, rows, positions, before), expected)
        for request, token in zip(rows, expected, strict=True):
            request.token_ids.append(token.token_id if step % 2 else rng.randrange(vocab))
        rows = rows[1:] + rows[:1] if step % 2 else rows  # rows change their places


@pytest.mark.parametrize("late", ["seen", "new", "of the prompt"])
def test_an_id_that_only_the_device_knows_counts(late: str) -> None:
    prompt, output, last = [3, 7, 7], [9, 9, 4], {"seen": 9, "new": 11, "of the prompt": 7}[late]
    params = [SamplingParams(temperature=0.0, logprobs=20, **one) for one in PENALTIES]
    known = requests(params, prompt, [*output, last])
    unknown = requests(params, prompt, [*output, PLACEHOLDER])
    logits, positions = normal(len(params), 20, scale=2.0), [4] * len(params)
    drawn = torch.full((9,), 2, device=DEVICE)
    rows = {f"r{number}": 8 - number for number in range(len(params))}
    drawn[list(rows.values())] = last
    found = queued(logits, unknown, positions, Before(drawn, rows, SeenTokens()))
    assert_alike(found, sampler.sample(logits, known, positions))


def test_penalties_and_masks_together() -> None:
    """Rows that have nothing left, that are not finite, and both; ids that are both penalised and masked."""
    fields = [{**one, **filters} for one, filters in zip(PENALTIES, FILTERS, strict=True)]
    params = [SamplingParams(min_tokens=3, **one) for one in [*fields, {}, {}, {"presence_penalty": 1.0}]]
    rows, logits = requests(params, [3, 7, 7], [7, 2]), normal(8, 20, scale=2.0)
    best = logits.argmax(-1).tolist()
    for row, request in enumerate(rows):
        request.stop_token_ids = frozenset({best[row], 7} if row < 5 else range(20))
    logits[4, 3], logits[6, 2] = NAN, float("inf")
    before = logits.clone()
    expected = sampler.sample(logits, rows, [2] * 8)
    assert [bool(token.error) for token in expected] == [False] * 4 + [True] * 4
    assert_alike(queued(logits, rows, [2] * 8, nothing_before()), expected)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_penalties_stay_finite() -> None:
    logits = torch.full((1, 4), 3e38, device=DEVICE)
    rows = requests([SamplingParams(temperature=0.0, repetition_penalty=1e-30)], [1, 2], [])
    assert_alike(queued(logits, rows, [0], nothing_before()), sampler.sample(logits, rows, [0]))


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """CUDA's own check: whatever synchronises raises. The first call compiles."""
    params = [SamplingParams(seed=1, min_tokens=9, top_p=0.9, **one) for one in PENALTIES]
    rows, logits = requests(params, [3, 7, 7], [7, PLACEHOLDER]), normal(len(params), 200)
    for request in rows:
        request.stop_token_ids = frozenset({5})
    before = Before(torch.full((1,), 4, device=DEVICE), {request.request_id: 0 for request in rows}, SeenTokens())
    expected = sampler.queue_sample(logits, rows, [2] * len(rows), KERNELS, before)[1]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        collect = sampler.queue_sample(logits, rows, [2] * len(rows), KERNELS, before)[1]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert collect() == expected
